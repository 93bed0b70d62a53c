"""GLM-5.2 answers: typed values, calls in odd places, and no dependence on how text was cut."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any, Literal, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.models.synthetic_tokenizer_glm import tokenizer_json
from moet.runtime.detokenizer import Detokenizer, Piece
from moet.runtime.tokenizer import Tokenizer
from moet.server.chat.calls import CallArguments, CallStart
from moet.server.chat.glm_grammar import GRAMMAR, coerce
from moet.server.chat.grammar import Lexicon, ReasoningCounter
from moet.server.chat.messages import Tool
from moet.server.chat.parser import ContentDelta, Delta, OutputParser, ReasoningDelta
from moet.types import FinishReason

TOKENIZER = Tokenizer(json.dumps(tokenizer_json(512)))
BY_ID, BY_TEXT = Lexicon(GRAMMAR, TOKENIZER), Lexicon(GRAMMAR, None)
STRING, INTEGER = {"type": "string"}, {"type": "integer"}


def tool(name: str, required: tuple[str, ...] = (), **properties: Any) -> Tool:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return Tool(name, None, schema)


PUT = tool("put", path=STRING, n=INTEGER)
NOW, PING = tool("now"), tool("ping")
READ, LOOKUP = tool("read", p=STRING), tool("lookup", q=STRING)
TOOLS = (PUT, NOW, PING, READ, LOOKUP)


def call(name: str, **arguments: str) -> str:
    pairs = (f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments.items())
    return f"<tool_call>{name}{''.join(pairs)}</tool_call>"


class Answer(NamedTuple):
    """What a client has in the end. calls: name and arguments' JSON text, by index."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]
    finish_reason: str
    is_answer: bool


def collect(deltas: list[Delta], finish_reason: str, is_answer: bool) -> Answer:
    calls: list[list[str]] = []
    ids = []
    for delta in deltas:
        if isinstance(delta, CallStart):
            assert delta.index == len(calls)
            calls.append([delta.name, ""])
            ids.append(delta.id)
        elif isinstance(delta, CallArguments):
            assert delta.index == len(calls) - 1
            calls[delta.index][1] += delta.text
        else:
            assert delta.text, "an empty delta"
    assert len(set(ids)) == len(ids)
    return Answer(
        "".join(d.text for d in deltas if isinstance(d, ReasoningDelta)),
        "".join(d.text for d in deltas if isinstance(d, ContentDelta)),
        tuple((name, arguments) for name, arguments in calls),
        finish_reason,
        is_answer,
    )


Start = Literal["reasoning", "content"]


def run(
    batches: list[list[Piece]],
    *,
    start: Start = "content",
    tools: tuple[Tool, ...] = TOOLS,
    reason: FinishReason = FinishReason.STOP,
    lexicon: Lexicon = BY_ID,
) -> Answer:
    parser = OutputParser(lexicon, start=start, tools=tools)
    deltas = [delta for pieces in batches for delta in parser.feed(pieces)]
    end = parser.finish(reason)
    return collect([*deltas, *end.deltas], end.finish_reason, end.reasoning_is_answer)


def by_tokens(text: str, sizes: list[int]) -> list[list[Piece]]:
    """The text as its tokens, cut into deltas of the given sizes; the last takes the rest."""
    ids = TOKENIZER.encode(text, allow_special=True)
    detokenizer, batches, at = Detokenizer(TOKENIZER), [], 0
    for size in [*sizes, len(ids)]:
        batches.append(detokenizer.push(ids[at : at + size]))
        at += size
    return [*batches, detokenizer.finish()]


def parse(text: str, **options: Any) -> Answer:
    """Parse in one delta, and check that no other cut gives anything else."""
    whole = run(by_tokens(text, []), **options)
    num_tokens = len(TOKENIZER.encode(text, allow_special=True))
    for cut in range(1, num_tokens):
        assert run(by_tokens(text, [cut]), **options) == whole, cut
    for size in (1, 2, 3, 5, 17):
        assert run(by_tokens(text, [size] * num_tokens), **options) == whole, size
    singles = [[Piece(char)] for char in text]
    for batches in ([[Piece(text)]], singles):
        assert run(batches, lexicon=BY_TEXT, **options) == whole
    for name, arguments in whole.calls:
        assert name in {t.name for t in options.get("tools", TOOLS)}
        assert isinstance(json.loads(arguments), dict)
    return whole


@pytest.mark.bug("P01")
def test_p01_a_call_without_arguments_streams() -> None:
    answer = run([[Piece(t)] for t in ("<tool_call>", "no", "w", "</tool_call>")], lexicon=BY_TEXT)
    assert answer.calls == (("now", "{}"),)
    assert answer.finish_reason == "tool_calls"
    assert parse(call("now")) == answer


@pytest.mark.bug("P02")
def test_p02_a_lost_opening_value_tag_keeps_the_value() -> None:
    text = "<tool_call>lookup<arg_key>q</arg_key>leave days 2026</arg_value></tool_call>"
    answer = parse(text)
    assert answer.calls == (("lookup", '{"q": "leave days 2026"}'),)
    assert answer.finish_reason == "tool_calls"


@pytest.mark.bug("P02")
def test_p02_what_cannot_be_recovered_is_shown_as_it_came() -> None:
    text = "<tool_call>lookup q=leave days</arg_value>"
    answer = parse(text, reason=FinishReason.LENGTH)
    assert answer.calls == ()
    assert "leave days" in answer.content
    assert answer.finish_reason == "length"


@pytest.mark.bug("P03")
def test_p03_several_tags_in_one_delta() -> None:
    text = call("put", path="a.txt", n="3")
    expected = (("put", '{"path": "a.txt", "n": 3}'),)
    assert parse(text).calls == expected
    for cut in range(len(text)):
        halves = [[Piece(text[:cut])], [Piece(text[cut:])]]
        assert run(halves, lexicon=BY_TEXT).calls == expected
    for seed in range(500):
        cuts = sorted(random.Random(seed).sample(range(1, len(text)), 6))
        parts = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        assert run([[Piece(part)] for part in parts], lexicon=BY_TEXT).calls == expected


@pytest.mark.bug("P05")
def test_p05_a_call_after_one_without_arguments() -> None:
    answer = parse(call("ping") + call("read", p="x"))
    assert answer.calls == (("ping", "{}"), ("read", '{"p": "x"}'))


@pytest.mark.bug("P11")
def test_p11_an_answer_without_thinking_is_an_answer() -> None:
    answer = parse("The port is 8080.", start="reasoning")
    assert answer.content == "The port is 8080."
    assert answer.is_answer
    assert answer.finish_reason == "stop"


@pytest.mark.bug("P12")
def test_p12_thinking_that_was_cut_stays_thinking() -> None:
    text = "1. Look at the request 2."
    answer = parse(text, start="reasoning", reason=FinishReason.LENGTH)
    assert answer == Answer(text, "", (), "length", False)
    ids = TOKENIZER.encode(text)
    counter = ReasoningCounter(GRAMMAR, TOKENIZER, in_reasoning=True)
    assert all(counter.push(token_id) for token_id in ids)
    assert counter.count == len(ids)


def test_reasoning_content_and_calls_in_order() -> None:
    text = "Let me see.</think>I will look.\n" + call("read", p=" a ") + call("now")
    answer = parse(text, start="reasoning")
    assert answer.reasoning == "Let me see."
    assert answer.content == "I will look."
    assert answer.calls == (("read", '{"p": " a "}'), ("now", "{}"))
    assert answer.finish_reason == "tool_calls"


def test_a_call_ends_open_reasoning() -> None:
    answer = parse("I need the time." + call("now"), start="reasoning")
    assert answer == Answer("I need the time.", "", (("now", "{}"),), "tool_calls", False)


def test_white_space_between_reasoning_and_a_call_is_dropped() -> None:
    assert parse("R</think>\n\n" + call("now"), start="reasoning").content == ""


def test_a_repeated_think_and_a_stray_closer_are_swallowed() -> None:
    answer = parse("<think>R</think>A</think>B", start="reasoning")
    assert answer == Answer("R", "AB", (), "stop", False)


def test_content_between_calls_is_kept() -> None:
    answer = parse(call("now") + "and then" + call("ping") + "done")
    assert answer.calls == (("now", "{}"), ("ping", "{}"))
    assert "and then" in answer.content
    assert "done" in answer.content


def test_white_space_around_names_keys_and_pairs_is_no_part_of_them() -> None:
    text = (
        "<tool_call>\n put \n<arg_key> path </arg_key>\n<arg_value>a\n</arg_value>\n"
        "<arg_key>n</arg_key> <arg_value> 3 </arg_value>\n</tool_call>"
    )
    assert parse(text).calls == (("put", '{"path": "a\\n", "n": 3}'),)


@pytest.mark.parametrize(
    "value", ["123", "true", '{"a":1}', "  x\n", "null", "<b>&</b>", "é😀", ""]
)
def test_a_string_stays_as_it_is(value: str) -> None:
    (answer,) = parse(call("read", p=value)).calls
    assert json.loads(answer[1]) == {"p": value}


def test_a_missing_end_of_a_value_or_call_is_recovered() -> None:
    text = "<tool_call>put<arg_key>path</arg_key><arg_value>a<arg_key>n</arg_key><arg_value>3"
    answer = parse(text + "</tool_call>")
    assert answer.calls == (("put", '{"path": "a", "n": 3}'),)
    two = "<tool_call>read<arg_key>p</arg_key><arg_value>x</arg_value>" + call("now")
    assert parse(two).calls == (("read", '{"p": "x"}'), ("now", "{}"))


def test_a_long_string_streams_and_a_number_waits() -> None:
    parser = OutputParser(BY_TEXT, start="content", tools=TOOLS)
    opening = "<tool_call>read<arg_key>p</arg_key><arg_value>"
    deltas = parser.feed([Piece(opening + "x" * 8000)])
    streamed = [d.text for d in deltas if isinstance(d, CallArguments)]
    assert len("".join(streamed)) > 7900
    parser = OutputParser(BY_TEXT, start="content", tools=TOOLS)
    deltas = parser.feed([Piece("<tool_call>put<arg_key>n</arg_key><arg_value>12")])
    assert "".join(d.text for d in deltas if isinstance(d, CallArguments)) == '{"n": '


def test_a_name_is_sent_once_it_is_whole() -> None:
    parser = OutputParser(BY_TEXT, start="content", tools=TOOLS)
    assert parser.feed([Piece("<tool_call>re")]) == []
    assert parser.feed([Piece("ad<arg_")]) == []
    deltas = parser.feed([Piece("key>p</arg_key><arg_value>")])
    assert [d.name for d in deltas if isinstance(d, CallStart)] == ["read"]


def test_markup_is_text_where_no_tools_are_declared() -> None:
    text = "Use " + call("now")
    assert parse(text, tools=()).content == text


TYPED = {
    "zip": STRING,
    "n": INTEGER,
    "f": {"type": "number"},
    "ok": {"type": "boolean"},
    "tags": {"type": "array", "items": INTEGER},
    "opt": {"anyOf": [STRING, {"type": "null"}]},
    "free": {},
    "pick": {"enum": [1, 2, "all"]},
    "o": {"type": "object", "properties": {"d": INTEGER}},
}


def test_values_are_typed_by_schema() -> None:
    typed = tool("put", **TYPED)
    text = call(
        "put", zip="01234", n="7", f="2.0", ok="true", tags='["1", 2]', opt="null", free="[1]"
    )
    ((_, arguments),) = parse(text, tools=(typed,)).calls
    expected = '{"zip": "01234", "n": 7, "f": 2, "ok": true, "tags": [1, 2], "opt": null, '
    assert arguments == expected + '"free": [1]}'


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("n", "7.5", "7.5"),
        ("n", " 7 ", 7),
        ("n", "9" * 5000, "9" * 5000),
        ("f", "1e3", 1000),
        ("f", "0.5", 0.5),
        ("f", "inf", "inf"),
        ("f", "1e999", "1e999"),
        ("ok", "0", False),
        ("ok", "yes", "yes"),
        ("opt", "NULL", None),
        ("opt", "Smith", "Smith"),
        ("pick", "2", 2),
        ("pick", "all", "all"),
        ("o", '{"d": "4", "e": "5"}', {"d": 4, "e": "5"}),
        ("o", "{broken", "{broken"),
        ("o", '{"a": 1e999}', '{"a": 1e999}'),
        ("free", '["\\ud83d"]', '["\\ud83d"]'),
        ("free", '["\\ud83d\\ude00"]', ["😀"]),
        ("free", "text", "text"),
        ("free", '"text"', '"text"'),
        ("free", "-1.5", -1.5),
        ("free", "NaN", "NaN"),
        ("tags", "é", "é"),
    ],
)
def test_coercion(key: str, text: str, value: object) -> None:
    got = coerce(text, TYPED[key])
    assert got == value
    assert type(got) is type(value)


def test_a_dropped_call_shows_no_thinking_tags() -> None:
    """What was a value's text while the call was open is prose once the call is none."""
    text = "<tool_call><arg_value><think>a</think>"
    whole = run(by_tokens(text, []), start="reasoning")
    assert whole.reasoning == "<tool_call><arg_value>a"
    assert run([[Piece(text)]], start="reasoning", lexicon=BY_TEXT) == whole


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.sampled_from([*GRAMMAR.tags, "now", "put", "path", "n", "a b", "\n", "7", "<", "é"]),
        max_size=14,
    ),
    st.randoms(use_true_random=False),
    st.sampled_from(["reasoning", "content"]),
)
def test_no_cut_changes_anything(parts: list[str], rng: random.Random, start: Start) -> None:
    text = "".join(parts)
    whole = run(by_tokens(text, []), start=start)
    num_tokens = len(TOKENIZER.encode(text, allow_special=True))
    sizes = [rng.randint(1, 4) for _ in range(num_tokens)]
    assert run(by_tokens(text, sizes), start=start) == whole
    assert run([[Piece(text)]], start=start, lexicon=BY_TEXT) == whole
    for _, arguments in whole.calls:
        if whole.finish_reason == "tool_calls":
            assert isinstance(json.loads(arguments), dict)
    assert not re.search("|".join(map(re.escape, ("<think>", "</think>"))), whole.reasoning)
