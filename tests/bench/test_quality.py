"""How answers are scored."""

from __future__ import annotations

import random

from bench.quality import missing
from bench.quality_report import judged
from bench.quality_tasks import (
    Question,
    follows_schema,
    held_out,
    is_right,
    needle_text,
    needles,
    said,
)
from bench.train_demo.data import records, sums, tools
from bench.train_demo.data.sample import draw
from tests.bench.demo_rig import renderer


def test_the_wanted_answer_is_right_and_another_is_not() -> None:
    source, rng = renderer("deepseek-v4"), random.Random(1)
    ends = source.tokenizer.eos_token_ids
    for generate in (sums.problem, tools.call, records.record):
        sample = draw(generate, rng, held_out=True)
        question = Question(sample, source.render(sample, thinking=True), True)
        wanted = said(source.tokenizer, question.rendered.completion, ends)
        assert is_right(question, wanted, wanted)
        assert not is_right(question, "something else", wanted)


def test_reasoning_and_end_tokens_are_not_part_of_what_is_said() -> None:
    source = renderer("glm")
    ids = source.tokenizer.encode("<think>a</think>b<|user|>", allow_special=True)
    assert said(source.tokenizer, ids, ()) == "b<|user|>"
    assert said(source.tokenizer, ids, source.tokenizer.eos_token_ids) == "b"


def test_a_valid_object_need_not_be_the_right_one() -> None:
    sample = draw(records.record, random.Random(2), held_out=True)
    wrong = sample.expect.replace("e", "o", 1)
    assert follows_schema(sample, sample.expect)
    assert not follows_schema(sample, wrong + "}")
    assert not follows_schema(sample, "{}")


def test_questions_are_distinct_and_held_out() -> None:
    asked = list(held_out(sums.bare, renderer("glm"), 5, seed=3))
    assert len({question.sample.key for question in asked}) == 5
    assert all(question.sample.held_out for question in asked)
    assert all(q.sample.held_out for q in needles(renderer("glm"), 60, 3, seed=3))
    of_one = needle_text(renderer("glm"), 60, 3, seed=3)
    assert len({tuple(q.rendered.prompt[:60]) for q in of_one}) == 1


def test_what_is_not_measured_is_listed_and_the_rest_is_judged() -> None:
    def row(share: float) -> dict[str, object]:
        return {"tasks": {"sum": {"right": share, "questions": 2.0}}}

    models = {"glm": {"official": row(1.0), "w2 mse": row(0.5)}}
    targets = {each.case: (each.value, each.target) for each in judged(models)}
    assert targets == {"glm, official, sum": (1.0, 0.9), "glm, w2 mse, sum": (0.5, 0.9)}
    gaps = missing(models, ["glm"], longest=1000)
    assert "glm, official, sum" not in gaps
    assert {"glm, official, problem", "glm, w2 mse, needle 1000", "glm, fp4, sum"} <= set(gaps)
    assert "glm, official, needle 2000" not in gaps


def test_a_tool_s_result_may_be_told_in_other_words() -> None:
    source, rng = renderer("glm"), random.Random(4)
    sample = draw(tools.result, rng, held_out=True)
    while sample.messages[-3].tool_calls[0].name != "get_weather":
        sample = draw(tools.result, rng, held_out=True)
    question = Question(sample, source.render(sample, thinking=False), False)
    told = " ".join(reversed(sample.expect.rstrip(".").replace(",", "").split()))
    assert is_right(question, f"Here: {told}!", sample.expect)
    number = next(word for word in told.split() if word.lstrip("-").isdecimal())
    assert not is_right(question, told.replace(number, "77"), sample.expect)
