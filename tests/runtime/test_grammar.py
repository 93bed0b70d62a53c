"""Answers are held to grammars: masks, their beginning and end, and the same tokens everywhere."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from moet.errors import OverloadedError, RequestError
from moet.runtime.grammar import Constraint, allowed, num_words
from moet.runtime.grammar_check import check_grammar, is_exotic
from moet.runtime.grammar_compiler import CompileJob, GrammarCompiler
from moet.server.metrics import render
from moet.server.operations import ServerCounters
from moet.types import FinishReason, GrammarSpec, Request, SamplingParams, TokenEvent
from tests.fakes import drain, tokens_of
from tests.texts import EOS, byte_tokenizer, ids
from tests.writing import VOCAB_SIZE, WritingModel, new_compiler, wanting, writing_core

END_THINK = byte_tokenizer().control_id("</think>")
DSML = byte_tokenizer().control_id("｜DSML｜")
ANSWER = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
COMPILER = new_compiler()
LIST_OF_LISTS = {"type": "array", "items": {"$ref": "#/$defs/t"}}


def schema(value: object, **fields: object) -> GrammarSpec:
    return GrammarSpec(kind="json_schema", text=json.dumps(value), **fields)  # type: ignore[arg-type]


def grammar_request(
    name: str, spec: GrammarSpec | None, *, prompt: str = "<｜Assistant｜>", **params: object
) -> Request:
    fields = {"temperature": 0.0, "max_tokens": 60, **params}
    return Request(
        request_id=name,
        prompt_token_ids=ids(prompt),
        params=SamplingParams(**fields),  # type: ignore[arg-type]
        eos_token_ids=(EOS,),
        grammar=spec,
    )


def text_of(events: list[TokenEvent]) -> str:
    return byte_tokenizer().decode(tokens_of(events))


def compiled(spec: GrammarSpec, compiler: GrammarCompiler | None = None) -> Constraint:
    """The constraint of a grammar, once it is compiled; raises its refusal."""
    compiler = compiler or COMPILER
    job = compiler.start(spec)
    job.future.exception(60)
    return compiler.constraint(spec, job.result(), [EOS])


def next_ids(constraint: Constraint) -> set[int]:
    return set(allowed(constraint.masks()[0], VOCAB_SIZE).nonzero()[:, 0].tolist())


def spells(constraint: Constraint, text: str) -> bool:
    """Whether a text is allowed token by token, each seen in the mask first, and may end there."""
    for token_id in ids(text):
        if token_id not in next_ids(constraint):
            return False
        assert constraint.accept(token_id)
    return EOS in next_ids(constraint)


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (schema(ANSWER), ['{"answer": "17"}', '{"answer":""}'], ["17", '{"answer": 17}', "{}"]),
        (schema({"type": "object"}), ['{"a": [1, null]}', "{}"], ["[]", "1"]),
        (GrammarSpec(kind="regex", text=r"\d{2}-[ab]+"), ["12-ab"], ["1-a", "12-"]),
        (GrammarSpec(kind="choice", text='["yes", "n\\"o", "é"]'), ["yes", 'n"o', "é"], ["ye"]),
        (GrammarSpec(kind="ebnf", text='root ::= "a" root "b" | "x"'), ["aaxbb"], ["aaxb", "a"]),
        (GrammarSpec(kind="ebnf", text='start: "a" start "b" | "x"'), ["aaxbb"], ["aaxb", "a"]),
        (
            schema({"allOf": [{"type": "integer"}, {"minimum": 7}, {"maximum": 12}]}),
            ["7", "12"],
            ["6", "13"],
        ),
        (schema({"type": "number", "multipleOf": 5}), ["15"], ["16"]),
        (schema({"anyOf": [{"const": "a"}, {"enum": [1, 2]}]}), ['"a"', "2"], ["3", '"b"']),
        (
            schema({"$ref": "#/$defs/t", "$defs": {"t": LIST_OF_LISTS}}),
            ["[[], [[]]]"],
            ["[1]"],
        ),
    ],
)
def test_exactly_what_the_grammar_says_can_be_written(
    spec: GrammarSpec, good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert spells(compiled(spec), text), text
    for text in bad:
        assert not spells(compiled(spec), text), text


@pytest.mark.parametrize(
    "spec",
    [
        schema({"type": "strin"}),
        schema({"$ref": "#/nowhere"}),
        schema({"$ref": "http://example.org/schema"}),
        schema({"not": {"type": "string"}}),
        schema({"type": "array", "uniqueItems": True}),
        schema({"type": "string", "pattern": "(?=a)b"}),
        schema(False),
        GrammarSpec(kind="regex", text="[a-"),
        GrammarSpec(kind="regex", text="a(?!b)"),
        GrammarSpec(kind="ebnf", text="root ::= nothing"),
        GrammarSpec(kind="ebnf", text="root ::= root"),
        schema({"$ref": "#"}),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_field(spec: GrammarSpec) -> None:
    core = writing_core()
    queued = core.submit(grammar_request("bad", spec))
    assert queued is not None
    assert drain(core) == {}
    with pytest.raises(RequestError, match="cannot be enforced") as caught:
        queued.result(0)
    assert caught.value.param == "structured_outputs"
    assert "/project" not in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [
        schema("x" * (600 << 10)),
        GrammarSpec(kind="json_schema", text="[" * 100_000),
        GrammarSpec(kind="json_schema", text='{"a":' * 80 + "1" + "}" * 80),
        GrammarSpec(kind="choice", text="[]"),
        GrammarSpec(kind="choice", text='["a", ""]'),
        GrammarSpec(kind="choice", text='["a", 1]'),
        GrammarSpec(kind="regex", text=""),
    ],
)
def test_what_is_wrong_at_first_sight_is_refused_without_compiling(spec: GrammarSpec) -> None:
    with pytest.raises(RequestError):
        check_grammar(spec)
    with pytest.raises(RequestError):
        writing_core().submit(grammar_request("bad", spec))


def test_names_of_properties_are_no_keywords() -> None:
    assert not is_exotic(schema({"properties": {"not": {"type": "string"}}, "required": ["not"]}))
    assert not is_exotic(schema({"const": {"not": 1}}))
    assert is_exotic(schema({"properties": {"a": {"items": {"not": {}}}}}))


def test_control_tokens_are_no_text() -> None:
    constraint = compiled(schema(ANSWER))
    for token_id in ids('{"answer": "a'):
        assert constraint.accept(token_id)
    inside = next_ids(constraint)
    controls = {i for i in range(VOCAB_SIZE) if byte_tokenizer().is_control(i)}
    assert len(inside) > 100
    assert not inside & controls
    assert max(inside) < byte_tokenizer().vocab_size  # ids beyond the tokenizer spell nothing


def test_a_tag_may_ask_for_a_control_token_by_its_id() -> None:
    elements = [
        {"type": "const_string", "value": "<"},
        {"type": "token", "token": DSML},
        {"type": "any_text"},
        {"type": "token", "token": DSML},
        {"type": "const_string", "value": ">"},
    ]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    spec = GrammarSpec(kind="structural_tag", text=json.dumps(tag))
    assert spells(compiled(spec), "<｜DSML｜any <> text｜DSML｜>")
    assert not spells(compiled(spec), "<｜DSML｜any <think> text｜DSML｜>")


KEYS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("value", "holds"),
    [
        ({"type": "object"}, lambda v: isinstance(v, dict)),
        (ANSWER, lambda v: v.keys() == {"answer"} and isinstance(v["answer"], str)),
        (
            {"type": "array", "items": KEYS, "maxItems": 3},
            lambda v: len(v) <= 3 and all(isinstance(one["a"], int) for one in v),
        ),
        ({"type": "string", "minLength": 2, "maxLength": 5}, lambda v: 2 <= len(v) <= 5),
        ({"type": "string", "pattern": "^[a-c]+$"}, lambda v: bool(v) and set(v) <= set("abc")),
        ({"type": "string", "pattern": "^[^a]{3}$"}, lambda v: len(v) == 3 and "a" not in v),
        ({"type": "integer", "minimum": -3, "maximum": 12}, lambda v: -3 <= v <= 12),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, lambda v: v in (True, False, None)),
        ({"type": "string", "format": "date"}, lambda v: bool(re.match(r"\d{4}-\d\d-\d\d$", v))),
        ({"enum": ["x", 5, None, [1]]}, lambda v: v in ["x", 5, None, [1]]),
        ({"allOf": [KEYS, {"properties": {"a": {"maximum": 9}}}]}, lambda v: v["a"] <= 9),
    ],
    ids=map(str, range(11)),
)
def test_whatever_is_let_through_is_json_of_the_schema(
    value: object, holds: Callable[[Any], bool]
) -> None:
    closing = set(ids('"}]')) | {EOS}
    plain = {i for i in range(EOS + 1) if byte_tokenizer().token_bytes(i)[0] < 128}
    for seed in range(15):
        rng, constraint, written = random.Random(seed), compiled(schema(value)), list[int]()
        while True:
            options = sorted(next_ids(constraint) & plain)
            token_id = rng.choices(options, [20 if i in closing else 1 for i in options])[0]
            if token_id == EOS:
                break
            assert constraint.accept(token_id)
            written.append(token_id)
        text = byte_tokenizer().decode(written)
        assert holds(json.loads(text)), text


# Beginning, drafts and their taking back


@pytest.mark.bug("P17")
def test_p17_drafts_across_the_end_of_thinking_are_checked_token_by_token() -> None:
    constraint = compiled(schema(ANSWER, after_token_id=END_THINK, forbidden_token_ids=(DSML,)))
    drafts = [*ids("hm"), END_THINK, *ids('{"x')]
    masks = constraint.masks(drafts)
    assert masks.shape == (7, num_words(VOCAB_SIZE))
    shown = [allowed(mask, VOCAB_SIZE) for mask in masks]
    everything = VOCAB_SIZE - 2  # but the end and what is forbidden
    assert [int(mask.sum()) for mask in shown[:3]] == [everything] * 3
    assert not shown[0][EOS]
    assert not shown[0][DSML]
    assert set(shown[3].nonzero()[:, 0].tolist()) == {*ids("{")}
    assert ids("x")[0] not in shown[5].nonzero()[:, 0].tolist()
    assert shown[6].all()  # behind a draft that is refused
    assert not constraint.is_on
    assert torch.equal(constraint.masks(drafts), masks)


@pytest.mark.parametrize("kind", ["xgrammar", "llguidance"])
def test_drafts_leave_no_trace(kind: str) -> None:
    value = ANSWER if kind == "xgrammar" else {"allOf": [ANSWER, {"type": "object"}]}
    text = ids('{"answer": "some words"}')
    constraint = compiled(schema(value))
    expected = []
    for token_id in text:
        expected.append(constraint.masks()[0])
        assert constraint.accept(token_id)
    expected.append(constraint.masks()[0])
    constraint.rollback(len(text))
    rng = random.Random(0)
    at = 0
    while at < len(text):
        count = rng.randrange(1, 6)
        drafts = [*text, EOS][at : at + count]
        masks = constraint.masks(drafts)
        assert all(torch.equal(a, b) for a, b in zip(masks, expected[at:], strict=False))
        step = rng.randrange(1, count + 1)
        for token_id in text[at : at + step]:
            assert constraint.accept(token_id)
        at += step
    assert next_ids(constraint) == {EOS}


def test_a_refused_token_changes_nothing() -> None:
    for value in (ANSWER, {"allOf": [ANSWER, {"type": "object"}]}):
        constraint = compiled(schema(value))
        assert not constraint.accept(ids("x")[0])
        assert spells(constraint, '{"answer": "a"}')


# In the core


@pytest.mark.bug("P17")
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_p17_thinking_ends_before_the_grammar_begins(overlap: bool) -> None:
    core = writing_core(WritingModel(wanting('2+15</think>{"answer":"17"}')), overlap=overlap)
    spec = schema(ANSWER, after_token_id=END_THINK)
    core.submit(grammar_request("thinks", spec, prompt="<｜Assistant｜><think>"))
    events = drain(core)["thinks"]
    assert text_of(events) == '2+15</think>{"answer":"17"}'
    assert events[-1].finish_reason == FinishReason.STOP
    core.submit(grammar_request("direct", schema(ANSWER), prompt="<｜Assistant｜></think>"))
    assert json.loads(text_of(drain(core)["direct"])).keys() == {"answer"}
    core.shutdown()


def test_a_grammar_that_leads_nowhere_is_named_as_what_is_wrong() -> None:
    core = writing_core()
    spec = GrammarSpec(kind="ebnf", text='root ::= "a" endless\nendless ::= endless "b"')
    core.submit(grammar_request("one", spec))
    last = drain(core)["one"][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert "cannot come to an end" in (last.error or "")


def test_an_answer_cannot_end_before_its_grammar_began() -> None:
    core = writing_core(WritingModel(wanting("17")))  # no end of thinking at all
    spec = schema(ANSWER, after_token_id=END_THINK)
    core.submit(grammar_request("one", spec, prompt="<｜Assistant｜><think>", max_tokens=12))
    events = drain(core)["one"]
    assert events[-1].finish_reason == FinishReason.LENGTH
    assert EOS not in tokens_of(events)


def test_the_end_comes_where_the_grammar_has_it_whatever_min_tokens_says() -> None:
    core = writing_core(WritingModel(wanting("yes")))
    spec = GrammarSpec(kind="choice", text='["yes", "no"]')
    core.submit(grammar_request("one", spec, min_tokens=20))
    core.submit(grammar_request("two", spec, allowed_token_ids=tuple(ids("no"))))
    core.submit(grammar_request("three", spec, allowed_token_ids=tuple(ids("q"))))
    core.submit(grammar_request("four", spec, logit_bias={ids("n")[0]: 100.0}))
    events = drain(core)
    assert {name: text_of(one) for name, one in events.items()} == {
        "one": "yes",
        "two": "no",
        "three": "yes",
        "four": "no",
    }
    assert all(one[-1].finish_reason == FinishReason.STOP for one in events.values())


def test_min_tokens_still_holds_where_the_grammar_may_go_on() -> None:
    core = writing_core(WritingModel(wanting("ab")))
    core.submit(grammar_request("one", GrammarSpec(kind="regex", text="[ab]*"), min_tokens=9))
    events = drain(core)["one"]
    assert len(tokens_of(events)) == 10
    assert re.fullmatch("[ab]{9}", text_of(events))


def test_what_excludes_a_grammar_is_refused() -> None:
    spec = schema(ANSWER)
    with pytest.raises(RequestError, match="ignore_eos"):
        writing_core().submit(grammar_request("one", spec, ignore_eos=True))
    with pytest.raises(RequestError, match="token"):
        writing_core().submit(grammar_request("one", schema(ANSWER, after_token_id=10**6)))


def test_an_abort_while_a_grammar_is_compiled() -> None:
    compiler = new_compiler()
    gate = threading.Event()
    compiler._pool.submit(gate.wait)
    compiler._pool.submit(gate.wait)
    core = writing_core(compiler=compiler, max_queued_tokens=2)
    queued = core.submit(grammar_request("one", schema(ANSWER)))
    assert queued is not None
    with pytest.raises(OverloadedError, match="1 prompt tokens wait and this request brings 2"):
        core.submit(grammar_request("long", None, prompt="ab"))
    assert core.step() == []
    assert core.has_work
    core.submit(grammar_request("two", None, max_tokens=3))  # others do not wait
    while not (events := core.step()) or events[-1].finish_reason is None:
        assert not queued.done()
    core.abort("one")
    assert queued.result(0) is None
    assert [(e.request_id, e.finish_reason) for e in core.step()] == [("one", FinishReason.ABORT)]
    assert not core.has_work
    core.check()
    gate.set()
    core.shutdown()


def test_a_grammar_that_takes_too_long_is_refused() -> None:
    job = CompileJob(schema(ANSWER), time_limit_s=0.001)
    assert not job.is_over
    job.began = time.perf_counter() - 1
    assert job.is_over
    job.future.set_running_or_notify_cancel()
    with pytest.raises(RequestError, match="to compile"):
        job.result()


def test_compiled_grammars_are_kept_within_bounds() -> None:
    compiler = new_compiler(cache_bytes=20_000)
    spec = GrammarSpec(kind="regex", text="a{3}")
    compiled(spec, compiler)
    assert compiler.start(spec).is_over
    for i in range(3):
        compiled(
            schema({"type": "object", "properties": {f"p{i}": {"enum": ["x" * 50]}}}), compiler
        )
    sizes = [size for _, size in compiler._cache.values()]
    assert sum(sizes) <= 20_000
    assert len(sizes) < 4


# The same tokens in every loop, batch and place

FREE = [
    grammar_request("object", schema({"type": "object"}), prompt="abc", temperature=1.0, seed=1),
    grammar_request("schema", schema(ANSWER), prompt="<｜Assistant｜>"),
    grammar_request(
        "thinks",
        schema(ANSWER, after_token_id=END_THINK),
        prompt="<｜User｜>q<｜Assistant｜><think>",
        temperature=1.0,
        seed=2,
        logit_bias={END_THINK: 2.0},
    ),
    grammar_request("regex", GrammarSpec(kind="regex", text="([a-z]+ ){6}"), prompt="r" * 20),
    grammar_request("guided", schema({"allOf": [ANSWER, {"type": "object"}]}), prompt="g"),
    grammar_request("plain", None, prompt="plain", max_tokens=40),
    grammar_request("other", None, prompt="other", max_tokens=40, temperature=1.0, seed=3),
    grammar_request("counted", schema(ANSWER), prompt="c", presence_penalty=1.0),
]


@cache
def _alone() -> dict[str, tuple[list[int], FinishReason | None]]:
    return {one.request_id: _run([one], max_num_seqs=1)[one.request_id] for one in FREE}


def _run(
    requests: list[Request], **options: object
) -> dict[str, tuple[list[int], FinishReason | None]]:
    core = writing_core(**options)  # type: ignore[arg-type]
    for one in requests:
        core.submit(one)
    events = drain(core)
    core.shutdown()
    return {name: (tokens_of(one), one[-1].finish_reason) for name, one in events.items()}


def test_constrained_answers_are_what_their_grammars_say() -> None:
    alone = _alone()
    for one in FREE:
        token_ids, reason = alone[one.request_id]
        if one.grammar is None:
            continue
        constraint = compiled(one.grammar)
        for token_id in token_ids:
            assert token_id in next_ids(constraint)
            assert token_id == EOS or constraint.accept(token_id)
        assert (reason == FinishReason.STOP) == (token_ids[-1] == EOS)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("max_num_seqs", [3, 8])
def test_loops_and_mates_change_nothing(overlap: bool, max_num_seqs: int) -> None:
    assert _run(FREE, overlap=overlap, max_num_seqs=max_num_seqs) == _alone()


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("num_host_blocks", [0, 400], ids=["recompute", "host"])
def test_preemption_changes_nothing(overlap: bool, num_host_blocks: int) -> None:
    core = writing_core(
        num_pages=16, num_host_blocks=num_host_blocks, max_model_len=100, overlap=overlap
    )
    for one in FREE:
        core.submit(one)
    events = drain(core)
    stats = core.stats()
    core.shutdown()
    assert stats.num_preemptions > 0
    assert (stats.num_recomputed > 0) == (num_host_blocks == 0)
    got = {name: (tokens_of(one), one[-1].finish_reason) for name, one in events.items()}
    assert got == _alone()


def test_others_never_wait_for_a_grammar() -> None:
    model = WritingModel()
    core = writing_core(model, overlap=True)
    for one in FREE:
        if one.request_id in ("regex", "plain"):
            core.submit(one)
    steps: dict[str, list[int]] = {"regex": [], "plain": []}
    step = 0
    while core.has_work:
        for event in core.step():
            steps[event.request_id].append(step)
        step += 1
    core.shutdown()
    assert 2 in model.batches
    gaps = {b - a for a, b in zip(steps["plain"], steps["plain"][1:], strict=False)}
    assert gaps == {1}  # a token in every step, while its mate has one in every other


def test_grammars_are_counted() -> None:
    core = writing_core()
    for name in ("made", "kept"):
        core.submit(grammar_request(name, schema(ANSWER)))
        drain(core)
    core.submit(grammar_request("refused", GrammarSpec(kind="ebnf", text="root ::= nowhere")))
    drain(core)
    stats = core.stats()
    assert (stats.grammar_compile_s.count, stats.num_grammar_hits) == (1, 1)
    assert stats.num_grammars_refused == 1
    experts, counters = core.expert_stats(), ServerCounters()
    text = render(stats, core.info(), "m", counters, experts, {}, age_s=0.0).decode()
    for name in ("cache_hits_total", "refusals_total", "compile_seconds_count"):
        assert f'moet:grammar_{name}{{model_name="m"}} 1.0' in text
    core.shutdown()


def test_ten_grammars_at_once() -> None:
    integers = {f"k{i}": {"type": "integer"} for i in range(10)}
    specs = [
        schema({"type": "object", "properties": {key: integers[key]}, "required": [key]})
        for key in integers
    ]
    requests = [grammar_request(f"r{i}", spec, prompt=f"p{i}") for i, spec in enumerate(specs)]
    for overlap in (False, True):
        core = writing_core(overlap=overlap)
        for one in requests:
            core.submit(one)
        events = drain(core)
        core.shutdown()
        for i in range(10):
            text, last = text_of(events[f"r{i}"]), events[f"r{i}"][-1]
            assert last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert re.match(rf'\s*\{{\s*"k{i}"', text)
