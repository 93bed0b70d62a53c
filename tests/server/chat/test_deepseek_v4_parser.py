"""DSML answers: every way of cutting them, the known malformations, and who wins at the end."""

import json
import random
from functools import cache

import deepseek_recipe as recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.runtime.detokenizer import Piece
from moet.server.chat.calls import CallArguments, CallStart
from moet.server.chat.deepseek_v4 import DeepseekV4Encoding
from moet.server.chat.deepseek_v4_grammar import GRAMMAR
from moet.server.chat.encoding import ChatOptions
from moet.server.chat.grammar import Lexicon, ReasoningCounter
from moet.server.chat.messages import Message, ToolCall, ToolChoice
from moet.server.chat.parser import ContentDelta
from moet.types import FinishReason
from tests.server.chat.answers import Answer, feed, function, of_ids, of_text, of_tokens
from tests.text_fixtures import RELEASED, released_tokenizer

TEXT = Lexicon(GRAMMAR, None)
TOOLS = [
    function("ls", ["path"], path="string", depth="integer"),
    function("bash", ["command"], command="string"),
    function("weather", city="string", days="integer", opts="object"),
    function("now"),
]
NONE = ToolChoice("none")
OPEN, CLOSE = "<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>"


def by_id():
    return Lexicon(GRAMMAR, released_tokenizer())


def param(key, value, string="true"):
    attribute = f' string="{string}"' if string else ""
    return f'<｜DSML｜parameter name="{key}"{attribute}>{value}</｜DSML｜parameter>'


def invoke(name, *params):
    return f'<｜DSML｜invoke name="{name}">\n' + "\n".join(params) + "\n</｜DSML｜invoke>"


def block(*invokes):
    return OPEN + "\n".join(invokes) + CLOSE


LS = invoke("ls", param("path", "/x"))


def parse(text, tools=TOOLS, **options):
    """The answer in one delta; checked to be the same by id, token by token and by character."""
    answer, _ = feed(TEXT, of_text([text]), tools=tools, **options)
    tokenizer = released_tokenizer()
    for chunks, lexicon in (
        (of_text(text), TEXT),
        (of_tokens(tokenizer, text, 1), by_id()),
        (of_tokens(tokenizer, text, 10**6), by_id()),
    ):
        assert feed(lexicon, chunks, tools=tools, **options)[0] == answer
    return answer


def thought(text, **options):
    return parse(text, start="reasoning", **options)


# --- the three properties


SAMPLES = [
    "why</think>answer",
    "why\n\n</think>answer\n\n" + block(LS, invoke("now")) + "tail",
    "why\n\n" + block(invoke("bash", param("command", 'a "q" \\ <b> </｜ 2>&1\n\n'))),
    "a</think>b<think>c</think>d < e <\n",
    "x</think>" + LS + "\n" + invoke("ls") + "y",
    block(invoke("weather", param("city", "杭州"), param("days", 5, "false"), "junk")),
    "t</think>" + block('<｜DSML｜invoke name="ls">{"path": "/j"}</｜DSML｜invoke>') + "z",
    "t</think>"
    + OPEN
    + '<｜DSML｜invoke name="bash">\n<｜DSML｜parameter name="command" string="t',
    "t</think>" + OPEN + '<｜DSML｜invoke name="bash">\n' + param("command", "ls 😀")[:-5],
    "t</think>a ｜DSML｜ b <｜DSML｜foo> c </｜DSML｜invoke> d </think> e",
]


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("choice", [ToolChoice(), NONE])
@pytest.mark.bug("P08")
def test_p08_any_split_into_two_gives_the_same_answer(text, reason, choice):
    options = {"tools": TOOLS, "start": "reasoning", "reason": reason, "tool_choice": choice}
    whole, _ = feed(TEXT, of_text([text]), **options)
    for cut in range(len(text)):
        assert feed(TEXT, of_text([text[:cut], text[cut:]]), **options)[0] == whole
    tokenizer, lexicon = released_tokenizer(), by_id()
    for size in (1, 2, 3, 5, 17, 10**6):
        assert feed(lexicon, of_tokens(tokenizer, text, size), **options)[0] == whole
    for seed in range(20):
        assert feed(lexicon, of_tokens(tokenizer, text, seed=seed), **options)[0] == whole


FRAGMENTS = st.sampled_from(
    [
        "<think>", "</think>", OPEN, CLOSE, LS, "｜DSML｜", "<｜DSML｜", "</｜DSML｜", "\n\n", " ",
        '<｜DSML｜invoke name="ls">', "</｜DSML｜invoke>", '<｜DSML｜invoke name="now"/>', "text",
        "<", '<｜DSML｜parameter name="path" string="true">', "</｜DSML｜parameter>", '"', ">",
        '<｜DSML｜parameter name="n" string="false">', '{"path": "p"}', "</", 'name="', "\\", "é🙂",
        "{}", '<｜DSML｜invoke name="">', '<｜DSML｜parameter name="arguments" string="true">',
        "/>",
    ]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    st.lists(FRAGMENTS, max_size=14).map("".join),
    st.integers(),
    st.sampled_from(["reasoning", "content"]),
    st.sampled_from(["stop", "length"]),
    st.booleans(),
)
def test_any_text_in_any_cut_gives_one_answer_without_markup(text, seed, start, reason, parallel):
    options = {
        "tools": TOOLS,
        "start": start,
        "reason": FinishReason(reason),
        "parallel_tool_calls": parallel,
    }
    whole, _ = feed(TEXT, of_text([text]), **options)
    rng = random.Random(seed)
    cuts = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(1, 6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
    assert feed(TEXT, of_text(parts), **options)[0] == whole
    assert feed(TEXT, of_text(text), **options)[0] == whole
    for shown in (whole.content, whole.reasoning):
        assert "DSML｜" not in shown
        assert "think>" not in shown
    assert all(name for name, _ in whole.calls)
    assert parallel or len(whole.calls) <= 1
    assert reason == "stop" or whole.finish_reason == "length"


# Markers travel as noncharacters, so one that a model wrote itself comes out as U+FFFD.
CHARACTERS = st.characters(
    codec="utf-8", exclude_characters="".join(map(chr, range(0xFDD0, 0xFDF0)))
)
KEYS = st.sampled_from(["path", "n", "é", "arguments", "a b"])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(CHARACTERS, max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(CHARACTERS, max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["ls", "now", "other"]), st.dictionaries(KEYS, JSON_VALUES)),
        min_size=1,
        max_size=3,
    ),
    st.text(CHARACTERS, max_size=10).filter(lambda text: text.strip() == text),
    st.integers(),
)
def test_what_the_prompt_renders_is_read_back(calls, content, seed):
    """History that the encoding writes, given as an answer, is the message that it was made of."""
    tokenizer = released_tokenizer()
    message = Message(
        "assistant",
        content,
        "thought",
        tuple(ToolCall(str(i), name, json.dumps(args)) for i, (name, args) in enumerate(calls)),
    )
    prompt = DeepseekV4Encoding(tokenizer, "0731")
    options = ChatOptions(add_generation_prompt=False)
    rendered = prompt.encode([Message("user", "u"), message], (), options).token_ids
    answer_ids = rendered[rendered.index(tokenizer.control_id("<｜Assistant｜>")) + 2 :]
    chunks = of_ids(tokenizer, answer_ids, seed=seed)
    answer, _ = feed(by_id(), chunks, tools=TOOLS, start="reasoning")
    assert (answer.reasoning, answer.content) == ("thought", content)
    expected = [(name, args["arguments"] if unwraps(args) else args) for name, args in calls]
    assert answer.arguments == expected
    assert answer.finish_reason == "tool_calls"


def unwraps(args):
    return list(args) == ["arguments"] and isinstance(args["arguments"], dict)


# --- reports


@pytest.mark.bug("P05")
def test_p05_a_call_after_one_without_arguments():
    answer = parse(block(invoke("now"), invoke("ls", param("path", "x"))))
    assert answer.arguments == [("now", {}), ("ls", {"path": "x"})]


@pytest.mark.bug("P06")
def test_p06_tool_choice_none_shows_no_markup_and_calls_nothing():
    answer = parse("I run it.\n\n" + block(LS), tool_choice=NONE)
    assert (answer.content, answer.calls, answer.finish_reason) == ("I run it.", [], "stop")
    answer = parse(block(LS) + "done", tool_choice=NONE)
    assert (answer.content, answer.calls) == ("done", [])


@pytest.mark.bug("P07")
def test_p07_a_closing_tag_never_ends_up_in_the_arguments():
    text = OPEN + '<｜DSML｜invoke name="bash">\n' + param("command", "ls /nope 2>&1")
    text += "</｜DSML｜invoke></｜DSML｜tool_calls>"
    for cut in range(len(text)):
        answer, steps = feed(TEXT, of_text([text[:cut], text[cut:]]), tools=TOOLS)
        assert answer.arguments == [("bash", {"command": "ls /nope 2>&1"})]
        assert "DSML" not in repr(steps)
    assert thought("t</think>" + text).arguments == answer.arguments


@pytest.mark.bug("P08")
def test_p08_several_parameters_per_delta():
    opts = param("opts", '{"a":[1,2]}', "false")
    text = block(invoke("weather", param("city", "杭州"), param("days", 5, "false"), opts))
    expected = [("weather", {"city": "杭州", "days": 5, "opts": {"a": [1, 2]}})]
    assert parse(text).arguments == expected
    chunks = of_tokens(released_tokenizer(), text, 5)
    assert feed(by_id(), chunks, tools=TOOLS)[0].arguments == expected


@pytest.mark.bug("P09")
def test_p09_a_last_step_of_only_the_end_token():
    chunks = [*of_text([block(LS)]), [Piece("<｜end▁of▁sentence｜>", 1, special=True)]]
    answer, steps = feed(TEXT, chunks, tools=TOOLS)
    assert answer.finish_reason == "tool_calls"
    assert steps[-2:] == [[], []]
    assert parse(block(LS), reason=FinishReason.LENGTH).finish_reason == "length"
    assert parse(block(LS), reason=FinishReason.ERROR).finish_reason == "error"
    assert parse(block(LS), stop_reason="x").finish_reason == "tool_calls"


@pytest.mark.bug("P10")
def test_p10_the_reason_for_each_tool_choice():
    reasons = {
        kind: parse(block(LS), tool_choice=ToolChoice(kind)).finish_reason
        for kind in ("auto", "required", "named")
    }
    assert reasons == {"auto": "tool_calls", "required": "tool_calls", "named": "stop"}


@pytest.mark.bug("P11")
def test_p11_an_answer_without_thinking_is_content():
    answer = thought("The port is 8080.")
    assert answer.content == answer.reasoning == "The port is 8080."
    assert answer.reasoning_is_answer
    assert answer.finish_reason == "stop"
    stopped = thought("The port", stop_reason=" is")
    assert (stopped.reasoning, stopped.content) == ("The port", "")
    assert not thought("x</think>").reasoning_is_answer
    assert not thought(block(LS)).reasoning_is_answer


@pytest.mark.bug("P12")
def test_p12_thinking_cut_by_length_stays_reasoning():
    answer = thought("1. Look at the request 2.", reason=FinishReason.LENGTH)
    assert (answer.reasoning, answer.content) == ("1. Look at the request 2.", "")
    assert (answer.finish_reason, answer.reasoning_is_answer) == ("length", False)


@pytest.mark.bug("S15")
def test_s15_arguments_flow_while_a_long_value_is_written():
    value = "".join(f"line {i}\n" for i in range(1000))
    text = block(invoke("bash", param("command", value)))
    chunks = of_tokens(released_tokenizer(), text, 4)
    answer, steps = feed(by_id(), chunks, tools=TOOLS)
    assert answer.arguments == [("bash", {"command": value})]
    with_arguments = [s for s in steps if any(isinstance(d, CallArguments) for d in s)]
    assert len(with_arguments) > 0.9 * len(steps)
    first = next(i for i, s in enumerate(steps) if any(isinstance(d, CallStart) for d in s))
    assert first < 10


# --- the table of behaviours, row by row


def test_reasoning_then_content():
    answer = thought("why</think>answer")
    assert (answer.reasoning, answer.content, answer.finish_reason) == ("why", "answer", "stop")


def test_text_before_a_block_is_kept_without_the_blank_line_and_text_behind_it_dropped():
    answer = thought("why</think>I look.\n\n" + block(LS) + "\nDone!")
    assert (answer.reasoning, answer.content) == ("why", "I look.")
    assert answer.arguments == [("ls", {"path": "/x"})]
    assert thought("why</think> \n\n" + block(LS)).content == ""
    assert thought("why</think>a \n" + block(LS)).content == "a "


@pytest.mark.bug("P06")
def test_a_block_inside_reasoning_is_a_call():
    answer = thought("need ls\n\n" + block(LS))
    assert (answer.reasoning, answer.content) == ("need ls", "")
    assert answer.arguments == [("ls", {"path": "/x"})]
    assert answer.finish_reason == "tool_calls"


def test_more_think_tags_are_absorbed():
    answer = thought("<think>a<think>b</think>c</think>d")
    assert (answer.reasoning, answer.content) == ("ab", "cd")
    answer = parse("a<think>b</think>c")
    assert (answer.reasoning, answer.content) == ("b", "ac")


def test_white_space_of_content_survives():
    assert parse("a\n\n  b \n").content == "a\n\n  b \n"
    assert thought("\n r \n</think>\n\na").reasoning == "\n r \n"


@pytest.mark.parametrize("name", ["toolcalls", "tool", "tools", "tool_call", "function_calls"])
def test_other_spellings_of_the_block(name):
    answer = parse(f"<｜DSML｜{name}>\n{LS}\n</｜DSML｜{name}>")
    assert answer.arguments == [("ls", {"path": "/x"})]


def test_a_call_without_a_block_must_prove_itself():
    assert parse("x\n" + LS).arguments == [("ls", {"path": "/x"})]
    assert parse("x\n" + LS).content == "x"
    for text in (
        LS.removesuffix("</｜DSML｜invoke>"),  # is not closed
        invoke("rm", param("path", "/x")),  # no such tool
        invoke("ls", param("depth", 2, "false")),  # a required argument is missing
    ):
        answer = parse("x " + text + " y")
        assert (answer.calls, answer.finish_reason) == ([], "stop")
        assert "DSML" not in answer.content
        assert answer.num_malformed > 0
    assert parse("x " + invoke("rm") + " y").content == "x  y"
    still = thought("r1 " + invoke("rm") + "r2</think>a")
    assert (still.reasoning, still.content) == ("r1 r2", "a")


@pytest.mark.parametrize("body", ["/>", "></｜DSML｜invoke>", ">\n\n</｜DSML｜invoke>"])
def test_calls_without_arguments(body):
    answer = parse(OPEN + '<｜DSML｜invoke name="now"' + body + CLOSE)
    assert answer.calls == [["now", "{}"]]


def test_a_json_body_is_the_arguments():
    text = OPEN + '<｜DSML｜invoke name="ls">\n{"path": "/x", "n": 1}\n</｜DSML｜invoke>' + CLOSE
    assert parse(text).arguments == [("ls", {"path": "/x", "n": 1})]


def test_a_body_that_is_no_json_is_no_call():
    text = OPEN + '<｜DSML｜invoke name="ls">\n/x please\n</｜DSML｜invoke>' + CLOSE
    answer = parse("a" + text)
    assert (answer.content, answer.calls, answer.finish_reason) == ("a", [], "stop")
    assert answer.num_malformed > 0


def test_a_parameter_without_the_string_attribute():
    text = block(invoke("ls", param("path", "12", None), param("depth", "12", None)))
    assert parse(text).arguments == [("ls", {"path": "12", "depth": 12})]
    text = block(invoke("other", param("a", "[1]", None), param("b", "[1", None)))
    assert parse(text).arguments == [("other", {"a": [1], "b": "[1"})]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("5", 5),
        (" 5 ", 5),
        ("1e400x", "1e400x"),
        ("NaN", "NaN"),
        ("{broken", "{broken"),
        ("", ""),
        ("[" * 5000, "[" * 5000),
        ('"s"', "s"),
        ("true", True),
    ],
)
def test_a_value_that_should_be_json(value, expected):
    answer = parse(block(invoke("weather", param("opts", value, "false"))))
    assert answer.arguments == [("weather", {"opts": expected})]


def test_a_missing_end_tag_of_a_value():
    text = OPEN + '<｜DSML｜invoke name="ls">\n<｜DSML｜parameter name="path" string="true">/x\n'
    assert parse(text + param("depth", 1, "false") + "\n</｜DSML｜invoke>" + CLOSE).arguments == [
        ("ls", {"path": "/x", "depth": 1})
    ]
    assert parse(text + "</｜DSML｜invoke>" + CLOSE).arguments == [("ls", {"path": "/x"})]
    assert parse(text + CLOSE.strip()).arguments == [("ls", {"path": "/x"})]
    assert parse(text + LS + CLOSE).arguments == [("ls", {"path": "/x"})] * 2


def test_a_tag_that_lost_its_bracket():
    text = (
        OPEN
        + '<｜DSML｜invoke name="ls"\n'
        + '<｜DSML｜parameter name="path" string="true">/x</｜DSML｜parameter\n'
    )
    assert parse(text + "</｜DSML｜invoke\n" + CLOSE).arguments == [("ls", {"path": "/x"})]


def test_the_missing_end_of_a_whole_call_is_mended_at_the_models_own_end():
    text = OPEN + '<｜DSML｜invoke name="ls">\n' + param("path", "/x")
    answer = parse(text)
    assert (answer.arguments, answer.finish_reason) == ([("ls", {"path": "/x"})], "tool_calls")
    for options in ({"reason": FinishReason.LENGTH}, {"stop_reason": "x"}):
        cut = parse(text, **options)
        assert cut.finish_reason in ("length", "stop")
        assert cut.calls == [["ls", '{"path": "/x"']]  # unfinished: nobody should run it


def test_a_call_cut_within_a_value_stays_unfinished():
    text = (
        OPEN
        + '<｜DSML｜invoke name="bash">\n<｜DSML｜parameter name="command" string="true">rm -rf /tm'
    )
    for reason in (FinishReason.LENGTH, FinishReason.STOP):
        answer = parse(text, reason=reason)
        assert answer.calls == [["bash", '{"command": "rm -rf /tm']]
        assert answer.finish_reason == reason.value
    assert parse(OPEN + '<｜DSML｜invoke name="ba', reason=FinishReason.LENGTH).calls == []


def test_arguments_in_a_wrapper_key_are_unwrapped():
    inner = '{"path": "/x"}'
    for key in ("arguments", "input"):
        for string in ("true", "false"):
            text = block(invoke("ls", param(key, inner, string)))
            assert parse(text).arguments == [("ls", {"path": "/x"})]
    text = block(invoke("ls", param("arguments", "not json")))
    assert parse(text).arguments == [("ls", {"arguments": "not json"})]
    text = block(invoke("ls", param("input", inner), param("path", "/y")))
    assert parse(text).arguments == [("ls", {"input": inner, "path": "/y"})]
    declared = [function("ls", input="string")]
    assert parse(block(invoke("ls", param("input", inner))), tools=declared).arguments == [
        ("ls", {"input": inner})
    ]


def test_quotes_newlines_and_brackets_are_escaped():
    value = 'say "hi"\n\t<b> & \\ </｜x｜> </ <'
    assert parse(block(invoke("bash", param("command", value)))).arguments == [
        ("bash", {"command": value})
    ]


def test_think_tags_in_a_value_are_text():
    value = "a <think> b </think> c"
    assert parse(block(invoke("bash", param("command", value)))).arguments == [
        ("bash", {"command": value})
    ]


def test_without_tools_markup_is_content():
    text = "see " + block(LS)
    assert parse(text, tools=()).content == text


def test_a_block_without_calls_loses_only_its_tags():
    answer = parse("x\n\n" + OPEN + CLOSE + "y")
    assert (answer.content, answer.finish_reason) == ("xy", "stop")


@pytest.mark.bug("U17")
def test_a_call_without_a_name_is_none():
    for name in ("", " "):
        assert parse(block(invoke(name, param("path", "/x")))).calls == []
    text = OPEN + "<｜DSML｜invoke>\n" + param("path", "/x") + "\n</｜DSML｜invoke>" + CLOSE
    assert parse(text).calls == []


def test_an_undeclared_tool_in_a_block_reaches_the_client():
    assert parse(block(invoke("rm", param("a", "b")))).arguments == [("rm", {"a": "b"})]


def test_a_parameter_without_a_name_is_dropped_and_one_may_close_itself():
    nameless = '<｜DSML｜parameter string="true">lost</｜DSML｜parameter>'
    text = block(invoke("ls", nameless, param("path", "/x"), nameless))
    assert parse(text).arguments == [("ls", {"path": "/x"})]
    closed = '<｜DSML｜parameter name="path" string="true"/>'
    assert parse(block(invoke("ls", closed, param("depth", 1, "false")))).arguments == [
        ("ls", {"path": "", "depth": 1})
    ]


def test_parallel_tool_calls_off_keeps_the_first():
    answer = parse(block(LS, invoke("now")), parallel_tool_calls=False)
    assert answer.arguments == [("ls", {"path": "/x"})]
    assert answer.finish_reason == "tool_calls"


def test_a_marker_spelled_by_ordinary_tokens_is_text():
    tokenizer = released_tokenizer()
    quoted = "the tag </think> and " + block(LS)
    pieces = [Piece(tokenizer.decode(tokenizer.encode(quoted)))]
    answer, _ = feed(by_id(), [pieces], tools=TOOLS, start="reasoning", reason=FinishReason.LENGTH)
    assert (answer.reasoning, answer.calls) == (quoted, [])


def test_noncharacters_cannot_pose_as_markers():
    pieces = [Piece("a\ufdd0b\ufdd2c")]
    answer, _ = feed(by_id(), [pieces], tools=TOOLS)
    assert answer.content == "a\ufffdb\ufffdc"


def test_content_is_not_held_back_without_need():
    _, steps = feed(TEXT, of_text(["a <", "b", " c\n", "d"]), tools=TOOLS)
    assert steps == [
        [ContentDelta("a")],
        [ContentDelta(" <b")],
        [ContentDelta(" c")],
        [ContentDelta("\nd")],
        [],
    ]


def test_reasoning_tokens_are_counted():
    tokenizer = released_tokenizer()

    def count(text, in_reasoning=True):
        counter = ReasoningCounter(GRAMMAR, tokenizer, in_reasoning=in_reasoning)
        for token_id in tokenizer.encode(text, allow_special=True):
            counter.push(token_id)
        return counter.count

    three = len(tokenizer.encode("one two three"))
    assert count("one two three</think>four") == three
    assert count("one two three") == three
    assert count("four<think>one two three</think>", in_reasoning=False) == three
    assert count("one two three" + block(LS)) in (three, three + 1)  # "<" before the marker


@cache
def vendors_tokenizer():
    return recipe.Tokenizer.from_file(str(RELEASED))


def vendors_answer(text):
    """The same by the vendor's stream parser, one token at a time."""
    request = recipe.ConversationRequest(
        recipe.Conversation([recipe.UserMessage("u")]), recipe.ModelVersion.DeepseekV4Pro
    )
    tokenizer = vendors_tokenizer()
    stage = recipe.ThinkingInitialStage.ReasoningStart
    processor = recipe.StreamProcessor(
        recipe.ChatCompletionRequest.chunk_generator(request, "id", "m"),
        recipe.ParsingOptions(thinking_initial_stage=stage),
        tokenizer,
    )
    chunks = [recipe.InferenceChunk.ready()]
    chunks += [recipe.InferenceChunk.tokens([i]) for i in tokenizer.encode(text)]
    chunks.append(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
    shown = [chunk for part in chunks for chunk in processor.push(part)] + processor.finish()
    answer = Answer()
    for choice in (c for chunk in shown for c in json.loads(chunk.to_json())["choices"]):
        delta = choice["delta"]
        answer.reasoning += delta.get("reasoning_content") or ""
        answer.content += delta.get("content") or ""
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(answer.calls):
                answer.calls.append(["", ""])
            function = call.get("function", {})
            answer.calls[call["index"]][0] += function.get("name") or ""
            answer.calls[call["index"]][1] += function.get("arguments") or ""
    return answer


@pytest.mark.parametrize(
    "text",
    [
        "why</think>answer",
        "why</think>I look.\n\n" + block(LS, invoke("now")) + "tail",
        "need ls\n\n" + block(LS),
        "a</think>b</think>c",
        "a</think>" + LS,
        "a</think>" + block('<｜DSML｜invoke name="now"/>'),
        "a</think>" + block(invoke("bash", param("command", 'x "y"\n<z> 2>&1'))),
        "a</think>" + block(invoke("weather", param("days", 5, "false"), param("city", "杭州"))),
        "a</think>" + block(invoke("ls", param("path", "/x")).replace("</｜DSML｜invoke>", "")),
        "a</think>x <｜DSML｜tool_calls>\n</｜DSML｜tool_calls>",
    ],
)
def test_the_vendors_parser_agrees(text):
    mine, theirs = thought(text), vendors_answer(text)
    assert (mine.reasoning, mine.content.strip()) == (theirs.reasoning, theirs.content.strip())
    assert mine.arguments == theirs.arguments
    assert mine.finish_reason == theirs.finish_reason
