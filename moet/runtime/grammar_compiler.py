"""Grammars in a request to matchers over a vocabulary: xgrammar, or llguidance where that refuses.

Compiling happens on threads of its own, since it may take a second, and its results are kept. Only
what will be enforced is accepted: a schema with a keyword that xgrammar would overlook goes to
llguidance, and what neither can hold is refused. In structural tags (tool calls) such keywords are
overlooked instead: a call that is merely well-formed beats none.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from moet.errors import OverloadedError
from moet.runtime.grammar import Constraint, Matcher, allows, num_words
from moet.runtime.grammar_backends import Backend, Guidance, XGrammar
from moet.runtime.grammar_check import is_exotic, refusal
from moet.runtime.tokenizer import Tokenizer
from moet.types import GrammarSpec

CACHE_BYTES = 256 << 20
TIME_LIMIT_S = 10.0
QUEUE_LIMIT_S = 60.0
NUM_THREADS = 2

Compiled = Callable[[Sequence[int]], Matcher]
"""Makes a matcher at the grammar's beginning; the argument is the sequence's end tokens."""


class GrammarCompiler:
    """Compiles for one vocabulary; vocab_size is the model's, which may exceed the tokenizer's."""

    def __init__(
        self,
        load_tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        *,
        time_limit_s: float = TIME_LIMIT_S,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """load_tokenizer is called when the first grammar comes, on a thread."""
        self.vocab_size = vocab_size
        self.time_limit_s = time_limit_s
        self._load_tokenizer = load_tokenizer
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[tuple[str, str], tuple[Compiled, int]] = OrderedDict()
        self._lock = threading.Lock()  # of the cache
        self._loading = threading.Lock()
        self._backends: tuple[Backend, Backend] | None = None
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="moet-grammar")

    @property
    def num_cached(self) -> int:
        return len(self._cache)

    def start(self, spec: GrammarSpec) -> CompileJob:
        """Begin to compile; at once done if the result is kept from before."""
        job = CompileJob(spec, self.time_limit_s)
        with self._lock:
            kept = self._cache.get((spec.kind, spec.text))
            if kept is not None:
                self._cache.move_to_end((spec.kind, spec.text))
        if kept is not None:
            job.future.set_result(kept[0])
        else:
            self._pool.submit(self._run, job)
        return job

    def constraint(
        self, spec: GrammarSpec, compiled: Compiled, end_token_ids: Sequence[int]
    ) -> Constraint:
        """A new sequence's constraint. RequestError if no text fits the grammar, or no JSON."""
        matcher = compiled(end_token_ids)
        self._require_text(spec, matcher, end_token_ids)
        return Constraint(
            matcher,
            vocab_size=self.vocab_size,
            after_token_id=spec.after_token_id,
            forbidden_token_ids=spec.forbidden_token_ids,
            end_token_ids=end_token_ids,
        )

    def _require_text(
        self, spec: GrammarSpec, matcher: Matcher, end_token_ids: Sequence[int]
    ) -> None:
        mask = torch.zeros(num_words(self.vocab_size), dtype=torch.int32)
        matcher.fill(mask)
        if not mask.any():
            raise refusal(spec, "no text fits it")
        if spec.kind == "json_schema" and any(allows(mask, i) for i in end_token_ids):
            raise refusal(spec, "only an empty text fits it, which is no JSON")

    def close(self) -> None:
        """Start nothing more; a job under way ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _load(self) -> tuple[Backend, Backend]:
        with self._loading:
            if self._backends is None:
                tokenizer = self._load_tokenizer()
                self._backends = (
                    XGrammar(tokenizer, self.vocab_size),
                    Guidance(tokenizer, self.vocab_size),
                )
            return self._backends

    def _run(self, job: CompileJob) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            backends = self._load()
            job.began = time.perf_counter()
            compiled = self._compile(job.spec, backends)
            job.took_s = time.perf_counter() - job.began
            job.future.set_result(compiled)
        except Exception as error:  # the request's, whatever it is
            job.future.set_exception(error)

    def _compile(self, spec: GrammarSpec, backends: tuple[Backend, Backend]) -> Compiled:
        first, second = backends
        exotic = is_exotic(spec)
        if exotic:
            first, second = second, first
        try:
            compiled, num_bytes = first.compile(spec)
        except ValueError as error:
            if exotic or spec.kind == "structural_tag":  # the other one would enforce less
                raise refusal(spec, str(error)) from error
            try:
                compiled, num_bytes = second.compile(spec)
            except ValueError:
                raise refusal(spec, str(error)) from error
        self._keep(spec, compiled, num_bytes)
        return compiled

    def _keep(self, spec: GrammarSpec, compiled: Compiled, num_bytes: int) -> None:
        with self._lock:
            self._cache[spec.kind, spec.text] = compiled, num_bytes
            while sum(size for _, size in self._cache.values()) > self._cache_bytes:
                self._cache.popitem(last=False)


class CompileJob:
    """A grammar being compiled."""

    def __init__(self, spec: GrammarSpec, time_limit_s: float) -> None:
        self.spec = spec
        self.future: Future[Compiled] = Future()
        self.began: float | None = None  # seconds of time.perf_counter
        self.took_s: float | None = None  # None if it was kept from before
        self._made = time.perf_counter()
        self._limit_s = time_limit_s

    @property
    def is_over(self) -> bool:
        """Whether result() has an answer, a refusal for lack of time among them."""
        if self.began is None:
            return self.future.done() or time.perf_counter() - self._made > QUEUE_LIMIT_S
        return self.future.done() or time.perf_counter() - self.began > self._limit_s

    def result(self) -> Compiled:
        """The compiled grammar, when is_over.

        RequestError if it is refused, OverloadedError if others took all the time.
        """
        if self.future.done():
            return self.future.result()
        if self.future.cancel():
            raise OverloadedError("other grammars are still being compiled; try again later")
        reason = f"it takes more than {self._limit_s:g} s to compile; simplify it"
        raise refusal(self.spec, reason)
