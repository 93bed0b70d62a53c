"""Which published flavour of GLM-5.2 a folder of tensors is, and what that implies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moet.errors import CheckpointError
from moet.models.expert_map import ExpertMap
from moet.models.glm_moe_dsa_config import Flavour, GlmMoeDsaConfig
from moet.models.glm_moe_dsa_tensors import expert_map, tensor_inventory
from moet.models.release import DenseDtype, entry_of
from moet.models.tensor_files import TensorEntry
from moet.models.tensor_spec import TensorSpec

_FLAVOUR_OF: Mapping[str, Flavour] = {"BF16": "bf16", "F8_E4M3": "fp8", "U8": "nvfp4"}


@dataclass(frozen=True, slots=True)
class GlmMoeDsaRelease:
    """One checkpoint's form. What is quantised is read from dtypes, never from config's lists."""

    config: GlmMoeDsaConfig
    form: Flavour

    @classmethod
    def detect(
        cls, config: GlmMoeDsaConfig, entries: Mapping[str, TensorEntry]
    ) -> GlmMoeDsaRelease:
        """Raises CheckpointError if the routed experts have an unknown dtype."""
        first = config.first_k_dense_replace
        expert = entry_of(entries, f"model.layers.{first}.mlp.experts.0.gate_proj.weight")
        if expert.dtype not in _FLAVOUR_OF:
            known = ", ".join(_FLAVOUR_OF)
            raise CheckpointError(f"routed experts are {expert.dtype}; known are {known}")
        if f"model.layers.{config.num_hidden_layers}.eh_proj.weight" not in entries:
            config = replace(config, num_nextn_predict_layers=0)
        return cls(config, _FLAVOUR_OF[expert.dtype])

    @property
    def experts(self) -> ExpertMap:
        return expert_map(self.config, self.form)

    @property
    def optional(self) -> frozenset[str]:
        """Copies of the embedding and the head that some repacks give the draft layer."""
        prefix = f"model.layers.{self.config.num_hidden_layers}"
        return frozenset({f"{prefix}.embed_tokens.weight", f"{prefix}.shared_head.head.weight"})

    def specs(self) -> list[TensorSpec]:
        return tensor_inventory(self.config, self.form)

    def dense_specs(self, dtype: DenseDtype) -> Sequence[TensorSpec]:
        form: Flavour = self.form if dtype == "keep" else dtype
        experts = self.experts
        specs = tensor_inventory(self.config, form)
        return [spec for spec in specs if not experts.is_expert(spec.name)]

    def describe(self) -> str:
        experts = {"bf16": "BF16", "fp8": "FP8 block-128", "nvfp4": "NVFP4"}[self.form]
        kept = "exactly" if self.form == "nvfp4" else "as MXFP4 made at conversion"
        dense = "FP8 block-128" if self.form == "fp8" else "BF16"
        draft = "The MTP draft layer is available."
        if self.config.num_draft_blocks == 0:
            draft = "It has no draft layer; speculation is off."
        return (
            f"GLM-5.2, flavour {self.form}: {experts} experts, kept {kept} in the FP4 tier; "
            f"{dense} elsewhere. {draft}"
        )
