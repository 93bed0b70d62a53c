"""Engine: prompts to text, sync and async, over a core in a thread or in a process of its own.

Knows tokens, text and requests; knows nothing of HTTP, chat formats or tensors.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import queue
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from types import TracebackType
from typing import TypeVar

import msgspec

from moet.config import (
    CacheConfig,
    EngineConfig,
    ExpertConfig,
    ModelSettings,
    ParallelConfig,
    SchedulerConfig,
    TargetConfig,
)
from moet.errors import MoetError, OverloadedError, RequestError
from moet.runtime.grammar_check import check_grammar
from moet.runtime.host import Core, Host, HostState, Progress, Seen, ThreadHost
from moet.runtime.metrics import CoreInfo, CoreStats, ExpertStats
from moet.runtime.output import Choice, Completion, Output
from moet.runtime.process import ProcessHost
from moet.runtime.router import Generation as Generation
from moet.runtime.router import Merge, Router
from moet.runtime.sampling_params import check_precision, validate_params
from moet.runtime.text_side import TextSide, existing_folder, text_folder
from moet.types import GrammarSpec, Request, SamplingParams, TokenEvent

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
T = TypeVar("T")

MAX_N = 128
ANSWER_TIMEOUT_S = 10.0
RESIZE_TIMEOUT_S = 120.0  # a GPU's steps are captured anew then
MAX_IN_FLIGHT = 256  # requests that `generate` keeps open at a time


class Engine:
    """A model that answers prompts.

    model: "demo" or "demo-glm" (tiny trained models of the two architectures), a checkpoint folder
    in the official layout or a pack folder. Checkpoints are converted to a pack at first use.
    own_process: run the step loop in a process of its own; call from under
    `if __name__ == "__main__"` then. wait: return only when requests are taken; otherwise calls
    raise OverloadedError until `state` is "ready".
    tensor_parallel, pipeline_parallel: processes that share each layer, and stages that hold some
    of the layers each; the others are started here and live no longer than this engine.
    target: where the model runs; with dummy weights, `model` is a folder with a config.json or a
    name such as "deepseek-v4-flash".
    experts: where routed experts live, and which precisions requests may ask for.
    hang_timeout_s: after which one that gives no sign of life ends all.

    Raises ConfigError or CheckpointError if the model cannot be served.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        settings: ModelSettings | None = None,
        cache: CacheConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        hang_timeout_s: float = 15.0,
        target: TargetConfig | None = None,
        experts: ExpertConfig | None = None,
        seed: int = 0,
        own_process: bool = False,
        wait: bool = True,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        config = EngineConfig(
            model=model,
            settings=settings or ModelSettings(),
            cache=cache or CacheConfig(),
            scheduler=scheduler or SchedulerConfig(),
            parallel=ParallelConfig(
                tensor=tensor_parallel, pipeline=pipeline_parallel, hang_timeout_s=hang_timeout_s
            ),
            target=target or TargetConfig(),
            experts=experts or ExpertConfig(),
            seed=seed,
        )
        if config.target.weights == "checkpoint":
            existing_folder(model)  # a wrong name is said before a process starts
        build = partial(_load_core, config)
        host = ProcessHost(build) if own_process else ThreadHost(build)
        self._set_up(model, host, lambda: TextSide.from_folder(text_folder(config)), on_death)
        if wait:
            self.wait_until_ready()

    @classmethod
    def over(
        cls,
        host: Host,
        text: Callable[[], TextSide],
        *,
        model: str = "model",
        on_death: Callable[[], None] = lambda: None,
    ) -> Engine:
        """An engine over a given host that was not started yet; does not wait for it."""
        engine = cls.__new__(cls)
        engine._set_up(model, host, text, on_death)
        return engine

    def _set_up(
        self,
        model: str,
        host: Host,
        text: Callable[[], TextSide],
        on_death: Callable[[], None],
    ) -> None:
        self.model = model
        self._host = host
        self._text: TextSide | None = None
        self._load_text = text
        self._ready: Future[None] = Future()
        self._on_death = on_death
        self._router = Router(host)
        self._numbers = count()
        # Threads that are in the middle of something abort an interpreter that ends.
        weakref.finalize(self, host.close)
        finish = weakref.WeakMethod(self._finish_loading)

        def loaded(ready: Future[CoreInfo]) -> None:
            method = finish()
            if method is not None:
                method(ready)

        host.ready.add_done_callback(loaded)
        host.start(self._router.deliver, on_death)

    def _finish_loading(self, ready: Future[CoreInfo]) -> None:
        if ready.exception() is not None:  # the host tells of its death itself
            self._ready.set_exception(ready.exception())
            return
        try:
            self._text = self._load_text().within(ready.result().max_model_len)
        except Exception as error:
            self._ready.set_exception(error)
            self._on_death()
        else:
            self._ready.set_result(None)

    # What is loaded

    @property
    def state(self) -> HostState:
        """loading, ready, dead or closed."""
        if self._host.state != "ready":
            return self._host.state
        if not self._ready.done():
            return "loading"
        return "dead" if self._ready.exception() else "ready"

    @property
    def load_progress(self) -> tuple[str, float]:
        """The stage that loading has reached and the done share of it."""
        return self._host.stage

    @property
    def load_times_s(self) -> Mapping[str, float]:
        """Seconds that each stage of loading took, of those that are over."""
        return self._host.load_times_s

    @property
    def late_step(self) -> str | None:
        """What the step loop is doing, if that takes longer than --step-timeout."""
        return self._host.late_step

    @property
    def silent_s(self) -> float | None:
        """Seconds since the engine's process was heard of, if longer than --step-timeout."""
        return self._host.silent_s

    @property
    def error(self) -> BaseException | None:
        """Why the engine is dead."""
        if self._host.error is not None or not self._ready.done():
            return self._host.error
        return self._ready.exception()

    def wait_until_ready(self, timeout_s: float | None = None) -> None:
        """Return when requests are taken; raise what ended the load."""
        try:
            self._ready.result(timeout_s)
        except MoetError:
            self.close()
            raise

    @property
    def info(self) -> CoreInfo:
        """Sizes of the model and the cache. OverloadedError while loading."""
        self._require_ready()
        return self._host.ready.result()

    @property
    def text(self) -> TextSide:
        """Tokenizer, config and default sampling of the model. OverloadedError while loading."""
        self._require_ready()
        assert self._text is not None
        return self._text

    def _require_ready(self) -> None:
        if not self._ready.done():
            stage, done = self.load_progress
            message = f"the model is still loading ({stage}, {done:.0%}); try again later"
            raise OverloadedError(message, retry_after_s=5, unavailable=True)
        self._ready.result()

    # Calls

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        grammar: GrammarSpec | None = None,
    ) -> list[Completion]:
        """Answer every prompt; returns them in order, each with n choices.

        Raises RequestError for a bad prompt, parameter or grammar, MoetError if a request fails.
        """
        requests = self._many(prompts, params, n, grammar)
        inbox: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        merge = Merge(self._router, self.text.tokenizer, requests, inbox.put, None)
        choices = [Choice(index=i % n) for i in range(len(requests))]
        completions = [
            Completion(prompt_token_ids=requests[i].prompt_token_ids, choices=choices[i : i + n])
            for i in range(0, len(requests), n)
        ]
        try:
            for future in merge.submit_up_to(MAX_IN_FLIGHT):
                future.result()
            while merge.unfinished:
                output = merge.take(inbox.get())
                if output is None:
                    continue
                output.raise_if_failed()
                completions[output.index // n].add(output, choices[output.index])
                if output.finish_reason is not None:
                    for future in merge.submit_up_to(MAX_IN_FLIGHT):
                        future.result()
        finally:
            merge.close()
        return completions

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        grammar: GrammarSpec | None = None,
    ) -> Iterator[Output]:
        """Answer one prompt, increment by increment. Closing the iterator stops the request."""
        requests = self._many([prompt], params, 1, grammar)
        inbox: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        merge = Merge(self._router, self.text.tokenizer, requests, inbox.put, None)
        try:
            for future in merge.submit_up_to(1):
                future.result()
            while merge.unfinished:
                output = merge.take(inbox.get())
                if output is not None:
                    output.raise_if_failed()
                    yield output
        finally:
            merge.close()

    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        grammar: GrammarSpec | None = None,
    ) -> Completion:
        """Answer one prompt with n choices. Cancelling the call stops the requests."""
        requests = self._many([prompt], params, n, grammar)
        completion = Completion(
            prompt_token_ids=requests[0].prompt_token_ids,
            choices=[Choice(index=index) for index in range(n)],
        )
        async with await self.open(requests) as generation:
            async for output in generation:
                output.raise_if_failed()
                completion.add(output, completion.choices[output.index])
        return completion

    async def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        grammar: GrammarSpec | None = None,
    ) -> AsyncIterator[Output]:
        """Answer one prompt, increment by increment. Closing the iterator stops the request."""
        requests = self._many([prompt], params, 1, grammar)
        async with await self.open(requests) as generation:
            async for output in generation:
                output.raise_if_failed()
                yield output

    async def open(self, requests: Sequence[Request]) -> Generation:
        """Hand requests over as one; returns when all are queued.

        If one is refused the others are stopped, and its error is raised: RequestError (also
        ContextLengthError) for a prompt that cannot be served, OverloadedError for a full queue.
        """
        generation = Generation(self._router, self.text.tokenizer, requests)
        await generation.submit()
        return generation

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, in which the names of control tokens count as such.

        Raises RequestError for what is neither a text nor ids.
        """
        if isinstance(prompt, str):
            return self.text.tokenizer.encode(prompt, allow_special=True)
        for token_id in prompt:
            if not isinstance(token_id, int):
                raise RequestError(
                    f"a prompt's token ids are integers; one is {str(token_id)[:40]!r}, a "
                    f"{type(token_id).__name__}",
                    param="prompt",
                )
        return list(prompt)

    def requests(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        n: int = 1,
        priority: int = 0,
        cache_salt: str = "",
        grammar: GrammarSpec | None = None,
    ) -> list[Request]:
        """Make n requests of a prompt, sample by sample; parameters are checked here.

        A max_tokens that the window has no room for is lowered to what it has. Sample 0 keeps the
        seed; the others get seeds derived from it, so that a set of samples is reproducible
        without being n times the same.
        """
        if not 1 <= n <= MAX_N:
            raise RequestError(f"n is {n}; it must be from 1 to {MAX_N}", param="n")
        info = self.info
        validate_params(params, info.vocab_size, info.max_model_len)
        check_precision(params.precision, info.precision, info.precisions)
        if grammar is not None:
            check_grammar(grammar)
        room = info.max_model_len - len(prompt_token_ids)
        if params.max_tokens is not None and 1 <= room < params.max_tokens:
            params = msgspec.structs.replace(params, max_tokens=room)
        number = next(self._numbers)
        return [
            Request(
                request_id=f"{number}-{index}",
                prompt_token_ids=prompt_token_ids,
                params=msgspec.structs.replace(params, seed=_nth_seed(params.seed, index)),
                eos_token_ids=self.text.tokenizer.eos_token_ids,
                priority=priority,
                cache_salt=cache_salt,
                grammar=grammar,
            )
            for index in range(n)
        ]

    @property
    def num_open(self) -> int:
        """Requests that somebody still reads."""
        return self._router.num_open

    def stats(self, timeout_s: float = 10.0) -> CoreStats:
        """The core's counters, taken between two steps."""
        return self._host.stats().result(timeout_s)

    async def astats(self, timeout_s: float | None = None) -> CoreStats:
        """The core's counters, taken between two steps. OverloadedError if none ends in time."""
        return await self._between_steps(self._host.stats(), timeout_s)

    @property
    def last_stats(self) -> Seen[CoreStats] | None:
        """The counters that came last, whoever asked for them; None while loading."""
        return self._host.last_stats

    @property
    def last_expert_stats(self) -> Seen[ExpertStats] | None:
        """The experts' books that came last; None if nobody has asked yet."""
        return self._host.last_expert_stats

    async def areset_prefix_cache(self) -> None:
        """Have no later request start from what was cached so far, on the device, host or disk.

        Requests under way go on.
        """
        await self._between_steps(self._host.forget_prefixes())

    def tune_experts(
        self,
        *,
        tau: float | None = None,
        pool_bytes: int | None = None,
        kv_bytes: int | None = None,
        timeout_s: float = RESIZE_TIMEOUT_S,
    ) -> ExpertStats:
        """Change the gate's tau, the bytes of the expert pool, or, while no request is under way,
        those of the KV pages, without a restart.

        Raises RequestError where that cannot be, as EngineCore.tune_experts says.
        """
        asked = self._host.expert_stats(tau=tau, pool_bytes=pool_bytes, kv_bytes=kv_bytes)
        return asked.result(timeout_s)

    async def aexpert_stats(
        self,
        *,
        tau: float | None = None,
        pool_bytes: int | None = None,
        kv_bytes: int | None = None,
        timeout_s: float | None = None,
    ) -> ExpertStats:
        """Where the experts are and how often they were asked for, taken between two steps.

        What is given is changed before, as by tune_experts.
        """
        asked = self._host.expert_stats(tau=tau, pool_bytes=pool_bytes, kv_bytes=kv_bytes)
        if timeout_s is None and (pool_bytes is not None or kv_bytes is not None):
            timeout_s = RESIZE_TIMEOUT_S
        return await self._between_steps(asked, timeout_s)

    async def _between_steps(self, answer: Future[T], timeout_s: float | None = None) -> T:
        """Wait for the core's answer, unless a step keeps it from giving one."""
        timeout_s = ANSWER_TIMEOUT_S if timeout_s is None else timeout_s
        wrapped = asyncio.wrap_future(answer)
        try:
            return await asyncio.wait_for(asyncio.shield(wrapped), timeout_s)
        except TimeoutError:
            wrapped.add_done_callback(_read)
            message = f"the step loop has not answered for {timeout_s:g} s"
            raise OverloadedError(message, retry_after_s=5, unavailable=True) from None

    def close(self) -> None:
        """End the core; open requests end with an error. Idempotent."""
        self._host.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _many(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None,
        n: int,
        grammar: GrammarSpec | None,
    ) -> list[Request]:
        each = _prompt_list(prompts)
        params = params or self.text.defaults
        return [
            request
            for prompt in each
            for request in self.requests(self.encode(prompt), params, n=n, grammar=grammar)
        ]


def _load_core(config: EngineConfig, progress: Progress) -> Core:
    """Imports the model's side only where it runs: the caller's process needs no torch."""
    from moet.runtime.loader import load_core

    return load_core(config, progress)


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _read(answer: asyncio.Future[T]) -> None:
    """Look at a late answer, so that its error, if it is one, counts as seen."""
    if not answer.cancelled():
        answer.exception()


def _nth_seed(seed: int | None, index: int) -> int | None:
    if seed is None or index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
