"""The server itself at full size: from a pack in memory to its first token, and to the openai SDK.

    python -m bench.serve_h200 [--parts pack,dummy] [--layers N] [--folder DIR] [--out FILE]

pack: writes a dense + W2 pack of dummy weights into memory-backed storage, as many layers as that
and a process beside it leave room for, and times `moet serve` from its start to a token. dummy:
`moet serve MODEL --weights dummy` of every layer. Both stream to the SDK, alone and to several
clients at once, and end by SIGTERM. Needs the openai package.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import traceback
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import msgspec
import psutil
import torch
from torch import Tensor

from moet.kernels.layout import LAYOUT_VERSION
from moet.models.dummy import DummyOptions, DummySource, dummy_rows
from moet.models.expert_encoder import row_formats
from moet.models.pack import (
    CHECKSUMS_NAME,
    DENSE_NAME,
    FORMAT_VERSION,
    MANIFEST_NAME,
    PackManifest,
    bases_name,
    rows_name,
)
from moet.models.synthetic import plan_checkpoint
from moet.models.tensor_writer import write_json
from moet.runtime.dummy import first_layers, preset_config

MODEL = "deepseek-v4-flash"
GIB = 1 << 30
BESIDE_BYTES = 28 * GIB  # what the server's process and this one need
DTYPES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int64: "I64",
}
NUM_CLIENTS, NUM_TOKENS = 8, 128


def layers_that_fit(folder: Path, raw: dict[str, Any]) -> int:
    """How many layers' rows and dense weights the storage and the memory around it take."""
    experts = DummySource(raw, DummyOptions(), "cpu").experts
    form = row_formats(experts.hidden_size, experts.moe_intermediate_size, experts.fp4)["w2"]
    layer_bytes = experts.num_experts * form.row_bytes + (GIB >> 2)
    free = min(shutil.disk_usage(folder).free, psutil.virtual_memory().available)
    fits = int((free - BESIDE_BYTES - 3 * GIB) // layer_bytes) - 1  # the draft block's
    return max(1, min(int(raw["num_hidden_layers"]), fits))


def write_dense(path: Path, source: DummySource) -> None:
    """Every dense tensor as safetensors."""
    head: dict[str, Any] = {}
    parts: list[Tensor] = []
    at = 0
    for name in source.names():
        value = source.load(name)
        flat = value.contiguous().view(-1).view(torch.uint8).cpu()
        head[name] = {
            "dtype": DTYPES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [at, at + flat.numel()],
        }
        at += flat.numel()
        parts.append(flat)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for flat in parts:
            file.write(flat.numpy().data)


def write_pack(folder: Path, raw: dict[str, Any], texts: Mapping[str, Any], device: str) -> int:
    """A pack of dummy weights. Returns its bytes."""
    source = DummySource(raw, DummyOptions(skew=0.5), device)
    experts = source.experts
    form = row_formats(experts.hidden_size, experts.moe_intermediate_size, experts.fp4)["w2"]
    write_dense(folder / DENSE_NAME, source)
    with (
        (folder / rows_name("w2")).open("wb") as rows_file,
        (folder / bases_name("w2")).open("wb") as bases_file,
    ):
        for n in range(len(experts.layers)):
            rows, bases = dummy_rows(form, experts.num_experts, seed=n, device=device)
            rows_file.write(rows.view(-1).cpu().numpy().data)
            bases_file.write(bases.view(-1).cpu().numpy().data)
    for name, content in texts.items():
        write_json(folder / name, content)
    write_json(folder / "config.json", raw)
    write_json(folder / CHECKSUMS_NAME, {})
    names = [path.name for path in folder.iterdir()]
    manifest = PackManifest(
        format_version=FORMAT_VERSION,
        layout_version=LAYOUT_VERSION,
        source="dummy",
        artefact="dummy",
        scale_rule="mse",
        tiers=("w2",),
        hidden_size=experts.hidden_size,
        moe_intermediate_size=experts.moe_intermediate_size,
        num_experts=experts.num_experts,
        layers=experts.layers,
        prefixes=experts.prefixes,
        names=experts.names,
        fp4=experts.fp4,
        dense_dtype="keep",
        files={name: (folder / name).stat().st_size for name in names},
        checksums_sha256=hashlib.sha256((folder / CHECKSUMS_NAME).read_bytes()).hexdigest(),
    )
    write_json(folder / MANIFEST_NAME, msgspec.to_builtins(manifest))
    return sum(manifest.files.values())


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def server(words: list[str], log: Path, timeout_s: float) -> Iterator[tuple[str, float]]:
    """A server's address, and seconds from its start to /ready; ended by SIGTERM."""
    port, began_s = free_port(), perf_counter()
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "moet", "serve", *words, "--port", str(port)],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            address = f"http://127.0.0.1:{port}"
            while not is_ready(address):
                if process.poll() is not None or perf_counter() - began_s > timeout_s:
                    raise RuntimeError(log.read_text()[-3000:])
                sleep(0.05)
            yield address, perf_counter() - began_s
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/ready", timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def stream(address: str, text: str, num_tokens: int) -> dict[str, Any]:
    """One streamed chat answer through the SDK: times, and whether it is whole."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{address}/v1", api_key="none", timeout=120)
    model = client.models.list().data[0].id
    began_s = perf_counter()
    times, reason, usage = [], None, None
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        max_tokens=num_tokens,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            times.append(perf_counter() - began_s)
            reason = choice.finish_reason or reason
    made = usage.completion_tokens if usage else 0
    between_s = (times[-1] - times[0]) / max(1, made - 1)
    return {
        "first token s": round(times[0], 4),
        "ms between": round(1e3 * between_s, 3),
        "tokens": made,
        "prompt tokens": usage.prompt_tokens if usage else 0,
        "whole": reason == "length" and made == num_tokens,
    }


def talk(address: str) -> dict[str, Any]:
    """What the SDK gets alone, again, and from several clients at once."""
    found: dict[str, Any] = {"alone": stream(address, "Say something.", NUM_TOKENS)}
    found["again"] = stream(address, "Say something else.", NUM_TOKENS)
    answers: list[dict[str, Any]] = []

    def one(n: int) -> None:
        answers.append(stream(address, f"Tell me about number {n}.", NUM_TOKENS))

    began_s = perf_counter()
    clients = [threading.Thread(target=one, args=(n,)) for n in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    rate = sum(answer["tokens"] for answer in answers) / (perf_counter() - began_s)
    found[f"{NUM_CLIENTS} at once"] = {
        "whole": sum(answer["whole"] for answer in answers),
        "tokens/s": round(rate, 1),
        "ms between": sorted(answer["ms between"] for answer in answers),
    }
    return found


def started(words: list[str], log: Path, timeout_s: float) -> dict[str, Any]:
    """Seconds to /ready and to the first token; what the SDK says."""
    began_s = perf_counter()
    with server(words, log, timeout_s) as (address, ready_s):
        stream(address, "Hello.", 1)
        found = {
            "ready s": round(ready_s, 2),
            "first token after s": round(perf_counter() - began_s, 2),
        }
        return found | talk(address)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="dummy,pack")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--size", choices=["full", "tiny"], default="full", help="tiny: to try it")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds a start may take")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    flags = ["--max-model-len", "16k", "--max-num-seqs", "8", "--served-model-name", MODEL]
    results: dict[str, Any] = {"hardware": torch.cuda.get_device_name() if on_gpu else "cpu"}
    raw = preset_config(MODEL, args.size)
    for part in args.parts.split(","):
        log, began_s = args.out.with_suffix(f".{part}.log"), perf_counter()
        try:
            if part == "dummy":
                words = [MODEL, "--weights", "dummy", "--dummy-skew", "0.5", *flags]
                results[part] = started(words, log, args.timeout)
            else:
                folder = args.folder / "moet-pack"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                count = args.layers or layers_that_fit(args.folder, raw)
                texts = plan_checkpoint(args.size, model=MODEL).texts
                where = "cuda" if on_gpu else "cpu"
                num_bytes = write_pack(folder, first_layers(raw, count), texts, where)
                written_s = perf_counter() - began_s
                if on_gpu:
                    torch.cuda.empty_cache()
                entry: dict[str, Any] = {
                    "layers": f"{count} of {raw['num_hidden_layers']}",
                    "GiB": round(num_bytes / GIB, 2),
                    "written in s": round(written_s, 1),
                }
                results[part] = entry
                entry["start"] = started([str(folder), *flags], log, args.timeout)
                shutil.rmtree(folder)
        except Exception:
            results[f"{part} failed"] = traceback.format_exc(limit=-3)
        print(part, json.dumps(results, indent=1), f"{perf_counter() - began_s:.1f} s", flush=True)
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
