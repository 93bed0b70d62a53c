"""The two models: config, layers, weight map, KV spec. Tensors in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from moet.errors import ConfigError

if TYPE_CHECKING:
    from moet.config import KVDtype, ModelSettings
    from moet.kernels.device_gemm import Device
    from moet.models.base import Model, TensorSource
    from moet.models.sharding import Shard


def _deepseek_v4(
    raw_config: Mapping[str, Any],
    source: TensorSource,
    settings: ModelSettings,
    kv_dtype: KVDtype,
    num_spec_tokens: int,
    gpu: Device | None,
    shard: Shard,
) -> Model:
    from moet.models.deepseek_v4 import DeepseekV4
    from moet.models.deepseek_v4_config import DeepseekV4Config

    config = DeepseekV4Config.from_dict(raw_config)
    return DeepseekV4.load(config, source, settings, kv_dtype, num_spec_tokens, shard, gpu=gpu)


def _glm_moe_dsa(
    raw_config: Mapping[str, Any],
    source: TensorSource,
    settings: ModelSettings,
    kv_dtype: KVDtype,
    num_spec_tokens: int,
    gpu: Device | None,
    shard: Shard,
) -> Model:
    from moet.models.glm_moe_dsa import GlmMoeDsa
    from moet.models.glm_moe_dsa_config import GlmMoeDsaConfig

    config = GlmMoeDsaConfig.from_dict(raw_config)
    return GlmMoeDsa.load(config, source, settings, kv_dtype, num_spec_tokens, shard, gpu=gpu)


_Loader = Callable[..., "Model"]
LOADERS: Mapping[str, _Loader] = {
    "DeepseekV4ForCausalLM": _deepseek_v4,
    "GlmMoeDsaForCausalLM": _glm_moe_dsa,
}


def load_model(
    raw_config: Mapping[str, Any],
    source: TensorSource,
    settings: ModelSettings,
    kv_dtype: KVDtype,
    num_spec_tokens: int = 0,
    gpu: Device | None = None,
    shard: Shard | None = None,
) -> Model:
    """Build the model that a parsed config.json names, reading everything but routed experts.

    gpu: where it goes, of settings.arch; None for the reference ops. shard: what this process has
    of it; None: everything.
    Raises ConfigError for an unknown architecture or config, CheckpointError for bad tensors.
    """
    from moet.models.sharding import WHOLE

    architectures = raw_config.get("architectures") or [None]
    loader = LOADERS.get(architectures[0])
    if loader is None:
        raise ConfigError(
            f"config.json names the architecture {architectures[0]!r}; moet runs "
            f"{', '.join(LOADERS)}"
        )
    return loader(raw_config, source, settings, kv_dtype, num_spec_tokens, gpu, shard or WHOLE)
