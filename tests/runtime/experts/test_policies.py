"""Precision policies end to end on the reference ops: answers are a function of the policy alone,
whatever is resident, drafted, batched, moved or replayed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moet.config import CacheConfig, ModelSettings, SchedulerConfig
from moet.errors import RequestError
from moet.kernels.moe import ExpertFormat
from moet.models import load_model
from moet.models.base import ExpertProvider
from moet.models.checkpoint import Checkpoint
from moet.models.convert import convert
from moet.models.convert_plan import ConvertOptions
from moet.models.expert_encoder import TIERS, Tier
from moet.models.moe import UnpackedExperts
from moet.models.synthetic import write_checkpoint
from moet.runtime.core import EngineCore
from moet.runtime.device_runner import Placement
from moet.runtime.experts.build import open_store
from moet.runtime.experts.precision import PrecisionSet, max_probability
from moet.runtime.experts.sizes import tier_sizes
from moet.runtime.experts.store import ResidentExpertStore
from moet.runtime.experts.tiered import TieredExpertStore
from moet.runtime.queues import CpuQueue, uncaptured
from moet.types import Request
from tests.fakes import drain, request, tokens_of

PROMPT = [(37 * i + 11) % 250 + 2 for i in range(24)]
REQUESTS = [
    request("a", PROMPT, max_tokens=8, logprobs=0),
    request("b", [42, 7, 99], max_tokens=10, logprobs=0),
    request("c", PROMPT[5:12], max_tokens=5, temperature=0.8, seed=3, logprobs=0),
]
GREEDY = REQUESTS[:2]
Content = tuple[list[int], list[float]]


class Remembered:
    """Unpacks equal bytes once: what a slot holds still decides what comes out of it."""

    def __init__(self, form: ExpertFormat) -> None:
        self.name, self.row_bytes, self._form = form.name, form.row_bytes, form
        self._known: dict[bytes, tuple[Tensor, Tensor, Tensor]] = {}

    def unpack(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        key = hashlib.blake2b(row.numpy().data).digest()
        if key not in self._known:
            w1, w3, w2 = self._form.unpack(row)
            self._known[key] = (w1, w3, w2)
        return self._known[key]


class Models:
    """A tiny V4-Flash pack, its model with and without drafts, and its experts in memory."""

    def __init__(self, folder: Path) -> None:
        write_checkpoint(folder / "checkpoint", size="tiny")
        self.pack = convert(
            Checkpoint.open(folder / "checkpoint"), folder / "pack", ConvertOptions(num_workers=1)
        )
        self.forms = {tier: Remembered(self.pack.format(tier)) for tier in TIERS}
        self.resident: Mapping[str, ExpertProvider] = {
            tier: UnpackedExperts(ResidentExpertStore(self.pack, tier)) for tier in ("w2", "fp4")
        }

    @cache  # noqa: B019 (one instance a session)
    def model(self, num_spec_tokens: int = 0):  # type: ignore[no-untyped-def]
        return load_model(self.pack.config, self.pack, ModelSettings(), "fp8", num_spec_tokens)

    def store(self, tier: Tier, share: float | None, host_share: float = 1.0) -> TieredExpertStore:
        """A pool of a share of all rows, or of one layer's routed set of one token (None)."""
        num_rows, row_bytes = self.pack.experts.num_rows, self.pack.format(tier).row_bytes
        top_k = self.pack.config["num_experts_per_tok"]
        slots = top_k if share is None else max(top_k, round(share * num_rows))
        sizes = tier_sizes(
            row_bytes=row_bytes,
            num_rows=num_rows,
            top_k=top_k,
            pool_bytes=slots * row_bytes,
            host_bytes=round(host_share * num_rows) * row_bytes,
        )
        store = open_store(self.pack, tier, sizes)
        store.form = self.forms[tier]
        return store

    def core(
        self,
        policy: str,
        providers: Mapping[str, ExpertProvider] | None = None,
        *,
        prefill: str | None = None,
        tau: float = 0.02,
        offered: tuple[str, ...] = (),
        prefix_cache: str = "off",
        num_pages: int = 64,
        num_host_blocks: int = 0,
        placement: Placement | None = None,
        **scheduler: object,
    ) -> EngineCore:
        precisions = PrecisionSet(
            policy, providers or self.resident, prefill=prefill, tau=tau, offered=offered
        )
        num_spec_tokens: int = scheduler.get("num_spec_tokens", 0)  # type: ignore[assignment]
        model = self.model(num_spec_tokens)
        page_bytes = model.kv_cache_spec().bytes_per_page
        return EngineCore(
            model,
            precisions.drafting,
            cache=CacheConfig(
                budget_bytes=num_pages * page_bytes,
                host_budget_bytes=num_host_blocks * page_bytes,
                prefix_cache=prefix_cache,  # type: ignore[arg-type]
            ),
            scheduler=SchedulerConfig(**{"overlap": False, **scheduler}),  # type: ignore[arg-type]
            precision=policy,
            vocab_size=model.vocab_size,
            seed=0,
            precisions=precisions,
            placement=placement,
        )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("policies"))


def run(core: EngineCore, requests: list[Request]) -> dict[str, Content]:
    """Submit together, run dry, and leave nothing behind."""
    for one in requests:
        core.submit(one)
    events = drain(core)
    core.check()
    core.shutdown()
    assert all(each[-1].error is None for each in events.values())
    return {
        name: (
            tokens_of(each),
            [entry.logprobs[0] for event in each for entry in event.logprobs or []],
        )
        for name, each in events.items()
    }


@pytest.fixture(scope="module")
def alone(models: Models) -> Callable[..., dict[str, Content]]:
    """What each request gives by itself with all experts in memory."""

    @cache
    def of(policy: str, prefill: str | None = None) -> dict[str, Content]:
        found = {}
        for one in REQUESTS:
            found |= run(models.core(policy, prefill=prefill), [one])
        return found

    return of


def test_policies_differ_and_the_gate_is_between(
    models: Models, alone: Callable[..., dict[str, Content]]
) -> None:
    outputs = {policy: alone(policy)["a"] for policy in ("w2", "fp4", "gate")}
    assert len({str(output) for output in outputs.values()}) == 3
    always = run(models.core("gate", tau=1.0), GREEDY)
    assert always == {name: alone("fp4", "fp4")[name] for name in always}
    never = run(models.core("gate", tau=0.0, prefill="w2"), GREEDY)
    assert never == {name: alone("w2")[name] for name in never}


def test_some_rows_go_twice_and_are_counted(models: Models) -> None:
    core = models.core("gate")
    run(core, GREEDY)
    precisions = core._precisions
    assert 0 < precisions.num_again < precisions.num_judged == 8 + 10 - 2


POOLS = [(1.0, 1.0), (0.5, 1.0), (0.2, 0.3), (0.05, 0.1), (None, 0.0)]


@pytest.mark.parametrize(("share", "host_share"), POOLS)
def test_answers_do_not_depend_on_pools(
    models: Models,
    alone: Callable[..., dict[str, Content]],
    share: float | None,
    host_share: float,
) -> None:
    """All at once, cold; then one alone, warm."""
    stores = {tier: models.store(tier, share, host_share) for tier in ("w2", "fp4")}
    assert run(models.core("gate", stores), REQUESTS) == alone("gate")
    assert run(models.core("gate", stores), REQUESTS[1:2]) == {"b": alone("gate")["b"]}
    for store in stores.values():
        store.check()
        rows = store.device.tables.row_of.tolist()
        for slot, row in enumerate(rows):
            if row >= 0:
                layer, expert = divmod(row, models.pack.experts.num_experts)
                tier: Tier = "w2" if store is stores["w2"] else "fp4"
                layer_idx = models.pack.experts.layers[layer]
                expected = models.pack.expert_row(tier, layer_idx, expert)
                assert torch.equal(store.device.rows[slot], expected)
        if host_share < 1 and share is not None and share < 0.5:
            assert store.stats().num_disk_reads > 0
        store.close()


@pytest.mark.parametrize("prefill", [None, "fp4"])
@pytest.mark.parametrize("num_spec_tokens", [3])
def test_drafts_change_no_token(
    models: Models,
    alone: Callable[..., dict[str, Content]],
    num_spec_tokens: int,
    prefill: str | None,
) -> None:
    core = models.core(
        "gate", num_spec_tokens=num_spec_tokens, adaptive_spec=False, prefill=prefill
    )
    expected = alone("gate", prefill)
    assert run(core, GREEDY) == {one.request_id: expected[one.request_id] for one in GREEDY}
    assert core._precisions.num_again > 0


def test_the_request_chooses(models: Models, alone: Callable[..., dict[str, Content]]) -> None:
    """All policies in one batch, with the overlapped loop, chunks and different prompts' rows."""
    core = models.core(
        "w2", offered=("fp4", "gate"), overlap=True, max_num_batched_tokens=16, max_num_seqs=8
    )
    mixed = [
        request(str(policy), PROMPT, max_tokens=8, logprobs=0, precision=policy)
        for policy in ("w2", "fp4", "gate", None)
    ]
    outputs = run(core, mixed)
    for policy in ("w2", "fp4", "gate"):
        assert outputs[policy] == alone(policy)["a"]
    assert outputs["None"] == alone("w2")["a"]


def test_a_policy_that_is_not_served_is_refused(models: Models) -> None:
    core = models.core("w2", {"w2": models.resident["w2"]})
    with pytest.raises(RequestError, match="precision is 'fp4'; this server has w2"):
        core.submit(request("x", [1], precision="fp4"))
    core.shutdown()


def test_a_replay_repeats_what_the_gate_did(models: Models) -> None:
    """Rows that went twice are FP4 rows when a sequence is computed again, and only these."""
    prompt = [(31 * i + 5) % 250 + 2 for i in range(250)]
    requests = [request(str(n), prompt[n:], max_tokens=9, logprobs=0) for n in range(2)]
    expected: dict[str, Content] = {}
    for one in requests:
        expected |= run(models.core("gate", prefill="fp4"), [one])
    core = models.core("gate", prefill="fp4", num_pages=3, num_host_blocks=0, max_num_seqs=2)
    assert run(core, requests) == expected
    stats = core.stats()
    assert stats.num_recomputed == stats.num_preemptions > 0


def test_prompts_share_pages_and_generated_rows_do_not(
    models: Models, alone: Callable[..., dict[str, Content]]
) -> None:
    """With FP4 prompts, pages of a prompt serve every policy; W2 pages behind it serve none."""
    prompt = [(31 * i + 5) % 250 + 2 for i in range(260)]
    core = models.core("w2", prefill="fp4", offered=("gate",), prefix_cache="on")
    first = request("first", [*prompt, *range(2, 240)], max_tokens=30, logprobs=0)
    core.submit(first)
    answer = tokens_of(drain(core)["first"])
    core.submit(request("again", prompt, max_tokens=3, precision="gate"))
    events = drain(core)["again"]
    assert events[0].num_cached_tokens == 256
    turn = [*first.prompt_token_ids, *answer, 17]  # ends behind the second page
    follow = request("next", turn, max_tokens=4, logprobs=0)
    core.submit(follow)
    events = drain(core)["next"]
    assert events[0].num_cached_tokens == 256
    warm = tokens_of(events)
    core.shutdown()
    assert warm == run(models.core("w2", prefill="fp4"), [follow])["next"][0]


def test_max_probability_is_a_row_s_own() -> None:
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(1)) * 4
    logits[:, 990:] = float("-inf")
    together = max_probability(logits).tolist()
    assert together == [float(max_probability(row[None])) for row in logits]
    expected = torch.softmax(logits.double(), -1).amax(-1).tolist()
    assert together == pytest.approx(expected, rel=1e-12)


def test_a_bad_row_ends_the_requests_that_need_it_and_no_other(models: Models) -> None:
    store = models.store("w2", 0.5, 0.0)
    healthy = {
        one.request_id: tokens_of(events)
        for one in GREEDY
        for events in [_events(models, {"w2": models.resident["w2"]}, [one])[one.request_id]]
    }
    used = {name: _experts_of(models, name) for name in healthy}
    bad = sorted(used["a"] - used["b"])[-1]  # that "b" never asks for
    assert store.host.disk is not None
    real = store.host.disk._preadv

    def preadv(file: int, buffers, offset: int) -> int:  # type: ignore[no-untyped-def]
        if offset // store.form.row_bytes == bad:
            raise OSError(5, "Input/output error")
        return real(file, buffers, offset)

    store.host.disk._preadv = preadv
    events = _events(models, {"w2": store}, GREEDY)
    assert events["a"][-1].error is not None
    assert f"experts.w2, row {bad} (layer" in events["a"][-1].error
    assert events["b"][-1].error is None
    assert tokens_of(events["b"]) == healthy["b"]
    store.check()
    store.close()


def _events(models: Models, providers, requests: list[Request]):  # type: ignore[no-untyped-def]
    core = models.core("w2", providers)
    for one in requests:
        core.submit(one)
    events = drain(core)
    core.check()
    assert core.stats().num_used_pages == 0
    core.shutdown()
    return events


def _experts_of(models: Models, name: str) -> set[int]:
    """Rows that a request asks for when it runs alone."""
    asked: set[int] = set()

    class Watch:
        def resolve(self, layer_idx: int, expert_ids: Tensor):  # type: ignore[no-untyped-def]
            asked.update(
                models.pack.experts.row(layer_idx, e) for e in expert_ids.flatten().tolist()
            )
            return models.resident["w2"].resolve(layer_idx, expert_ids)

    _events(models, {"w2": Watch()}, [one for one in GREEDY if one.request_id == name])
    return asked


def test_a_device_follows_the_policies(models: Models) -> None:
    """Captured where a policy computes rows again or in another format; requests of all policies
    together."""
    requests = [
        request("a", PROMPT, max_tokens=4, precision="fp4", logprobs=0),
        request("b", [42, 7, 99], max_tokens=6, precision="gate", logprobs=0),
        request("c", PROMPT[5:12], max_tokens=5, logprobs=0),
    ]
    options: dict[str, Any] = {"offered": ("fp4", "gate"), "num_spec_tokens": 2}
    expected = run(models.core("w2", **options, max_num_seqs=3), requests)
    placement = Placement(CpuQueue(), uncaptured)
    core = models.core("w2", **options, max_num_seqs=3, placement=placement)
    assert run(core, requests) == expected
    core = models.core("fp4", num_spec_tokens=2, max_num_seqs=3, placement=placement)
    assert run(core, [requests[0]]) == {"a": expected["a"]}
