"""DeepSeek-V4-Flash with dummy weights on one GPU, part by part: products, logits, steps, prefill.

    python -m bench.gpu_model [--layers N] [--parts products,logits,model] [--out FILE]

Checks as it measures, and goes on where a part fails: what failed is printed and comes last in the
JSON. Steps are captured as graphs; what a step costs kernel by kernel comes from the profiler.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bench.gpu import milliseconds, open_gpu
from moet.config import ModelSettings
from moet.kernels.device_gemm import (
    Device,
    PackedGroups,
    PackedMatrix,
    multiply,
    multiply_groups,
)
from moet.kernels.quant import fp8_qdq
from moet.kernels.rows import Rows
from moet.models.base import ForwardInput, ResidentProvider
from moet.models.deepseek_v4 import DeepseekV4
from moet.models.dummy import DummyOptions
from moet.runtime.dummy import dummy_model, preset_config

ROW_COUNTS = (1, 3, 8, 32, 96, 300)
PAGE = 256
NUM_DRAFTS = 2  # rows of a sequence beside its first, in steps

Results = dict[str, Any]


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def fp8(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and values of a random matrix, or of several."""
    codes = torch.randn(*shape, device="cuda").mul_(60).to(torch.float8_e4m3fn)
    blocks = (*shape[:-2], -(-shape[-2] // 128), shape[-1] // 128)
    scale = 2.0 ** torch.randint(-13, -10, blocks, device="cuda").float()
    wide = scale.repeat_interleave(128, -2)[..., : shape[-2], :].repeat_interleave(128, -1)
    return codes, scale, codes.float() * wide


def products(device: Device) -> Results:
    """Every dense product of a layer: error, equality of a row in all batches, time."""
    found: Results = {}

    def judge(name: str, call: Callable[[Tensor], Tensor], exact: Tensor, x: Tensor) -> None:
        alone = torch.cat([call(x[i : i + 1]) for i in range(3)])
        times = {}
        for rows in ROW_COUNTS:
            got = call(x[:rows])
            same = torch.equal(got[: len(alone)], alone[:rows])
            error = relative(got.flatten(1), exact[:rows].flatten(1))
            ms = milliseconds(lambda rows=rows: call(x[:rows]), repeats=10, rounds=5)
            times[rows] = round(1e3 * ms, 1)
            if not same or error > 2**-7:
                found[f"{name} T={rows} WRONG"] = {"same": same, "error": error}
        found[f"{name} us"] = times
        print(name, times, flush=True)

    x = torch.randn(max(ROW_COUNTS), 8192, device="cuda").bfloat16()
    for n, k in ((1536, 4096), (40960, 1024), (32768, 1024), (4096, 8192)):
        codes, scale, values = fp8(n, k)
        packed = PackedMatrix.pack(codes, scale, device)
        part = x[:, :k].contiguous()
        exact = fp8_qdq(part.float(), block=128).double() @ values.double().t()
        judge(f"fp8 {n}x{k}", lambda y, p=packed: multiply(y, p), exact, part)
    for n in (2624, 1024, 256, 129280):
        weight = torch.randn(n, 4096, device="cuda").div_(64).bfloat16()
        packed = PackedMatrix.pack(weight, None, device)
        part = x[:, :4096].contiguous()
        exact = (part.float() @ weight.float().t()).double()
        judge(f"bf16 f32 {n}x4096", lambda y, p=packed: multiply(y, p, output="f32"), exact, part)
    codes, scale, values = fp8(8, 1024, 4096)
    groups = PackedGroups.pack(codes, scale, device)
    y = torch.randn(max(ROW_COUNTS), 8, 4096, device="cuda").bfloat16()
    rounded = fp8_qdq(y.float(), block=128).double()
    exact = torch.einsum("tgk,gnk->tgn", rounded, values.double())
    judge("fp8 groups 8x1024x4096", lambda z: multiply_groups(z, groups), exact, y)
    found["error word"] = int(device.error)
    return found


def logits(device: Device) -> Results:
    """The comparison with the CPU reference, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-s", "tests/gpu/test_deepseek_v4_logits.py"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    print(done.stdout[-3000:], done.stderr[-500:], flush=True)
    return {"rc": done.returncode, "lines": done.stdout.splitlines()[-40:]}


def decode_rows(num_seqs: int, num_rows: int, context: int) -> Rows:
    """Sequences of that context, with pages of their own."""
    pages = -(-(context + 8) // PAGE)
    row = torch.arange(num_seqs * num_rows, device="cuda")
    seq, offset = row // num_rows, row % num_rows
    starts = torch.full_like(row, context - num_rows)
    table = torch.arange(num_seqs * pages, device="cuda").view(num_seqs, pages)
    ends = torch.full_like(row, context)
    return Rows(starts + offset, starts, ends, seq, seq, table, PAGE, True)


def state(model: DeepseekV4, num_pages: int, num_slots: int) -> dict[str, Tensor]:
    """Zeroed KV tensors."""
    sizes = {"paged": num_pages, "ring": num_slots}
    return {
        group.name: torch.zeros(
            (len(group.layers), sizes[group.kind], group.page_bytes),
            dtype=torch.uint8,
            device="cuda",
        )
        for group in model.kv_cache_spec().groups
    }


def kernels_of(call: Callable[[], object], top: int = 30) -> tuple[int, list[str]]:
    """How many kernels a call launches, and where their time goes."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    rows = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    rows.sort(key=lambda event: -event.self_device_time_total)
    lines = [
        f"{event.self_device_time_total:9.0f} us {event.count:5} x {event.key[:70]}"
        for event in rows[:top]
    ]
    return sum(event.count for event in rows), lines


def distinct_experts(model: DeepseekV4, call: Callable[[], object]) -> float:
    """Experts that a step reads in a layer, on average."""
    from moet.kernels import device_moe

    counts: list[Tensor] = []
    real = device_moe.route

    def counting(*args: Any) -> tuple[Tensor, Tensor]:
        ids, weights = real(*args)
        counts.append(ids.unique())
        return ids, weights

    device_moe.route = counting
    try:
        call()
    finally:
        device_moe.route = real
    return sum(len(ids) for ids in counts) / max(1, len(counts))


def full_model(device: Device, num_layers: int | None) -> Results:
    """Steps and prefill of the whole model."""
    found: Results = {}
    begin = perf_counter()
    raw = preset_config("deepseek-v4-flash", "full", num_layers)
    settings = ModelSettings(arch=device.arch)
    options = DummyOptions(seed=1)
    made = dummy_model(raw, settings, device, num_spec_tokens=NUM_DRAFTS, options=options)
    torch.cuda.synchronize()
    model, experts = made.model, made.experts
    assert isinstance(model, DeepseekV4)
    assert isinstance(experts, ResidentProvider)
    found["build s"] = round(perf_counter() - begin, 1)
    found["GiB"] = round(torch.cuda.memory_allocated() / 2**30, 2)
    print(found, flush=True)
    kv = state(model, 640, 33)
    vocab = model.vocab_size
    with torch.inference_mode():
        for seqs, rows, context in ((1, 1, 1024), (1, 3, 1024), (8, 1, 1024), (32, 1, 1024)):
            name = f"{seqs} x {rows} rows at {context}"
            try:
                step_rows = decode_rows(seqs, rows, context)
                ids = torch.randint(vocab, (seqs * rows,), device="cuda")
                run = lambda ids=ids, r=step_rows: model.compute(ids, r, None, kv, experts)  # noqa: E731
                out = run().logits
                again = run().logits
                entry = {
                    "finite": bool(out.isfinite().all()),
                    "deviation": round(float(out.std()), 3),
                    "twice the same": bool(torch.equal(out, again)),
                    "distinct experts": round(distinct_experts(model, run), 1),
                    "ms": round(milliseconds(run, repeats=1, rounds=5), 3),
                }
                entry["kernels"], lines = kernels_of(run)
                found[name] = entry | {"top": lines}
                print(name, entry, *lines, sep="\n", flush=True)
            except Exception:
                found[f"{name} FAILED"] = traceback.format_exc()
                print(name, traceback.format_exc(), flush=True)
        for count in (2048, 8192):
            try:
                found[f"prefill {count}"] = prefill(model, kv, experts, count)
            except Exception:
                found[f"prefill {count} FAILED"] = traceback.format_exc()
                print(traceback.format_exc(), flush=True)
    found["error word"] = int(device.error)
    return found


def prefill(model: DeepseekV4, kv: dict[str, Tensor], experts: Any, count: int) -> Results:
    """One prompt as one chunk, its last row's logits."""
    inputs = ForwardInput(
        token_ids=torch.randint(model.vocab_size, (count,)),
        positions=torch.arange(count),
        cu_seqlens_q=(0, count),
        seq_slots=torch.zeros(1, dtype=torch.int64),
        page_table=torch.arange(count // PAGE).view(1, -1),
        seq_lens=(count,),
        logits_indices=torch.tensor([count - 1]),
    )
    run = lambda: model.forward(inputs, kv, experts)  # noqa: E731
    out = run().logits
    torch.cuda.synchronize()
    begin = perf_counter()
    again = run().logits
    torch.cuda.synchronize()
    seconds = perf_counter() - begin
    halves = []
    for first, last in ((0, count // 2), (count // 2, count)):
        half = replace(
            inputs,
            token_ids=inputs.token_ids[first:last],
            positions=inputs.positions[first:last],
            cu_seqlens_q=(0, last - first),
            seq_lens=(last,),
            logits_indices=torch.tensor([last - first - 1]),
        )
        halves.append(model.forward(half, kv, experts).logits)
    entry = {
        "finite": bool(out.isfinite().all()),
        "twice the same": bool(torch.equal(out, again)),
        "two chunks the same": bool(torch.equal(out, halves[1])),
        "ms": round(1e3 * seconds, 1),
        "tok/s": round(count / seconds),
        "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }
    _, lines = kernels_of(run)
    print(f"prefill {count}", entry, *lines, sep="\n", flush=True)
    return entry | {"top": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--parts", default="products,model,logits")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = open_gpu()
    parts: dict[str, Callable[[], Results]] = {
        "products": lambda: products(device),
        "logits": lambda: logits(device),
        "model": lambda: full_model(device, args.layers),
    }
    results: Results = {"hardware": torch.cuda.get_device_name()}
    for part in args.parts.split(","):
        begin = perf_counter()
        try:
            results[part] = parts[part]()
        except Exception:
            results[f"{part} FAILED"] = traceback.format_exc()
            print(traceback.format_exc(), flush=True)
        print(f"-- {part}: {perf_counter() - begin:.1f} s", flush=True)
        torch.cuda.empty_cache()
        if args.out:
            args.out.write_text(json.dumps(results, indent=1, default=str))


if __name__ == "__main__":
    main()
