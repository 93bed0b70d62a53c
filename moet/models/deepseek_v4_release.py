"""Which published form of DeepSeek-V4-Flash a folder of tensors is, and what that implies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moet.errors import CheckpointError
from moet.models.deepseek_v4_config import DeepseekV4Config
from moet.models.deepseek_v4_tensors import (
    ARTEFACTS,
    Artefact,
    Draft,
    expert_map,
    tensor_inventory,
)
from moet.models.expert_map import ExpertMap
from moet.models.release import DenseDtype, entry_of
from moet.models.tensor_files import TensorEntry
from moet.models.tensor_spec import TensorSpec


@dataclass(frozen=True, slots=True)
class DeepseekV4Release:
    """One checkpoint's form."""

    config: DeepseekV4Config
    artefact: Artefact

    @classmethod
    def detect(
        cls, config: DeepseekV4Config, entries: Mapping[str, TensorEntry]
    ) -> DeepseekV4Release:
        return cls(config, detect_artefact(config, entries))

    @property
    def form(self) -> str:
        return self.artefact.name

    @property
    def experts(self) -> ExpertMap:
        return expert_map(self.config, self.artefact)

    @property
    def optional(self) -> frozenset[str]:
        return frozenset()

    def specs(self) -> list[TensorSpec]:
        return tensor_inventory(self.config, self.artefact)

    def dense_specs(self, dtype: DenseDtype) -> Sequence[TensorSpec]:
        if dtype != "keep":
            raise CheckpointError(
                f"--dense-dtype {dtype}: DeepSeek-V4-Flash has its linears in fp8 as trained; "
                "use keep"
            )
        experts = self.experts
        return [spec for spec in self.specs() if not experts.is_expert(spec.name)]

    def describe(self) -> str:
        experts = "FP4 (MXFP4)" if self.artefact.expert_dtype == "I8" else "FP8 block-128"
        draft = {
            "mtp": "The MTP draft block is available.",
            "dspark": "The backbone runs; its DSpark draft stages are kept but not used yet.",
            "none": "It has no draft block; speculation is off.",
        }[self.artefact.draft]
        return f"DeepSeek-V4-Flash, form {self.artefact.name}: {experts} experts. {draft}"


def detect_artefact(config: DeepseekV4Config, entries: Mapping[str, TensorEntry]) -> Artefact:
    """Tell the published forms apart by dtypes and keys; what config.json claims is not trusted."""
    weight = entry_of(entries, "layers.0.ffn.experts.0.w1.weight")
    scale = entry_of(entries, "layers.0.attn.wkv.scale")
    if weight.dtype not in ("I8", "F8_E4M3"):
        raise CheckpointError(f"routed experts are {weight.dtype}; known are I8 (FP4) and F8_E4M3")
    if scale.dtype not in ("F8_E8M0", "F32"):
        raise CheckpointError(f"fp8 scales are {scale.dtype}; known are F8_E8M0 and F32")
    has_stages = "mtp.0.main_proj.weight" in entries
    if has_stages != config.has_dspark and any(name.startswith("mtp.") for name in entries):
        raise CheckpointError(
            f"config.json {'has' if config.has_dspark else 'lacks'} dspark_block_size but "
            f"mtp.0.main_proj.weight is {'present' if has_stages else 'absent'}; "
            "config and shards are of different releases"
        )
    draft: Draft = "dspark" if has_stages else "mtp" if "mtp.0.e_proj.weight" in entries else "none"
    for known in ARTEFACTS.values():
        traits = (known.expert_dtype, known.scale_dtype, known.draft)
        if traits == (weight.dtype, scale.dtype, draft):
            return known
    name = f"repack ({weight.dtype} experts, {scale.dtype} scales, draft {draft})"
    return Artefact(
        name,
        "I8" if weight.dtype == "I8" else "F8_E4M3",
        "F32" if scale.dtype == "F32" else "F8_E8M0",
        draft,
    )
