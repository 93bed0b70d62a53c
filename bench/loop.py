"""An engine core at work on dummy weights: requests that are told by name, and what its steps took.

Knows no bench's figures."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean, median
from time import perf_counter

import torch

from bench.rigs import placement_on
from moet.config import CacheConfig, SchedulerConfig
from moet.kernels.device_gemm import Device
from moet.runtime.batch import Batch, StepResult
from moet.runtime.core import EngineCore
from moet.runtime.device_runner import Placement
from moet.runtime.dummy import DummyModel
from moet.types import Request, SamplingParams, TokenEvent


class Loop:
    """An engine core at work on the same weights."""

    def __init__(self, made: DummyModel, placement: Placement, **scheduler: object) -> None:
        model = made.model
        page_bytes = model.kv_cache_spec().bytes_per_page
        self.core = EngineCore(
            model,
            made.experts,
            cache=CacheConfig(
                budget_bytes=800 * page_bytes,
                host_budget_bytes=4 * page_bytes,
                snapshot_budget_bytes=1,
                prefix_cache="off",
            ),
            scheduler=SchedulerConfig(**scheduler),  # type: ignore[arg-type]
            precision="w2",
            vocab_size=model.vocab_size,
            seed=0,
            placement=placement,
        )
        self.told: dict[str, list[int]] = {}

    def submit(
        self, name: str, ids: list[int], max_tokens: int, spec_tokens: int | None = None
    ) -> None:
        """spec_tokens: of its own, at most those of the scheduler; None: as many as that has."""
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=max_tokens, spec_tokens=spec_tokens
        )
        self.core.submit(Request(request_id=name, prompt_token_ids=ids, params=params))
        self.told[name] = []

    def step(self) -> list[TokenEvent]:
        events = self.core.step()
        for event in events:
            if event.error:
                raise RuntimeError(event.error)
            self.told[event.request_id] += event.token_ids
        return events

    def until(self, over: Callable[[], bool]) -> None:
        while not over():
            self.step()

    def tokens(self, name: str, ids: list[int], max_tokens: int) -> list[int]:
        """What a request that is alone is told."""
        self.submit(name, ids, max_tokens)
        self.until(lambda: len(self.told[name]) == max_tokens)
        self.until(lambda: not self.core.has_work)
        return self.told[name]

    def token_times(self, name: str, until: Callable[[list[TokenEvent]], bool]) -> list[float]:
        """Moments of one request's tokens, from now on until an event says stop."""
        times: list[float] = []
        while True:
            events = self.step()
            times += [perf_counter() for event in events if event.request_id == name]
            if until(events):
                return times

    def ended(self, name: str) -> Callable[[list[TokenEvent]], bool]:
        return lambda events: any(e.request_id == name and e.finish_reason for e in events)


def random_ids(count: int) -> list[int]:
    ids: list[int] = torch.randint(1000, 60_000, (count,)).tolist()
    return ids


def open_loop(
    made: DummyModel, device: Device, num_drafts: int, *, num_rows: int = 2048, share: float = 0.4
) -> Loop:
    return Loop(
        made,
        placement_on(device),
        max_num_seqs=1 if num_drafts else 2,
        max_num_batched_tokens=num_rows,
        prefill_share=share,
        num_spec_tokens=num_drafts,
        adaptive_spec=False,
    )


class StepLog:
    """What the steps of a core took on the device, by what they carried."""

    def __init__(self, core: EngineCore) -> None:
        self.seen: list[tuple[int, int, int, float]] = []  # decoding, parts, rows of prompts, s
        commit = core._scheduler.commit

        def logged(batch: Batch, result: StepResult) -> list[TokenEvent]:
            num_rows = batch.num_prefill_tokens
            self.seen.append((batch.num_decoding, batch.num_parts, num_rows, result.device_s))
            return commit(batch, result)

        core._scheduler.commit = logged  # type: ignore[method-assign]

    def clear(self) -> None:
        self.seen.clear()

    def told(self, taken_s: float) -> str:
        """Where the time of a prompt went, in words."""
        plain = [1e3 * s for _, parts, _, s in self.seen if not parts]
        passing = [(parts, 1e3 * s) for _, parts, _, s in self.seen if parts]
        rows = [rows for _, _, rows, _ in self.seen if rows]
        device_s = sum(s for *_, s in self.seen)
        if not plain or not passing or not rows:
            return f"steps {self.seen[:4]}"
        extra = sum(ms for _, ms in passing) - len(passing) * median(plain)
        return (
            f"{len(self.seen)} steps, {device_s:.2f} of {taken_s:.2f} s on the device; "
            f"{len(plain)} of {median(plain):.2f} ms carry none of it, {len(passing)} of "
            f"{median(ms for _, ms in passing):.2f} ms {mean(n for n, _ in passing):.1f} layers of "
            f"{max(rows)} rows, {extra / max(1, sum(n for n, _ in passing)):.2f} ms each"
        )
