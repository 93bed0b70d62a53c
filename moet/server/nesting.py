"""How deep JSON may nest: what checks it, shows it to a model and writes it again is recursive."""

from __future__ import annotations

from itertools import islice

from moet.runtime.grammar_check import levels

MAX_DEPTH = 128


def is_too_deep(value: object) -> bool:
    """Whether lists and objects nest deeper than MAX_DEPTH; found without recursion."""
    beyond = next(islice(levels(value), MAX_DEPTH + 1, None), [])
    return any(isinstance(each, dict | list) for each in beyond)
