"""Predicted rates of a plan: bytes over bandwidths at stated efficiencies, and published hit rates.

Predictions, not measurements: every constant here is an assumption that `ASSUMPTIONS` spells out.
Pure; knows no device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import msgspec

from moet.models.footprint import Footprint
from moet.runtime.hardware import Hardware
from moet.runtime.plan_types import Plan

# Share of the memory's read rate that 2-bit expert products reach, by distinct experts of a layer:
# unpolished kernels on an H200, K = N = 4096.
EXPERT_EFFICIENCY = ((6, 0.51), (18, 0.65), (48, 0.78), (128, 0.83))
DENSE_EFFICIENCY = 0.60  # fp8 prototypes: 95 % for the head, 67 % at 33 MB, 22-35 % for small ones
KV_EFFICIENCY = 0.60
KERNELS_PER_LAYER = 14
KERNEL_S = 1.0e-6  # launch and tail of a kernel inside a graph, on an H200
DRAFT_STEP_S = 40e-6  # the same for one pass of the draft block
REDUCTIONS_PER_LAYER = 2  # all-reduces under tensor parallelism
LINK_EFFICIENCY = 0.80  # a miss costs 1.25 times its bytes over the link, nothing hidden
PREFILL_EFFICIENCY = 0.25  # of fp8 peak; the design's goal on an H200, not yet measured
STREAM_EFFICIENCY = 0.90  # copy engine, whole layers
PREFILL_READ_EFFICIENCY = 0.80
# Tokens a step with k drafts: between 2.0 (prose, temperature 1) and 2.6-2.9 (code, repetitive
# text) as published for both models at k = 2.
TOKENS_PER_STEP = {0: 1.0, 1: 1.7, 2: 2.3, 3: 2.6}
# (share of rows on cards, hits) as published by a system that keeps the same experts on the same
# cards; the lower figure of each range. In between a line, which lies below a concave curve.
HIT_CURVES: Mapping[str, Sequence[tuple[float, float]]] = {
    "DeepseekV4ForCausalLM": ((0.0, 0.0), (0.152, 0.965), (0.193, 0.987), (1.0, 1.0)),
    "GlmMoeDsaForCausalLM": ((0.0, 0.0), (0.506, 0.91), (0.74, 0.999), (1.0, 1.0)),
}

ASSUMPTIONS = (
    "expert products stream at 51 / 65 / 78 / 83 % of memory bandwidth for 6 / 18 / 48 / 128 "
    "distinct experts, as unpolished kernels did on an H200; taken for sm_120 too, unmeasured",
    "dense weights and KV stream at 60 %; 14 kernels a layer at 1 us each",
    "routing is independent between tokens, so a step of n rows touches E (1 - (1 - top_k/E)^n) "
    "experts a layer",
    "hit rates follow published curves: DeepSeek-V4-Flash 96.5 % with 15.2 % of the rows on the "
    "card and 98.7 % with 19.3 %; GLM-5.2 91 % with 50.6 % and 99.9 % with 74 %; lines between",
    "a miss costs 1.25 times its bytes over the link, a row from disk its bytes at 6 GB/s; "
    "nothing of it is hidden",
    "2.3 tokens a step with two drafts; published figures go from 2.0 for prose to 2.9 for code",
    "prefill computes at 25 % of fp8 peak, reads every expert once a chunk, and streams the rows "
    "that are not on the card behind the computation",
    "several cards: dense weights and expert rows are divided, two all-reduces a layer at 15 us "
    "over PCIe or 8 us over NVLink, each card with a full link of its own",
)


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Decoding. tokens_per_s: of all streams together. floor_ms: weights and state of the step at
    the full memory bandwidth, without misses."""

    num_streams: int
    num_spec_tokens: int
    context: int
    step_ms: float
    tokens_per_s: float
    floor_ms: float
    missed_rows: float


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """prefill_tokens_per_s: of one prompt of prefill_tokens in one chunk."""

    hit_rate: float
    prefill_tokens: int
    prefill_tokens_per_s: float
    decode: list[Rate]


def hit_rate(architecture: str, share: float) -> float:
    """Of routed experts that are on a card, given the share of rows that are there."""
    return _interpolated(HIT_CURVES[architecture], share)


def distinct_experts(num_experts: int, top_k: int, num_rows: int) -> float:
    """Expected number of experts of one layer that a step of num_rows tokens touches."""
    return num_experts * (1 - (1 - top_k / num_experts) ** num_rows)


def predict(
    model: Footprint,
    hardware: Hardware,
    plan: Plan,
    *,
    prefill_tokens: int,
    streams: Sequence[int] = (1, 8),
    context: int = 8192,
) -> Rates:
    """Rates of a plan at k = 0 and at the model's number of drafted tokens."""
    spec = sorted({0, model.num_spec_tokens})
    depth = min(context, plan.kv.max_model_len)
    chunk = min(prefill_tokens, plan.kv.max_model_len)
    return Rates(
        hit_rate=hit_rate(model.architecture, plan.experts.device_share),
        prefill_tokens=chunk,
        prefill_tokens_per_s=chunk / _prefill_s(model, hardware, plan, chunk),
        decode=[
            _decode(model, hardware, plan, num_streams, k, depth)
            for num_streams in streams
            if num_streams <= plan.kv.max_num_seqs
            for k in spec
        ],
    )


def _decode(
    model: Footprint, hardware: Hardware, plan: Plan, num_streams: int, k: int, context: int
) -> Rate:
    ranks, speed = hardware.num_devices, hardware.read_bytes_per_s
    distinct = distinct_experts(model.num_experts, model.top_k, num_streams * (k + 1))
    row = plan.experts.row_bytes // ranks
    dense = model.dense.read.on(ranks) + model.head_bytes.on(ranks)
    experts = model.num_expert_layers * distinct * row
    state = num_streams * model.kv_read_bytes(context)  # drafted rows share their sequence's
    drafts = k * _draft_bytes(model, ranks, num_streams, row)
    step_s = (
        (dense + drafts) / DENSE_EFFICIENCY / speed
        + experts / _interpolated(EXPERT_EFFICIENCY, distinct) / speed
        + state / KV_EFFICIENCY / speed
        + model.num_layers * KERNELS_PER_LAYER * KERNEL_S
        + k * DRAFT_STEP_S
    )
    if ranks > 1:
        step_s += (model.num_layers + k) * REDUCTIONS_PER_LAYER * hardware.collective_s
    needed = model.num_expert_layers * distinct
    missed = needed * (1 - hit_rate(model.architecture, plan.experts.device_share))
    from_disk = needed * (1 - hit_rate(model.architecture, plan.experts.memory_share))
    step_s += missed * row / LINK_EFFICIENCY / hardware.link_bytes_per_s
    step_s += from_disk * plan.experts.row_bytes / hardware.disk_bytes_per_s
    return Rate(
        num_streams=num_streams,
        num_spec_tokens=k,
        context=context,
        step_ms=1000 * step_s,
        tokens_per_s=num_streams * TOKENS_PER_STEP.get(k, TOKENS_PER_STEP[3]) / step_s,
        floor_ms=1000 * (dense + experts + state + drafts) / speed,
        missed_rows=missed,
    )


def _draft_bytes(model: Footprint, ranks: int, num_streams: int, row: int) -> float:
    """Weights that one pass of the draft block reads."""
    if model.draft is None:
        return 0.0
    distinct = distinct_experts(model.num_experts, model.top_k, num_streams)
    head = model.draft_head_bytes.on(ranks)
    return model.draft.read.on(ranks) + head + distinct * row


def _prefill_s(model: Footprint, hardware: Hardware, plan: Plan, chunk: int) -> float:
    """Time of a prompt's first chunk: the slowest of computing, reading and streaming."""
    ranks = hardware.num_devices
    row = plan.experts.row_bytes // ranks
    distinct = distinct_experts(model.num_experts, model.top_k, chunk)
    rows = model.num_expert_layers * distinct
    flops = chunk * (model.flops_per_token + model.attention_flops(chunk // 2))
    compute_s = flops / ranks / PREFILL_EFFICIENCY / hardware.fp8_flops
    read = model.dense.read.on(ranks) + rows * row
    read_s = read / PREFILL_READ_EFFICIENCY / hardware.read_bytes_per_s
    absent = rows * (1 - plan.experts.device_share)
    stream_s = absent * row / STREAM_EFFICIENCY / hardware.link_bytes_per_s
    on_disk = rows * (1 - plan.experts.memory_share)
    disk_s = on_disk * plan.experts.row_bytes / hardware.disk_bytes_per_s
    moved = 2 * (ranks - 1) / ranks * chunk * model.hidden_size * 2
    exchange_s = model.num_layers * REDUCTIONS_PER_LAYER * moved / hardware.peer_bytes_per_s
    launch_s = model.num_layers * KERNELS_PER_LAYER * KERNEL_S
    return max(compute_s, read_s, stream_s, disk_s) + exchange_s + launch_s


def _interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """On the broken line through points; flat beyond its ends."""
    place = bisect_right([point[0] for point in points], x)
    if place == 0:
        return points[0][1]
    if place == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
