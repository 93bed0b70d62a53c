"""Router and expert mixture, and experts that are simply all resident. Knows no tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moet.config import ModelSettings
from moet.kernels.comm import RankPart, added
from moet.kernels.gemm import Matrix, linear_fp32
from moet.kernels.mixture import Mixture
from moet.kernels.moe import (
    ExpertTable,
    F32Experts,
    expert_mixture,
    expert_weights,
    route_by_bias,
    route_by_token,
    sigmoid_scores,
    sqrt_softplus,
    swiglu_halves,
)
from moet.kernels.moe_layer import RouterWeights, SharedWeights, moe
from moet.kernels.quant import Activations, plain_values
from moet.kernels.registry import Op
from moet.kernels.stream_experts import SharedExpert
from moet.models.base import ExpertProvider, ResidentProvider
from moet.models.formats import dequantize_mxfp4
from moet.models.layers import InputLinear, Linear, Weights


class Router:
    """Chooses experts and weighs them: by biased score, or by token id if `table` is given.

    scores turns logits into scores, which is where the models differ.
    weight: [num_experts, dim] fp32, or packed for a GPU, where `moe` routes, too.
    bias: [num_experts] fp32. table: [vocab_size, top_k] int64.
    """

    def __init__(
        self,
        weight: Matrix,
        *,
        bias: Tensor | None,
        table: Tensor | None,
        top_k: int,
        scaling_factor: float,
        scores: Op[[Tensor], Tensor],
        arch: str,
    ) -> None:
        assert (bias is None) != (table is None)
        self.weight = weight
        self.bias = bias
        self.table = table
        self.top_k = top_k
        self.scaling_factor = scaling_factor
        assert scores is sqrt_softplus or scores is sigmoid_scores
        self.weights = RouterWeights(
            weight, bias, table, top_k, scaling_factor, sigmoid=scores is sigmoid_scores
        )
        if arch != "reference":
            return
        self._logits = linear_fp32.bind(arch=arch)
        self._scores = scores.bind(arch=arch)
        self._by_bias = route_by_bias.bind(arch=arch)
        self._by_token = route_by_token.bind(arch=arch)
        self._weigh = expert_weights.bind(arch=arch)

    def __call__(self, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """x: [n, dim]. Returns expert ids [n, top_k] int64 and weights [n, top_k] fp32."""
        scores = self._scores(self._logits(x, self.weight))
        if self.table is not None:
            expert_ids = self._by_token(token_ids, self.table)
        else:
            assert self.bias is not None
            expert_ids = self._by_bias(scores, self.bias, top_k=self.top_k)
        return expert_ids, self._weigh(scores, expert_ids, scaling_factor=self.scaling_factor)


class SwigluMlp:
    """Three linears that every token passes: a shared expert, or the MLP of a dense layer."""

    def __init__(
        self, w1: Linear, w3: Linear, w2: InputLinear, *, limit: float | None, arch: str
    ) -> None:
        self.gate_up = Linear.stacked([w1, w3])
        self.w2 = w2
        self.limit = limit
        self._swiglu = swiglu_halves.bind(arch=arch)

    def weights(self) -> SharedWeights:
        """As the op `moe` takes them."""
        up, down = self.gate_up.weight, self.w2.weight
        if isinstance(up, Tensor) or isinstance(down, Tensor) or not up.quantised:
            return SharedWeights(up, down, self.gate_up.quantised)
        packed = SharedExpert.joined(up.stored, down.stored)
        return SharedWeights(None, None, True, packed)

    def _hidden(self, x: Tensor | Activations) -> Tensor:
        return self._swiglu(self.gate_up(x), limit=self.limit)

    def partial(self, x: Tensor) -> Tensor:
        """This rank's part of the output, to be summed over the ranks. fp32."""
        return self.w2.partial(self._hidden(x))

    def __call__(self, x: Tensor | Activations) -> Tensor:
        return self.w2(self._hidden(x))


class MoE:
    """Routed experts plus the shared one. Where the routed ones are is the provider's affair.

    Ranks that share the intermediate columns add both parts in one exchange; the parts are added to
    each other last, so that the sums are the same however many ranks there are.
    """

    def __init__(
        self,
        layer_idx: int,
        router: Router,
        shared: SwigluMlp,
        *,
        limit: float | None,
        settings: ModelSettings,
        weigh_output: bool = False,
        on_read: bool = False,
        unsummed: bool = False,
    ) -> None:
        """on_read: whoever takes the output can sum the ranks' parts; unsummed: a mixture's, and
        with on_read both at once."""
        self.layer_idx = layer_idx
        self._on_read = on_read
        self.unsummed = unsummed and (shared.w2.shard.size == 1 or on_read)
        self.router = router
        self.shared = shared
        self.limit = limit
        self.weigh_output = weigh_output
        self.shard, self.num_slices = shared.w2.shard, shared.w2.num_slices
        self.round_activations = settings.rounding == "deployed"
        self._whole = None if settings.arch == "reference" else moe.bind(arch=settings.arch)
        self._shared_weights = shared.weights()
        if self._whole is None:
            self._mixture = expert_mixture.bind(arch=settings.arch)

    def __call__(
        self, x: Tensor | Activations, token_ids: Tensor, positions: Tensor, experts: ExpertProvider
    ) -> Tensor | RankPart | Mixture:
        """x: [n, dim]; token_ids, positions: [n]. Returns [n, dim] in the dtype of x."""
        if self._whole is not None:
            assert isinstance(experts, ResidentProvider), "tiers of experts have no GPU form yet"
            part = self._whole(
                x,
                token_ids,
                positions,
                self.router.weights,
                experts.resident(self.layer_idx, len(token_ids)),
                self._shared_weights,
                limit=self.limit,
                round_activations=self.round_activations,
                weigh_output=self.weigh_output,
                num_slices=self.num_slices,
                on_read=self.unsummed,
            )
            if self.shard.size == 1:
                return part
            comm = self.shard.comm
            return comm.sum_on_read(part) if self._on_read else comm.sum(added(part))
        x = plain_values(x)
        expert_ids, weights = self.router(x, token_ids)
        routed = self._mixture(
            x,
            expert_ids,
            weights,
            experts.resolve(self.layer_idx, expert_ids),
            limit=self.limit,
            round_activations=self.round_activations,
            weigh_output=self.weigh_output,
            num_slices=self.num_slices,
        )
        shared = self.shared.partial(x)
        if self.shard.size > 1:
            routed, shared = self.shard.comm.sum(torch.stack([routed, shared])).unbind(0)
        return (routed + shared).to(x.dtype)


class ResidentExperts:
    """Every expert of every layer in one table per layer; nothing ever moves."""

    def __init__(self, tables: Mapping[int, ExpertTable]) -> None:
        self.tables = tables

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        return self.tables[layer_idx]

    @classmethod
    def load(
        cls,
        weights: Weights,
        prefixes: Mapping[int, str],
        *,
        num_experts: int,
        dim: int,
        inter: int,
        names: tuple[str, str, str] = ("w1", "w3", "w2"),
    ) -> ResidentExperts:
        """Read the experts `prefixes[layer_idx]` + "{expert_id}.w1" and so on as fp32, exact.

        names: what gate, up and down are called in the source.
        Accepts MXFP4 (int8 pairs), fp8 block-128 and float weights, by dtype.
        """
        form = F32Experts(dim, inter)
        tables = {}
        for layer_idx, prefix in prefixes.items():
            rows = torch.empty(num_experts, form.row_bytes, dtype=torch.uint8)
            for expert_id in range(num_experts):
                expert = weights.under(f"{prefix}{expert_id}.")
                shapes = ((inter, dim), (inter, dim), (dim, inter))
                matrices = [
                    _expert_matrix(expert, name, *shape)
                    for name, shape in zip(names, shapes, strict=True)
                ]
                rows[expert_id] = form.pack(*matrices)
            tables[layer_idx] = ExpertTable(form, rows, torch.arange(num_experts))
        return cls(tables)


@dataclass(frozen=True, slots=True)
class UnpackedTable(ExpertTable):
    """kept: the matrices of each resident expert, views of its row."""

    kept: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def matrices(self, expert_id: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.kept[expert_id]


class UnpackedExperts:
    """Another provider's experts, each unpacked to fp32 when it is first asked for and kept.

    For the reference ops, where unpacking a row costs more than its product. Exact, so it shows in
    no result. Takes 4 bytes for every weight of every expert that was ever used.
    """

    def __init__(self, provider: ExpertProvider) -> None:
        self.provider = provider
        self._tables: dict[tuple[int, str], tuple[F32Experts, UnpackedTable]] = {}

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        packed = self.provider.resolve(layer_idx, expert_ids)
        wanted = sorted(set(expert_ids.flatten().tolist()))
        if isinstance(packed.format, F32Experts) or not wanted:
            return packed
        key = layer_idx, packed.format.name
        if key not in self._tables:
            self._tables[key] = _unpacked_table(packed, wanted[0])
        form, table = self._tables[key]
        for expert_id in wanted:
            if expert_id not in table.kept:
                row = packed.rows[packed.slot_of[expert_id]]
                table.rows[expert_id] = form.pack(*packed.format.unpack(row))
                table.slot_of[expert_id] = expert_id
                table.kept[expert_id] = form.unpack(table.rows[expert_id])
        return table


def _unpacked_table(packed: ExpertTable, resident_id: int) -> tuple[F32Experts, UnpackedTable]:
    """An fp32 table for the experts of a packed one, still empty; rows take memory when written."""
    w1, _, _ = packed.format.unpack(packed.rows[packed.slot_of[resident_id]])
    form = F32Experts(w1.shape[1], w1.shape[0])
    num_experts = len(packed.slot_of)
    with torch.inference_mode(False):  # to stay writable outside of a forward pass
        rows = torch.empty(num_experts, form.row_bytes, dtype=torch.uint8)
        slot_of = torch.full((num_experts,), -1)
    return form, UnpackedTable(form, rows, slot_of)


def _expert_matrix(weights: Weights, name: str, num_out: int, num_in: int) -> Tensor:
    """One matrix of an expert in fp32; pairs of FP4 values are stored as int8 of half the width."""
    stored = weights.source.load(f"{weights.prefix}{name}.weight")
    if stored.dtype in (torch.int8, torch.uint8):
        packed = weights.tensor(f"{name}.weight", num_out, num_in // 2).view(torch.uint8)
        return dequantize_mxfp4(packed, weights.tensor(f"{name}.scale", num_out, num_in // 32))
    return weights.matrix(name, num_out, num_in)[0]
