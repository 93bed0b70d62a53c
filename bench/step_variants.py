"""Ways to run one decode step, side by side on one GPU: the same weights and bits, other times.

    python -m bench.step_variants [--layers N] [--steps N] [--out FILE]

Every variant is checked: logits and state, launched piece by piece, and the state that captured
steps leave must equal the plain way's bit for bit.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bench.experts import timeline
from bench.gpu import open_gpu
from bench.gpu_model import decode_rows, state
from moet.bench.device_rig import DeviceRig
from moet.bench.device_step import profile_kernels
from moet.bench.rig import Shape
from moet.config import ModelSettings
from moet.kernels import (
    ahead,
    device_gemm,
    device_streams,
    paired_experts,
    projections,
    triton_attention,
    triton_attention_inputs,
    triton_rows,
)
from moet.models.deepseek_v4 import DeepseekV4
from moet.models.dummy import DummyOptions
from moet.models.synthetic import MODEL_NAME
from moet.runtime.device_runner import Placement
from moet.runtime.dummy import dummy_model, preset_config
from moet.runtime.queues import CudaGraphs, CudaQueue

FEW = ((1, 1), (1, 3), (8, 1))
ALL = (*FEW, (32, 1))
CONTEXT = 1024
Change = Callable[[DeepseekV4], None]


def early(model: DeepseekV4) -> None:
    """Attention reads keys, and what follows it weights, before queries are there."""
    triton_attention.EARLY = True


def reading(model: DeepseekV4) -> None:
    """Small kernels read what is older than their inputs before those are there."""
    triton_rows.EARLY = triton_attention_inputs.EARLY = True


def asking(model: DeepseekV4) -> None:
    """The groups' product asks for what its rings do not hold."""
    device_gemm.GROUPS_AHEAD = ahead.WIDE


def deep(model: DeepseekV4) -> None:
    """Its rings are as deep as memory allows."""
    device_gemm.GROUPS_AHEAD = ahead.DEEP


def following(model: DeepseekV4) -> None:
    """It asks for the weights of the product behind it, too."""
    for layer in model.layers:
        attn = layer.attn
        attn.wo_a.weight = replace(attn.wo_a.weight, following=attn.wo_b.weight.stored.plane)


def held(model: DeepseekV4) -> None:
    """What streams are finished with is read before they are there."""
    device_streams.HELD = True


def mixing(model: DeepseekV4) -> None:
    """Streams take the experts' outputs unsummed."""
    for layer in model.layers:
        layer.ffn.unsummed = True


def tables(model: DeepseekV4) -> None:
    """Whoever chooses experts asks for its tables at once."""
    paired_experts.BEGIN_STAGES = {"pair_begin_asking": 4, "pair_begin_small": 1}


def projecting(model: DeepseekV4) -> None:
    """The first products ask for what their rings do not hold."""
    projections.AHEAD = True


ALL_BUT_FOLLOWING = "early, reading, deep, held, mixing, tables, projecting"
EVERYTHING = "early, reading, deep, following, held, mixing, tables, projecting"
VARIANTS: dict[str, list[Change]] = {
    "plain": [],
    "held": [held],
    "held, mixing": [held, mixing],
    "tables": [tables],
    "projecting": [projecting],
    "early": [early],
    "early, reading": [early, reading],
    "early, asking": [early, asking],
    "early, deep": [early, deep],
    "early, deep, following": [early, deep, following],
    ALL_BUT_FOLLOWING: [early, reading, deep, held, mixing, tables, projecting],
    EVERYTHING: [early, reading, deep, following, held, mixing, tables, projecting],
}


WHOLE = ("plain", ALL_BUT_FOLLOWING, EVERYTHING)
LONG = ("kernels us", "timeline")


def plain(model: DeepseekV4) -> None:
    triton_attention.EARLY = triton_rows.EARLY = triton_attention_inputs.EARLY = False
    device_gemm.GROUPS_AHEAD = None
    paired_experts.BEGIN_STAGES = {"pair_begin": 4, "pair_begin_small": 1}
    device_streams.HELD = projections.AHEAD = False
    for layer in model.layers:
        layer.attn.wo_a.weight = replace(layer.attn.wo_a.weight, following=None)
        layer.ffn.unsummed = False


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
    plain(model)
    wanted = bits(model, made.experts)
    left: list[torch.Tensor] = []  # by the captured steps of the plain way
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
            for seqs, rows in ALL if name in WHOLE else FEW:
                shape = Shape(num_seqs=seqs, num_rows=rows, context=CONTEXT)
                entry[f"{seqs} x {rows} ms"] = round(rig.time_steps(shape, args.steps).step_ms, 4)
                if (seqs, rows) == FEW[-1]:
                    state_left = [*rig.kv.tensors.values(), rig.sampler.last_token]
                    left = left or [tensor.clone() for tensor in state_left]
                    same = all(torch.equal(a, b) for a, b in zip(state_left, left, strict=True))
                    entry["same bits captured"] = same
            if name in WHOLE:
                replay = partial(rig.replay, Shape(num_seqs=1, num_rows=1, context=CONTEXT))
                entry["timeline"] = timeline(replay)
                kernels = profile_kernels(replay)
                entry["launches"] = sum(kernel.num_launches for kernel in kernels)
                entry["kernels us"] = {k.name[:60]: round(k.time_us, 1) for k in kernels[:24]}
                del replay
            del rig
        except Exception:
            entry = {"failed": traceback.format_exc(limit=-5)}
        results[name] = entry
        short = {key: value for key, value in entry.items() if key not in LONG}
        print(f"{name}: {short} ({perf_counter() - began_s:.1f} s)", flush=True)
        args.out.write_text(json.dumps(results, indent=1))
    plain(model)


if __name__ == "__main__":
    main()
