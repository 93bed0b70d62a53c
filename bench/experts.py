"""Experts in host memory behind a pool on one GPU: what a decode step and a long prompt cost.

    python -m bench.experts [--layers N] [--quick] [--commit X] [--out FILE]

V4-Flash with dummy weights; the router's skew and the seed are stated with each figure. For every
case the same step is timed with all experts resident, so that what is compared is the pool alone,
and its answer is compared bit for bit. The link is measured in the same run. What fails is printed
and the rest goes on. Needs host memory for all rows (1.7 GiB a layer).
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bench.gpu_model import PAGE, decode_rows, state
from moet.config import ModelSettings
from moet.kernels.device_gemm import Device
from moet.models.base import ForwardInput
from moet.models.deepseek_v4 import DeepseekV4
from moet.models.dummy import DummyOptions
from moet.runtime.dummy import dummy_model, open_device, preset_config
from moet.runtime.experts.gpu import CachedExperts, StreamedExperts, copy_from
from moet.runtime.experts.host import Arena
from moet.runtime.experts.store import DeviceExperts

GIB = 1 << 30
SEED = 1
CONTEXT = 1024
WARM_STEPS, STEPS = 150, 60
TOKENS_A_STEP = {1: 1.0, 3: 2.6}  # rows of a step -> tokens that it yields


class Rig:
    """A model, its experts resident and in host memory, and steps of tokens at random."""

    def __init__(self, device: Device, num_layers: int | None, skew: float) -> None:
        raw = preset_config("deepseek-v4-flash", "full", num_layers)
        settings = ModelSettings(arch=device.arch)
        made = dummy_model(raw, settings, device, options=DummyOptions(seed=SEED, skew=skew))
        assert isinstance(made.model, DeepseekV4)
        assert isinstance(made.experts, DeviceExperts)
        self.device, self.model, self.resident = device, made.model, made.experts
        self.layers = list(range(int(raw["num_hidden_layers"])))
        table = self.resident.resident(0)
        self.form: Any = table.format
        assert table.bases is not None
        self.bases = torch.cat([self.resident.resident(i).bases for i in self.layers])  # type: ignore[arg-type]
        self.kv = state(self.model, 256, 8)
        self.generator = torch.Generator("cpu").manual_seed(SEED)

    def to_host(self) -> tuple[Arena, dict[str, float]]:
        """All rows into pinned memory; how long that took."""
        num_rows, begin = len(self.resident.rows), perf_counter()
        arena = Arena(num_rows, self.form.row_bytes, pin=True)
        pinned_s, begin = perf_counter() - begin, perf_counter()
        first = 0
        for chunk in arena.chunks:
            chunk.copy_(self.resident.rows[first : first + len(chunk)])
            first += len(chunk)
        torch.cuda.synchronize()
        size = num_rows * self.form.row_bytes / GIB
        return arena, {
            "GiB": round(size, 2),
            "pin GiB/s": round(size / pinned_s, 2),
            "copy out GiB/s": round(size / (perf_counter() - begin), 2),
        }

    def tokens(self, count: int) -> Tensor:
        return torch.randint(self.model.vocab_size, (count,), generator=self.generator)


class CapturedStep:
    """A decode step of one sequence, captured once and replayed with other tokens."""

    def __init__(self, rig: Rig, experts: Any, num_rows: int) -> None:
        self.ids = torch.zeros(num_rows, dtype=torch.int64, device="cuda")
        rows = decode_rows(1, num_rows, CONTEXT)
        stream = torch.cuda.Stream()
        with torch.inference_mode():
            with torch.cuda.stream(stream):
                for _ in range(2):
                    rig.model.compute(self.ids, rows, None, rig.kv, experts)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.logits = rig.model.compute(self.ids, rows, None, rig.kv, experts).logits
        torch.cuda.synchronize()

    def __call__(self, tokens: Tensor) -> float:
        """Milliseconds of a step."""
        self.ids.copy_(tokens)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)


def link_rate(arena: Arena) -> float:
    """Bytes a second from pinned memory by the copy engine."""
    out = torch.empty_like(arena.chunks[0], device="cuda")
    best = 0.0
    for chunk in arena.chunks[:3]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        out[: len(chunk)].copy_(chunk, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        best = max(best, chunk.numel() / begin.elapsed_time(end) * 1e3)
    return best


def cached_case(
    rig: Rig, arena: Arena, link: float, *, pool_bytes: float, num_rows: int, overlap: bool = True
) -> dict[str, Any]:
    """Steps with a pool against the same steps with everything resident."""
    num_slots = max(int(pool_bytes // rig.form.row_bytes), num_rows * 6)
    resident = CapturedStep(rig, rig.resident, num_rows)
    experts = CachedExperts(
        rig.device.launcher,
        rig.form,
        arena,
        rig.bases,
        rig.layers,
        num_slots,
        error=rig.device.error,
        overlap=overlap,
    )
    cached = CapturedStep(rig, experts, num_rows)
    for _ in range(WARM_STEPS):
        cached(rig.tokens(num_rows))
    hits, misses = experts.counts()
    times: list[float] = []
    base: list[float] = []
    same = True
    for _ in range(STEPS):
        tokens = rig.tokens(num_rows)
        times.append(cached(tokens))
        base.append(resident(tokens))
        same &= bool(torch.equal(cached.logits, resident.logits))
    after = experts.counts()
    asked, missed = after[0] + after[1] - hits - misses, after[1] - misses
    step_ms, base_ms = sum(times) / STEPS, sum(base) / STEPS
    floor_ms = missed / STEPS * rig.form.row_bytes / link * 1e3
    return {
        "slots": num_slots,
        "share %": round(100 * num_slots / len(rig.bases), 1),
        "hits %": round(100 * (1 - missed / max(1, asked)), 2),
        "step ms": round(step_ms, 3),
        "resident ms": round(base_ms, 3),
        "missed bytes / link ms": round(floor_ms, 3),
        "beyond resident / floor": round((step_ms - base_ms) / floor_ms, 3) if floor_ms else None,
        "target ms": round(base_ms + 1.25 * floor_ms, 3),
        "tok/s": round(TOKENS_A_STEP.get(num_rows, 1.0) / step_ms * 1e3, 1),
        "same bits": same,
        "error word": int(rig.device.error),
    }


def prefill_case(rig: Rig, arena: Arena, link: float, *, length: int, chunk: int) -> dict[str, Any]:
    """A prompt in chunks, every layer's experts streamed once a chunk."""
    experts = StreamedExperts(rig.form, rig.bases, rig.layers, copy_from(arena))

    def run(provider: Any) -> Tensor:
        out = torch.empty(0)
        for first in range(0, length, chunk):
            count = min(chunk, length - first)
            inputs = ForwardInput(
                token_ids=prompt[first : first + count],
                positions=torch.arange(first, first + count),
                cu_seqlens_q=(0, count),
                seq_slots=torch.zeros(1, dtype=torch.int64),
                page_table=torch.arange(-(-(first + count) // PAGE)).view(1, -1),
                seq_lens=(first + count,),
                logits_indices=torch.tensor([count - 1]),
            )
            out = rig.model.forward(inputs, rig.kv, provider).logits
        torch.cuda.synchronize()
        return out

    prompt = rig.tokens(length)
    with torch.inference_mode():
        expected = run(rig.resident)
        begin = perf_counter()
        run(rig.resident)
        resident_s = perf_counter() - begin
        run(experts)
        begin = perf_counter()
        found = run(experts)
        seconds = perf_counter() - begin
    moved = -(-length // chunk) * len(rig.bases) * rig.form.row_bytes
    whole = 43 / len(rig.layers)
    return {
        "tok/s": round(length / seconds),
        "resident tok/s": round(length / resident_s),
        "tok/s scaled to 43 layers": round(length / seconds / whole),
        "of link rate %": round(100 * moved / seconds / link, 1),
        "same bits": bool(torch.equal(expected, found)),
    }


def run_cases(rig: Rig, arena: Arena, results: dict[str, Any], *, quick: bool, label: str) -> None:
    """Every case of the table that this skew is for."""
    link = link_rate(arena)
    results[f"link GB/s, {label}"] = round(link / 1e9, 2)
    total = len(rig.bases) * rig.form.row_bytes
    cases: dict[str, Callable[[], dict[str, Any]]] = {}
    for share in (0.193,) if quick else (0.193, 0.152):
        for num_rows in (1, 3):
            cases[f"pool {100 * share:.1f} %, {num_rows} rows"] = lambda s=share, n=num_rows: (
                cached_case(rig, arena, link, pool_bytes=s * total, num_rows=n)
            )
    cases["pool 19.3 %, 1 row, copies in turn"] = lambda: cached_case(
        rig, arena, link, pool_bytes=0.193 * total, num_rows=1, overlap=False
    )
    if label.endswith(" 0") or not quick:
        cases["one layer's set of a token"] = lambda: cached_case(
            rig, arena, link, pool_bytes=6 * rig.form.row_bytes, num_rows=1
        )
    if label.endswith(" 0"):
        for chunk in (8192,) if quick else (8192, 16384):
            cases[f"prompt of 32768, chunks of {chunk}"] = lambda c=chunk: prefill_case(
                rig, arena, link, length=32768, chunk=c
            )
    for name, case in cases.items():
        begin = perf_counter()
        rig.device.error.zero_()
        try:
            results[f"{name}, {label}"] = case()
        except Exception:
            results[f"{name}, {label} FAILED"] = traceback.format_exc()
        print(f"{name}, {label}", results.get(f"{name}, {label}", "FAILED"), flush=True)
        print(f"-- {perf_counter() - begin:.1f} s", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--skew", type=float, nargs="+", default=[0.0, 2.0, 4.0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    device = open_device()
    if device is None:
        raise SystemExit("no GPU that kernels are built for")
    results: dict[str, Any] = {
        "hardware": torch.cuda.get_device_name(),
        "commit": args.commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seed": SEED,
        "layers": args.layers or 43,
    }
    arena: Arena | None = None  # rows are the same at any skew
    out = args.out or Path(os.environ.get("OUT", ".")) / "experts.json"
    for skew in args.skew:
        begin = perf_counter()
        try:
            rig = Rig(device, args.layers, skew)
            print(f"built in {perf_counter() - begin:.1f} s", flush=True)
            if arena is None:
                arena, results["host memory"] = rig.to_host()
                print(results["host memory"], flush=True)
            run_cases(rig, arena, results, quick=args.quick, label=f"skew {skew:g}")
        except Exception:
            results[f"skew {skew:g} FAILED"] = traceback.format_exc()
            print(traceback.format_exc(), flush=True)
        rig = None  # type: ignore[assignment]
        gc.collect()
        torch.cuda.empty_cache()
        out.write_text(json.dumps(results, indent=1))
    if arena is not None:
        arena.close()


if __name__ == "__main__":
    main()
