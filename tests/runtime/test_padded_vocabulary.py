"""Ids that the model has and the tokenizer lacks: however likely, they never come."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from moet.config import SchedulerConfig
from moet.errors import RequestError
from moet.models.synthetic import write_checkpoint
from moet.models.synthetic_tokenizer_glm import tokenizer_json
from moet.runtime.device_sampler import Kind, choose
from moet.runtime.engine import Engine
from moet.runtime.sampler import SamplerState
from moet.types import GrammarSpec, SamplingParams
from tests.fakes import FakeModel, drain, expected_logits, make_core, request, tokens_of

KNOWN, PADDED = 24, 64
PROMPT = [5, 9, 2, 11, 7, 7, 12, 3]
FIELDS = [
    {"temperature": 0.0},
    {"temperature": 5.0},
    {"temperature": 5.0, "top_p": 0.9},
    {"temperature": 5.0, "top_k": 30},
    {"temperature": 5.0, "min_p": 0.01},
    {"temperature": 5.0, "repetition_penalty": 2.0, "presence_penalty": 1.0},
    {"temperature": 5.0, "logit_bias": {3: 5.0}, "min_tokens": 100},
]


def state(**fields: object) -> SamplerState:
    made = SamplerState(1, PADDED, num_token_ids=KNOWN)
    made.admit(0, SamplingParams(**fields), (), (), (3,), 7)  # type: ignore[arg-type]
    return made


def tempting() -> torch.Tensor:
    """Logits that nearly always mean padding."""
    row = torch.linspace(0, 1, PADDED)
    row[KNOWN:] += 30
    return row


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_tokens_and_drafts_are_as_if_the_padding_were_not_there(fields: dict[str, object]) -> None:
    padded, exact = state(**fields), SamplerState(1, KNOWN)
    exact.admit(0, SamplingParams(**fields), (), (), (3,), 7)  # type: ignore[arg-type]
    logits, slots = tempting()[None], torch.tensor([0])
    for position in range(50):
        at = torch.tensor([position])
        ours, theirs = (
            padded.propose(logits, slots, at),
            exact.propose(logits[:, :KNOWN], slots, at),
        )
        assert ours[0].token_id == theirs[0].token_id
        drawn = padded.sample(logits, slots, at).token_ids
        assert drawn.tolist() == exact.sample(logits[:, :KNOWN], slots, at).token_ids.tolist()
    assert torch.equal(logits[0], tempting())


def test_logprobs_are_those_of_the_known_ids() -> None:
    sampled = state(temperature=0.0, logprobs=20).sample(
        tempting()[None], torch.tensor([0]), torch.tensor([0])
    )
    (report,) = sampled.logprobs
    assert report is not None
    expected = tempting()[:KNOWN].log_softmax(-1)
    assert report.rank == 1
    assert report.token_ids == [KNOWN - 1, *range(KNOWN - 1, KNOWN - 21, -1)]
    assert report.logprobs == pytest.approx(expected[report.token_ids].tolist())


def test_what_are_no_numbers_is_the_same_on_the_host_and_in_steps() -> None:
    """Infinity is none, if a token that may come has it; minus infinity only forbids."""
    rows = torch.zeros(5, PADDED)
    rows[0, 3], rows[1, 3], rows[2, 3], rows[3, KNOWN] = math.nan, math.inf, -math.inf, math.nan
    known, slots = state(temperature=1.0), torch.zeros(5, dtype=torch.int64)
    bad = [True, True, False, False, False]
    assert known.not_numbers(rows).tolist() == bad
    for kind in Kind:
        drawn = choose(known.tensors(), rows, slots, torch.arange(5), None, kind)
        assert drawn.is_bad.tolist() == bad, kind


@pytest.mark.parametrize("num_spec_tokens", [0, 2])
def test_greedy_answers_of_a_core_take_the_best_known_id(num_spec_tokens: int) -> None:
    model = FakeModel(vocab_size=PADDED, num_spec_tokens=num_spec_tokens)
    core = make_core(model, vocab_size=KNOWN)
    core.submit(request("a", PROMPT, max_tokens=24, logprobs=0, prompt_logprobs=0))
    events = drain(core)["a"]
    tokens = tokens_of(events)
    logits = torch.from_numpy(expected_logits([*PROMPT, *tokens], model))
    rows = logits[len(PROMPT) - 1 : -1]
    assert tokens == rows[:, :KNOWN].argmax(-1).tolist()
    assert (rows.argmax(-1) >= KNOWN).any()  # it was tempted
    expected = logits[:, :KNOWN].log_softmax(-1)
    reported = [entry for event in events for entry in event.logprobs or ()]
    for row, entry in zip(expected[len(PROMPT) - 1 :], reported, strict=False):
        assert entry.logprobs[0] == pytest.approx(float(row[entry.token_ids[0]]), abs=1e-6)
    assert events[0].prompt_logprobs is not None
    for row, token_id, prompt_entry in zip(
        expected, PROMPT[1:], events[0].prompt_logprobs[1:], strict=False
    ):
        assert prompt_entry is not None
        assert prompt_entry.logprobs[0] == pytest.approx(float(row[token_id]), abs=1e-6)


def test_padding_is_no_input_either() -> None:
    core = make_core(FakeModel(vocab_size=PADDED), vocab_size=KNOWN)
    assert core.info().vocab_size == KNOWN
    with pytest.raises(RequestError, match=f"token id {KNOWN}; ids must be from 0 to {KNOWN - 1}"):
        core.submit(request("a", [1, KNOWN]))
    for fields in ({"logit_bias": {KNOWN: 1.0}}, {"allowed_token_ids": (KNOWN,)}):
        with pytest.raises(RequestError, match=f"{KNOWN - 1}"):
            core.submit(request("a", [1], **fields))


def test_a_folder_whose_tokenizer_is_smaller_than_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOET_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, size="tiny", model="glm-5.2")
    num_ids = 300
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(num_ids)), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    params = SamplingParams(temperature=100.0, max_tokens=48, seed=1, ignore_eos=True, logprobs=1)
    with Engine(str(folder), scheduler=SchedulerConfig(overlap=False)) as engine:
        assert engine.info.vocab_size == num_ids
        (choice,) = engine.generate("Hello", params)[0].choices
        assert len(choice.token_ids) == 48
        assert max(choice.token_ids) < num_ids
        for entry in choice.logprobs or ():
            assert max(entry.token_ids) < num_ids
            assert all(math.isfinite(value) for value in entry.logprobs)
        grammar = GrammarSpec(kind="regex", text="[a-c]{3}")
        prompt = engine.text.tokenizer.encode("Hello")
        held = engine.generate(prompt, SamplingParams(temperature=100.0, seed=1), grammar=grammar)
        assert len(held[0].text) == 3
