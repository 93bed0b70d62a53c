"""Prompts of DeepSeek-V4-Flash at full size on one GPU: forms of the kernels for many rows side
by side, their bits compared, and where the time of an 8k prompt goes.

    python -m bench.long_rows --part products|ops|host|model [--commit X] [--out FILE]

A part is a process of its own: one that hangs is ended by whoever started it (`timeout`).
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import gc
import json
import pstats
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from bench.gpu import milliseconds, open_gpu
from bench.gpu_model import PAGE, kernels_of, state
from bench.kernels.prefill import EXPERTS, TOP_K, routed
from bench.kernels.rig import DEVICE, Bench, random_pool
from moet.config import ModelSettings
from moet.kernels import prefill_gemm
from moet.kernels.device_gemm import Device
from moet.kernels.layout import W2Rows
from moet.models.base import ForwardInput, ResidentProvider
from moet.models.deepseek_v4 import DeepseekV4
from moet.models.dummy import DummyOptions
from moet.runtime.dummy import dummy_model, preset_config

FORMS = (False, True)
OPS = ("attention", "index", "query_heads", "hc_", "inputs")


def experts(bench: Bench, tokens: int) -> None:
    """A layer's experts: how fast."""
    format = W2Rows(4096, 2048)
    pool, ids = random_pool(format, EXPERTS), routed(tokens, 0.5)
    slot_of = torch.arange(EXPERTS, device=DEVICE)
    x = torch.randn(tokens, 4096, device=DEVICE).bfloat16()
    weights = torch.rand(tokens, TOP_K, device=DEVICE)

    def call() -> torch.Tensor:
        return prefill_gemm.mixture(
            bench.kernels, pool, x, ids, weights, slot_of, limit=10.0, error=bench.error
        )

    flops = 6.0 * tokens * TOP_K * 4096 * 2048
    bench.computed(f"w2 layer {tokens} tokens", "", bench.time_us([call] * 2), flops, 0.0)


def plan(bench: Bench, tokens: int) -> None:
    """The work list of a layer's experts: one launch against torch's operations."""
    ids, slot_of = routed(tokens, 0.5), torch.arange(EXPERTS, device=DEVICE)
    made = prefill_gemm.plan_chunk(bench.kernels, ids, slot_of, 128)
    wanted = prefill_gemm.plan_rows(ids, slot_of, 128)
    count = int(wanted.num_entries)
    same = int(made.num_entries) == count and torch.equal(made.pairs, wanted.pairs)
    same = same and torch.equal(made.entries[:count], wanted.entries[:count])
    bench.add(f"plan of {tokens} tokens is the same", float(same), "", "higher", None, 1.0)
    calls = {
        "plan in one launch": partial(prefill_gemm.plan_chunk, bench.kernels, ids, slot_of, 128),
        "plan in torch": partial(prefill_gemm.plan_rows, ids, slot_of, 128),
    }
    for name, call in calls.items():
        us = bench.time_us([call] * 2)
        bench.add(f"{name}, {tokens} tokens", us, "us", "lower", None, 0.0)


def products(device: Device) -> Any:
    bench = Bench(device.launcher, device.error)  # type: ignore[arg-type]
    for tokens in (8192, 1024):
        bench.attempt(plan, tokens)
        bench.attempt(experts, tokens)
    return {"rows": bench.rows, "failures": bench.failures, "error": int(device.error)}


def ops(device: Device) -> Any:
    from tests.kernels.accelerated.released import Released

    found = []
    for rows, context in ((8192, 8192), (1024, 102400)):
        step = Released(rows, context, device.torch_device, chunk=True)
        for name, call in step.ops().items():
            if not name.startswith(OPS) or "_triton" in name:
                continue
            try:
                us = round(milliseconds(call) * 1e3, 1)
            except Exception as error:  # one op that fails must not hide the others
                print(f"{name}: {error!r}"[:300], flush=True)
                continue
            found.append({"op": name, "rows": rows, "context": context, "us": us})
            print(found[-1], flush=True)
        del step
        torch.cuda.empty_cache()
    return found


class Prompts:
    """A full-size model that runs prompts in chunks."""

    def __init__(self, device: Device, num_layers: int | None) -> None:
        raw = preset_config("deepseek-v4-flash", "full", num_layers)
        options = DummyOptions(seed=1, skew=0.5)
        made = dummy_model(raw, ModelSettings(arch=device.arch), device, options=options)
        assert isinstance(made.model, DeepseekV4)
        assert isinstance(made.experts, ResidentProvider)
        self.model, self.experts = made.model, made.experts
        self.kv = state(self.model, 40, 1)
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(self.model.vocab_size, (8192,), generator=generator)

    def run(self, total: int, size: int) -> torch.Tensor:
        """The last row's logits."""
        logits = torch.empty(0)
        for first in range(0, total, size):
            last = min(first + size, total)
            inputs = ForwardInput(
                token_ids=self.tokens[first:last],
                positions=torch.arange(first, last),
                cu_seqlens_q=(0, last - first),
                seq_slots=torch.zeros(1, dtype=torch.int64),
                page_table=torch.arange(-(-last // PAGE)).view(1, -1),
                seq_lens=(last,),
                logits_indices=torch.tensor([last - first - 1]),
            )
            logits = self.model.forward(inputs, self.kv, self.experts).logits
        return logits

    def milliseconds(self, total: int, size: int) -> float:
        times = []
        for _ in range(3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.run(total, size)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        return median(times)


def host(device: Device, num_layers: int | None) -> Any:
    """What launching a short chunk takes this process, and the functions in which it is spent."""
    prompts, found = Prompts(device, num_layers), {}
    for size in (512, 1024, 2048):
        prompts.run(2 * size, size)
        torch.cuda.synchronize()
        began_s = perf_counter()
        prompts.run(2 * size, size)
        launched_s = perf_counter() - began_s
        torch.cuda.synchronize()
        taken_s = perf_counter() - began_s
        entry = {"launched ms": round(5e2 * launched_s, 1), "ms": round(5e2 * taken_s, 1)}
        found[f"chunk of {size}"] = entry
        print(size, entry, flush=True)
        _, lines = kernels_of(lambda size=size: prompts.run(size, size))  # type: ignore[misc]
        print(*lines[:24], sep="\n", flush=True)
    profile = cProfile.Profile()
    profile.runcall(prompts.run, 2048, 1024)
    torch.cuda.synchronize()
    pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    return found


def model(device: Device, num_layers: int | None, all_forms: bool) -> Any:
    found: dict[str, Any] = {}
    kept: dict[int, torch.Tensor] = {}
    for attends in FORMS if all_forms else (True,):
        prompts = Prompts(replace(device, chunk_attention=attends), num_layers)
        name = f"chunk attention {attends}"
        try:
            for size in (8192, 2048, 1024, 512):
                logits = prompts.run(8192, size)
                same = torch.equal(logits, kept.setdefault(0, logits))
                ms = prompts.milliseconds(8192, size)
                entry = {"ms": round(ms, 1), "tok/s": round(8192e3 / ms), "same bits": same}
                found[f"{name}, chunks of {size}"] = entry
                print(name, size, entry, flush=True)
            _, lines = kernels_of(lambda p=prompts: p.run(8192, 8192))  # type: ignore[misc]
            found[f"{name}, kernels"] = lines
            print(*lines, sep="\n", flush=True)
        except Exception:
            found[f"{name} FAILED"] = traceback.format_exc()
            print(traceback.format_exc(), flush=True)
        del prompts
        gc.collect()
        torch.cuda.empty_cache()
    found["error word"] = int(device.error)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("products", "ops", "host", "model"), required=True)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--all-forms", action="store_true", help="not only those that are bound")
    parser.add_argument("--commit", default="", help="what to call the sources that are measured")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = open_gpu()
    torch.manual_seed(0)
    parts: dict[str, Callable[[], Any]] = {
        "products": lambda: products(device),
        "ops": lambda: ops(device),
        "host": lambda: host(device, args.layers),
        "model": lambda: model(device, args.layers, args.all_forms),
    }
    result = {
        "hardware": f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        "commit": args.commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        args.part: parts[args.part](),
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
