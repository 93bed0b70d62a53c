"""A core that replays given token ids through the interface of EngineCore, one a step.

No model, no pages: what a request answers is decided by `script(request)`. It keeps books of what
is open, so that lost aborts show.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from moet.errors import ContextLengthError, OverloadedError, RequestError
from moet.runtime.host import Build, Progress
from moet.runtime.metrics import (
    CoreInfo,
    CoreStats,
    Counters,
    ExpertStats,
    Histogram,
    LayerExperts,
)
from moet.types import FinishReason, Request, TokenEvent, TokenLogprobs

Script = Callable[[Request], list[int]]

FAULT = -1  # a script's token: the step raises here


def echo(request: Request) -> list[int]:
    """Answer with the prompt, then its first end-of-sequence id."""
    return [*request.prompt_token_ids, *request.eos_token_ids[:1]]


class ScriptedCore:
    """Replays `script(request)` until it is used up, an id stops it, or max_tokens is reached."""

    def __init__(
        self,
        script: Script = echo,
        *,
        vocab_size: int = 1000,
        max_model_len: int = 4096,
        max_open: int = 1000,
        step_s: float = 0.0,
    ) -> None:
        self.script = script
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.max_open = max_open
        self.step_s = step_s
        self.open: dict[str, tuple[Request, list[int], int]] = {}
        self.counters = Counters()
        self.submitted: list[Request] = []
        self.aborted: list[str] = []
        self.num_cleared = 0

    @property
    def has_work(self) -> bool:
        return bool(self.open)

    def submit(self, request: Request) -> None:
        if len(self.open) >= self.max_open:
            raise OverloadedError(f"{len(self.open)} requests wait; the limit is {self.max_open}")
        prompt = request.prompt_token_ids
        if len(prompt) + (request.params.max_tokens != 0) > self.max_model_len:
            raise ContextLengthError(f"prompt has {len(prompt)} tokens; {self.max_model_len} fit")
        if not prompt or not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            raise RequestError("the prompt is not made of the model's ids", param="prompt")
        self.submitted.append(request)
        self.open[request.request_id] = request, self.script(request), 0

    def abort(self, request_id: str, *, reason: FinishReason) -> None:
        if self.open.pop(request_id, None) is not None:
            self.aborted.append(request_id)
            self.counters.finished[reason.value] += 1

    def step(self) -> list[TokenEvent]:
        if self.step_s:
            time.sleep(self.step_s)
        events = [self._advance(request_id) for request_id in list(self.open)]
        for event in events:
            if event.finish_reason is not None:
                del self.open[event.request_id]
        return events

    def _advance(self, request_id: str) -> TokenEvent:
        request, script, position = self.open[request_id]
        params = request.params
        limit = params.max_tokens
        if limit == 0 or position >= len(script):
            return self._event(request, [], FinishReason.LENGTH, position)
        token_id = script[position]
        if token_id == FAULT:
            raise RuntimeError("scripted fault")
        position += 1
        self.open[request_id] = request, script, position
        stops = params.stop_token_ids + (() if params.ignore_eos else request.eos_token_ids)
        reason = None
        if token_id in stops:
            reason = FinishReason.STOP
        elif position == limit or position == len(script):
            reason = FinishReason.LENGTH
        return self._event(request, [token_id], reason, position)

    def _event(
        self, request: Request, token_ids: list[int], reason: FinishReason | None, position: int
    ) -> TokenEvent:
        params = request.params
        first = position <= 1
        prompt_logprobs = None
        if params.prompt_logprobs is not None and first:
            prompt_logprobs = [None, *map(_logprobs, request.prompt_token_ids[1:])]
        return TokenEvent(
            request_id=request.request_id,
            token_ids=token_ids,
            finish_reason=reason,
            stop_token_id=token_ids[-1] if reason == FinishReason.STOP else None,
            logprobs=[_logprobs(t) for t in token_ids] if params.logprobs is not None else None,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=len(request.prompt_token_ids) // 2 if first else 0,
        )

    def stats(self) -> CoreStats:
        told = [name for name in Counters.__slots__ if name in CoreStats.__struct_fields__]
        counters = {name: getattr(self.counters, name) for name in told}
        return CoreStats(
            num_running=len(self.open),
            num_waiting=0,
            num_used_pages=len(self.open),
            num_cached_pages=0,
            num_used_host_blocks=0,
            num_used_snapshots=0,
            kv_cache_usage=len(self.open) / 1000,
            **{
                name: value.stats() if isinstance(value, Histogram) else value
                for name, value in counters.items()
            },
        )

    def expert_stats(self) -> ExpertStats:
        return ExpertStats(
            layers=[
                LayerExperts(
                    layer=layer,
                    format="w2",
                    num_resident=3,
                    rows=[layer, 5, 0, 1],
                    resident=[True, True, False, True],
                )
                for layer in range(2)
            ]
        )

    def clear_prefix_cache(self) -> None:
        self.num_cleared += 1

    def activity(self) -> str:
        return f"{len(self.open)} scripts"

    def info(self) -> CoreInfo:
        return CoreInfo(
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            precision="w2",
            page_size=256,
            num_pages=1000,
            kv_cache_bytes=1 << 20,
            num_seq_slots=self.max_open,
            num_host_blocks=0,
            num_snapshots=0,
            max_num_batched_tokens=2048,
            prefix_cache="on",
            overlap=False,
        )

    def check(self) -> None:
        assert not self.open

    def shutdown(self) -> None:
        self.open.clear()


def _logprobs(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_ids=[token_id, 0], logprobs=[-0.25, -2.0], rank=1)


def build(progress: Progress, *, script: Script = echo, step_s: float = 0.0) -> ScriptedCore:
    """A picklable Build."""
    progress("weights", 0.5)
    return ScriptedCore(script, step_s=step_s)


def builder(script: Script = echo, *, step_s: float = 0.0) -> Build:
    return partial(build, script=script, step_s=step_s)


def endless(request: Request) -> list[int]:
    """A long answer, for aborts."""
    return [request.prompt_token_ids[0]] * 100_000


def faulty(request: Request) -> list[int]:
    """Two tokens, then the step raises."""
    return [5, 5, FAULT]
