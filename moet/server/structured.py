"""What an answer must look like, from the fields of a request to one grammar.

`response_format` and `structured_outputs` speak of the content, `tools` and `tool_choice` of calls:
- tool_choice required or named: the answer is calls, of the declared tools, by their schemas;
- auto with a content grammar: the answer is either that content or calls;
- auto with strict tools alone: anything goes, but a call that is begun follows a declared tool.
Where the prompt opens reasoning, a grammar begins behind it, and calls cannot begin inside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from moet.errors import RequestError
from moet.runtime.grammar_check import check_grammar, is_exotic
from moet.server.chat.encoding import EncodedPrompt
from moet.server.chat.grammar import Lexicon
from moet.server.chat.messages import Tool, ToolChoice
from moet.server.chat.tags import CallWriter, Format, const, either, json_value, regex, whole
from moet.types import GrammarSpec

KINDS = ("json", "json_object", "regex", "choice", "grammar")
ANY_OBJECT = {"type": "object"}


def content_grammar(
    response_format: Mapping[str, Any] | None,
    structured: Mapping[str, Any] | None = None,
    *,
    param: str = "response_format",
) -> GrammarSpec | None:
    """The grammar that the content has to follow. RequestError names the field that is wrong.

    param: where the client has its response_format.
    """
    schema = response_schema(response_format)
    if not structured:
        if schema is None:
            return None
        return _checked(GrammarSpec(kind="json_schema", text=_dumps(schema), param=param))
    if schema is not None:
        message = "structured_outputs and response_format exclude each other; send one"
        raise RequestError(message, param="structured_outputs")
    given = {name: value for name, value in structured.items() if value is not None}
    unknown = sorted(given.keys() - set(KINDS))
    if unknown:
        message = f"structured_outputs.{unknown[0]:.60} is not supported; it may have one of "
        raise RequestError(message + ", ".join(KINDS), param="structured_outputs")
    if len(given) != 1:
        message = f"structured_outputs must have exactly one of {', '.join(KINDS)}"
        raise RequestError(message, param="structured_outputs")
    [(name, value)] = given.items()
    return _checked(_structured(name, value))


def _checked(spec: GrammarSpec) -> GrammarSpec:
    check_grammar(spec)
    return spec


def _structured(name: str, value: object) -> GrammarSpec:
    param = f"structured_outputs.{name}"
    if name == "json_object":
        if value is not True:
            raise RequestError(f"{param} must be true", param=param)
        return GrammarSpec(kind="json_schema", text=_dumps(ANY_OBJECT), param=param)
    if name == "json":
        if not isinstance(value, str | dict | bool):
            message = f"{param} must be a JSON schema, as an object or as text"
            raise RequestError(message, param=param)
        text = value if isinstance(value, str) else _dumps(value)
        return GrammarSpec(kind="json_schema", text=text, param=param)
    if name == "choice":
        if not isinstance(value, list):
            raise RequestError(f"{param} must be a list of strings", param=param)
        return GrammarSpec(kind="choice", text=_dumps(value), param=param)
    if not isinstance(value, str):
        raise RequestError(f"{param} must be a string", param=param)
    return GrammarSpec(kind="regex" if name == "regex" else "ebnf", text=value, param=param)


def response_schema(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The JSON schema of a `response_format`, None for text."""
    kind = "text" if form is None else form.get("type")
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        message = "response_format.type must be text, json_object or json_schema"
        raise RequestError(message, param="response_format.type")
    described = form.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        message = "response_format.json_schema.schema must be a JSON schema object"
        raise RequestError(message, param="response_format.json_schema")
    return schema


def answer_grammar(
    content: GrammarSpec | None,
    tools: Sequence[Tool],
    tool_choice: ToolChoice,
    writer: CallWriter,
    *,
    only_one: bool,
) -> tuple[GrammarSpec | None, bool]:
    """The grammar of a chat answer, and whether it includes the reasoning.

    only_one: parallel calls are not wanted.
    """
    match tool_choice.kind:
        case "none":
            return content, False
        case "required":
            return _calls(writer.calls(tools, only_one=only_one)), False
        case "named":
            named = [tool for tool in tools if tool.name == tool_choice.name]
            return _calls(writer.calls(named, only_one=True)), False
        case "auto" if content is not None and tools:
            if is_exotic(_with_tools(content)):
                message = "this schema can be enforced only without tools; send tool_choice none"
                raise RequestError(message, param=content.param)
            calls = writer.calls(tools, only_one=only_one)
            text = whole(either([_as_format(content), calls]))
            return GrammarSpec(kind="structural_tag", text=text, param=content.param), False
        case "auto" if any(tool.strict for tool in tools):
            loose = [tool if tool.strict else _without_schema(tool) for tool in tools]
            return _calls(writer.text_with_calls(loose, only_one=only_one)), True
    return content, False


def behind_reasoning(spec: GrammarSpec, prompt: EncodedPrompt, lexicon: Lexicon) -> GrammarSpec:
    """The same grammar, off until the reasoning that the prompt opens has ended."""
    if prompt.start != "reasoning":
        return spec
    return msgspec.structs.replace(
        spec,
        after_token_id=lexicon.end_think_id,
        forbidden_token_ids=lexicon.call_marker_ids,
    )


def _calls(form: Format) -> GrammarSpec:
    return GrammarSpec(kind="structural_tag", text=whole(form), param="tools")


def _without_schema(tool: Tool) -> Tool:
    """A tool that takes any arguments."""
    return Tool(tool.name, tool.description, ANY_OBJECT)


def _with_tools(spec: GrammarSpec) -> GrammarSpec:
    """The content grammar as it will be beside calls."""
    if spec.kind != "json_schema":
        return spec
    return msgspec.structs.replace(spec, text=_dumps(_as_format(spec)["json_schema"]))


def _as_format(spec: GrammarSpec) -> Format:
    """A content grammar as a part of a larger one."""
    match spec.kind:
        case "json_schema":
            return json_value(json.loads(spec.text), exact=True)
        case "choice":
            return either([const(text) for text in json.loads(spec.text)])
        case "regex":
            return regex(spec.text)
        case _:
            return {"type": "grammar", "grammar": spec.text}


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
