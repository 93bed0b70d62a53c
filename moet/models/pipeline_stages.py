"""Which layers a pipeline stage holds: cuts are where no selection has to travel. Knows configs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from moet.errors import ConfigError
from moet.models.deepseek_v4_config import DeepseekV4Config
from moet.models.glm_moe_dsa_config import ARCHITECTURE, GlmMoeDsaConfig
from moet.models.sharding import Shard, divide_deepseek_v4, divide_glm_moe_dsa


def stage_layers(owners: Sequence[int], num_layers: int, shard: Shard) -> range:
    """The layers of this stage, of num_layers (a draft block not counted).

    owners: layers that own an indexer; a stage begins at one of them, or at 0, so that no
    selection has to travel. Cuts are as even as that allows. Raises ConfigError if there are fewer
    owners than cuts.
    """
    cuts = [0]
    for stage in range(1, shard.num_stages):
        left = shard.num_stages - stage - 1  # cuts still to be made behind this one
        free = [each for each in owners if each > cuts[-1]]
        if len(free) <= left:
            raise ConfigError(
                f"-pp {shard.num_stages} needs {shard.num_stages - 1} layers to cut before; only "
                f"layers that own an indexer are, {list(owners)} of {num_layers}; use a smaller -pp"
            )
        ideal = num_layers * stage / shard.num_stages
        cuts.append(min(free[: len(free) - left], key=lambda each: (abs(each - ideal), each)))
    cuts.append(num_layers)
    return range(cuts[shard.stage], cuts[shard.stage + 1])


def deepseek_v4_layers(config: DeepseekV4Config, shard: Shard) -> range:
    """The decoder layers of this stage."""
    num_layers = config.num_hidden_layers
    owners = [i for i in range(num_layers) if config.layer_kind(i) == "csa"]
    return stage_layers(owners, num_layers, shard)


def glm_moe_dsa_layers(config: GlmMoeDsaConfig, shard: Shard) -> range:
    """The decoder layers of this stage."""
    num_layers = config.num_hidden_layers
    owners = [i for i in range(num_layers) if config.owns_indexer(i)]
    return stage_layers(owners, num_layers, shard)


class _Nothing:
    """A source without tensors."""

    def names(self) -> Iterable[str]:
        return ()

    def load(self, name: str) -> Tensor:
        raise AssertionError(name)


def check_divisible(raw_config: Mapping[str, Any], tensor: int, pipeline: int) -> None:
    """Raise ConfigError if a model cannot be divided so, before anything is started or loaded."""
    nothing = _Nothing()
    for stage in range(pipeline):
        shard = Shard(0, tensor, stage, pipeline)
        if raw_config["architectures"][0] == ARCHITECTURE:
            glm = GlmMoeDsaConfig.from_dict(raw_config)
            divide_glm_moe_dsa(glm, nothing, shard)
            glm_moe_dsa_layers(glm, shard)
        else:
            v4 = DeepseekV4Config.from_dict(raw_config)
            divide_deepseek_v4(v4, nothing, shard)
            deepseek_v4_layers(v4, shard)


def held_layers(
    raw_config: Mapping[str, Any], layers: Sequence[int], shard: Shard
) -> tuple[int, ...]:
    """Which of `layers` this stage has; draft blocks, numbered behind them, are the last one's."""
    if raw_config["architectures"][0] == ARCHITECTURE:
        own = glm_moe_dsa_layers(GlmMoeDsaConfig.from_dict(raw_config), shard)
    else:
        own = deepseek_v4_layers(DeepseekV4Config.from_dict(raw_config), shard)
    return tuple(i for i in layers if i in own or (shard.is_last and i >= own.stop))
