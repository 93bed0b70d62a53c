"""What a grammar's text shows before it meets a vocabulary: refusals, and who must compile it.

Needs neither torch nor a grammar library, so that a server can refuse without them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from moet.errors import RequestError
from moet.types import GrammarSpec

MAX_TEXT_BYTES = 512 << 10
MAX_DEPTH = 64


def check_grammar(spec: GrammarSpec) -> None:
    """Refuse what can be seen to be wrong without a vocabulary: RequestError naming spec.param."""
    num_bytes = len(spec.text.encode("utf-8", "surrogatepass"))
    if num_bytes > MAX_TEXT_BYTES:
        raise refusal(spec, f"it has {num_bytes} bytes; the limit is {MAX_TEXT_BYTES}")
    if not spec.text:
        raise refusal(spec, "it is empty")
    if spec.kind in ("regex", "ebnf"):
        return
    try:
        value = json.loads(spec.text)
    except (ValueError, RecursionError) as error:
        raise refusal(spec, "it is not JSON, or nested too deep") from error
    if sum(1 for _ in levels(value)) > MAX_DEPTH:
        raise refusal(spec, f"it is nested deeper than {MAX_DEPTH} levels")
    if spec.kind == "choice":
        texts = isinstance(value, list) and value and all(isinstance(v, str) and v for v in value)
        if not texts:
            raise refusal(spec, "it must be a list of at least one string, none of them empty")


def refusal(spec: GrammarSpec, reason: str) -> RequestError:
    what = {"ebnf": "grammar", "structural_tag": "tool schema", "json_schema": "JSON schema"}
    name = what.get(spec.kind, spec.kind)
    return RequestError(f"the {name} cannot be enforced: {reason}", param=spec.param)


# Keywords that xgrammar takes and does not enforce, and what in a pattern it overlooks. A string of
# limited length it allows to hold control characters, which is no JSON.
_OVERLOOKED = {
    "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains",
    "dependentRequired", "dependentSchemas", "dependencies", "multipleOf", "propertyNames",
    "minLength", "maxLength",
}  # fmt: skip
_LOOKAROUND = re.compile(r"\(\?<?[=!]")


def is_exotic(spec: GrammarSpec) -> bool:
    """Whether xgrammar would accept the grammar and enforce less than it says."""
    if spec.kind == "regex":
        return bool(_LOOKAROUND.search(spec.text))
    if spec.kind != "json_schema":
        return False
    return any(map(_is_overlooked, schemas_in(json.loads(spec.text))))


def _is_overlooked(schema: dict[str, Any]) -> bool:
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    reference = schema.get("$ref", "#")
    elsewhere = isinstance(reference, str) and not reference.startswith("#")
    pattern = schema.get("pattern")
    looks = isinstance(pattern, str) and bool(_LOOKAROUND.search(pattern))
    named = any(schema.get(key) not in (None, False) for key in _OVERLOOKED & schema.keys())
    return several or elsewhere or looks or named


_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_NO_SCHEMAS = ("enum", "const", "default", "examples", "required")


def schemas_in(schema: object) -> Iterator[dict[str, Any]]:
    """The schema and every one inside it; names of properties are not keywords."""
    if isinstance(schema, list):
        for item in schema:
            yield from schemas_in(item)
    if not isinstance(schema, dict):
        return
    yield schema
    for key, value in schema.items():
        if key in _SCHEMA_MAPS and isinstance(value, dict):
            for member in value.values():
                yield from schemas_in(member)
        elif key not in _NO_SCHEMAS:
            yield from schemas_in(value)


def levels(value: object) -> Iterator[list[object]]:
    """What stands at each level of nesting, the value itself first; found without recursion."""
    level = [value]
    while level:
        yield level
        level = [child for item in level for child in _children(item)]


def _children(item: object) -> Iterable[object]:
    if isinstance(item, dict):
        return item.values()
    return item if isinstance(item, list) else ()
