"""How deep JSON may nest: what checks it, shows it to a model and writes it again is recursive."""

from __future__ import annotations

MAX_DEPTH = 128


def is_too_deep(value: object) -> bool:
    """Whether lists and objects nest deeper than MAX_DEPTH; found without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner += [each for each in item.values() if isinstance(each, dict | list)]
            elif isinstance(item, list):
                inner += [each for each in item if isinstance(each, dict | list)]
        if not inner:
            return False
        level = inner
    return True
