"""From a model's name to a running core: finds or makes the pack, loads it, wires the parts.

Knows where packs are cached; knows nothing of requests.
"""

from __future__ import annotations

from pathlib import Path

from moet.config import EngineConfig
from moet.runtime.host import Core, Progress
from moet.runtime.text_side import TextSide


def load_core(config: EngineConfig, progress: Progress) -> Core:
    raise NotImplementedError


def load_text(model: str) -> TextSide:
    return TextSide.from_folder(Path(model))
