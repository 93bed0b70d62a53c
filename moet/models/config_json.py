"""Checks that a model's config.json goes through. Knows no model.

A value that the arithmetic assumes is compared, a key nobody knows is refused: a surprise in a
checkpoint should stop the load, not bend the logits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moet.errors import ConfigError


def require(holds: bool, name: str, value: object, limit: str) -> None:
    """Raise ConfigError naming key, value and limit unless `holds`."""
    if not holds:
        raise ConfigError(f"config.json: {name} is {value!r}; {limit}")


def check_assumed(raw: Mapping[str, Any], assumed: Mapping[str, Any], prefix: str = "") -> None:
    """Compare what `raw` states with the only values that are implemented."""
    for name, expected in assumed.items():
        if name in raw:
            limit = f"only {expected!r} is implemented"
            require(raw[name] == expected, prefix + name, raw[name], limit)


def check_known(raw: Mapping[str, Any], known: Iterable[str], name: str = "config.json") -> None:
    """Refuse keys outside `known`."""
    unknown = sorted(set(raw) - set(known))
    if unknown:
        keys = ", ".join(map(str, unknown))
        raise ConfigError(f"{name} has unknown keys, which may change the arithmetic: {keys}")


def typed(name: str, value: Any, annotation: str) -> Any:
    """Check value against the type its field is annotated with; lists become tuples."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if annotation.startswith("int"):
        require(is_int, name, value, "an integer is needed")
    elif annotation == "float":
        require(is_int or isinstance(value, float), name, value, "a number is needed")
    elif annotation == "bool":
        require(isinstance(value, bool), name, value, "true or false is needed")
    elif annotation.startswith("tuple"):
        item_type = int if annotation.startswith("tuple[int") else str
        fits = isinstance(value, list) and all(type(item) is item_type for item in value)
        require(fits, name, value, f"a list of {item_type.__name__} is needed")
        return tuple(value)
    return value


def read_config(path: Path) -> dict[str, Any]:
    """Read config.json. Raises ConfigError if it is absent, not JSON, or not an object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; a model folder needs config.json") from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a {type(raw).__name__}; an object is needed")
    return raw
