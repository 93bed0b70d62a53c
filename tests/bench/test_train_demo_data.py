"""The generated conversations: reproducible, split by construction, right, rendered as served."""

from __future__ import annotations

import json
import random
import re
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.train_demo.corpus import READ_WEIGHT, TOKEN_MASK, WANTED, rows
from bench.train_demo.data import mixture, records, retrieval, sums, tools
from bench.train_demo.data.sample import Sample, draw
from bench.train_demo.feed import split
from bench.train_demo.tokenizer import VOCAB_SIZE, Family, controls
from moet.server.chat.encoding import ChatOptions
from moet.server.chat.messages import Message
from tests.bench.demo_rig import renderer

FAMILIES: tuple[Family, ...] = get_args(Family)


def samples(count: int, seed: int, *, held_out: bool = False) -> list[Sample]:
    rng = random.Random(seed)
    return [mixture.one(rng, held_out=held_out) for _ in range(count)]


def test_a_seed_makes_the_same_conversations() -> None:
    assert samples(200, 3) == samples(200, 3)
    assert samples(200, 3) != samples(200, 4)


def test_held_out_questions_are_never_trained_on() -> None:
    trained = {(s.task, s.key) for s in samples(3000, 1)}
    kept = {(s.task, s.key) for s in samples(300, 2, held_out=True)}
    assert kept
    assert not trained & kept


def test_every_generator_has_both_sides_of_the_split() -> None:
    rng = random.Random(0)
    for generate in (*mixture.SHARES, *mixture.LONG_SHARES):
        assert draw(generate, rng, held_out=True).held_out
        assert not draw(generate, rng, held_out=False).held_out


@given(st.integers(1, 9999), st.integers(1, 9999))
def test_worked_sums_are_right(a: int, b: int) -> None:
    large, small = max(a, b), min(a, b)
    assert sums.add_steps(a, b).endswith(f"= {a + b}.")
    assert sums.subtract_steps(large, small).endswith(f"= {large - small}.")
    text = sums.multiply_steps(a % 100 + 1, b % 100 + 1)
    assert text.endswith(f"= {(a % 100 + 1) * (b % 100 + 1)}.")
    for left, right, value in re.findall(r"(\d+) \* (\d+) = (\d+)", text):
        assert int(value) == int(left) * int(right)


def test_subtraction_digits_make_the_difference() -> None:
    steps = sums.subtract_steps(503, 87)
    digits = re.findall(r"= (\d)(?=[.])", steps.rsplit(" So", 1)[0])
    assert "".join(reversed(digits)) == "416"


def test_calls_name_a_declared_tool_and_its_parameters() -> None:
    rng = random.Random(5)
    for generate in (tools.call, tools.follow_up, tools.pair, tools.result, tools.drill):
        for _ in range(50):
            sample = generate(rng)
            declared = {tool.name: tool.parameters or {} for tool in sample.tools}
            for message in sample.messages:
                for call in message.tool_calls:
                    known = declared[call.name]["properties"]
                    assert set(json.loads(call.arguments)) == set(known)


def test_records_follow_their_schema() -> None:
    rng, kinds = random.Random(6), {"string": str, "integer": int, "number": float, "boolean": bool}
    for _ in range(50):
        sample = records.record(rng)
        value = json.loads(sample.messages[-1].content)
        for key, part in (sample.schema or {"properties": {}})["properties"].items():
            assert isinstance(value[key], kinds[part["type"]])


def test_a_needle_is_in_its_text_once() -> None:
    rng = random.Random(7)
    for depth in (0.0, 0.5, 1.0):
        sample = retrieval.needle(rng, 300, depth)
        prompt = sample.messages[0].content
        assert len(re.findall(rf"is {sample.expect}\.", prompt)) == 1
        place = prompt.index(f"is {sample.expect}.") / len(prompt)
        assert abs((1 - depth) - place) < 0.15


def test_codes_of_one_text_are_asked_for_from_its_end_to_its_beginning() -> None:
    asked = retrieval.shared_needles(random.Random(3), 200, 6)
    text = asked[0].messages[0].content
    places = [text.index(f"is {sample.expect}.") for sample in asked]
    assert places == sorted(places, reverse=True)
    assert len({sample.messages[0].content.rsplit("\n\n", 1)[0] for sample in asked}) == 1
    assert all(sample.held_out for sample in asked)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_answer_of_a_quiz_is_wanted(family: Family) -> None:
    source, rng = renderer(family), random.Random(4)
    sample = retrieval.quiz(rng, 30, 5)
    tokens = source.sample_tokens(sample, rng)
    kept = [int(token) & TOKEN_MASK for token in tokens if token >= WANTED]
    said = source.tokenizer.decode(kept).replace("<think>", "").replace("</think>", "")
    assert said == "".join(message.content for message in sample.messages[1::2])


@pytest.mark.parametrize("family", FAMILIES)
def test_names_in_calls_weigh_most(family: Family) -> None:
    source, rng = renderer(family), random.Random(6)
    sample = tools.drill(rng)
    tokens = source.sample_tokens(sample, rng)
    weights = split(tokens[None], source.pad, "cpu")[1][0]
    read = [int(token) & TOKEN_MASK for token in tokens[weights.numpy() == READ_WEIGHT]]
    said = source.tokenizer.decode(read)
    for message in sample.messages[1::4]:
        for call in message.tool_calls:
            assert all(name in said for name in (call.name, *json.loads(call.arguments)))
    assert 0 < len(read) < (tokens >= WANTED).sum() / 3
    assert (tokens[weights.numpy() == READ_WEIGHT] >= WANTED).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_vocabularies_are_full_and_hold_the_official_controls(family: Family) -> None:
    tokenizer = renderer(family).tokenizer
    assert tokenizer.vocab_size == VOCAB_SIZE
    for text in controls(family):
        assert tokenizer.is_control(tokenizer.control_id(text))
    assert len(tokenizer.encode("12345")) == 5


@pytest.mark.parametrize("family", FAMILIES)
def test_rendered_answers_follow_a_servers_prompt(family: Family) -> None:
    source = renderer(family)
    ends = (*source.tokenizer.eos_token_ids, *map(source.tokenizer.control_id, _ENDS[family]))
    for sample in samples(60, 8):
        if not sample.messages:
            continue
        done = source.render(sample, thinking=True)
        options = ChatOptions(thinking=True, response_schema=sample.schema)
        served = source.encoding.encode(sample.messages[:-1], sample.tools, options)
        assert served.token_ids == done.prompt
        assert served.start == "reasoning"
        assert done.completion[-1] in ends
        text = source.tokenizer.decode(done.completion, skip_special=False)
        assert text.startswith(sample.messages[-1].reasoning + "</think>")


_ENDS: dict[str, tuple[str, ...]] = {"glm": ("<|user|>", "<|observation|>"), "deepseek-v4": ()}


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_without_thinking_hold_no_reasoning(family: Family) -> None:
    source = renderer(family)
    sample = Sample("x", "x", (Message("user", "a"), Message("assistant", "b", reasoning="ccc")))
    done = source.render(sample, thinking=False)
    text = source.tokenizer.decode(done.prompt + done.completion, skip_special=False)
    assert "ccc" not in text
    assert source.tokenizer.decode(done.completion).startswith("b")


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_full_of_whole_conversations(family: Family) -> None:
    source = renderer(family)
    found = rows(source, 514, 9)
    taken = np.stack([next(found) for _ in range(12)])
    assert taken.shape == (12, 514)
    assert (taken == source.pad).mean() < 0.15
    first = source.tokenizer.control_id("[gMASK]" if family == "glm" else "<｜begin▁of▁sentence｜>")
    assert (taken[:, 0] == first).all()
    assert 0.1 < (taken >= WANTED).mean() < 0.9
