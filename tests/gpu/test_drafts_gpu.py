"""Drafts on a GPU: at temperature 0 they change no token; above it a seed gives the same tokens in
any company, in graphs or without."""

from __future__ import annotations

from typing import Any

import pytest

from moet.kernels.device_gemm import Device
from tests.fakes import request
from tests.gpu.steps import NUM_DRAFTS, dummy
from tests.gpu.test_exactness_gpu import REQUESTS, engine, tokens_from

LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
DRAFTING: dict[str, Any] = {**LIMITS, "num_spec_tokens": NUM_DRAFTS, "adaptive_spec": False}
UNDRAFTED = [request("none", [71, 72, 73], max_tokens=30, spec_tokens=0)]


@pytest.fixture(scope="module", params=["tiny", "small"])
def model(request: pytest.FixtureRequest, gpu: Device) -> tuple[Any, Any, Device]:
    return (*dummy(request.param, gpu), gpu)


def test_drafts_change_no_token_at_temperature_0(model: tuple[Any, Any, Device]) -> None:
    requests = [*REQUESTS, *UNDRAFTED]
    greedy = [one.request_id for one in requests if one.params.temperature == 0]
    plain = tokens_from(engine(model, graphs=True, overlap=True, **LIMITS), requests)
    drafted = {}
    for graphs, overlap in ((True, True), (False, False)):
        core = engine(model, graphs=graphs, overlap=overlap, **DRAFTING)
        found = drafted[graphs] = tokens_from(core, requests)
        stats = core.stats()
        assert stats.num_draft_tokens > 0
        assert {name: found[name] for name in greedy} == {name: plain[name] for name in greedy}
    assert drafted[True] == drafted[False]


def test_a_seed_gives_the_same_tokens_in_any_company(model: tuple[Any, Any, Device]) -> None:
    together = tokens_from(engine(model, graphs=True, overlap=True, **DRAFTING), REQUESTS)
    for one in REQUESTS[3:6]:
        alone = engine(model, graphs=True, overlap=True, **{**DRAFTING, "max_num_seqs": 1})
        assert tokens_from(alone, [one])[one.request_id] == together[one.request_id]


def test_steps_of_more_rows_than_decoding_kernels_take_are_captured(
    model: tuple[Any, Any, Device],
) -> None:
    if model[0].config.hidden_size > 512:
        pytest.skip("one size is enough")
    wide = {**DRAFTING, "max_num_seqs": 96}  # 288 rows
    requests = [request(str(n), [n + 2, 9, 4], max_tokens=6) for n in range(90)]
    alone = tokens_from(engine(model, graphs=True, overlap=True, **LIMITS), requests)
    assert tokens_from(engine(model, graphs=True, overlap=True, **wide), requests) == alone
