"""moet: frontier mixture-of-experts models on the cards people have at home."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Engine", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from moet.runtime.engine import Engine
    from moet.types import SamplingParams


def __getattr__(name: str) -> Any:
    """Import the engine only when it is asked for, so that `import moet` stays light."""
    if name == "Engine":
        from moet.runtime.engine import Engine

        return Engine
    if name == "SamplingParams":
        from moet.types import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'moet' has no attribute {name!r}")
