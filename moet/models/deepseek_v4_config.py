"""DeepSeek-V4-Flash's config.json as a checked value. Knows nothing of tensors or arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from moet.errors import ConfigError
from moet.models.config_json import check_assumed, check_known, read_config, require, typed

ARCHITECTURE = "DeepseekV4ForCausalLM"
LayerKind = Literal["window", "csa", "hca"]
KIND_OF_RATIO: Mapping[int, LayerKind] = {0: "window", 4: "csa", 128: "hca"}


# Values that the arithmetic assumes: another one needs other code, so it must stop the load.
_ASSUMED: Mapping[str, Any] = {
    "model_type": "deepseek_v4",
    "architectures": [ARCHITECTURE],
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
}
_ASSUMED_ROPE: Mapping[str, Any] = {"type": "yarn", "rope_type": "yarn"}
_ASSUMED_QUANTIZATION: Mapping[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
_MUST_BE_STATED = frozenset({"model_type", "scoring_func", "topk_method"})
# Keys that change nothing here.
_NO_EFFECT = frozenset(
    {
        "_name_or_path",
        "attention_dropout",
        "auto_map",
        "dtype",
        "initializer_range",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """YaRN parameters; no mscale exists in this model."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32
    beta_slow: float = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepseekV4Config:
    """The numbers of config.json, spelled as there; `compress_ratios` covers draft blocks too."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    max_position_embeddings: int
    rope_scaling: RopeScaling
    rope_theta: float
    compress_rope_theta: float
    rms_norm_eps: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    num_nextn_predict_layers: int = 0
    bos_token_id: int = 0
    eos_token_id: int = 1
    expert_dtype: Literal["fp4", "fp8"] = "fp4"  # informative: the tensors' dtypes decide
    dspark_block_size: int | None = None
    dspark_noise_token_id: int | None = None
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int | None = None

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            require(value > 0, name, value, "it must be positive")
        ratios = self.compress_ratios
        layers = self.num_hidden_layers
        require(
            len(ratios) >= layers, "compress_ratios", ratios, f"{layers} layers need an entry each"
        )
        for ratio in ratios:
            require(ratio in KIND_OF_RATIO, "compress_ratios", ratio, "known are 0, 4 and 128")
        drafts = ratios[layers:]
        require(not any(drafts), "compress_ratios", ratios, "draft blocks must be window-only (0)")
        heads, groups = self.num_attention_heads, self.o_groups
        require(heads % groups == 0, "o_groups", groups, f"it must divide {heads} heads")
        for name in ("head_dim", "index_head_dim"):
            width = getattr(self, name)
            fits = self.qk_rope_head_dim <= width and self.qk_rope_head_dim % 2 == 0
            require(fits, "qk_rope_head_dim", self.qk_rope_head_dim, f"{name} is {width}")
        require(
            self.num_experts_per_tok <= self.n_routed_experts,
            "num_experts_per_tok",
            self.num_experts_per_tok,
            f"there are {self.n_routed_experts} experts",
        )
        require(
            0 <= self.num_hash_layers <= layers,
            "num_hash_layers",
            self.num_hash_layers,
            f"there are {layers} layers",
        )
        for name in ("bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            require(0 <= value < self.vocab_size, name, value, f"vocab_size is {self.vocab_size}")
        require(self.expert_dtype in ("fp4", "fp8"), "expert_dtype", self.expert_dtype, "fp4, fp8")
        if self.has_dspark:
            self._check_dspark()

    def _check_dspark(self) -> None:
        missing = self.dspark_noise_token_id is None or not self.dspark_markov_rank
        require(not missing, "dspark_markov_rank", self.dspark_markov_rank, "DSpark needs it")
        targets = self.dspark_target_layer_ids
        inside = targets and all(0 <= i < self.num_hidden_layers for i in targets)
        require(
            bool(inside),
            "dspark_target_layer_ids",
            targets,
            f"there are {self.num_hidden_layers} layers",
        )
        require(
            self.num_draft_blocks > 0, "compress_ratios", self.compress_ratios, "no draft entries"
        )

    @property
    def qk_nope_head_dim(self) -> int:
        """Leading part of a head that is not rotated."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def has_dspark(self) -> bool:
        """Whether the draft blocks are DSpark stages; num_nextn_predict_layers does not say."""
        return self.dspark_block_size is not None

    @property
    def num_draft_blocks(self) -> int:
        """Blocks `mtp.0`, `mtp.1`, ... after the decoder layers."""
        return len(self.compress_ratios) - self.num_hidden_layers

    def layer_kind(self, layer_idx: int) -> LayerKind:
        """Attention kind of a decoder layer or, from num_hidden_layers on, of a draft block."""
        return KIND_OF_RATIO[self.compress_ratios[layer_idx]]

    def is_hash_layer(self, layer_idx: int) -> bool:
        """Whether the router reads experts from a table by token id; never true of draft blocks."""
        return layer_idx < self.num_hash_layers

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DeepseekV4Config:
        """Check a parsed config.json. Raises ConfigError naming key, value and limit."""
        fields_here = {f.name for f in fields(cls)}
        check_known(raw, fields_here | set(_ASSUMED) | _NO_EFFECT | {"quantization_config"})
        for name in sorted(_MUST_BE_STATED - set(raw)):
            raise ConfigError(f"config.json has no {name}; expected {_ASSUMED[name]!r}")
        check_assumed(raw, _ASSUMED)
        quantization = raw.get("quantization_config") or {}
        check_known(quantization, _ASSUMED_QUANTIZATION, "quantization_config")
        check_assumed(quantization, _ASSUMED_QUANTIZATION, "quantization_config.")
        values: dict[str, Any] = {}
        for field in fields(cls):
            if field.name in raw and raw[field.name] is not None:
                values[field.name] = _read(field.name, raw[field.name], str(field.type))
            elif field.default is MISSING:
                raise ConfigError(f"config.json has no {field.name}; every release states it")
        return cls(**values)

    @classmethod
    def from_file(cls, path: Path) -> DeepseekV4Config:
        """Read config.json. Raises ConfigError if it is absent, not JSON, or not this model."""
        return cls.from_dict(read_config(path))

    def to_dict(self) -> dict[str, Any]:
        """The same as a config.json in the released spelling, assumed values included."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["compress_ratios"] = list(self.compress_ratios)
        values["rope_scaling"] = {"type": "yarn", **asdict(self.rope_scaling)}
        dspark = {name: values.pop(name) for name in list(values) if name.startswith("dspark_")}
        if self.has_dspark:
            dspark["dspark_target_layer_ids"] = list(self.dspark_target_layer_ids)
            values |= dspark
        quantization = {"quantization_config": dict(_ASSUMED_QUANTIZATION)}
        return dict(_ASSUMED) | values | quantization | {"torch_dtype": "bfloat16"}


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "max_position_embeddings",
    "hc_mult",
    "hc_sinkhorn_iters",
    "rms_norm_eps",
    "rope_theta",
    "compress_rope_theta",
    "swiglu_limit",
)


def _read(name: str, value: Any, annotation: str) -> Any:
    return _rope_scaling(value) if annotation == "RopeScaling" else typed(name, value, annotation)


def _rope_scaling(raw: Any) -> RopeScaling:
    require(isinstance(raw, dict), "rope_scaling", raw, "an object is needed")
    require("type" in raw or "rope_type" in raw, "rope_scaling", raw, 'it must say type "yarn"')
    check_assumed(raw, _ASSUMED_ROPE, "rope_scaling.")
    known = {f.name for f in fields(RopeScaling)}
    check_known(raw, known | set(_ASSUMED_ROPE), "rope_scaling")
    for name in ("factor", "original_max_position_embeddings"):
        require(raw.get(name, 0) > 0, f"rope_scaling.{name}", raw.get(name), "it must be positive")
    return RopeScaling(**{name: raw[name] for name in known & set(raw)})
