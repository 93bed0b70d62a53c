"""DeepSeek V4's answers: reasoning up to a tag, and calls in the DSML markup.

Accepted beyond the form that the prompt teaches: other spellings of the block's name, calls without
a block (if they prove themselves), calls that close themselves, arguments as one JSON object, a
missing `string` attribute, and missing end tags.
"""

from __future__ import annotations

from collections.abc import Mapping

from moet.server.chat.deepseek_v4 import DSML, END_THINK, THINK
from moet.server.chat.grammar import (
    JSON,
    STRING,
    Grammar,
    Schema,
    TagRule,
    ValueCodec,
    is_string_schema,
)

_BLOCK = r"(?:tool|function)(?:_?calls?|s)?"
_OPEN, _CLOSE = rf"<?{DSML}\s*", rf"</{DSML}\s*"


def value_codec(attributes: Mapping[str, str], schema: Schema | None) -> ValueCodec:
    """The `string` attribute decides; without one the schema does, and JSON is tried first."""
    if "string" in attributes:
        return STRING if attributes["string"] == "true" else JSON
    return STRING if is_string_schema(schema) else JSON


GRAMMAR = Grammar(
    markers=(THINK, END_THINK, DSML),
    tags=(THINK, END_THINK, f"<{DSML}", f"</{DSML}", DSML),
    open_ended=(f"<{DSML}", f"</{DSML}", DSML),
    rules=(
        TagRule("think", THINK),
        TagRule("end_think", END_THINK),
        TagRule("value", _OPEN + r"param\w*\b.*"),
        TagRule("end_value", _CLOSE + r"param\w*\s*>?"),
        TagRule("call", _OPEN + r"invoke\b.*"),
        TagRule("end_call", _CLOSE + r"invoke\s*>?"),
        TagRule("calls", _OPEN + _BLOCK + r"\s*>?"),
        TagRule("end_calls", _CLOSE + _BLOCK + r"\s*>?"),
    ),
    wrapped=True,
    value_codec=value_codec,
    surface_raw=False,
    think=THINK,
    end_think=END_THINK,
    call_markers=(DSML,),
)
