"""What a pass over a chunk of tokens holds at once on a GPU: a formula for each phase of a layer,
from the config alone. Knows what ops allocate and when models let go; nothing of allocators and
devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moet.models.deepseek_v4_config import DeepseekV4Config
from moet.models.glm_moe_dsa_config import GlmMoeDsaConfig

TILE = 128  # values that share a scale, and the rows of a tile of an expert's tokens
CODED = 132  # bytes of TILE values as fp8 products read them
CHOICE_BYTES = 12  # an expert's id and weight


@dataclass(frozen=True, slots=True)
class Phase:
    """Bytes of a token, and bytes whatever their number; those that ranks divide apart."""

    name: str
    split: int
    copied: int
    fixed_split: int = 0
    fixed_copied: int = 0

    def num_bytes(self, num_tokens: int, num_ranks: int) -> int:
        """Of one rank."""
        split = num_tokens * self.split + self.fixed_split
        return -(-split // num_ranks) + num_tokens * self.copied + self.fixed_copied


def step_bytes(phases: Sequence[Phase], num_tokens: int, num_ranks: int = 1) -> int:
    """The most that a pass holds at once, beside weights, KV and index scores."""
    return max(phase.num_bytes(num_tokens, num_ranks) for phase in phases)


def coded(width: int) -> int:
    """A row of fp8 values with their scales."""
    return -(-width // TILE) * CODED


def mixture_phases(
    hidden: int, inter: int, num_experts: int, top_k: int, held: int
) -> tuple[Phase, ...]:
    """A layer's experts. held: bytes a token that the model keeps meanwhile.

    Tokens are laid out by expert, each in whole tiles: at most one more an expert than needed.
    """
    held += 2 * hidden + top_k * CHOICE_BYTES  # the shared expert's output
    spare = num_experts * TILE
    values, output = top_k * 2 * inter, 2 * hidden
    return (
        Phase(
            "experts, gate and up",
            values,
            held + top_k * coded(hidden),
            fixed_copied=spare * coded(hidden),
        ),
        Phase("experts, tiles", values + top_k * coded(inter), held, spare * coded(inter)),
        Phase(
            "experts, down",
            top_k * coded(inter),
            held + top_k * 2 * hidden,
            spare * coded(inter),
        ),
        Phase("experts, sum", 0, held + top_k * 2 * hidden + output),
    )


def mlp_phases(hidden: int, inter: int, held: int) -> tuple[Phase, ...]:
    """A dense layer's MLP."""
    return (
        Phase("mlp, gate and up", 2 * 2 * inter, held + coded(hidden)),
        Phase("mlp, between", 2 * 2 * inter + 2 * inter, held),
        Phase("mlp, down", 2 * inter + coded(inter), held + 2 * hidden),
    )


def deepseek_v4_phases(config: DeepseekV4Config) -> tuple[Phase, ...]:
    """Of DeepSeek-V4, as models/deepseek_v4.py goes through a layer."""
    hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
    index = config.index_n_heads * config.index_head_dim
    streams, row = 2 * config.hc_mult * hidden, 2 * hidden
    query = 2 * heads * dim
    projected = 4 * (4 * dim + 4 * config.index_head_dim + config.index_n_heads)
    latents = 2 * (2 * config.q_lora_rank + 3 * dim) + 4 * config.index_topk
    held = streams + row + projected + latents
    groups = 2 * config.o_groups * config.o_lora_rank
    return (
        # The experts' outputs, which a rank alone sums on their way in.
        Phase("streams", config.num_experts_per_tok * row, 2 * streams + 3 * row),
        Phase("attention, queries", query + 2 * heads * dim, held + 2 * index + 2 * index),
        Phase("attention", 2 * query, held + 2 * index),
        Phase("attention, groups", 2 * query + coded(heads * dim) + groups, held + 2 * index),
        *mixture_phases(
            hidden,
            config.moe_intermediate_size,
            config.n_routed_experts,
            config.num_experts_per_tok,
            streams + 2 * row,
        ),
    )


def glm_phases(config: GlmMoeDsaConfig) -> tuple[Phase, ...]:
    """Of GLM, as models/glm_moe_dsa.py goes through a layer."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    rope, latent, rank = config.qk_rope_head_dim, config.kv_lora_rank, config.q_lora_rank
    index = config.index_n_heads * config.index_head_dim
    stream = 2 * hidden
    selections = 2 * 4 * config.index_topk  # the last owner's, and this one's
    held = 4 * stream + selections  # what came, and both as the norm made them
    before = held + 2 * rank
    query, mixed = 2 * heads * (latent + rope), 2 * heads * latent
    given, value = 2 * heads * config.qk_head_dim, 2 * heads * config.v_head_dim
    projected = 4 * (config.index_head_dim + config.index_n_heads)
    chosen = before + projected + 4 * index  # what a layer that chooses keeps until it has
    attention = (
        Phase("attention, queries", given + query, chosen + 2 * index),
        Phase("attention, choice", query, chosen),
        Phase("attention", query + mixed, before),
        Phase("attention, values", mixed + value, before),
        Phase("attention, output", mixed + value + coded(value // 2), before + stream),
    )
    behind = 5 * stream + selections
    experts = mixture_phases(
        hidden,
        config.moe_intermediate_size,
        config.n_routed_experts,
        config.num_experts_per_tok,
        behind,
    )
    return (*attention, *mlp_phases(hidden, config.intermediate_size, behind), *experts)
