"""Captured steps on a stand-in device: which graph, what it is sent, what comes back and when."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from moet.errors import ConfigError
from moet.runtime.device_sampler import Kind, read_report
from moet.runtime.graph_runner import (
    RING_STEPS,
    GraphRunner,
)
from moet.runtime.queues import Capture, CpuQueue, uncaptured
from moet.runtime.sampler import SamplerState
from moet.runtime.step_shapes import Shape, bucket_sizes, reaches, row_counts
from moet.runtime.step_tensors import StepRow, StepTensors, fill
from moet.types import SamplingParams
from tests.fakes import NoExperts, expected_logits
from tests.runtime.device_fakes import StepFakeModel, Tape

NUM_SLOTS, PAGES_EACH = 4, 5
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [1], [33, 2, 33, 2, 33, 2, 33, 2]]


class World:
    """A runner whose slots hold prompts, without their last tokens."""

    def __init__(
        self,
        model: StepFakeModel | None = None,
        *,
        capture: Capture = uncaptured,
        params: Sequence[SamplingParams] = (GREEDY,) * NUM_SLOTS,
        fault: torch.Tensor | None = None,
    ) -> None:
        self.model = model or StepFakeModel(num_spec_tokens=2)
        spec = self.model.kv_cache_spec()
        sizes = {"paged": NUM_SLOTS * PAGES_EACH, "ring": NUM_SLOTS}
        self.kv = {
            g.name: torch.zeros(len(g.layers), sizes[g.kind], g.page_bytes, dtype=torch.uint8)
            for g in spec.groups
        }
        table = torch.arange(NUM_SLOTS * PAGES_EACH).view(NUM_SLOTS, PAGES_EACH)
        self.sampler = SamplerState(NUM_SLOTS, self.model.vocab_size)
        for slot, one in enumerate(params):
            self.sampler.admit(slot, one, PROMPTS[slot], [], [], seed=slot)
        self.runner = GraphRunner(
            self.model,
            NoExperts(),
            self.kv,
            self.sampler.tensors(),
            table,
            page_size=spec.page_size,
            buckets=(1, 2, 4),
            rows_per_seq=(1, 3),
            queue=CpuQueue(),
            capture=capture,
            fault=fault,
        )
        self.tokens = [list(prompt) for prompt in PROMPTS]
        for slot, prompt in enumerate(PROMPTS):
            for position, token_id in enumerate(prompt[:-1]):
                self.runner.launch([StepRow(slot, position, [token_id])]).result()
            self.sampler.last_token[slot] = prompt[-1]

    def best(self, slot: int) -> int:
        return int(expected_logits(self.tokens[slot], self.model)[-1].argmax())


def test_sizes_of_graphs_cover_every_step() -> None:
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(5) == (1, 2, 3, 4, 5)
    assert bucket_sizes(32) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    assert row_counts(1) == (1,)
    assert row_counts(4) == (1, 2, 4)
    assert row_counts(6) == (1, 2, 4, 6)
    assert reaches(5) == (5,)
    assert reaches(16) == (16,)
    assert reaches(2048) == (16, 128, 1024, 2048)


def test_the_least_graph_that_fits_is_taken() -> None:
    runner = World().runner
    assert runner.shape_for(1, 1, 1) == Shape(1, 1, 5)
    assert runner.shape_for(3, 2, 20) == Shape(4, 3, 5)
    with pytest.raises(ConfigError, match=r"5 sequences with 1 rows.*at most 4 sequences, 3 rows"):
        runner.shape_for(5, 1, 1)
    with pytest.raises(ConfigError, match="6 pages"):
        runner.shape_for(1, 1, 21)


def test_what_is_sent_fills_a_bucket_with_rows_that_do_nothing() -> None:
    sent = torch.full((StepTensors.num_sent(3, 2),), 77)
    fill(sent, [StepRow(2, 9, [4, 5]), StepRow(0, 3, None)], (3, 2), no_slot=4)
    step = StepTensors(3, 2, torch.device("cpu"), no_slot=4)
    step.sent.copy_(sent)
    assert step.token_ids.tolist() == [4, 5, -1, 0, 0, 0]
    assert step.positions.tolist() == [9, 10, 3, -1, -1, -1]
    assert step.starts.tolist() == [9, 9, 3, 0, 0, 0]
    assert step.ends.tolist() == [11, 11, 4, 0, 0, 0]
    assert step.seq_slots.tolist() == [2, 2, 0, 0, 0, 0]
    assert step.sampler_slots.tolist() == [2, 0, 4]
    assert step.counts.tolist() == [2, 1, 0]
    assert step.wanted.tolist() == [-1, -1, -1]


@pytest.mark.parametrize("capture", [uncaptured, Tape()])
def test_steps_follow_one_another_on_the_device(capture: Capture) -> None:
    world = World(capture=capture)
    world.runner.capture_all()
    for slots in ([0], [1, 3], [0, 1, 2], [3, 2, 1, 0], [2]):
        rows = [StepRow(slot, len(world.tokens[slot]) - 1, None) for slot in slots]
        output = world.runner.launch(rows).result()
        assert output.tokens == [[world.best(slot)] for slot in slots]
        assert output.is_bad == [False] * len(slots)
        assert output.fault == 0
        assert output.reports is None
        for slot, tokens in zip(slots, output.tokens, strict=True):
            world.tokens[slot] += tokens
    world.runner.check()


def test_a_step_may_be_launched_before_the_last_one_is_read() -> None:
    world = World()
    world.runner.capture_all()
    pending = []
    for ahead in range(RING_STEPS):
        rows = [StepRow(s, len(PROMPTS[s]) - 1 + ahead, None) for s in range(NUM_SLOTS)]
        pending.append(world.runner.launch(rows))
    with pytest.raises(AssertionError, match="never read"):
        world.runner.launch([StepRow(0, 9, None)])
    for step in pending:
        for slot, tokens in enumerate(step.result().tokens):
            assert tokens == [world.best(slot)]
            world.tokens[slot] += tokens
    world.runner.check()


def test_results_are_read_in_order() -> None:
    world = World()
    first, second = (world.runner.launch([StepRow(0, 2 + n, None)]) for n in range(2))
    with pytest.raises(AssertionError, match="order"):
        second.result()
    first.result()
    second.result()


def test_drafts_hold_up_to_the_first_wrong_one() -> None:
    world = World()
    right: list[list[int]] = []
    for slot in range(3):
        tokens = world.tokens[slot]
        more: list[int] = []
        for _ in range(3):
            logits = expected_logits([*tokens, *more], world.model)[-1]
            more.append(int(np.argmax(logits)))
        right.append(more)
    drafts = [right[0][:2], [right[1][0], right[1][1] ^ 1], [right[2][0] ^ 1, right[2][1]]]
    rows = [
        StepRow(slot, len(PROMPTS[slot]) - 1, [PROMPTS[slot][-1], *drafts[slot]])
        for slot in range(3)
    ]
    output = world.runner.launch([*rows, StepRow(3, len(PROMPTS[3]) - 1, None)]).result()
    assert output.tokens == [right[0], right[1][:2], right[2][:1], [world.best(3)]]
    newest = [tokens[-1] for tokens in output.tokens]
    assert world.sampler.last_token[:NUM_SLOTS].tolist() == newest


def test_what_depends_on_tokens_stops_where_drafts_do() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=1.5, logprobs=2)
    world = World(params=(params,) * NUM_SLOTS)
    first = world.best(0)
    rows = [StepRow(0, 2, [7, first, 63], Kind.FULL, told=True)]
    output = world.runner.launch(rows).result()
    second = expected_logits([*PROMPTS[0], first], world.model)[-1].copy()
    second[first] -= 1.5
    assert output.tokens == [[first, int(second.argmax())]]
    counts = world.sampler._output_counts
    assert counts[0].sum() == 2 or first == int(second.argmax())
    assert counts[1:NUM_SLOTS].sum() == 0
    assert output.reports is not None
    assert len(output.reports[0]) == 2
    reported = read_report(output.reports[0][0], first, 2)
    assert reported.token_ids[0] == reported.token_ids[1] == first
    assert reported.rank == 1


def test_a_mask_holds_for_its_step_alone() -> None:
    world = World()
    only = torch.zeros(1, 2, dtype=torch.int32)
    only[0, 0] = 1 << 11
    for masks, kind in ((None, Kind.FULL), (only, Kind.FULL), (None, Kind.FULL)):
        position = len(world.tokens[1]) - 1
        rows = [StepRow(0, 2, [7], kind), StepRow(1, position, None, kind, masks)]
        tokens = world.runner.launch(rows).result().tokens
        assert tokens == [[world.best(0)], [world.best(1) if masks is None else 11]]
        world.tokens[1] += tokens[1]


def test_rows_that_are_no_numbers_are_their_own_trouble() -> None:
    world = World(StepFakeModel(num_spec_tokens=2, nan_token=6))
    rows = [StepRow(0, 2, [6]), StepRow(1, 5, [4])]
    assert world.runner.launch(rows).result().is_bad == [True, False]


def test_a_fault_is_told_once() -> None:
    fault = torch.zeros(1, dtype=torch.int32)
    world = World(fault=fault)
    fault.fill_(5)
    row = StepRow(0, 2, None)
    assert world.runner.launch([row]).result().fault == 5
    assert world.runner.launch([row]).result().fault == 0


def test_nothing_grows_after_capture() -> None:
    tape = Tape()
    world = World(capture=tape)
    first = tape.num_captured  # the graphs of the only shape that was needed so far
    assert first == 1
    world.runner.capture_all()
    num_captured = tape.num_captured
    assert num_captured == 6 * (len(Kind) + 1)
    for num_seqs in (1, 2, 3, 4):
        rows = [StepRow(s, len(PROMPTS[s]), [1], Kind.RANKED) for s in range(num_seqs)]
        world.runner.launch(rows).result()
    assert tape.num_captured == num_captured
    world.kv["values"] = world.kv["values"].clone()
    with pytest.raises(AssertionError, match="has moved"):
        world.runner.check()


def test_capturing_touches_no_state() -> None:
    world = World()
    before = {name: tensor.clone() for name, tensor in world.kv.items()}
    last = world.sampler.last_token[:NUM_SLOTS].clone()
    world.runner.capture_all()
    assert all(torch.equal(world.kv[name], tensor) for name, tensor in before.items())
    assert torch.equal(world.sampler.last_token[:NUM_SLOTS], last)
    assert not world.sampler._output_counts[:NUM_SLOTS].any()
