"""Host time per step: what the engine adds to a model that takes no time.

`python bench/host_overhead.py` writes results/host_overhead.json. The model and the sampler here
return constants, so what is measured is scheduling, building the batch and its tensors, committing
and making events; the plain loop, since there nothing is hidden behind a device. The `sampler` rows
put the reference sampler back, which on a device is kernels.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from moet.config import CacheConfig, SchedulerConfig
from moet.kernels.moe import ExpertTable
from moet.models.base import ForwardInput, KVCacheSpec, KVGroup, KVTensors, ModelOutput
from moet.runtime.core import EngineCore
from moet.runtime.sampler import Sampled
from moet.types import Request, SamplingParams

RESULTS = Path(__file__).parent / "results" / "host_overhead.json"
VOCAB_SIZE = 256
PROMPT_TOKENS = 1000
ROUNDS = 8
TARGET_US = {8: 150.0}


class NullModel:
    """Pages of the real size in tokens, nothing in them, and the same logits every time."""

    vocab_size = VOCAB_SIZE
    max_position_embeddings = 1 << 20

    def __init__(self) -> None:
        self._logits = torch.zeros(4096, VOCAB_SIZE)
        self._logits[:, 7] = 1.0

    def kv_cache_spec(self) -> KVCacheSpec:
        return KVCacheSpec(
            256,
            (
                KVGroup("paged", "paged", (0,), 256, 256),
                KVGroup("window", "ring", (0,), 128, 128, resume=True),
            ),
        )

    def forward(self, inputs: ForwardInput, kv: KVTensors, experts: object) -> ModelOutput:
        logits = self._logits[: len(inputs.logits_indices)]
        return ModelOutput(logits, logits)

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        raise AssertionError("the null model has no experts")


class NullSampler:
    """The same token for every row."""

    def __init__(self, num_slots: int) -> None:
        self.last_token = torch.full((num_slots,), 7)
        self._tokens = torch.full((num_slots,), 7)
        self._none = [None] * num_slots

    def admit(self, slot: int, params: SamplingParams, *rest: Sequence[int] | int) -> None:
        pass

    def release(self, slot: int) -> None:
        pass

    def check(self) -> None:
        pass

    def sample(self, logits: Tensor, slots: Tensor, positions: Tensor, *rest: object) -> Sampled:
        return Sampled(self._tokens[: len(slots)], self._none[: len(slots)])  # type: ignore[arg-type]


def make_core(num_seqs: int, *, with_sampler: bool, overlap: bool) -> EngineCore:
    """A core that decodes num_seqs sequences, past their prompts."""
    model = NullModel()
    core = EngineCore(
        model,
        model,
        cache=CacheConfig(budget_bytes=4096 * 256, host_budget_bytes=64 * 256),
        scheduler=SchedulerConfig(max_num_seqs=max(num_seqs, 2), overlap=overlap),
        precision="w2",
        vocab_size=VOCAB_SIZE,
        seed=0,
    )
    if not with_sampler:
        core._runner.sampler = NullSampler(num_seqs)  # type: ignore[assignment]
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    for i in range(num_seqs):
        prompt = [(i + n) % VOCAB_SIZE for n in range(PROMPT_TOKENS)]
        core.submit(Request(request_id=str(i), prompt_token_ids=prompt, params=params))
    while core.stats().generation_tokens < 3 * num_seqs:
        core.step()
    return core


def step_us(core: EngineCore, num_steps: int) -> list[float]:
    """Wall time of each step in microseconds."""
    times = []
    for _ in range(num_steps):
        started = time.perf_counter()
        core.step()
        times.append((time.perf_counter() - started) * 1e6)
    return times


def measure(num_steps: int) -> list[dict[str, object]]:
    """One row per case: the lowest of ROUNDS medians over num_steps steps each.

    Other work on the machine only ever adds time, so the quietest round is the engine's own.
    """
    rows: list[dict[str, object]] = []
    for with_sampler in (False, True):
        for num_seqs in (1, 8, 32):
            core = make_core(num_seqs, with_sampler=with_sampler, overlap=False)
            rounds = [sorted(step_us(core, num_steps)) for _ in range(ROUNDS)]
            core.shutdown()
            best = min(rounds, key=statistics.median)
            name = "sampler" if with_sampler else "null sampler"
            rows.append(
                {
                    "case": f"decode step, {num_seqs} sequences, {name}",
                    "value": round(statistics.median(best), 1),
                    "unit": "us",
                    "better": "lower",
                    "floor": 0,
                    "target": None if with_sampler else TARGET_US.get(num_seqs),
                    "note": (
                        f"lowest of {ROUNDS} medians of {num_steps} steps; in that round the 99th "
                        f"percentile was {best[num_steps * 99 // 100]:.0f} us"
                    ),
                }
            )
    return rows


def hardware() -> str:
    """The processor, by name."""
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.processor()}, one thread, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    rows = measure(args.steps)
    report = {
        "hardware": hardware(),
        "commit": commit,
        "command": f"python bench/host_overhead.py --steps {args.steps}",
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    args.output.parent.mkdir(exist_ok=True)
    args.output.write_text(json.dumps(report, indent=2) + "\n")
    for row in rows:
        target = f"  (target {row['target']})" if row["target"] else ""
        print(f"{row['case']:45s} {row['value']:8.1f} {row['unit']}{target}  {row['note']}")
    missed = [r for r in rows if r["target"] and r["value"] > r["target"]]  # type: ignore[operator]
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
