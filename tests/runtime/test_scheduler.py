"""Scheduler: who gets rows, where chunks end, who waits and who has to leave."""

import pytest

from moet.types import FinishReason, TokenEvent
from tests.fakes import FakeModel, drain, expected_greedy, make_core, request, run, tokens_of


def _first_events(events: dict[str, list[TokenEvent]]) -> list[str]:
    return list(events)


def test_decoding_sequences_have_a_row_in_every_step() -> None:
    model = FakeModel()
    core = make_core(model, max_num_seqs=4, max_num_batched_tokens=10, prefix_cache="off")
    for name in "abc":
        core.submit(request(name, [1, 2], max_tokens=40))
    core.step()
    core.submit(request("long", [7] * 120, max_tokens=2))
    while core.stats().num_waiting or "long" in core._scheduler.sequences:
        assert len(core.step()) >= 3
    chunks = [rows[3] for rows in model.batches[1:] if len(rows) == 4]
    assert chunks == [4] * 30 + [1]  # of 7 rows that were left, a page at a time
    assert all(sum(rows) <= 10 for rows in model.batches)


def test_chunks_end_at_page_borders_where_a_step_reaches_one() -> None:
    model = FakeModel(page_size=8)
    core = make_core(model, max_num_seqs=2, max_num_batched_tokens=20, prefix_cache="off")
    run(core, [request("a", [1] * 43, max_tokens=1), request("b", [2] * 13, max_tokens=1)])
    # 4 rows are left in the first two steps; b waits rather than stopping inside a page
    assert model.batches == [(16,), (16,), (11, 8), (5,)]
    model.batches.clear()
    small = make_core(model, max_num_seqs=2, max_num_batched_tokens=5, prefix_cache="off")
    run(small, [request("a", [1] * 20, max_tokens=1)])
    assert model.batches == [(5,), (3,), (5,), (3,), (4,)]


def test_chunks_stop_where_a_snapshot_is_kept() -> None:
    model = FakeModel()
    core = make_core(model, snapshot_interval=8)
    run(core, [request("a", [1] * 22, max_tokens=1)])
    assert model.batches == [(8,), (8,), (4,), (2,)]
    assert core.stats().num_used_snapshots == 3
    model.batches.clear()
    run(core, [request("b", [1] * 10 + [2] * 10, max_tokens=1)])
    assert model.batches == [(8,), (4,)]  # from token 8 on


def test_one_turn_keeps_one_snapshot_beside_the_prompts() -> None:
    core = make_core(FakeModel())
    run(core, [request("a", [1] * 6, max_tokens=30)])
    assert core.stats().num_used_snapshots == 2  # at 4 (prompt) and 32 (turn)
    for length, cached in ((5, 4), (20, 4), (34, 32)):
        tokens = ([1] * 6 + expected_greedy([1] * 6, 30, FakeModel()))[:length]
        core.submit(request("b", tokens, max_tokens=0))
        assert drain(core)["b"][0].num_cached_tokens == cached


def test_the_whole_prompt_is_never_taken_from_the_cache() -> None:
    for resumable in (True, False):
        core = make_core(FakeModel(resumable=resumable))
        for n, cached in enumerate((0, 4, 4)):
            core.submit(request(str(n), [3] * 8, max_tokens=1))
            assert drain(core)[str(n)][0].num_cached_tokens == cached


def test_exact_mode_keeps_pages_of_prompts_only() -> None:
    for resumable in (True, False):
        model = FakeModel(resumable=resumable)
        core = make_core(model, prefix_cache="exact")
        run(core, [request("a", [1] * 9, max_tokens=20)])
        assert core.stats().num_cached_pages == 2
        turn = [1] * 9 + expected_greedy([1] * 9, 20, model)
        core.submit(request("b", [*turn, 5]))
        assert drain(core)["b"][0].num_cached_tokens == 8
        core.submit(request("c", [*turn, 6]))
        assert drain(core)["c"][0].num_cached_tokens == 28


def test_salts_do_not_share() -> None:
    core = make_core()
    for n, (salt, cached) in enumerate((("", 0), ("x", 0), ("x", 8), ("", 8))):
        core.submit(request(str(n), [3] * 9, max_tokens=1, cache_salt=salt))
        assert drain(core)[str(n)][0].num_cached_tokens == cached


def test_lower_priority_values_run_first_and_equals_in_order() -> None:
    core = make_core(max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 5), ("c", 1), ("d", 1), ("e", -3)):
        core.submit(request(name, [1], max_tokens=2, priority=priority))
    assert _first_events(drain(core)) == ["e", "a", "c", "d", "b"]


def test_the_least_urgent_sequence_leaves_when_pages_run_out() -> None:
    model = FakeModel()
    core = make_core(model, num_pages=12, max_model_len=48, prefix_cache="off")
    core.submit(request("old", [1] * 8, max_tokens=24, priority=1))
    core.step()
    core.submit(request("urgent", [2] * 8, max_tokens=24))
    core.submit(request("new", [3] * 8, max_tokens=24, priority=1))
    moved: list[str] = []
    while core.has_work:
        before = core.stats().num_preemptions
        core.step()
        if core.stats().num_preemptions > before:
            moved.append(next(s.request.request_id for s in _waiting(core)))
        core.check()
    assert moved[0] == "new"
    assert "urgent" not in moved
    stats = core.stats()
    assert (stats.finished["length"], stats.num_used_host_blocks) == (3, 0)


def _waiting(core: object) -> list[object]:
    return [seq for _, seq in core._scheduler._waiting]  # type: ignore[attr-defined]


def test_pages_are_there_one_step_ahead() -> None:
    core = make_core(prefix_cache="off")
    core.submit(request("a", [1] * 5, max_tokens=12))
    while core.has_work:
        core.step()
        for seq in core._scheduler.running:
            ahead = min(seq.num_computed + 1, seq.max_len)
            assert len(seq.pages) == -(-ahead // 4)


def test_no_step_runs_past_the_last_token() -> None:
    for overlap in (False, True):
        model = FakeModel()
        core = make_core(model, overlap=overlap)
        run(core, [request("a", [1] * 5, max_tokens=6)])
        assert sum(sum(rows) for rows in model.batches) == 5 + 5  # the last token is not computed
        core.shutdown()


def test_overlap_discards_the_row_after_a_stop() -> None:
    model = FakeModel()
    answer = expected_greedy([1] * 5, 8, model)
    rows = {}
    for overlap in (False, True):
        model.batches.clear()
        core = make_core(model, overlap=overlap)
        core.submit(request("a", [1] * 5, stop_token_ids=(answer[2],)))
        events = drain(core)["a"]
        assert tokens_of(events) == answer[: answer.index(answer[2]) + 1]
        assert events[-1].finish_reason is FinishReason.STOP
        rows[overlap] = sum(sum(step) for step in model.batches)
        core.shutdown()
    assert rows[True] == rows[False] + 1


def test_a_sequence_in_flight_may_leave_and_come_back() -> None:
    model = FakeModel()
    core = make_core(model, num_pages=9, max_model_len=36, overlap=True, prefix_cache="off")
    requests = [request(name, [n] * 6, max_tokens=24) for n, name in enumerate("abc")]
    tokens = run(core, requests)
    assert core.stats().num_preemptions > 0
    for n, name in enumerate("abc"):
        assert tokens[name] == expected_greedy([n] * 6, 24, model)
    core.shutdown()


def test_prompt_logprobs_take_a_page_of_rows_a_step() -> None:
    model = FakeModel()
    core = make_core(model)
    run(core, [request(n, [1] * 10, max_tokens=0, prompt_logprobs=0) for n in "ab"])
    assert max(len(inputs.logits_indices) for inputs in model.inputs) == 4


def _start(core: object, *requests: object) -> None:
    for one in requests:
        core.submit(one)  # type: ignore[attr-defined]
    for _ in range(3):
        core.step()  # type: ignore[attr-defined]


def _running(core: object) -> list[str]:
    return [seq.request.request_id for seq in core._scheduler.running]  # type: ignore[attr-defined]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "scarce", [{"max_num_seqs": 2}, {"num_pages": 11}, {"num_pages": 11, "num_host_blocks": 0}]
)
def test_a_better_priority_takes_the_place_of_a_worse_one(
    scarce: dict[str, int], overlap: bool
) -> None:
    model = FakeModel()
    options = {"max_model_len": 40, "prefix_cache": "off", "overlap": overlap, **scarce}
    core = make_core(model, **options)
    lazy = [request(n, [ord(n)] * 14, max_tokens=20, priority=1) for n in ("\x01", "\x02")]
    _start(core, *lazy)
    assert _running(core) == ["\x01", "\x02"]
    core.submit(request("urgent", [3] * 14, max_tokens=20))
    core.step()
    assert _running(core) == ["urgent", "\x01"]  # in the very next step, and the last one left
    events = drain(core)
    for name, token in (("urgent", 3), ("\x01", 1), ("\x02", 2)):
        expected = expected_greedy([token] * 14, 20, model)
        assert (tokens_of(events[name]))[-10:] == expected[-10:]
    assert core.stats().finished["length"] == 3
    core.shutdown()


def test_nobody_leaves_in_vain_or_for_an_equal() -> None:
    core = make_core(num_pages=20, max_num_seqs=4, prefix_cache="off", max_model_len=80)
    same = request("same", [1] * 40, max_tokens=20, priority=1)
    _start(core, same, request("worse", [2] * 20, max_tokens=10, priority=2))
    core.submit(request("equal", [3] * 20, max_tokens=2, priority=2))
    core.submit(request("large", [4] * 70, max_tokens=2, priority=1))
    core.step()
    assert _running(core) == ["same", "worse"]  # without "same", too, "large" would not fit
    assert core.stats().num_preemptions == 0
    drain(core)


def test_a_stream_of_better_requests_moves_each_worse_one_once() -> None:
    model = FakeModel()
    core = make_core(model, max_num_seqs=2, prefix_cache="off")
    lazy = [request(n, [7] * 6, max_tokens=30, priority=1) for n in ("l0", "l1")]
    _start(core, *lazy)
    for n in range(12):  # two of them always wait or run
        core.submit(request(f"u{n}", [n] * 5, max_tokens=6))
        for _ in range(3):
            core.step()
            core.check()
    urgent_first = list(drain(core))
    assert core.stats().num_preemptions == 2
    assert urgent_first[-1] in ("l0", "l1")
    assert core.stats().finished["length"] == 14


def test_a_better_prompt_does_not_wait_for_a_long_worse_one() -> None:
    model = FakeModel()
    core = make_core(model, max_num_batched_tokens=32, prefix_cache="off")
    core.submit(request("long", [1] * 300, max_tokens=1, priority=1))
    core.step()
    core.submit(request("urgent", [2] * 8, max_tokens=1))
    assert [event.request_id for event in core.step()] == ["urgent"]
    assert model.batches[-1] == (8, 24)
    drain(core)


def test_prefills_leave_decoding_users_their_share() -> None:
    """With steps of a scripted length: two rows of prefill take as long as decoding."""
    core = make_core(
        model := FakeModel(max_position_embeddings=4096),
        num_pages=2000,
        max_num_batched_tokens=256,
        prefill_share=0.2,
        prefix_cache="off",
    )
    run, total_s = core._runner.run, 0.0

    def timed(batch: object) -> object:
        nonlocal total_s
        result = run(batch)  # type: ignore[arg-type]
        result.device_s = 1.0 + 0.02 * (batch.num_tokens - batch.num_decoding)  # type: ignore[attr-defined]
        total_s += result.device_s
        return result

    core._runner.run = timed  # type: ignore[method-assign, assignment]
    core.submit(request("user", [1] * 4, max_tokens=100))
    core.step()
    core.submit(request("long", [2] * 700, max_tokens=1))
    total_s, tokens = 0.0, 0
    while "long" in core._scheduler.sequences:
        tokens += sum(event.request_id == "user" for event in core.step())
    assert tokens >= 0.8 * total_s - 6  # one chunk of 255 rows is on credit
    assert tokens <= 0.9 * total_s
    assert max(map(sum, model.batches)) > 200
    drain(core)
