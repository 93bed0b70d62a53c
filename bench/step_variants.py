"""Ways to run one decode step, side by side on one GPU: the same weights and bits, other times.

    python -m bench.step_variants [--layers N] [--steps N] [--out FILE]

Every variant is checked first: logits and state must equal the plain way's bit for bit.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bench.gpu import open_gpu
from bench.gpu_model import decode_rows, state
from moet.bench.device_rig import DeviceRig
from moet.bench.device_step import profile_kernels
from moet.bench.rig import Shape
from moet.config import ModelSettings
from moet.kernels import (
    triton_attention,
    triton_attention_inputs,
    triton_indexer,
    triton_rows,
)
from moet.models.deepseek_v4 import DeepseekV4
from moet.models.dummy import DummyOptions
from moet.models.synthetic import MODEL_NAME
from moet.runtime.device_runner import Placement
from moet.runtime.dummy import dummy_model, preset_config
from moet.runtime.queues import CudaGraphs, CudaQueue

SHAPES = ((1, 1), (1, 3), (8, 1), (32, 1))
CONTEXT = 1024
Change = Callable[[DeepseekV4], None]


def products(model: DeepseekV4) -> None:
    """Two products of one input in one launch."""
    for layer in model.layers:
        attn = layer.attn
        attn._at_once = attn.unquantised is not None and attn.wqa_wkv.quantised


def overlapping(model: DeepseekV4) -> None:
    """Triton's kernels begin while the kernel ahead ends, as the CUDA ones do."""
    launched(OVERLAP=True, launch_pdl=True)


def launched(**options: bool) -> None:
    for module in (triton_attention, triton_attention_inputs, triton_indexer, triton_rows):
        module.overlap = lambda like: options  # type: ignore[attr-defined]


def splitting(model: DeepseekV4) -> None:
    """A tile's sums are divided among programs."""
    triton_attention.SPLIT_TILES = 64


VARIANTS: dict[str, list[Change]] = {
    "plain": [],
    "products": [products],
    "overlap": [overlapping],
    "products, overlap": [products, overlapping],
    "products, overlap, split tiles": [products, overlapping, splitting],
}


def plain(model: DeepseekV4) -> None:
    launched(OVERLAP=False, launch_pdl=False)
    triton_attention.SPLIT_TILES = 0
    for layer in model.layers:
        layer.attn._at_once = False


def bits(model: DeepseekV4, experts: Any) -> list[torch.Tensor]:
    """Logits and state of a few steps."""
    found = []
    kv = state(model, 80, 9)
    draw = torch.Generator("cuda").manual_seed(1)
    for seqs, rows in ((1, 1), (1, 3), (8, 1)):
        given = decode_rows(seqs, rows, CONTEXT)
        ids = torch.randint(model.vocab_size, (seqs * rows,), device="cuda", generator=draw)
        with torch.inference_mode():
            found.append(model.compute(ids, given, None, kv, experts).logits)
    return [*found, *kv.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = open_gpu()
    raw = preset_config(MODEL_NAME, "full", args.layers)
    made = dummy_model(raw, ModelSettings(arch=device.arch), device, options=DummyOptions(skew=0.5))
    model, results = made.model, dict[str, Any]()
    assert isinstance(model, DeepseekV4)
    wanted = bits(model, made.experts)
    for name, changes in VARIANTS.items():
        began_s = perf_counter()
        try:
            plain(model)
            for change in changes:
                change(model)
            entry: dict[str, Any] = {}
            pairs = zip(bits(model, made.experts), wanted, strict=True)
            entry["same bits"] = all(torch.equal(a, b) for a, b in pairs)
            queue = CudaQueue()
            rig = DeviceRig(
                model,
                made.experts,
                Placement(queue, CudaGraphs(queue), device.error, device.arch),
                num_seqs=32,
                num_rows=3,
                longest=CONTEXT,
                others=CONTEXT,
            )
            rig.fill()
            for seqs, rows in SHAPES:
                shape = Shape(num_seqs=seqs, num_rows=rows, context=CONTEXT)
                entry[f"{seqs} x {rows} ms"] = round(rig.time_steps(shape, args.steps).step_ms, 4)
            kernels = profile_kernels(
                lambda rig=rig: rig.replay(Shape(num_seqs=1, num_rows=1, context=CONTEXT))
            )
            entry["launches"] = sum(kernel.num_launches for kernel in kernels)
            entry["kernels us"] = {k.name[:60]: round(k.time_us, 1) for k in kernels[:24]}
            del rig
        except Exception:
            entry = {"failed": traceback.format_exc(limit=-5)}
        results[name] = entry
        short = {key: value for key, value in entry.items() if key != "kernels us"}
        print(f"{name}: {short} ({perf_counter() - began_s:.1f} s)", flush=True)
        args.out.write_text(json.dumps(results, indent=1))
    print(json.dumps(results[min(results, key=lambda n: results[n].get("1 x 1 ms", 99))], indent=1))


if __name__ == "__main__":
    main()
