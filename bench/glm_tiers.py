"""All of GLM-5.2 on one GPU that holds two thirds of it: what a step costs beside a resident one.

    python -m bench.glm_tiers [--layers N] [--ram GIB] [--distinct GIB] [--skews .5,1,2] [--out F]

Dense weights in fp8, NVFP4 KV and 2-bit experts of dummy weights, placed as the planner says for
this card and this host memory: rows that stay on the GPU, those of a layer that its router chooses
most; a cache; the rest in pinned host memory. No card has room to time all experts resident, so
those of a layer repeat: the ones that stay, over and over, each a row of its own in host memory. A
resident step then reads as many bytes out of what stays alone, and both must give the same bits.

--distinct: pin only so much, equal rows sharing a place: what crosses the link is the same.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from bench.gpu import open_gpu
from bench.step_h200 import GIB
from bench.suite import Bench
from moet.config import ModelSettings
from moet.kernels.device_gemm import Device
from moet.kernels.layout import ExpertRows
from moet.kernels.moe import ExpertTable
from moet.models.base import ForwardInput, ResidentProvider
from moet.models.dummy import DummyOptions, DummySource, dummy_rows
from moet.models.expert_encoder import row_formats
from moet.models.footprint import footprint
from moet.models.glm_moe_dsa import GlmMoeDsa
from moet.models.glm_moe_dsa_cache import PAGE_SIZE
from moet.models.glm_moe_dsa_config import GlmMoeDsaConfig
from moet.models.synthetic_glm import MODEL_NAME
from moet.runtime.device_start import this_gpu
from moet.runtime.dummy import preset_config, used_layers
from moet.runtime.experts.gpu import CachedExperts, HostSide
from moet.runtime.experts.host import Arena, touch
from moet.runtime.memory import plan
from moet.runtime.plan_types import Plan, PlanSettings
from moet.runtime.queues import CudaGraphs, CudaQueue, uncaptured

RESULTS = Path(__file__).parent / "results" / "glm_tiers.json"
SEED = 1
CONTEXT = 1024
WARM_STEPS, COMPARED = 60, 4
TARGET = 1.3  # times the floor of missed bytes, beyond the resident step
SPARE_BYTES = 6 * GIB  # of host memory, beside what the planner leaves


def make_plan(raw: dict[str, object], host_bytes: int, device: Device) -> Plan:
    """Where the planner puts the model's parts on this card, with that much host memory."""
    model = footprint(raw, kv_dtype="nvfp4", num_spec_tokens=0)
    card = replace(this_gpu(device.torch_device), host_bytes=host_bytes)
    return plan(model, card, PlanSettings())


class OneCard:
    """The model with its experts in tiers, and the same model with every expert resident.

    num_static: rows that stay on the GPU, num_cached: slots beside them, num_distinct: rows of host
    memory at most.
    """

    def __init__(
        self,
        raw: dict[str, object],
        device: Device,
        *,
        num_static: int,
        num_cached: int,
        num_distinct: int,
        num_pages: int,
    ) -> None:
        self.device, self.where = device, device.torch_device
        source = DummySource(raw, DummyOptions(seed=SEED, skew=1.0), self.where)
        config = GlmMoeDsaConfig.from_dict(raw)
        settings = ModelSettings(arch=device.arch, rounding="deployed", precision="w2")
        self.model = GlmMoeDsa.load(config, source, settings, "nvfp4", 0, gpu=device)
        if self.where.type == "cuda":
            torch.cuda.empty_cache()
        experts = source.experts
        self.num_experts, self.top_k = experts.num_experts, config.num_experts_per_tok
        self.layers = used_layers(experts.layers, config.num_hidden_layers, 0)
        formats = row_formats(experts.hidden_size, experts.moe_intermediate_size, experts.fp4)
        self.form: ExpertRows = formats["w2"]
        routers = [layer.moe.router for layer in self.model.layers if layer.moe is not None]
        self._biases = [(r.bias, r.bias.clone()) for r in routers if r.bias is not None]
        # [layers, num_experts], the most popular first; and the rank of each
        self.order = torch.stack([bias.argsort(descending=True) for _, bias in self._biases])
        self.rank = self.order.argsort(1)
        # the classes of a layer, to which its experts belong by rank; layers that have rows of
        # their own; rows in host memory
        self.classes = min(-(-num_static // len(self.layers)), self.num_experts - 1)
        self.own = max(1, min(len(self.layers), num_distinct // self.classes))
        self.all_distinct = num_distinct >= len(self.layers) * (self.num_experts - self.classes)
        if self.all_distinct:
            self.own = len(self.layers)
        num_slots = max(num_static + num_cached, self.classes * len(self.layers) + self.num_experts)
        self.cached = self._open(num_slots)
        self.resident = self._resident()
        spec = self.model.kv_cache_spec()
        self.kv = {
            group.name: torch.zeros(
                (len(group.layers), num_pages, group.page_bytes),
                dtype=torch.uint8,
                device=self.where,
            )
            for group in spec.groups
        }
        self.generator = torch.Generator("cpu").manual_seed(SEED)
        self.skew = 1.0

    # Rows

    @property
    def num_static(self) -> int:
        return self.classes * len(self.layers)

    def _alike(self, layer: int) -> Tensor:
        """[num_experts] int64: a static slot of this layer that has the bytes of each expert."""
        return layer * self.classes + self.rank[layer] % self.classes

    def _open(self, num_slots: int) -> CachedExperts:
        """A pool whose static rows are made, over host memory that is filled from them."""
        num_rows = len(self.layers) * self.num_experts
        is_static = (self.rank < self.classes).flatten()
        alike = torch.cat([self._alike(n) for n in range(len(self.layers))])
        if self.all_distinct:
            in_host = (~is_static).nonzero()[:, 0]
            content, place_of = alike[in_host], torch.full((num_rows,), -1)
            place_of[in_host.cpu()] = torch.arange(len(in_host))
        else:
            content = torch.arange(self.own * self.classes, device=self.where)
            place_of = torch.where(is_static, -1, alike % len(content)).cpu()
        arena, self.pinned_s, self.touched_s = self._arena(len(content))
        _, base = dummy_rows(self.form, 1, seed=0, device=self.where)
        cached = CachedExperts(
            self.device.launcher,
            self.form,
            HostSide(arena=arena, place_of=place_of.to(torch.int32)),
            base.expand(num_rows, *base.shape[1:]).contiguous(),
            self.layers,
            num_slots,
            error=self.device.error,
            overlap=self.where.type == "cuda",
        )
        for n in range(len(self.layers)):
            rows = n * self.num_experts + self.order[n, : self.classes]
            cached.fill(rows.tolist(), list(self._made(n, cached)), static=True)
        begin = perf_counter()
        for first in range(0, len(content), arena.rows_per_chunk):
            chunk = arena.chunks[first // arena.rows_per_chunk]
            for start in range(0, len(chunk), 32):
                part = chunk[start : start + 32]
                slots = content[first + start : first + start + len(part)]
                part.copy_(cached.cache.pool[slots])
        self.filled_s = perf_counter() - begin
        return cached

    def _made(self, layer: int, cached: CachedExperts) -> Tensor:
        """What the static slots of a layer hold."""
        if layer >= self.own:
            first = layer % self.own * self.classes
            return cached.cache.pool[first : first + self.classes]
        seed = 1000 * SEED + self.layers[layer]
        return dummy_rows(self.form, self.classes, seed=seed, device=self.where)[0]

    def _arena(self, num_places: int) -> tuple[Arena, float, float]:
        """Pinned memory, and the seconds that it took; of these, to touch it by many threads."""
        touched_s = 0.0

        def timed(first: int, chunk: Tensor) -> None:
            nonlocal touched_s
            begin = perf_counter()
            touch(first, chunk)
            touched_s += perf_counter() - begin

        begin, pin = perf_counter(), self.where.type == "cuda"
        arena = Arena(num_places, self.form.row_bytes, pin=pin, fill=timed)
        return arena, perf_counter() - begin, touched_s

    def _resident(self) -> ResidentProvider:
        """Every expert at the static slot that has its bytes."""
        pool, bases = self.cached.cache.pool, self.cached.bases
        return _Repeated(
            {
                layer: ExpertTable(
                    self.form,
                    pool,
                    self._alike(n),
                    bases[n * self.num_experts : (n + 1) * self.num_experts],
                )
                for n, layer in enumerate(self.layers)
            }
        )

    # Steps

    @torch.inference_mode()
    def set_skew(self, skew: float) -> None:
        """Make experts as popular as DummyOptions says, in place: captured steps see it."""
        for bias, at_one in self._biases:
            bias.copy_(at_one * skew)
        self.skew = skew

    def tokens(self, count: int) -> Tensor:
        return torch.randint(self.model.vocab_size, (count,), generator=self.generator)

    def link_rate(self) -> float:
        """Bytes a second from pinned memory by the copy engine."""
        chunk, best = self.cached.host.arena.chunks[0], 0.0
        out = torch.empty_like(chunk, device=self.where)
        for _ in range(3):
            taken = milliseconds(lambda: out.copy_(chunk, non_blocking=True), self.where)
            best = max(best, chunk.numel() / taken * 1e3)
        return best


class _Repeated:
    """A ResidentProvider of tables that are there."""

    def __init__(self, tables: dict[int, ExpertTable]) -> None:
        self._tables = tables

    def resident(self, layer_idx: int, num_rows: int = 1) -> ExpertTable:
        return self._tables[layer_idx]

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        return self._tables[layer_idx]


def milliseconds(call: Callable[[], object], where: torch.device) -> float:
    """Of one call, on the current stream."""
    if where.type == "cpu":
        begin_s = perf_counter()
        call()
        return 1e3 * (perf_counter() - begin_s)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


class Step:
    """A decode step of one sequence, captured once and replayed with other tokens and places."""

    def __init__(self, card: OneCard, experts: ResidentProvider, num_rows: int, context: int):
        self.card, self.num_rows = card, num_rows
        pages = -(-(context + num_rows) // PAGE_SIZE)
        inputs = ForwardInput(
            token_ids=torch.zeros(num_rows, dtype=torch.int64),
            positions=torch.arange(context, context + num_rows),
            cu_seqlens_q=(0, num_rows),
            seq_slots=torch.zeros(1, dtype=torch.int64),
            page_table=torch.arange(pages).view(1, -1),
            seq_lens=(context + num_rows,),
            logits_indices=torch.arange(num_rows),
        )
        self.ids = torch.zeros(num_rows, dtype=torch.int64, device=card.where)
        self.rows, self.offsets = card.model.rows(inputs), torch.arange(num_rows)
        self.logits = torch.empty(0)

        def work() -> None:
            compute = card.model.compute
            self.logits = compute(self.ids, self.rows, None, card.kv, experts).logits

        with torch.inference_mode():
            if card.where.type == "cpu":
                self.play = uncaptured(work)
            else:
                torch.cuda.synchronize()
                self.play = CudaGraphs(CudaQueue(card.where))(work)
                torch.cuda.synchronize()

    @torch.inference_mode()
    def move_to(self, context: int) -> None:
        """Put the rows behind that many tokens."""
        self.rows.positions.copy_(context + self.offsets)
        self.rows.starts.fill_(context)
        self.rows.ends.fill_(context + self.num_rows)

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> float:
        """Milliseconds of a step."""
        self.ids.copy_(tokens)
        return milliseconds(self.play, self.card.where)


def fill_context(card: OneCard, step: Step, context: int) -> None:
    """A page of tokens that really ran, copied over the pages of the context."""
    for position in range(PAGE_SIZE):
        step.move_to(position)
        step(card.tokens(1))
    for tensor in card.kv.values():
        tensor[:, 1 : -(-context // PAGE_SIZE)] = tensor[:, :1]
    step.move_to(context)


def same_bits(card: OneCard, resident: Step, tiered: Step, context: int) -> tuple[bool, bool]:
    """Whether steps in tiers give the logits and the state of resident ones; and these, twice."""
    last = slice(context // PAGE_SIZE, context // PAGE_SIZE + 1)
    kept = {name: tensor[:, last].clone() for name, tensor in card.kv.items()}
    same, twice = True, True
    for _ in range(COMPARED):
        tokens, made = card.tokens(resident.num_rows), []
        for step in (resident, resident, tiered):
            for name, content in kept.items():
                card.kv[name][:, last] = content
            step(tokens)
            made.append([step.logits.clone(), *(t[:, last].clone() for t in card.kv.values())])
        once, again, found = made
        twice &= all(map(torch.equal, once, again))
        same &= all(map(torch.equal, once, found)) and bool(found[0].isfinite().all())
    for name, content in kept.items():
        card.kv[name][:, last] = content
    return same, twice


def time_steps(
    bench: Bench, card: OneCard, link: float, steps: tuple[Step, Step], num_steps: int, context: int
) -> None:
    """Steps in tiers, in turn with resident ones, at the skew that is set; then their bits."""
    resident, tiered = steps
    experts, num_rows = card.cached, resident.num_rows
    for _ in range(WARM_STEPS):
        tiered(card.tokens(num_rows))
    before = experts.counts()
    times: list[tuple[float, float]] = []
    for _ in range(num_steps):
        tokens = card.tokens(num_rows)
        times.append((tiered(tokens), resident(tokens)))
    after = experts.counts()
    missed = after[1] - before[1]
    asked = sum(after) - sum(before)
    step_ms, base_ms = (sum(column) / num_steps for column in zip(*times, strict=True))
    floor_ms = missed / num_steps * card.form.row_bytes / link * 1e3
    same, twice = same_bits(card, resident, tiered, context)
    label = f"{num_rows} rows, routing of skew {card.skew:g}"
    bench.add(f"all experts resident, {label}", base_ms, "ms/step", note=f"twice alike: {twice}")
    bench.add(
        f"in tiers, {label}",
        step_ms,
        "ms/step",
        floor=round(base_ms + floor_ms, 4),
        target=round(base_ms + TARGET * floor_ms, 4),
        note=f"{100 * (1 - missed / max(1, asked)):.2f} % hits, {missed / num_steps:.1f} rows "
        f"missed a step, {floor_ms:.3f} ms of the link; same bits as resident: {same}; error word "
        f"{int(card.device.error)}",
    )
    bench.write()


def run(bench: Bench, card: OneCard, skews: Sequence[float], num_steps: int, context: int) -> None:
    """Every figure, once the model is there."""
    size = card.form.row_bytes / GIB
    arena = card.cached.host.arena
    slots = len(card.cached.tables.row_of)
    bench.more |= {
        "layers with experts": len(card.layers),
        "rows": len(card.layers) * card.num_experts,
        "GPU static GiB": round(card.num_static * size, 2),
        "GPU cache GiB": round((slots - card.num_static) * size, 2),
        "host GiB": round(arena.num_places * size, 2),
        "every row has a place of its own": card.all_distinct,
    }
    note = f"touching {card.touched_s:.1f} s, copying rows there {card.filled_s:.1f} s"
    bench.add("pinning host memory", arena.num_places * size / card.pinned_s, "GiB/s",
              better="higher", note=note)  # fmt: skip
    link = card.link_rate()
    bench.add("link, copy engine", link / 1e9, "GB/s", better="higher")
    for num_rows in (1, 3):
        resident = Step(card, card.resident, num_rows, context)
        if num_rows == 1:
            fill_context(card, resident, context)
        tiered = Step(card, card.cached, num_rows, context)
        for skew in skews if num_rows == 1 else skews[-1:]:
            card.set_skew(skew)
            time_steps(bench, card, link, (resident, tiered), num_steps, context)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s", stream=sys.stdout)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=78, help="take the first ones")
    parser.add_argument("--ram", type=float, help="GiB of host memory to plan with")
    parser.add_argument("--distinct", type=float, help="GiB of host memory to pin at most")
    parser.add_argument("--skews", default="0.5,1,2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    command = " ".join(["python -m bench.glm_tiers", *sys.argv[1:]])
    bench = Bench(args.out, command, args.commit, {})
    device, began_s = open_gpu(), perf_counter()
    config = GlmMoeDsaConfig.from_dict(preset_config(MODEL_NAME, "full", args.layers))
    raw = config.to_dict("fp8")
    available = this_gpu(device.torch_device).host_bytes - SPARE_BYTES
    made = make_plan(raw, available if args.ram is None else int(args.ram * GIB), device)
    experts = made.experts
    print(made, flush=True)
    bench.more |= {
        "model": f"{MODEL_NAME}, {args.layers} layers, w2, fp8 dense, nvfp4 KV, dummy weights",
        "seed": SEED,
        "host GiB available": round(available / GIB, 1),
    }
    with bench.part("all"):
        card = OneCard(
            raw,
            device,
            num_static=experts.num_static,
            num_cached=experts.num_cached,
            num_distinct=experts.num_rows
            if args.distinct is None
            else int(args.distinct * GIB / experts.row_bytes),
            num_pages=made.kv.num_pages,
        )
        note = f"{torch.cuda.memory_allocated() / GIB:.1f} GiB on the GPU"
        bench.add("making the model", perf_counter() - began_s, "s", note=note)
        skews = [float(skew) for skew in args.skews.split(",")]
        run(bench, card, skews, args.steps, CONTEXT)
    bench.add("all of this", perf_counter() - began_s, "s")
    bench.write()
    if bench.faults:
        sys.exit(1)


if __name__ == "__main__":
    main()
