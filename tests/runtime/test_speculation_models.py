"""Both models with drafts: tokens and log-probabilities are those without, bit for bit, and the
draft block's state is what it would be if every token had been known from the start."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Literal

import pytest
import torch
from torch import Tensor

from moet.config import CacheConfig, SchedulerConfig
from moet.models.base import ExpertProvider, ForwardInput, KVCacheSpec, KVTensors, ModelOutput
from moet.models.glm_moe_dsa_config import GlmMoeDsaConfig
from moet.runtime.core import EngineCore
from moet.types import Request, TokenEvent
from tests.fakes import drain, request, tokens_of
from tests.models.glm_configs import tiny
from tests.models.glm_rig import load_model, random_source, resident
from tests.models.hash_weights import DEPLOYED, GOLDEN, GOLDEN_IDS, Rig, hash_source, load_rig

Case = Literal["v4 exact", "v4 deployed", "glm deployed"]
RATIOS = (0, 4, 128, 4, 0)  # every kind of layer, and the draft block
GLM = GlmMoeDsaConfig.from_dict(
    tiny(vocab_size=257, num_hidden_layers=5, num_nextn_predict_layers=1)
)


@cache
def _rig(case: Case, num_drafts: int) -> Rig:
    if case == "glm deployed":
        source = random_source(GLM, "fp8")
        model = load_model(GLM, source, "deployed", "nvfp4", num_drafts)
        return Rig(model, resident(GLM, source), {})
    base = GOLDEN if case == "v4 exact" else DEPLOYED
    config = replace(base, num_hidden_layers=4, num_hash_layers=1, compress_ratios=RATIOS)
    deployed = case == "v4 deployed"
    source = hash_source(config, quantised=deployed)
    return load_rig(config, source, "deployed" if deployed else "none", num_spec_tokens=num_drafts)


class Coached:
    """A model whose draft block runs as it is, but often says what the answers are known to be.

    answers: (position, token there) -> the next token.
    """

    def __init__(self, model: object, answers: Mapping[tuple[int, int], int]) -> None:
        self.model = model
        self.answers = answers
        self.vocab_size: int = model.vocab_size  # type: ignore[attr-defined]
        self.max_position_embeddings: int = model.max_position_embeddings  # type: ignore[attr-defined]

    def kv_cache_spec(self) -> KVCacheSpec:
        return self.model.kv_cache_spec()  # type: ignore[attr-defined,no-any-return]

    def forward(self, inputs: ForwardInput, kv: KVTensors, experts: ExpertProvider) -> ModelOutput:
        return self.model.forward(inputs, kv, experts)  # type: ignore[attr-defined,no-any-return]

    def draft(
        self, inputs: ForwardInput, hidden_states: Tensor, kv: KVTensors, experts: ExpertProvider
    ) -> ModelOutput:
        output = self.model.draft(inputs, hidden_states, kv, experts)  # type: ignore[attr-defined]
        logits = output.logits.clone()
        for n, row in enumerate(inputs.logits_indices.tolist()):
            position = int(inputs.positions[row]) + 1
            answer = self.answers.get((position, int(inputs.token_ids[row])))
            if answer is not None and (position * 7 + answer) % 5:  # four of five
                logits[n, answer] = 1e6
        return ModelOutput(logits, output.hidden_states)


def _core(case: Case, num_drafts: int, num_pages: int = 40, **options: object) -> EngineCore:
    rig = _rig(case, num_drafts)
    model = Coached(rig.model, _answers(case)) if num_drafts else rig.model
    page_bytes = rig.model.kv_cache_spec().bytes_per_page
    host_blocks = options.pop("num_host_blocks", 1_000)
    mode = options.pop("prefix_cache", "off")
    return EngineCore(
        model,
        rig.experts,
        cache=CacheConfig(
            budget_bytes=num_pages * page_bytes,
            host_budget_bytes=host_blocks * page_bytes,  # type: ignore[operator]
            prefix_cache=mode,  # type: ignore[arg-type]
        ),
        scheduler=SchedulerConfig(
            **{"overlap": False, "num_spec_tokens": num_drafts, "adaptive_spec": False, **options}  # type: ignore[arg-type]
        ),
        precision="fp4",
        vocab_size=rig.model.vocab_size,
        seed=0,
    )


def _run(core: EngineCore, requests: list[Request]) -> dict[str, tuple[object, ...]]:
    for one in requests:
        core.submit(one)
    made = {name: _content(events) for name, events in drain(core).items()}
    core.shutdown()
    return made


def _content(events: list[TokenEvent]) -> tuple[object, ...]:
    logprobs = [entry.logprobs[0] for event in events for entry in event.logprobs or []]
    return tokens_of(events), logprobs


# Windows of 4 and of 128 tokens close, and a page ends, at every place of a step's rows; prompts go
# beyond index_topk and the sliding window.
REQUESTS = [
    request(f"at {length}", GOLDEN_IDS[n : n + length], max_tokens=10, logprobs=0)
    for n, length in enumerate([1, 7, 121, 126, 127, 128, 249, 254])
]


@cache
def _plain(case: Case) -> dict[str, tuple[object, ...]]:
    return _run(_core(case, 0), REQUESTS)


@cache
def _answers(case: Case) -> dict[tuple[int, int], int]:
    found = {}
    for one in REQUESTS:
        new: list[int] = _plain(case)[one.request_id][0]  # type: ignore[assignment]
        tokens = [*one.prompt_token_ids, *new]
        found |= {(p, tokens[p]): tokens[p + 1] for p in range(len(tokens) - 1)}
    return found


@pytest.mark.parametrize(
    ("case", "num_drafts", "overlap"),
    [
        ("v4 exact", 1, False),
        ("v4 exact", 2, True),
        ("v4 exact", 4, True),
        ("v4 deployed", 2, False),
        ("glm deployed", 3, False),
        ("glm deployed", 4, True),
    ],
)
def test_tokens_and_logprobs_are_those_without_drafts(
    case: Case, num_drafts: int, overlap: bool
) -> None:
    core = _core(case, num_drafts, overlap=overlap, max_num_batched_tokens=200)
    assert _run(core, REQUESTS) == _plain(case)
    stats = core.stats()
    assert stats.num_accepted_tokens > stats.num_draft_tokens // 3
    assert stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize(
    ("case", "num_host_blocks"), [("v4 exact", 0), ("v4 exact", 1_000), ("glm deployed", 1_000)]
)
def test_drafts_under_pressure(case: Case, num_host_blocks: int) -> None:
    core = _core(
        case,
        3,
        num_pages=4 if case.startswith("v4") else 14,
        num_host_blocks=num_host_blocks,
        overlap=True,
        max_num_seqs=4,
        prefix_cache="on",
    )
    wanted = {name: made for name, made in _plain(case).items() if name in ("at 249", "at 254")}
    requests = [one for one in REQUESTS if one.request_id in wanted]
    copies = [
        request(f"{one.request_id} {n}", one.prompt_token_ids, max_tokens=10, logprobs=0)
        for n in range(2)
        for one in requests
    ]
    made = _run(core, copies)
    assert made == {one.request_id: wanted[one.request_id[:6]] for one in copies}
    assert core.stats().num_preemptions > 0


@pytest.mark.parametrize("case", ["v4 exact", "glm deployed"])
def test_a_seed_reproduces_in_company_and_after_hits(case: Case) -> None:
    seeded = [
        request("a", GOLDEN_IDS[:257], max_tokens=10, temperature=0.8, seed=3),
        request("b", GOLDEN_IDS[5:131], max_tokens=10, temperature=1.0, top_p=0.9, seed=4),
    ]
    alone = {}
    for one in seeded:
        alone |= _run(_core(case, 2), [one])
    core = _core(case, 2, prefix_cache="on", max_num_batched_tokens=150)
    for _ in range(2):
        for one in [*seeded, *REQUESTS[:3]]:
            core.submit(one)
        made = {name: _content(events) for name, events in drain(core).items()}
        assert {name: made[name] for name in alone} == alone
    assert core.stats().cached_tokens > 0
    core.shutdown()


class Recorder(Coached):
    """Keeps the logits of draft rows that were made from true hidden states, by position."""

    def __init__(self, model: object, answers: Mapping[tuple[int, int], int]) -> None:
        super().__init__(model, answers)
        self.first: dict[tuple[int, int], Tensor] = {}
        self._after_forward = False

    def forward(self, inputs: ForwardInput, kv: KVTensors, experts: ExpertProvider) -> ModelOutput:
        self._after_forward = True
        return super().forward(inputs, kv, experts)

    def draft(
        self, inputs: ForwardInput, hidden_states: Tensor, kv: KVTensors, experts: ExpertProvider
    ) -> ModelOutput:
        raw = self.model.draft(inputs, hidden_states, kv, experts)  # type: ignore[attr-defined]
        if self._after_forward:
            for n, row in enumerate(inputs.logits_indices.tolist()):
                key = int(inputs.positions[row]), int(inputs.token_ids[row])
                self.first[key] = raw.logits[n].clone()
        self._after_forward = False
        return super().draft(inputs, hidden_states, kv, experts)


@pytest.mark.parametrize("case", ["v4 exact", "glm deployed"])
def test_draft_state_is_what_the_true_tokens_make(case: Case) -> None:
    """First drafts after any history of drafts, held or not, are those of one pass over all."""
    rig, length = _rig(case, 4), 40
    recorded = []
    for max_drafts in (4, 1):
        core = _core(case, 4)
        model = Recorder(rig.model, _answers(case))
        core._runner.model = model  # type: ignore[assignment]
        assert core._runner._drafter is not None
        core._runner._drafter.model = model  # type: ignore[assignment]
        limited = request("r", GOLDEN_IDS[:length], max_tokens=30, spec_tokens=max_drafts)
        _run(core, [limited])
        recorded.append(model.first)
    shared = recorded[0].keys() & recorded[1].keys()
    assert len(shared) > 4
    for key in shared:
        assert torch.equal(recorded[0][key], recorded[1][key])
