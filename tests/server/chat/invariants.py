"""Both models' answers from arbitrary bytes, checked for what must hold whatever a model writes."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any, NamedTuple

from moet.models import synthetic_tokenizer, synthetic_tokenizer_glm
from moet.runtime.tokenizer import Tokenizer
from moet.server.chat import deepseek_v4_grammar, glm_grammar
from moet.server.chat.grammar import Lexicon
from moet.server.chat.messages import ToolChoice
from moet.types import FinishReason
from tests.server.chat.answers import Answer, feed, function, of_text, of_tokens

TOOLS = [
    function("ls", ["path"], path="string", depth="integer"),
    function("put", a="object", b="array", c="boolean", d="number", input="string"),
    function("now"),
]
CHOICES = [ToolChoice(), ToolChoice("none"), ToolChoice("required"), ToolChoice("named", "ls")]
DSML = [
    "<think>", "</think>", "<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>",
    '<｜DSML｜invoke name="', "</｜DSML｜invoke>", '<｜DSML｜parameter name="', '" string="true">',
    '" string="false">', "</｜DSML｜parameter>", '">', '"/>', "｜DSML｜", "<｜DSML｜", "</｜DSML｜",
    "ls", "put", "now", "path", "depth", "input", "a", "\n", '{"path": "x"}', "7", "[1]", "杭😀",
    "<｜DSML｜function_calls>", "arguments", "\\", "</", "<｜",
]  # fmt: skip
GLM = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "<tool_response>", "ls", "put", "now", "path", "depth", "input",
    "a", "\n", '{"path": "x"}', "7", "[1]", "杭😀", "true", "1.5", '{"name": "ls"}', "arguments",
    "\\", "<", "</", "<arg", "_call>", "<tool", "null",
]  # fmt: skip


class Case(NamedTuple):
    """An answer and how it is asked for."""

    is_glm: bool
    text: str
    seed: int  # of the cuts
    options: dict[str, Any]


def case_of(data: bytes) -> Case:
    """Two bytes of options and cuts, then the answer: low bytes are its model's markup."""
    flags, seed = (data[:2] + b"\0\0")[:2]
    rest = data[2:]
    is_glm = bool(flags & 1)
    markup = GLM if is_glm else DSML
    options = {
        "start": "reasoning" if flags & 2 else "content",
        "tools": TOOLS if flags & 4 else (),
        "reason": FinishReason.LENGTH if flags & 8 else FinishReason.STOP,
        "tool_choice": CHOICES[flags >> 4 & 3],
        "parallel_tool_calls": not flags & 64,
    }
    text = "".join(markup[byte] if byte < len(markup) else chr(byte) for byte in rest)
    return Case(is_glm, text, seed, options)


def check(data: bytes) -> Answer:
    """Raise AssertionError if the answer depends on its cut, or is not what a client can use."""
    case = case_of(data)
    tokenizer, by_id, by_text = _model(case.is_glm)
    answer, _ = feed(by_text, of_text([case.text]), **case.options)
    cuts = random.Random(case.seed)
    parts, rest = [], case.text
    while rest:
        size = cuts.randint(1, 9)
        parts.append(rest[:size])
        rest = rest[size:]
    assert feed(by_text, of_text(parts), **case.options)[0] == answer, "another cut"
    for chunks in (
        of_tokens(tokenizer, case.text, seed=case.seed),
        of_tokens(tokenizer, case.text, 1),
    ):
        assert feed(by_id, chunks, **case.options)[0] == answer, "by token ids"
    _check_answer(answer, case)
    return answer


def _check_answer(answer: Answer, case: Case) -> None:
    kind = case.options["tool_choice"].kind
    if kind == "none" or not case.options["tools"]:
        assert not answer.calls, "a call that nobody wanted"
    if not case.options["parallel_tool_calls"]:
        assert len(answer.calls) <= 1, "calls beside the first"
    expected = "length" if case.options["reason"] == FinishReason.LENGTH else "stop"
    assert answer.finish_reason in (expected, "tool_calls")
    if answer.finish_reason == "tool_calls":
        assert expected == "stop", "a call that was cut off counts"
        assert kind != "named", "the end of another cell"
    for name, arguments in answer.calls[:-1]:  # the last one may have been cut
        assert name
        assert isinstance(json.loads(arguments), dict)
    size = len(answer.content) + len(answer.reasoning)
    assert size <= 2 * len(case.text), "more was said than written"


@cache
def _model(is_glm: bool) -> tuple[Tokenizer, Lexicon, Lexicon]:
    source = synthetic_tokenizer_glm if is_glm else synthetic_tokenizer
    tokenizer = Tokenizer(json.dumps(source.tokenizer_json(512)))
    grammar = glm_grammar.GRAMMAR if is_glm else deepseek_v4_grammar.GRAMMAR
    return tokenizer, Lexicon(grammar, tokenizer), Lexicon(grammar, None)
