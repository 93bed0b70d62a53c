"""Cached KV beyond the device: exact bytes come back, from the host, from disk, after a restart."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moet.errors import ConfigError
from moet.models.base import ForwardInput
from moet.runtime.core import EngineCore
from moet.types import FinishReason
from tests.fakes import FakeModel, drain, expected_greedy, make_core, request, run, tokens_of

BUDGET = 1 << 20
SESSION = [(7 * i) % 60 for i in range(90)]
BOTH = pytest.mark.parametrize("resumable", [True, False], ids=["rings", "no rings"])
LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])


def _answer(core: EngineCore, name: str, prompt: list[int], **params: object) -> tuple[object, int]:
    """Tokens with log-probabilities of a request by itself, and how much of it was cached."""
    core.submit(request(name, prompt, logprobs=2, **params))
    events = drain(core)[name]
    assert events[-1].finish_reason is FinishReason.LENGTH, events[-1]
    return (tokens_of(events), [e.logprobs for e in events]), events[0].num_cached_tokens


def _cold(prompt: list[int], resumable: bool, **params: object) -> object:
    core = make_core(FakeModel(resumable=resumable), prefix_cache="off")
    return _answer(core, "cold", prompt, **params)[0]


def _push_out(core: EngineCore) -> None:
    """Use every page of the device for something else."""
    pool = core._scheduler.memory.cache.pool
    run(core, [request("other", [61] * (pool.num_pages * 4 - 12), max_tokens=1)])


@LOOPS
@BOTH
def test_pages_come_back_from_the_host(resumable: bool, overlap: bool) -> None:
    core = make_core(
        FakeModel(resumable=resumable), num_pages=40, host_cache_blocks=400, overlap=overlap
    )
    first, cached = _answer(core, "a", SESSION, max_tokens=20)
    assert cached == 0
    _push_out(core)
    assert core.stats().num_host_cache_blocks > 0
    again, cached = _answer(core, "b", SESSION, max_tokens=20)
    assert (again, cached) == (first, 88)
    assert core.stats().num_host_hits > 0
    _push_out(core)
    turn = [*SESSION, *first[0], 5, 6]  # type: ignore[index, misc]
    following, cached = _answer(core, "c", turn)
    assert cached == 108
    assert following == _cold(turn, resumable)
    core.shutdown()


@LOOPS
@BOTH
@pytest.mark.parametrize("host_cache_blocks", [0, 400])
def test_a_restarted_core_goes_on_with_a_session(
    resumable: bool, overlap: bool, host_cache_blocks: int, tmp_path: Path
) -> None:
    def core() -> EngineCore:
        return make_core(
            FakeModel(resumable=resumable),
            num_pages=60,
            host_cache_blocks=host_cache_blocks,
            disk=(tmp_path, BUDGET),
            overlap=overlap,
        )

    one = core()
    first, _ = _answer(one, "a", SESSION, max_tokens=20)
    one.shutdown()
    two = core()
    again, cached = _answer(two, "b", SESSION, max_tokens=20)
    assert (again, cached) == (first, 88)
    turn = [*SESSION, *first[0], 5, 6]  # type: ignore[index, misc]
    two.shutdown()
    three = core()
    following, cached = _answer(three, "c", turn)
    assert cached == 108
    assert following == _cold(turn, resumable)
    stats = three.stats()
    assert stats.num_disk_hits >= 27
    assert (stats.num_disk_rejected, stats.num_disk_errors, stats.num_host_dropped) == (0, 0, 0)
    three.check()
    three.shutdown()


def test_a_core_that_was_killed_left_what_was_finished(tmp_path: Path) -> None:
    """Without a shutdown: a copy of the folder as a crash would leave it."""
    core = make_core(disk=(tmp_path / "kv", BUDGET))
    first, _ = _answer(core, "a", SESSION)
    core._scheduler.memory.tiers.disk.flush()  # type: ignore[union-attr]
    shutil.copytree(tmp_path / "kv", tmp_path / "copy")
    again = make_core(disk=(tmp_path / "copy", BUDGET))
    assert _answer(again, "b", SESSION) == (first, 88)
    core.shutdown()
    again.shutdown()


def _each(folder: Path, change: Callable[[bytes], bytes], pattern: str) -> int:
    files = sorted(folder.rglob(pattern))
    for file in files:
        file.write_bytes(change(file.read_bytes()))
    return len(files)


@BOTH
def test_damaged_files_only_cost_a_prefill(resumable: bool, tmp_path: Path) -> None:
    core = make_core(FakeModel(resumable=resumable), disk=(tmp_path, BUDGET))
    first, _ = _answer(core, "a", SESSION)
    core.shutdown()
    assert _each(tmp_path, lambda data: data[:-1] + bytes([data[-1] ^ 1]), "*.page") > 20
    core = make_core(FakeModel(resumable=resumable), disk=(tmp_path, BUDGET))
    assert _answer(core, "b", SESSION) == (first, 0)
    assert core.stats().num_disk_rejected > 20
    core.shutdown()
    core = make_core(FakeModel(resumable=resumable), disk=(tmp_path, BUDGET))
    assert _answer(core, "c", SESSION) == (first, 88)  # it was written again
    core.shutdown()


def test_one_damaged_page_ends_the_hit_before_it(tmp_path: Path) -> None:
    core = make_core(FakeModel(resumable=False), disk=(tmp_path, BUDGET))
    first, _ = _answer(core, "a", SESSION)
    core.check()
    key = core._scheduler.memory.cache
    keys = list(key._entries)
    core.shutdown()
    (path,) = tmp_path.rglob(f"{keys[10].hex()}.page")
    path.write_bytes(path.read_bytes()[:-3])
    core = make_core(FakeModel(resumable=False), disk=(tmp_path, BUDGET))
    assert _answer(core, "b", SESSION) == (first, 40)
    core.shutdown()


@pytest.mark.parametrize(
    "other",
    [
        {"kv_identity": "another model"},
        {"prefix_cache": "exact"},
        {"model": FakeModel(window=7)},
    ],
)
def test_foreign_pages_are_not_found(other: dict[str, object], tmp_path: Path) -> None:
    core = make_core(disk=(tmp_path, BUDGET))
    _answer(core, "a", SESSION)
    core.shutdown()
    core = make_core(**other, disk=(tmp_path, BUDGET))  # type: ignore[arg-type]
    assert core.stats().num_disk_foreign > 20
    assert _answer(core, "b", SESSION)[1] == 0
    core.shutdown()


def test_salts_stay_apart_on_disk(tmp_path: Path) -> None:
    core = make_core(disk=(tmp_path, BUDGET))
    _answer(core, "a", SESSION, cache_salt="mine")
    core.shutdown()
    core = make_core(disk=(tmp_path, BUDGET))
    assert _answer(core, "b", SESSION, cache_salt="yours")[1] == 0
    assert _answer(core, "c", SESSION, cache_salt="mine")[1] == 88
    core.shutdown()


def test_exact_mode_keeps_pages_of_prompts_only(tmp_path: Path) -> None:
    def core() -> EngineCore:
        return make_core(prefix_cache="exact", disk=(tmp_path, BUDGET))

    one = core()
    (tokens, _), _ = _answer(one, "a", SESSION, max_tokens=20)  # type: ignore[misc]
    one.shutdown()
    two = core()
    assert _answer(two, "b", [*SESSION, *tokens, 5])[1] == 88  # type: ignore[has-type]
    two.shutdown()


def test_the_disk_keeps_its_budget(tmp_path: Path) -> None:
    core = make_core(disk=(tmp_path, 12_000))
    for n in range(6):
        _answer(core, f"{n}", [n, *SESSION])
    core.shutdown()
    stats = core.stats()
    assert stats.num_disk_evicted > 0
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.*")) <= 12_000
    core = make_core(disk=(tmp_path, 12_000))
    assert _answer(core, "again", [5, *SESSION])[1] == 88  # the newest is whole
    core.shutdown()


@BOTH
def test_a_host_smaller_than_a_session_gives_part_of_it(resumable: bool, tmp_path: Path) -> None:
    options = {"disk": (tmp_path, BUDGET), "host_cache_blocks": 14, "snapshot_interval": 8}
    core = make_core(FakeModel(resumable=resumable), **options)  # type: ignore[arg-type]
    first, _ = _answer(core, "a", SESSION)
    core.shutdown()
    assert core.stats().num_host_dropped == 0  # saving waits for the disk
    core = make_core(FakeModel(resumable=resumable), **options)  # type: ignore[arg-type]
    again, cached = _answer(core, "b", SESSION)
    assert again == first
    assert 32 <= cached <= 56
    core.shutdown()


def test_a_request_that_leaves_while_its_pages_are_read(tmp_path: Path) -> None:
    core = make_core(disk=(tmp_path, BUDGET))
    _answer(core, "a", SESSION)
    core.shutdown()
    core = make_core(disk=(tmp_path, BUDGET))
    core.submit(request("b", SESSION))
    core._scheduler.schedule()
    core.abort("b")
    drain(core)
    tiers = core._scheduler.memory.tiers
    assert tiers is not None
    while tiers.is_busy:
        tiers.wait(1.0)
        tiers.pump(core._scheduler.memory.cache)
    core.check()
    assert _answer(core, "c", SESSION)[1] == 88
    core.shutdown()


def test_others_go_on_while_one_reads_from_disk(tmp_path: Path) -> None:
    core = make_core(disk=(tmp_path, BUDGET))
    _answer(core, "a", SESSION)
    core.shutdown()
    core = make_core(disk=(tmp_path, BUDGET))
    loads = core._scheduler.memory.tiers.loads  # type: ignore[union-attr]
    assert loads is not None
    tell, held = loads._tell, []
    loads._tell = held.append
    core.submit(request("slow", SESSION))
    core.submit(request("quick", [1, 2, 3], max_tokens=3))
    ended: list[str] = []
    while not ended or not held:
        ended += [e.request_id for e in core.step() if e.finish_reason is not None]
        core.check()
    assert ended == ["quick"]
    for load in held:
        tell(load)
    events = drain(core)["slow"]
    assert events[0].num_cached_tokens == 88
    core.shutdown()


def test_pages_in_doubt_are_dropped_everywhere(tmp_path: Path) -> None:
    armed = [False]

    def fault(inputs: ForwardInput) -> None:
        if armed[0] and max(inputs.seq_lens) > 92:
            raise RuntimeError("device fault")

    core = make_core(FakeModel(fault=fault), host_cache_blocks=400, disk=(tmp_path, BUDGET))
    _answer(core, "a", SESSION)
    armed[0] = True
    core.submit(request("b", SESSION))
    assert drain(core)["b"][-1].finish_reason is FinishReason.ERROR
    armed[0] = False
    core.shutdown()
    core = make_core(disk=(tmp_path, BUDGET))
    assert _answer(core, "c", SESSION)[1] == 0
    core.shutdown()


def test_clearing_the_cache_clears_every_tier(tmp_path: Path) -> None:
    core = make_core(num_pages=40, host_cache_blocks=100, disk=(tmp_path, BUDGET))
    _answer(core, "a", SESSION)
    _push_out(core)
    core.clear_prefix_cache()
    core._scheduler.memory.pump()
    assert _answer(core, "b", SESSION)[1] == 0
    core.check()
    core.clear_prefix_cache()
    core.shutdown()
    assert not list(tmp_path.rglob("*.page"))
    assert core.stats().disk_cache_bytes == 0


def test_a_full_disk_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(num_pages=40, disk=(tmp_path, BUDGET))

    def full(self: Path, target: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    for n in range(5):
        answer, _ = _answer(core, f"{n}", [n, *SESSION])
        assert answer[0] == expected_greedy([n, *SESSION], 8, FakeModel())  # type: ignore[index]
    core.shutdown()
    stats = core.stats()
    assert stats.num_disk_errors > 0
    assert (stats.num_disk_written, stats.disk_cache_bytes) == (0, 0)


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prefix cache, which is off"):
        make_core(host_cache_blocks=9, prefix_cache="off")
    with pytest.raises(ConfigError, match=r"--kv-disk-cache .* 0 bytes"):
        make_core(disk=(tmp_path, 0))
    with pytest.raises(ConfigError, match=r"--kv-host-cache gives .* take"):
        make_core(host_cache_blocks=1)
    with pytest.raises(ConfigError, match="which model"):
        make_core(disk=(tmp_path, BUDGET), kv_identity="")


@LOOPS
@BOTH
def test_a_session_with_drafts_goes_on_after_a_restart(
    resumable: bool, overlap: bool, tmp_path: Path
) -> None:
    prompt = list(SESSION)
    for turn, expected in enumerate((0, 88, 116)):
        model = FakeModel(resumable=resumable, num_spec_tokens=3, draft_rate=0.7)
        core = make_core(model, num_pages=60, disk=(tmp_path, BUDGET), overlap=overlap)
        answer, cached = _answer(core, f"{turn}", prompt, max_tokens=27)
        assert cached >= expected
        assert answer[0] == _cold(prompt, resumable, max_tokens=27)[0]  # type: ignore[index]
        assert core.stats().num_disk_rejected == 0
        core.check()
        core.shutdown()
        prompt += [*answer[0], 5] if turn else []  # type: ignore[index]
