"""Whatever a call grammar lets through is read as calls of the declared tools, by their schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from moet.runtime.detokenizer import Detokenizer
from moet.runtime.grammar import Constraint, allowed
from moet.runtime.grammar_backends import XGrammar
from moet.runtime.tokenizer import Tokenizer
from moet.server.chat import deepseek_v4_grammar, glm_grammar
from moet.server.chat.call_writers import DsmlCalls, GlmCalls
from moet.server.chat.deepseek_v4 import DeepseekV4Encoding
from moet.server.chat.encoding import ChatOptions
from moet.server.chat.glm import CONTROLS, GlmEncoding
from moet.server.chat.grammar import Lexicon
from moet.server.chat.messages import Message, Tool, ToolCall
from moet.server.chat.tags import CallWriter, Format, value_types, whole
from moet.types import GrammarSpec
from tests import text_fixtures, texts
from tests.server.chat.answers import Answer, feed

MODELS = pytest.mark.parametrize("model", ["deepseek", "glm"])
LS = Tool(
    "ls",
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "depth": {"type": "integer", "minimum": 0, "maximum": 20},
            "sort": {"enum": ["name", "size"]},
        },
        "required": ["path", "sort"],
    },
)
TAGGED = {"type": "object", "properties": {"x": {"$ref": "#/$defs/pair"}}, "required": ["x"]}
PAIR = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
PUT = Tool("put", parameters={**TAGGED, "$defs": {"pair": PAIR}})
ANY = Tool("any", parameters={"type": "object"})
NOW = Tool("now")
MIXED = Tool("mixed", parameters={"properties": {"v": {"type": ["string", "integer"]}, "w": {}}})
TOOLS = [LS, PUT, ANY, NOW, MIXED]


class Rig:
    """One model's writer, tokenizer and parser."""

    def __init__(self, model: str) -> None:
        self.writer: CallWriter
        if model == "deepseek":
            self.tokenizer = texts.byte_tokenizer()
            self.writer = DsmlCalls(self.tokenizer)
            self.lexicon = Lexicon(deepseek_v4_grammar.GRAMMAR, self.tokenizer)
            self.encoding: Any = DeepseekV4Encoding(self.tokenizer, "preview")
        else:
            self.tokenizer = _glm_tokenizer()
            self.writer = GlmCalls(self.tokenizer)
            self.lexicon = Lexicon(glm_grammar.GRAMMAR, self.tokenizer)
            self.encoding = GlmEncoding(self.tokenizer)
        self.vocab_size = self.tokenizer.vocab_size
        [self.end] = self.tokenizer.eos_token_ids
        self._backend = XGrammar(self.tokenizer, self.vocab_size)

    def constraint(self, form: Format) -> Constraint:
        spec = GrammarSpec(kind="structural_tag", text=whole(form))
        return Constraint(
            self._backend.compile(spec)[0]([self.end]),
            vocab_size=self.vocab_size,
            after_token_id=None,
            forbidden_token_ids=(),
            end_token_ids=[self.end],
        )

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, allow_special=True)

    def spells(self, form: Format, token_ids: Sequence[int]) -> bool:
        """Whether the tokens are allowed one by one and the answer may end behind them."""
        constraint = self.constraint(form)
        for token_id in token_ids:
            if not constraint.accept(token_id):
                return False
        return self.end in self.next_ids(constraint)

    def next_ids(self, constraint: Constraint) -> list[int]:
        mask = allowed(constraint.masks()[0], self.vocab_size)
        return [int(i) for i in mask.nonzero()[:, 0]]

    def babble(self, form: Format, seed: int, limit: int = 3000) -> list[int]:
        """A random answer that the grammar lets through, with a liking for what closes things."""
        rng, constraint = random.Random(seed), self.constraint(form)
        liking = {self.ids(char)[0]: 12 for char in '<"}]> \n'} | {self.ids("/")[0]: 60}
        written: list[int] = []
        while len(written) < limit:
            options = self.next_ids(constraint)
            control = 60 if len(options) > 10 else 12  # in text it ends something
            weights = [
                control if self.tokenizer.is_control(i) else liking.get(i, 1) for i in options
            ]
            token_id = rng.choices(options, weights)[0]
            if token_id == self.end:
                return written
            assert constraint.accept(token_id)
            written.append(token_id)
        raise AssertionError("the answer does not come to an end")

    def parse(self, token_ids: Sequence[int], tools: Sequence[Tool]) -> Answer:
        detokenizer = Detokenizer(self.tokenizer)
        pieces = [*detokenizer.push(token_ids), *detokenizer.finish()]
        return feed(self.lexicon, [pieces], tools=tools)[0]

    def written(self, tool_calls: Sequence[ToolCall]) -> list[int]:
        """The calls as the prompt's encoding writes them, without what comes before and behind."""
        history = [Message("user", "q"), Message("assistant", tool_calls=tuple(tool_calls))]
        options = ChatOptions(thinking=False, add_generation_prompt=False)
        token_ids = self.encoding.encode(history, TOOLS, options).token_ids
        start = max(i for i, t in enumerate(token_ids) if t == self.lexicon.end_think_id) + 1
        stop = -1 if token_ids[-1] == self.end else len(token_ids)
        return token_ids[start:stop]


def _glm_tokenizer() -> Tokenizer:
    return text_fixtures.byte_tokenizer("<|user|>", *[c for c in CONTROLS if c != "<|user|>"])


@cache
def rig(model: str) -> Rig:
    return Rig(model)


def fits(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """As much of JSON schema as the tools above use."""
    if "$ref" in schema:
        return fits(value, root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root)
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    python = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict}
    if kinds and not any(isinstance(value, python[kind]) for kind in kinds):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, list):
        inside = all(fits(item, schema.get("items", {}), root) for item in value)
        return inside and schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 99)
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        inside = all(fits(value[key], properties.get(key, {}), root) for key in value)
        listed = value.keys() <= properties.keys() or not properties
        return inside and listed and set(schema.get("required", ())) <= value.keys()
    number = isinstance(value, int) and not isinstance(value, bool)
    return not number or schema.get("minimum", value) <= value <= schema.get("maximum", value)


@MODELS
@pytest.mark.parametrize("only_one", [False, True], ids=["several", "one"])
def test_whatever_is_let_through_is_read_as_valid_calls(model: str, only_one: bool) -> None:
    the, counts = rig(model), set()
    form = the.writer.calls(TOOLS, only_one=only_one)
    by_name = {tool.name: tool.parameters or {} for tool in TOOLS}
    for seed in range(12):
        answer = the.parse(the.babble(form, seed), TOOLS)
        assert answer.finish_reason == "tool_calls"
        assert answer.num_malformed == 0
        assert not answer.content.strip()
        counts.add(len(answer.calls))
        for name, arguments in answer.arguments:
            assert fits(arguments, by_name[name], by_name[name]), (name, arguments)
            assert isinstance(arguments, dict)
            assert name != "now" or arguments == {}
    assert counts == {1} if only_one else max(counts) > 1


@MODELS
def test_the_forms_of_the_prompt_are_let_through(model: str) -> None:
    the = rig(model)
    calls = [
        ToolCall("1", "ls", json.dumps({"path": "/a b </x> \"é\"", "depth": 3, "sort": "size"})),
        ToolCall("2", "ls", json.dumps({"path": "", "sort": "name"})),
        ToolCall("3", "put", json.dumps({"x": [True, False]})),
        ToolCall("4", "any", json.dumps({"free": "text", "n": 5})),
        ToolCall("5", "now", "{}"),
        ToolCall("6", "mixed", json.dumps({"v": 7})),
        ToolCall("7", "mixed", json.dumps({"v": "seven", "w": {"a": [None]}})),
    ]  # fmt: skip
    several = the.writer.calls(TOOLS, only_one=False)
    for call in calls:
        token_ids = the.written([call])
        assert the.spells(several, token_ids), the.tokenizer.decode(token_ids, skip_special=False)
        [(name, arguments)] = the.parse(token_ids, TOOLS).arguments
        assert (name, arguments) == (call.name, json.loads(call.arguments))
    assert the.spells(several, the.written(calls))
    assert not the.spells(the.writer.calls(TOOLS, only_one=True), the.written(calls[:2]))


@MODELS
def test_wrong_calls_are_not_let_through(model: str) -> None:
    the = rig(model)
    form = the.writer.calls([LS], only_one=False)
    for name, arguments in (
        ("rm", {}),
        ("ls", {"path": "/"}),  # sort is missing
        ("ls", {"path": "/", "sort": "date"}),
        ("ls", {"path": "/", "depth": 21, "sort": "name"}),
        ("ls", {"path": "/", "sort": "name", "other": "x"}),
    ):
        call = ToolCall("1", name, json.dumps(arguments))
        assert not the.spells(form, the.written([call])), arguments
    assert not the.spells(form, the.ids("Let me see."))
    assert not the.spells(form, [])


@MODELS
def test_text_may_have_calls_in_it(model: str) -> None:
    the = rig(model)
    form = the.writer.text_with_calls([LS], only_one=False)
    good = the.written([ToolCall("1", "ls", json.dumps({"path": "/", "sort": "name"}))])
    bad = the.written([ToolCall("1", "ls", json.dumps({"path": "/", "sort": "date"}))])
    assert the.spells(form, the.ids("No call at all, a < b."))
    assert the.spells(form, [])
    assert the.spells(form, [*the.ids("hm</think>Let me see."), *good])
    assert not the.spells(form, [*the.ids("Let me see."), *bad])
    one = the.writer.text_with_calls([LS], only_one=True)
    assert the.spells(one, good)
    assert not the.spells(one, [*good, *good])


@MODELS
def test_a_schema_that_is_none_does_no_harm(model: str) -> None:
    the = rig(model)
    odd = {"type": 3, "enum": 5, "anyOf": "x"}, {"type": ["string", {}], "required": [[]]}
    for schema in odd:
        tool = Tool("f", None, {**schema, "properties": {"a": schema}})
        the.writer.calls([tool], only_one=False)
        [(_, arguments)] = the.parse(
            the.written([ToolCall("1", "f", '{"a": "x"}')]), [tool]
        ).arguments
        assert arguments == {"a": "x"}


def test_types_are_seen_through_references() -> None:
    definitions = {"a": {"$ref": "#/$defs/b"}, "b": {"type": "integer"}, "c": {"$ref": "#/$defs/c"}}
    assert value_types({"$ref": "#/$defs/a", "$defs": definitions}) == {"integer"}
    assert value_types({"$ref": "#/$defs/c", "$defs": definitions}) == set()
    assert value_types({"$ref": "#/$defs/none", "$defs": definitions}) == set()
    assert value_types({"type": ["string", "null"]}) == {"string", "null"}
