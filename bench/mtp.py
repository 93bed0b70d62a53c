"""What drafting costs and gives on one GPU: bench/results/mtp.json.

    python -m bench.mtp [--parts steps,sampled,kernels,heads,adaptive,demo] [--out FILE]

steps: whole steps of V4-Flash at full size with dummy weights, by streams and drafts, and the
tokens per second that they make at the acceptance that is stated in the file. sampled: the same
for requests above temperature 0. kernels: where the time of drafting goes. heads: two drafts
by what their logits come of. adaptive: the engine's loop with drafts that never hold. demo: the
demo models, 100 prompts and 200 tokens each with 0 to 4 drafts: tokens must be equal, and drafts
hold as often as bench/results/quality.json says. Each part stands alone, as in bench/step_h200.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from dataclasses import asdict, replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

import torch
from torch import Tensor

from bench.gpu import check_parts, open_gpu
from bench.loop import Loop, random_ids
from bench.quality_measure import drafts, some_of_each
from bench.quality_tasks import STORY, TASKS, held_out
from bench.rigs import CONTEXT, placement_on, rig_on
from bench.step_h200 import SEED, SKEW
from bench.suite import Bench
from bench.train_demo.corpus import Renderer
from bench.train_demo.tokenizer import Family
from moet.bench.device_rig import DeviceRig
from moet.bench.device_step import profile_kernels
from moet.bench.rig import Shape
from moet.config import CacheConfig, ModelSettings, SchedulerConfig, TargetConfig
from moet.kernels.device_gemm import Device, PackedMatrix
from moet.models.deepseek_v4 import DeepseekV4
from moet.models.dummy import DummyOptions, DummySource
from moet.models.layers import LMHead, Weights
from moet.models.synthetic import MODEL_NAME
from moet.runtime import device_runner
from moet.runtime.device_sampler import Kind
from moet.runtime.draft_length import fitted
from moet.runtime.dummy import DummyModel, dummy_model, preset_config
from moet.runtime.engine import Engine
from moet.types import SamplingParams

RESULTS = Path(__file__).parent / "results" / "mtp.json"
QUALITY = Path(__file__).parent / "results" / "quality.json"
DEMO = Path(__file__).parents[1] / "moet" / "demo"
FAMILIES: tuple[Family, ...] = ("deepseek-v4", "glm")
PARTS = ("steps", "sampled", "kernels", "heads", "adaptive", "demo")
STREAMS = (1, 8, 32)
MOST_DRAFTS = 3
# Chance that draft 1, 2, 3 holds if those before it do: 2.6 tokens a step with two drafts.
ACCEPTANCE = (0.9, 0.78, 0.7)
DEMO_DRAFTS, DEMO_PROMPTS, DEMO_TOKENS = 4, 100, 200
DEMO_SEQS = 32
ADDED = {"GREEDY 2": "2 drafts", "RANKED -1": "top_p and top_k", "RANKED 2": "2 drafts and top_p"}
LOOP_TOKENS = 80
FIRST_TOKENS = 1 << 15


def tokens_per_step(num_drafts: int) -> float:
    return 1.0 + sum(accumulate(ACCEPTANCE[:num_drafts], mul))


def step_rows(bench: Bench, rig: DeviceRig, num_steps: int) -> None:
    """Whole steps by streams and drafts, what drafting takes of them, and the best number."""
    measured: dict[tuple[int, int], float] = {}
    for num_seqs in STREAMS:
        best: dict[int, float] = {}
        for k in range(MOST_DRAFTS + 1):
            case = f"whole step, {num_seqs} streams, {k} drafts"
            with bench.part(case):
                shape = Shape(num_seqs=num_seqs, num_rows=1 + k, context=CONTEXT)
                times = rig.time_steps(shape, num_steps, num_to_draft=k if k else -1)
                measured[num_seqs * (1 + k), k] = times.step_ms
                floor, target = (3.5, 5.75) if (num_seqs, k) == (1, 2) else (None, None)
                note = f"period {times.period_ms:.3f} ms; launching takes {times.host_us:.0f} us"
                bench.add(case, times.step_ms, "ms/step", floor=floor, target=target, note=note)
                best[k] = 1e3 * num_seqs * tokens_per_step(k) / times.period_ms
                goal = 450.0 if (num_seqs, k) == (1, 2) else None
                note = f"{tokens_per_step(k):.2f} tokens a step"
                name = f"tokens per second, {num_seqs} streams, {k} drafts"
                bench.add(name, best[k], "tokens/s", better="higher", target=goal, note=note)
            if k == 2:
                with bench.part(f"{case}, verified alone"):
                    alone = rig.time_steps(shape, num_steps).step_ms
                    note = f"{times.step_ms - alone:.3f} ms are drafting"
                    bench.add(f"{case}, verified alone", alone, "ms/step", note=note)
        if best:
            k = max(best, key=lambda k: best[k])
            bench.add(f"best number of drafts, {num_seqs} streams", k, "drafts", better="higher")
    with bench.part("costs of a step"):
        bench.more["step_costs_ms"] = asdict(fitted(measured))


def sampled_rows(bench: Bench, rig: DeviceRig, num_steps: int) -> None:
    """Whole steps with two drafts by what their sequences ask for."""
    for num_seqs in (1, 32):
        for kind in (Kind.GREEDY, Kind.PLAIN, Kind.RANKED, Kind.FULL):
            case = f"whole step, {num_seqs} streams, 2 drafts, sampling of kind {kind.name}"
            with bench.part(case):
                shape = Shape(num_seqs=num_seqs, num_rows=3, context=CONTEXT)
                times = rig.time_steps(shape, num_steps, num_to_draft=2, kind=kind)
                bench.add(case, times.step_ms, "ms/step")


def kernel_rows(bench: Bench, rig: DeviceRig) -> None:
    """The kernels that drafting adds to a step, and those of sampled steps."""
    shape = Shape(num_seqs=1, num_rows=3, context=CONTEXT)
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for kind in (Kind.GREEDY, Kind.RANKED):
        for k in (-1, 2):
            with bench.part(f"kernels, {kind.name}, {max(k, 0)} drafts"):
                rig.time_steps(shape, 2, num_to_draft=k, kind=kind)
                kernels = profile_kernels(
                    lambda k=k, kind=kind: rig.replay(shape, num_to_draft=k, kind=kind)
                )
                name = f"{kind.name} {k}"
                found[name] = {each.name: (each.num_launches, each.time_us) for each in kernels}
                launches = sum(each.num_launches for each in kernels)
                case = f"launches of a step, {kind.name}, {max(k, 0)} drafts"
                bench.add(case, launches, "launches")
    with bench.part("kernels compared"):
        plain = found["GREEDY -1"]
        for name, more_of in ADDED.items():
            more = {
                kernel: (count - plain.get(kernel, (0, 0))[0], us - plain.get(kernel, (0, 0))[1])
                for kernel, (count, us) in found[name].items()
            }
            for kernel in sorted(more, key=lambda each: -more[each][1])[:22]:
                count, us = more[kernel]
                short = kernel.replace("(anonymous namespace)::", "")[:80]
                note = f"{count:.0f} launches more"
                bench.add(f"{more_of} add: {short}", us, "us/step", note=note)


def adaptive_rows(bench: Bench, made: DummyModel, device: Device) -> None:
    """The engine's loop with drafts that never hold: dummy weights' guesses are as bad as any."""
    loop: Loop | None = None
    with (
        bench.part("an engine that drafts"),
        patch.object(device_runner, "bucket_sizes", lambda most: STREAMS),  # to capture no others
    ):
        loop = Loop(
            made,
            placement_on(device),
            max_num_seqs=max(STREAMS),
            max_num_batched_tokens=2048,
            max_model_len=4096,
            num_spec_tokens=MOST_DRAFTS,
        )
    if loop is None:
        return
    scheduler = loop.core._scheduler
    for num_seqs in STREAMS:
        for how, spec_tokens, adaptive in (
            ("no drafts", 0, False),
            (f"{MOST_DRAFTS} drafts that never hold", MOST_DRAFTS, False),
            (f"{MOST_DRAFTS} drafts that never hold, adaptive", MOST_DRAFTS, True),
        ):
            case = f"engine loop, {num_seqs} streams, {how}"
            with bench.part(case):
                scheduler.config = replace(scheduler.config, adaptive_spec=adaptive)
                for n in range(num_seqs):
                    loop.submit(f"{case} {n}", random_ids(256), LOOP_TOKENS, spec_tokens)
                taken_ms, drafted = second_half(loop)
                note = f"{drafted / num_seqs:.2f} drafts a step and stream"
                bench.add(case, taken_ms, "ms/step", note=note)
    loop.core.shutdown()


def second_half(loop: Loop) -> tuple[float, float]:
    """Runs all that was submitted. Milliseconds and drafts a step, of the second half of the steps
    but for the last ones, in which sequences end."""
    first = loop.core.stats().num_steps
    ended: list[float] = []
    counts: list[int] = []
    while loop.core.has_work:
        loop.step()
        stats = loop.core.stats()
        if stats.num_steps - first > len(ended):
            ended.append(perf_counter())
            counts.append(stats.num_draft_tokens)
    middle, last = len(ended) // 2, len(ended) - 10
    num_steps = last - middle
    taken_ms = 1e3 * (ended[last] - ended[middle]) / num_steps
    return taken_ms, (counts[last] - counts[middle]) / num_steps


def demo_rows(bench: Bench, family: Family) -> None:
    """Tokens with 0 to 4 drafts, apart and in one batch, and how many drafts hold."""
    folder = DEMO / family
    renderer = Renderer(family, folder)
    generators = [*TASKS.values(), STORY]
    prompts = [
        next(held_out(generators[n % len(generators)], renderer, 1, seed=1000 + n)).rendered.prompt
        for n in range(DEMO_PROMPTS)
    ]
    began_s = perf_counter()
    scheduler = SchedulerConfig(
        num_spec_tokens=DEMO_DRAFTS, adaptive_spec=False, max_num_seqs=DEMO_SEQS
    )
    settings = ModelSettings(precision="fp4")
    with Engine(
        str(folder),
        settings=settings,
        cache=CacheConfig(budget_bytes=1 << 30),
        scheduler=scheduler,
        target=TargetConfig(device="cuda"),
    ) as engine:
        bench.add(f"{family} demo, start", perf_counter() - began_s, "s")

        def greedy(k: int) -> SamplingParams:
            return SamplingParams(
                temperature=0.0, max_tokens=DEMO_TOKENS, ignore_eos=True, spec_tokens=k
            )

        def ask(k: int, spare: bool = False) -> list[list[int]]:
            chosen = prompts[:20] if spare else prompts
            done = engine.generate([list(prompt) for prompt in chosen], greedy(k))
            return [each.choices[0].token_ids for each in done]

        ask(0, spare=True)
        plain: list[list[int]] = []
        for k in range(DEMO_DRAFTS + 1):
            before, began_s = engine.stats(), perf_counter()
            answers = ask(k)
            taken_s, after = perf_counter() - began_s, engine.stats()
            plain = plain or answers
            same = sum(a == b for a, b in zip(plain, answers, strict=True))
            case = f"{family} demo, {k} drafts"
            rate = DEMO_PROMPTS * DEMO_TOKENS / taken_s
            note = f"{rate:.0f} tokens/s in {DEMO_SEQS} streams"
            wanted = float(DEMO_PROMPTS)
            bench.add(
                f"{case}, equal answers", same, "of 100", better="higher", target=wanted, note=note
            )
            steps = after.num_drafts - before.num_drafts
            for n in range(k if steps else 0):
                held = after.num_accepted_by_position[n]
                if n < len(before.num_accepted_by_position):
                    held -= before.num_accepted_by_position[n]
                name = f"{case}, draft {n + 1} holds"
                bench.add(name, held / steps, "share", better="higher", note="past ends, too")
        held_rows(bench, family, drafts(engine, some_of_each(renderer))["held"])

        async def mixed() -> list[list[list[int]]]:
            async def one(prompt: list[int], k: int) -> list[int]:
                return (await engine.agenerate(prompt, greedy(k))).choices[0].token_ids

            async def some(k: int) -> list[list[int]]:
                return list(await asyncio.gather(*(one(list(p), k) for p in prompts[:20])))

            return list(await asyncio.gather(*(some(k) for k in range(DEMO_DRAFTS + 1))))

        found = asyncio.run(mixed())
        same = sum(a == b for each in found for a, b in zip(plain, each, strict=False))
        name = f"{family} demo, all numbers of drafts in one batch, equal answers"
        bench.add(name, same, "of 100", better="higher", target=100)


def held_rows(bench: Bench, family: Family, held: list[float]) -> None:
    """How many drafts hold in answers to the questions of the quality table, which says it, too."""
    official = json.loads(QUALITY.read_text())["models"][family]["official"]
    expected: list[float] = official.get("drafts", {}).get("held", [])
    for n, share in enumerate(held):
        note = f"quality.json: {expected[n]:.4f}" if expected else "quality.json has none yet"
        name = f"{family} demo, questions of quality.json, draft {n + 1} holds"
        bench.add(name, share, "share", better="higher", note=note)
    if expected:
        points = 100 * abs(held[0] - expected[0])
        bench.add(f"{family} demo, first draft, off quality.json", points, "points", target=2)


class FirstTokens:
    """A head that knows of the first tokens only: the others are never likely."""

    def __init__(self, head: LMHead, vocab_size: int) -> None:
        self.head, self.vocab_size = head, vocab_size

    @classmethod
    def of(cls, head: LMHead, device: Device) -> FirstTokens:
        """Of a head in fp8."""
        assert isinstance(head.weight, PackedMatrix)
        stored = head.weight.stored
        assert stored.scale is not None
        few = replace(
            stored,
            plane=stored.plane[:FIRST_TOKENS],
            scale=stored.scale[: FIRST_TOKENS // 128],
            out_features=FIRST_TOKENS,
        )
        matrix = replace(head.weight, stored=few)
        return cls(LMHead(matrix, arch=device.arch, quantised=True), stored.out_features)

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.head(x)
        more = self.vocab_size - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, more), value=-torch.inf)


def head_rows(bench: Bench, made: DummyModel, device: Device, rig: DeviceRig, steps: int) -> None:
    """Two drafts by the head that their logits come of, for reading it is most of a draft."""
    assert isinstance(made.model, DeepseekV4)
    assert made.model.mtp is not None
    draft_head, config = made.model.mtp.head, made.model.config
    kept = draft_head.lm_head
    table = "head", config.vocab_size, config.hidden_size
    settings = ModelSettings(arch=device.arch, rounding="deployed", precision="w2")
    options = DummyOptions(seed=SEED, skew=SKEW)
    weights = Weights(
        DummySource(made.raw_config, options, device.torch_device), settings, gpu=device
    )
    heads: dict[str, LMHead | FirstTokens] = {}
    with bench.part("heads of drafts"):
        heads["bf16"], rounded = LMHead.load(weights, *table), LMHead.guessing(weights, *table)
        heads["fp8"] = rounded
        heads[f"fp8, {FIRST_TOKENS} tokens"] = FirstTokens.of(rounded, device)
        check_heads(bench, heads["bf16"], rounded, config.hidden_size)
    for name, head in heads.items():
        with bench.part(f"drafts by a head in {name}"):
            draft_head.lm_head = head  # type: ignore[assignment]
            other = make_rig(made, device, max(STREAMS), like=rig)
            for num_seqs in STREAMS:
                case = f"whole step, {num_seqs} streams, 2 drafts, their head {name}"
                shape = Shape(num_seqs=num_seqs, num_rows=3, context=CONTEXT)
                times = other.time_steps(shape, steps, num_to_draft=2)
                bench.add(case, times.step_ms, "ms/step")
        draft_head.lm_head = kept


def check_heads(bench: Bench, exact: LMHead | FirstTokens, rounded: LMHead, dim: int) -> None:
    """Rows have the same bits in any number, and logits are near those of the head as stored."""
    x = torch.randn(max(STREAMS), dim, device="cuda").bfloat16()
    alone = torch.cat([rounded(row) for row in x.split(1)])
    for num_rows in (8, max(STREAMS)):
        found = rounded(x[:num_rows])
        same = int((found == alone[:num_rows]).all(1).sum())
        case = f"rows of {num_rows} through a head in fp8 that are as alone"
        bench.add(case, same, "rows", better="higher", target=num_rows)
    error = float((alone - exact(x)).norm() / exact(x).norm())
    bench.add("error of logits of a head in fp8", error, "of their norm")


def make_model(device: Device, num_layers: int | None) -> DummyModel:
    raw = preset_config(MODEL_NAME, "full", num_layers)
    settings = ModelSettings(arch=device.arch, rounding="deployed", precision="w2")
    options = DummyOptions(seed=SEED, skew=SKEW)
    return dummy_model(raw, settings, device, num_spec_tokens=MOST_DRAFTS, options=options)


def make_rig(
    made: DummyModel, device: Device, num_seqs: int, *, like: DeviceRig | None = None
) -> DeviceRig:
    """like: one of the same size whose prompts it takes over."""
    rig = rig_on(
        placement_on(device),
        made,
        num_seqs=num_seqs,
        num_rows=1 + MOST_DRAFTS,
        longest=CONTEXT,
        num_drafts=MOST_DRAFTS,
    )
    if like is None:
        rig.fill()
        return rig
    for name, tensor in rig.kv.tensors.items():
        tensor.copy_(like.kv.tensors[name])
    torch.cuda.synchronize()  # not by the rig's queue
    return rig


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--families", type=lambda text: text.split(","), default=list(FAMILIES))
    parser.add_argument("--layers", type=int, help="take the first ones only")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each row")
    parser.add_argument("--commit", default="", help="what to call the sources that are measured")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    check_parts(parser, args.parts, PARTS)
    return args


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s", stream=sys.stdout)
    args = arguments()
    torch.manual_seed(0)
    device = open_gpu()
    began_s = perf_counter()
    model = f"{MODEL_NAME}, w2, fp8 KV, dummy weights of seed {SEED} and skew {SKEW}"
    more: dict[str, object] = {"model": model, "acceptance": ACCEPTANCE, "context": CONTEXT}
    if args.layers:
        more["layers"] = args.layers
    command = " ".join(["python -m bench.mtp", *sys.argv[1:]])
    bench = Bench(args.out, command, args.commit, more)
    if "demo" in args.parts:
        for family in args.families:
            with bench.part(f"{family} demo"):
                demo_rows(bench, family)
        torch.cuda.empty_cache()
    made = rig = None
    if set(args.parts) - {"demo"}:
        with bench.part("weights, state and prompts"):
            made = make_model(device, args.layers)
            rig = make_rig(made, device, max(STREAMS))
    if rig is not None and "steps" in args.parts:
        step_rows(bench, rig, args.steps)
    if rig is not None and "sampled" in args.parts:
        sampled_rows(bench, rig, min(args.steps, 10))
    if rig is not None and "kernels" in args.parts:
        kernel_rows(bench, rig)
    if made is not None and rig is not None and "heads" in args.parts:
        head_rows(bench, made, device, rig, args.steps)
    if made is not None and "adaptive" in args.parts:
        adaptive_rows(bench, made, device)
    bench.add("all of this", perf_counter() - began_s, "s")
    bench.write()
    print(f"faults: {bench.faults}" if bench.faults else "no faults", flush=True)


if __name__ == "__main__":
    main()
