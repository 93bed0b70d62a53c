"""Text to token ids and back, for byte-level BPE tokenizers in `tokenizer.json` form.

Tokens of the added vocabulary are called control tokens here: they steer the model, so text that
somebody else wrote must never turn into one. Knows nothing of chat formats.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from moet.errors import ConfigError, ContextLengthError, RequestError

MAX_CACHED_CHARS = 1024  # of a text whose control tokens are kept


class Span(NamedTuple):
    """A piece of a prompt. Only trusted text may spell control tokens."""

    text: str
    trusted: bool = False


class Tokenizer:
    """One model's vocabulary. Immutable; safe to share between threads."""

    def __init__(self, tokenizer_json: str, eos_token_ids: Sequence[int] = ()) -> None:
        """tokenizer_json is the file's content. Raises ConfigError if it is not byte-level BPE."""
        _require_byte_level(tokenizer_json)
        self._full = tokenizers.Tokenizer.from_str(tokenizer_json)
        self._full.no_truncation()
        self._full.no_padding()
        self._plain = tokenizers.Tokenizer(self._full.model)  # shares the model, adds no vocabulary
        self._plain.pre_tokenizer = self._full.pre_tokenizer
        if self._full.normalizer is not None:
            self._plain.normalizer = self._full.normalizer
        added = self._full.get_added_tokens_decoder()
        self._control = {token_id: token.content for token_id, token in added.items()}
        self._special = frozenset(i for i, token in added.items() if token.special)
        vocab = self._full.get_vocab()
        self.vocab_size = max(vocab.values()) + 1
        self._longest = max(map(len, vocab))  # no token is of more characters of text
        for token_id in eos_token_ids:
            if not isinstance(token_id, int) or not 0 <= token_id < self.vocab_size:
                message = f"eos_token_id {token_id!r} is not one of the tokenizer's "
                message += f"{self.vocab_size} ids; the model folder's files do not belong together"
                raise ConfigError(message)
        self.eos_token_ids = tuple(eos_token_ids)
        self._max_tokens: int | None = None
        self.token_bytes = lru_cache(maxsize=None)(self._token_bytes)
        self._cached_controls = lru_cache(maxsize=256)(self._find_controls)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json and, for the end tokens, the configs beside it.

        End tokens come from generation_config.json, else config.json, else tokenizer_config.json.
        Raises ConfigError naming the file that is missing or broken.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path} is missing; moet needs the tokenizer in this form")
        try:
            text = path.read_text(encoding="utf-8")
            eos_token_ids = _eos_token_ids(folder, json.loads(text))
            return cls(text, eos_token_ids)
        except ValueError as error:
            raise ConfigError(f"{path} is not a tokenizer file: {error}") from error

    def within(self, max_tokens: int) -> Tokenizer:
        """This one, but it refuses texts that cannot have so few tokens instead of reading them."""
        limited = copy.copy(self)
        if self._full.normalizer is None:  # which may write less than it reads
            limited._max_tokens = max_tokens
        return limited

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """The ids of a text, with nothing put before or after it.

        Control tokens spelled in the text become their ids only with allow_special. Raises
        RequestError if the text holds a lone surrogate.
        """
        return self.encode_spans([Span(text, allow_special)])

    def encode_spans(self, spans: Iterable[Span]) -> list[int]:
        """The ids of the joined spans; words may cross span borders, control tokens may not.

        Where no untrusted text spells a control token, this equals tokenizing the joined text.
        Raises ContextLengthError as `within` says.
        """
        ids: list[int] = []
        pending: list[str] = []
        spans = list(spans)
        self._require_short(sum(len(text) for text, _ in spans))
        for text, trusted in spans:
            start = 0
            for begin, end, token_id in self._controls_in(_valid(text)) if trusted else ():
                pending.append(text[start:begin])
                self._flush(pending, ids)
                ids.append(token_id)
                start = end
            pending.append(text[start:])
        self._flush(pending, ids)
        return ids

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of the ids; broken UTF-8 becomes U+FFFD, as in the tokenizers library."""
        kept = (i for i in token_ids if not (skip_special and i in self._special))
        return b"".join(self.token_bytes(i) for i in kept).decode("utf-8", "replace")

    def control_id(self, text: str) -> int:
        """The id of a control token by its text. Raises ConfigError if there is none."""
        token_id = self._full.token_to_id(text)
        if token_id is None or token_id not in self._control:
            message = f"the tokenizer has no control token {text!r}, which this model's chat format"
            raise ConfigError(message + " needs; check that tokenizer.json belongs to the model")
        return int(token_id)

    def controls_in(self, text: str) -> tuple[tuple[int, int, int], ...]:
        """Where a text spells control tokens: begin, end, id. RequestError for a lone surrogate."""
        return self._controls_in(_valid(text))

    def has_control(self, text: str) -> bool:
        """Whether a control token is spelled so."""
        return text in self._control.values()

    def is_control(self, token_id: int) -> bool:
        """Whether the id is one of the added vocabulary."""
        return token_id in self._control

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token that never shows in text, such as the end token."""
        return token_id in self._special

    def _require_short(self, num_chars: int) -> None:
        if self._max_tokens is not None and num_chars > self._max_tokens * self._longest:
            least = -(-num_chars // self._longest)
            raise ContextLengthError(
                f"prompt is too long: {least} tokens > {self._max_tokens} maximum "
                f"(--max-model-len); its {num_chars} characters cannot be fewer"
            )

    def _token_bytes(self, token_id: int) -> bytes:
        if token_id in self._control:
            return self._control[token_id].encode()
        token = self._full.id_to_token(token_id)
        if token is None:  # the model's vocabulary is padded beyond the tokenizer's
            return b""
        return bytes(_BYTE_OF[char] for char in token)

    def _controls_in(self, text: str) -> tuple[tuple[int, int, int], ...]:
        """Those of short texts are kept, as the pieces of a chat format come again and again."""
        find = self._cached_controls if len(text) <= MAX_CACHED_CHARS else self._find_controls
        return find(text)

    def _find_controls(self, text: str) -> tuple[tuple[int, int, int], ...]:
        encoding = self._full.encode(text, add_special_tokens=False)
        pairs = zip(encoding.offsets, encoding.ids, strict=True)
        return tuple((begin, end, i) for (begin, end), i in pairs if i in self._control)

    def _flush(self, pending: list[str], ids: list[int]) -> None:
        text = "".join(pending)
        if text:
            ids += self._plain.encode(_valid(text), add_special_tokens=False).ids
        pending.clear()


def _bytes_of_chars() -> dict[str, int]:
    """Byte-level BPE spells each byte as one printable character: itself, or the next from 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _bytes_of_chars()


def _require_byte_level(tokenizer_json: str) -> None:
    parts = json.loads(tokenizer_json)
    decoder = parts.get("decoder") or {}
    kinds = {decoder.get("type")} | {part.get("type") for part in decoder.get("decoders", ())}
    if (parts.get("model") or {}).get("type") != "BPE" or "ByteLevel" not in kinds:
        raise ConfigError("tokenizer.json is not byte-level BPE, the only kind that moet reads")


def _eos_token_ids(folder: Path, tokenizer: dict[str, Any]) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        if value is not None:
            return value if isinstance(value, list) else [value]
    token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    return [t["id"] for t in tokenizer.get("added_tokens", ()) if t["content"] == text]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return content


def _valid(text: str) -> str:
    """The text itself. Raises RequestError if it cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"the text has a lone surrogate at character {error.start}, which is no character"
        raise RequestError(message + "; send valid Unicode") from error
    return text
