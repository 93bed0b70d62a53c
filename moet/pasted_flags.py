"""Flags of other servers that are pasted behind `moet serve`, and what stands for each here."""

from __future__ import annotations

from collections.abc import Iterable

_BY_ITSELF = "leave it out: the model's own is chosen"
_INSTEAD = {
    "--gpu-memory-utilization": "leave it out: all that is free is planned; --kv-cache-memory "
    "bounds the pages, --expert-pool the experts",
    "--tool-call-parser": _BY_ITSELF,
    "--reasoning-parser": _BY_ITSELF,
    "--chat-template": _BY_ITSELF,
    "--tokenizer": _BY_ITSELF,
    "--tokenizer-mode": _BY_ITSELF,
    "--trust-remote-code": "leave it out: no code of a checkpoint is run",
    "--quantization": "say --precision",
    "--dtype": "leave it out: weights stay as the pack has them",
    "--load-format": "leave it out: packs have one form",
    "--enable-chunked-prefill": "leave it out: it is always on",
    "--enable-expert-parallel": "say -tp",
    "--cpu-offload-gb": "say --host-experts",
    "--block-size": "leave it out: the model's own is used",
    "--max-seq-len": "say --max-model-len",
    "--context-length": "say --max-model-len",
    "--model-path": "give the folder as MODEL",
    "--tp-size": "say -tp",
    "--mem-fraction-static": "say --kv-cache-memory",
    "--config": "give the flags themselves",
    "--disable-log-requests": "leave it out: no prompt is logged",
    "--no-enable-log-requests": "leave it out: no prompt is logged",
}


def unknown(words: Iterable[str]) -> str:
    """What to say of words that no command knows."""
    words = list(words)
    message = f"unrecognized arguments: {' '.join(words)}"
    for word in words:
        name = word.partition("=")[0]
        if name in _INSTEAD:
            message += f"\n  {name}: {_INSTEAD[name]}"
    return message
