"""A start for which a device has too little memory ends in words for whoever chose the flags."""

import pytest
import torch

from moet.config import EngineConfig
from moet.errors import ConfigError
from moet.runtime import loader


def test_a_start_without_memory_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: EngineConfig) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a")

    monkeypatch.setattr(loader, "known_config", refuse)
    with pytest.raises(ConfigError, match=r"\(Tried to allocate 2.00 GiB\).*--kv-cache-memory"):
        loader.load_core(EngineConfig(model="m"), lambda stage, share: None)
