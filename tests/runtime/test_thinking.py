"""A thinking budget forces the end of thinking, on the device, the same in every loop and batch."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from moet.errors import RequestError
from moet.runtime.grammar import num_words
from moet.runtime.sampler import SamplerState
from moet.runtime.sampling_params import validate_params
from moet.types import GrammarSpec, Request, SamplingParams, ThinkingBudget
from tests.fakes import drain, tokens_of
from tests.texts import EOS, byte_tokenizer, ids
from tests.writing import WritingModel, wanting, writing_core

THINK, END, CALL = (byte_tokenizer().control_id(t) for t in ("<think>", "</think>", "｜DSML｜"))


def budget(max_tokens: int, **fields: object) -> ThinkingBudget:
    return ThinkingBudget(
        max_tokens=max_tokens,
        start_token_id=THINK,
        end_token_id=END,
        other_end_token_ids=(CALL,),
        **fields,  # type: ignore[arg-type]
    )


def thinker(name: str, max_tokens: int | None, **params: object) -> Request:
    thinking = None if max_tokens is None else budget(max_tokens)
    fields = {"temperature": 0.0, "max_tokens": 40, **params}
    return Request(
        request_id=name,
        prompt_token_ids=ids(f"<｜User｜>{name}<｜Assistant｜><think>"),
        params=SamplingParams(thinking=thinking, **fields),  # type: ignore[arg-type]
        eos_token_ids=(EOS,),
    )


def answers(requests: list[Request], text: str, **options: object) -> dict[str, str]:
    core = writing_core(WritingModel(wanting(text)), **options)  # type: ignore[arg-type]
    for one in requests:
        core.submit(one)
    events = drain(core)
    core.shutdown()
    return {name: byte_tokenizer().decode(tokens_of(one)) for name, one in events.items()}


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("limit", [0, 1, 5, 6, 7, 100])
def test_thinking_ends_after_exactly_that_many_tokens(limit: int, overlap: bool) -> None:
    text = answers([thinker("a", limit)], "sixsix</think>answer", overlap=overlap)["a"]
    reasoning, found, rest = text.partition("</think>")
    assert found
    assert reasoning == "sixsix"[:limit]
    assert rest.endswith("answer"[max(0, limit - 6) :])


def test_without_a_budget_thinking_goes_on() -> None:
    assert answers([thinker("a", None)], "long" * 20)["a"] == "long" * 10


def test_thinking_in_several_blocks_shares_one_budget() -> None:
    text = answers([thinker("a", 5)], "abc</think>x<think>defghi")["a"]
    assert text == "abc</think>x<think>de</think>ghi"


def test_a_call_ends_thinking_too() -> None:
    assert answers([thinker("a", 3)], "ab｜DSML｜rest of it")["a"] == "ab｜DSML｜rest of it"


def test_the_forced_token_comes_whatever_else_is_asked() -> None:
    params = {"logit_bias": {END: -100.0}, "allowed_token_ids": tuple(ids("abc")), "min_tokens": 9}
    text = answers([thinker("a", 2, **params)], "abcabc", max_num_seqs=1)["a"]
    assert text.startswith("ab</think>")


@cache
def _mixed() -> tuple[Request, ...]:
    free = {"temperature": 1.0}
    return (
        thinker("one", 0, seed=1, **free),
        thinker("two", 7, seed=2, **free),
        thinker("three", 19, seed=3, logprobs=1, **free),
        thinker("four", None, seed=4, **free),
        thinker("five", 4, seed=5, presence_penalty=1.0, **free),
    )


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("num_host_blocks", [0, 400], ids=["recompute", "host"])
def test_mates_loops_and_preemption_change_nothing(overlap: bool, num_host_blocks: int) -> None:
    alone = {}
    for one in _mixed():
        alone |= answers([one], "", max_num_seqs=1)
    options = {"num_pages": 14, "max_model_len": 80, "num_host_blocks": num_host_blocks}
    assert answers(list(_mixed()), "", overlap=overlap, **options) == alone


def test_a_grammar_begins_behind_the_forced_end() -> None:
    spec = GrammarSpec(kind="choice", text='["yes", "no"]', after_token_id=END)
    request = thinker("a", 3)
    core = writing_core(WritingModel(wanting("never ending")))
    core.submit(
        Request(
            request_id="a",
            prompt_token_ids=request.prompt_token_ids,
            params=request.params,
            eos_token_ids=(EOS,),
            grammar=spec,
        )
    )
    text = byte_tokenizer().decode(tokens_of(drain(core)["a"]))
    assert text in ("nev</think>yes", "nev</think>no")


def test_state_of_a_slot_does_not_outlive_its_sequence() -> None:
    sampler = SamplerState(2, 8)
    limited = SamplingParams(
        temperature=0.0, thinking=ThinkingBudget(max_tokens=1, start_token_id=6, end_token_id=7)
    )
    logits = torch.zeros(1, 8)
    logits[0, 3] = 1.0
    slot, position = torch.tensor([0]), torch.tensor([0])

    def draw() -> int:
        return int(sampler.sample(logits, slot, position).token_ids)

    sampler.admit(0, limited, [1], [], [], 0)
    assert [draw() for _ in range(4)] == [3, 7, 3, 3]
    sampler.release(0)
    sampler.admit(0, SamplingParams(temperature=0.0), [1], [], [], 0)
    assert [draw() for _ in range(3)] == [3, 3, 3]
    sampler.release(0)
    sampler.admit(0, limited, [1], [3], [], 0)  # resumed: one token is spent
    assert [draw() for _ in range(2)] == [7, 3]


def test_masks_are_applied_row_by_row() -> None:
    sampler = SamplerState(3, 40)
    params = SamplingParams(temperature=0.0)
    for slot in range(3):
        sampler.admit(slot, params, [1], [], [], 0)
    logits = torch.arange(40, dtype=torch.float32).repeat(3, 1)
    before = logits.clone()
    mask = torch.zeros(num_words(40), dtype=torch.int32)
    mask[0], mask[1] = -(2**31), 2  # tokens 31 and 33
    slots, positions = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    drawn = sampler.sample(logits, slots, positions, {1: mask})
    assert drawn.token_ids.tolist() == [39, 33, 39]
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "thinking",
    [
        ThinkingBudget(max_tokens=-1, start_token_id=1, end_token_id=2),
        ThinkingBudget(max_tokens=1, start_token_id=1, end_token_id=400),
        ThinkingBudget(
            max_tokens=1, start_token_id=1, end_token_id=2, other_end_token_ids=(3,) * 4
        ),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(thinking: ThinkingBudget) -> None:
    with pytest.raises(RequestError):
        validate_params(SamplingParams(thinking=thinking), 300, 1000)
