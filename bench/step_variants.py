"""Ways to run one decode step, side by side on one GPU: the same weights and bits, other times.

    python -m bench.step_variants [--layers N] [--steps N] [--out FILE]

Every variant is checked: logits and state, launched piece by piece, and the state that captured
steps leave must equal the plain way's bit for bit. Prompts are compared, too.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable
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
from moet.kernels import device_streams, triton_attention, triton_common
from moet.models.deepseek_v4 import DeepseekV4
from moet.models.dummy import DummyOptions
from moet.models.synthetic import MODEL_NAME
from moet.runtime.device_runner import Placement
from moet.runtime.dummy import dummy_model, preset_config
from moet.runtime.queues import CudaGraphs, CudaQueue

SHAPES = ((1, 1), (1, 3), (8, 1))
NUM_SEQS = max(seqs for seqs, _ in SHAPES)
CONTEXT = 1024
Change = Callable[[DeepseekV4], None]


def by_a_launch(model: DeepseekV4) -> None:
    """A launch sums the experts' outputs; otherwise streams do on their way in."""
    for layer in model.layers:
        layer.ffn.unsummed = False


def one_in_a_cluster(model: DeepseekV4) -> None:
    """A row that comes alone has a cluster, too."""
    device_streams.CLUSTER_LEAST = 1


def eight_in_clusters(model: DeepseekV4) -> None:
    """Up to eight rows have a cluster each."""
    device_streams.CLUSTER_ROWS = 8


def not_held(model: DeepseekV4) -> None:
    """What streams are finished with is read when it is needed."""
    device_streams.HELD_ROWS = 0


def streams_early(model: DeepseekV4) -> None:
    """The kernel behind streams may begin before the one ahead of them has ended."""
    device_streams.EARLY = True


def triton_early(model: DeepseekV4) -> None:
    """Likewise of Triton's kernels."""
    triton_common.EARLY = True


def divided(model: DeepseekV4) -> None:
    """A tile's sums of attention are divided among eight programs."""
    triton_attention.PROGRAMS_EACH = 8


def fused(model: DeepseekV4) -> None:
    """The compiler makes one of products and sums where it likes: other bits."""
    triton_common.Kernel.fusion = True


EARLY: list[Change] = [streams_early, triton_early]
VARIANTS: dict[str, list[Change]] = {
    "plain": [],
    "plain again": [],
    "streams early": [streams_early],
    "Triton early": [triton_early],
    "early": EARLY,
    "early, not held": [*EARLY, not_held],
    "early, one in a cluster": [*EARLY, one_in_a_cluster],
    "early, eight in clusters": [*EARLY, eight_in_clusters],
    "early, by a launch": [*EARLY, by_a_launch],
    "early, divided": [*EARLY, divided],
    "by a launch": [by_a_launch],
    "eight in clusters": [eight_in_clusters],
    "fused": [fused],
}
LONG = ("kernels us", "timeline")


def plain(model: DeepseekV4) -> None:
    device_streams.CLUSTER_LEAST, device_streams.CLUSTER_ROWS = 2, 4
    device_streams.HELD_ROWS, device_streams.EARLY = 1, False
    triton_common.EARLY = triton_common.Kernel.fusion = False
    triton_attention.PROGRAMS_EACH = 4
    for layer in model.layers:
        layer.ffn.unsummed = True


def bits(model: DeepseekV4, experts: Any) -> list[torch.Tensor]:
    """Logits and state of a few steps."""
    found = []
    kv = state(model, 80, 9)
    draw = torch.Generator("cuda").manual_seed(1)
    for seqs, rows in SHAPES:
        given = decode_rows(seqs, rows, CONTEXT)
        ids = torch.randint(model.vocab_size, (seqs * rows,), device="cuda", generator=draw)
        with torch.inference_mode():
            found.append(model.compute(ids, given, None, kv, experts).logits)
    return [*found, *kv.values()]


def state_of(rig: DeviceRig) -> dict[str, torch.Tensor]:
    """What steps leave; whose token nobody asked for, does not matter."""
    return {**rig.kv.tensors, "last_token": rig.sampler.last_token[:-1]}


def differences(
    found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]
) -> dict[str, dict[str, Any]]:
    """Of the tensors that differ: how many elements, and the first places."""
    said = {}
    for key, tensor in found.items():
        places = (tensor != wanted[key]).nonzero()
        if len(places):
            said[key] = {"count": len(places), "first": places[:3].tolist()}
    return said


def best(results: dict[str, Any]) -> str:
    """The variant whose steps of one stream are fastest, of those that change nothing else."""

    def fine(entry: dict[str, Any]) -> bool:
        alike = not any(value for key, value in entry.items() if key.endswith("left otherwise"))
        return bool(entry.get("same bits")) and alike and "8 x 1 ms" in entry

    return min(
        (name for name in results if fine(results[name])),
        key=lambda name: float(results[name]["1 x 1 ms"]),
        default="plain",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = open_gpu()
    raw = preset_config(MODEL_NAME, "full", args.layers)
    settings, options = ModelSettings(arch=device.arch), DummyOptions(skew=0.5)
    most = max(rows for _, rows in SHAPES) - 1
    made = dummy_model(raw, settings, device, num_spec_tokens=most, options=options)
    model, results = made.model, dict[str, Any]()
    assert isinstance(model, DeepseekV4)
    plain(model)
    wanted = bits(model, made.experts)
    filled: dict[str, torch.Tensor] = {}  # by prompts of the plain way
    left: dict[tuple[int, int], dict[str, torch.Tensor]] = {}  # by its captured steps
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
                num_seqs=NUM_SEQS,
                num_rows=3,
                longest=CONTEXT,
                others=CONTEXT,
            )
            rig.fill()
            torch.cuda.synchronize()
            states = state_of(rig)
            if not filled:
                filled = {key: tensor.clone() for key, tensor in states.items()}
            entry["filled otherwise"] = differences(states, filled)
            for key, tensor in states.items():  # whatever prompts do, steps begin alike
                tensor.copy_(filled[key])
            torch.cuda.synchronize()
            for seqs, rows in SHAPES:
                shape = Shape(num_seqs=seqs, num_rows=rows, context=CONTEXT)
                entry[f"{seqs} x {rows} ms"] = round(rig.time_steps(shape, args.steps).step_ms, 4)
                case = left.setdefault((seqs, rows), {})
                for key, tensor in states.items():
                    case.setdefault(key, tensor.clone())
                entry[f"{seqs} x {rows} left otherwise"] = differences(states, case)
            replay = partial(rig.replay, Shape(num_seqs=1, num_rows=1, context=CONTEXT))
            entry["timeline"] = timeline(replay)
            if name in ("plain", "early"):
                kernels = profile_kernels(replay)
                entry["launches"] = sum(kernel.num_launches for kernel in kernels)
                entry["kernels us"] = {k.name[:60]: round(k.time_us, 1) for k in kernels[:24]}
            del replay, states, tensor
            del rig
        except Exception:
            entry = {"failed": traceback.format_exc(limit=-5)}
        results[name] = entry
        short = {key: value for key, value in entry.items() if key not in LONG}
        print(f"{name}: {short} ({perf_counter() - began_s:.1f} s)", flush=True)
        args.out.write_text(json.dumps(results, indent=1))
    plain(model)
    print(f"best: {best(results)}")


if __name__ == "__main__":
    main()
