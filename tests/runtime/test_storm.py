"""Everything at once, for long: the books balance after each step and all memory comes back."""

import random
from pathlib import Path

import pytest

from moet.errors import CapacityError, OverloadedError
from moet.models.base import ForwardInput
from moet.runtime.core import EngineCore
from moet.runtime.page_pool import PagePool
from moet.runtime.prefix_cache import PrefixCache, page_key, root_key
from moet.types import FinishReason, Request, TokenEvent
from tests.fakes import FakeModel, drain, expected_greedy, make_core, request, tokens_of

BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])


def _storm_core(seed: int, overlap: bool, disk: Path | None, num_blocks: int) -> EngineCore:
    rng = random.Random(seed)
    steps = random.Random(seed + 1)

    def fault(inputs: ForwardInput) -> None:
        if steps.random() < 0.01:
            raise RuntimeError("a fault of the storm")

    return make_core(
        FakeModel(resumable=seed % 2 == 0, nan_token=61, fault=fault),
        num_pages=rng.choice([16, 24, 40]),
        num_host_blocks=rng.choice([0, 10, 60]),
        num_snapshots=rng.choice([0, 2, 20]),
        prefix_cache=rng.choice(
            ["on", "on", "exact", "off"] if num_blocks == 0 else ["on", "exact"]
        ),
        host_cache_blocks=num_blocks,
        disk=None if disk is None else (disk, 6_000),
        max_num_seqs=rng.choice([2, 4, 7]),
        max_num_batched_tokens=rng.choice([8, 20]),
        max_model_len=60,
        max_queued_requests=6,
        snapshot_interval=rng.choice([4, 12, 64]),
        overlap=overlap,
    )


@BOTH
@pytest.mark.parametrize(
    ("seed", "num_blocks", "on_disk"),
    [
        *((seed, 0, False) for seed in range(4)),
        *((seed, 16, disk) for seed in (7, 10) for disk in (False, True)),
    ],
)
def test_storm_drains_to_zero(
    seed: int, num_blocks: int, on_disk: bool, overlap: bool, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    core = _storm_core(seed, overlap, tmp_path if on_disk else None, num_blocks)
    prompts = [rng.choices(range(60), k=rng.randint(1, 40)) for _ in range(6)]
    ended: dict[str, FinishReason] = {}
    said: dict[str, list[int]] = {}
    greedy: dict[str, Request] = {}
    open_ids: list[str] = []
    refused = 0
    for n in range(400):
        if rng.random() < 0.4:
            prompt = rng.choice(prompts)[: rng.randint(1, 40)] + rng.choices(range(62), k=1)
            params = {"max_tokens": rng.randint(0, 15), "priority": rng.randint(0, 2)}
            if rng.random() < 0.5:
                params |= {"temperature": 1.0, "eos_token_ids": (1, 2, 3)}
            if rng.random() < 0.2:
                params |= {"prompt_logprobs": 1, "logprobs": 0}
            try:
                core.submit(request(str(n), prompt, **params))
                open_ids.append(str(n))
                if "temperature" not in params:
                    greedy[str(n)] = request(str(n), prompt, **params)
            except OverloadedError:
                refused += 1
        if open_ids and rng.random() < 0.1:
            core.abort(rng.choice(open_ids))
        _note(core.step(), ended, said)
        core.check()
        open_ids = [one for one in open_ids if one not in ended]
    for events in drain(core).values():
        _note(events, ended, said)
    model = FakeModel()
    finished = [name for name in greedy if ended[name] is FinishReason.LENGTH]
    for name in finished[-20:]:
        prompt, params = greedy[name].prompt_token_ids, greedy[name].params
        assert said[name] == expected_greedy(prompt, params.max_tokens or 0, model)
    stats = core.stats()
    assert sum(stats.finished.values()) == len(ended) > 50
    assert (stats.num_running, stats.num_waiting, stats.num_used_pages) == (0, 0, 0)
    assert stats.num_used_host_blocks == 0
    assert (stats.num_host_hits > 0) == (num_blocks > 0)
    assert (stats.num_disk_hits > 0, stats.num_disk_evicted > 0) == (on_disk, on_disk)
    assert stats.num_disk_errors == stats.num_disk_rejected == 0
    core.clear_prefix_cache()
    assert core.stats().num_cached_pages == core.stats().num_used_snapshots == 0
    core.check()
    core.shutdown()
    core.check()
    assert core.stats().num_host_cache_blocks == core.stats().disk_cache_bytes == 0
    assert not list(tmp_path.rglob("*.*"))


def _note(
    events: list[TokenEvent], ended: dict[str, FinishReason], said: dict[str, list[int]]
) -> None:
    for event in events:
        assert event.request_id not in ended, "an event after the last one"
        said.setdefault(event.request_id, []).extend(event.token_ids)
        if event.finish_reason is not None:
            ended[event.request_id] = event.finish_reason


@pytest.mark.bug("P21")
@BOTH
def test_p21_samples_of_one_prompt_keep_apart(overlap: bool) -> None:
    prompt = [9, 8, 7, 6, 5, 4, 3, 2, 1]

    def sample(abort: bool) -> dict[str, list[int]]:
        core = make_core(overlap=overlap)
        for i in range(3):
            params = {"seed": 7 + i, "temperature": 1.0, "max_tokens": 20}
            core.submit(request(f"n{i}", prompt, **params))
        if abort:
            for _ in range(6):
                core.step()
            for i in range(3):
                core.abort(f"n{i}")
        events = drain(core)
        assert core.stats().num_used_pages == 0
        assert core.stats().finished["abort"] == 3 * abort
        core.shutdown()
        return {name: tokens_of(one) for name, one in events.items()}

    first = sample(abort=False)
    assert set(first) == {"n0", "n1", "n2"}
    assert all(len(tokens) == 20 for tokens in first.values())
    assert len({tuple(tokens) for tokens in first.values()}) == 3
    assert sample(abort=False) == first
    sample(abort=True)


@pytest.mark.bug("P22")
@pytest.mark.parametrize("enabled", [False, True], ids=["cache off", "cache on"])
def test_p22_no_page_is_lost_over_two_thousand_requests(enabled: bool) -> None:
    rng = random.Random(22)
    size, pool = 256, PagePool(12)
    cache = PrefixCache(pool, num_snapshots=0, needs_snapshot=False, enabled=enabled)
    root = root_key("", "w2")
    live: list[list[int]] = []
    done = 0
    while done < 2000:
        length = rng.randint(1, 3) * size + rng.choice([-1, 0, 1])
        lookahead = rng.choice([1, 2, 6])  # slots of tokens that may be drafted
        tokens = [rng.randint(0, 1)] * length
        keys = []
        for start in range(0, length - size + 1, size):
            keys.append(page_key(keys[-1] if keys else root, tokens[start : start + size]))
        hit = cache.match(keys[: (length - 1) // size])
        try:
            pages = hit.pages + cache.allocate(-(-(length + lookahead) // size) - len(hit.pages))
        except CapacityError:
            cache.release(hit.pages)
            cache.release(live.pop(rng.randrange(len(live))))
            continue
        done += 1
        aborted = rng.random() < 0.2
        for key, page in list(zip(keys, pages, strict=False))[
            : rng.randint(0, 3) if aborted else 3
        ]:
            cache.register(key, page)
        live.append(pages)
        if aborted or rng.random() < 0.5:
            cache.release(live.pop())
        cache.check()
    for pages in live:
        cache.release(pages)
    cache.check()
    assert pool.num_used == cache.num_cached == cache.num_evictable
    assert (pool.num_used > 0) == enabled
    assert len(cache.allocate(12)) == 12


@pytest.mark.bug("P22")
@pytest.mark.parametrize("mode", ["off", "on"])
def test_p22_the_core_gives_every_page_back(mode: str) -> None:
    model = FakeModel()
    core = make_core(model, num_pages=24, max_num_seqs=4, prefix_cache=mode)
    rng = random.Random(1)
    for n in range(120):
        length = 4 * rng.randint(1, 3) + rng.choice([-1, 0, 1])
        core.submit(request(str(n), [rng.randint(0, 3)] * length, max_tokens=rng.randint(1, 3)))
        if rng.random() < 0.2:
            core.abort(str(n))
        core.step()
    drain(core)
    assert core.stats().num_used_pages == 0
    assert (core.stats().num_cached_pages > 0) == (mode == "on")
    assert len(core._scheduler.memory.cache.allocate(24)) == 24


def test_a_waiting_request_is_not_passed_by_smaller_ones() -> None:
    model = FakeModel()
    core = make_core(model, num_pages=12, max_num_seqs=8, prefix_cache="off")
    core.submit(request("runs", [1] * 20, max_tokens=10))
    core.step()
    core.submit(request("large", [2] * 30, max_tokens=4))
    for i in range(6):
        core.submit(request(f"small{i}", [3 + i], max_tokens=2))
    events = drain(core)
    order = list(events)
    assert order.index("large") < order.index("small0")
    assert tokens_of(events["large"]) == expected_greedy([2] * 30, 4, model)
