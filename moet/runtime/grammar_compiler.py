"""Grammars in a request to matchers over a vocabulary: xgrammar, or llguidance where that refuses.

Compiling happens on threads of its own, since it may take a second, and its results are kept. Only
what will be enforced is accepted: a schema with a keyword that xgrammar would overlook goes to
llguidance, and what neither can hold is refused. In structural tags (tool calls) such keywords are
overlooked instead: a call that is merely well-formed beats none.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from moet.errors import OverloadedError, RequestError
from moet.runtime.grammar import Constraint, Matcher
from moet.runtime.grammar_backends import Backend, Guidance, XGrammar
from moet.runtime.tokenizer import Tokenizer
from moet.types import GrammarSpec

MAX_TEXT_BYTES = 512 << 10
MAX_DEPTH = 64
CACHE_BYTES = 256 << 20
TIME_LIMIT_S = 10.0
QUEUE_LIMIT_S = 60.0
NUM_THREADS = 2

Compiled = Callable[[Sequence[int]], Matcher]
"""Makes a matcher at the grammar's beginning; the argument is the sequence's end tokens."""


def check_grammar(spec: GrammarSpec) -> None:
    """Refuse what can be seen to be wrong without a vocabulary: RequestError naming spec.param."""
    num_bytes = len(spec.text.encode("utf-8", "surrogatepass"))
    if num_bytes > MAX_TEXT_BYTES:
        raise _refusal(spec, f"it has {num_bytes} bytes; the limit is {MAX_TEXT_BYTES}")
    if not spec.text:
        raise _refusal(spec, "it is empty")
    if spec.kind in ("regex", "ebnf"):
        return
    try:
        value = json.loads(spec.text)
    except (ValueError, RecursionError) as error:
        raise _refusal(spec, "it is not JSON, or nested too deep") from error
    if _depth(value) > MAX_DEPTH:
        raise _refusal(spec, f"it is nested deeper than {MAX_DEPTH} levels")
    if spec.kind == "choice":
        texts = isinstance(value, list) and value and all(isinstance(v, str) and v for v in value)
        if not texts:
            raise _refusal(spec, "it must be a list of at least one string, none of them empty")


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
        """A new sequence's constraint."""
        return Constraint(
            compiled(end_token_ids),
            vocab_size=self.vocab_size,
            after_token_id=spec.after_token_id,
            forbidden_token_ids=spec.forbidden_token_ids,
            end_token_ids=end_token_ids,
        )

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
            job.future.set_result(self._compile(job.spec, backends))
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
                raise _refusal(spec, str(error)) from error
            try:
                compiled, num_bytes = second.compile(spec)
            except ValueError:
                raise _refusal(spec, str(error)) from error
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
        raise _refusal(self.spec, reason)


def _refusal(spec: GrammarSpec, reason: str) -> RequestError:
    what = {"ebnf": "grammar", "structural_tag": "tool schema", "json_schema": "JSON schema"}
    name = what.get(spec.kind, spec.kind)
    return RequestError(f"the {name} cannot be enforced: {reason}", param=spec.param)


# Keywords that xgrammar takes and does not enforce, and what in a pattern it overlooks.
_OVERLOOKED = {
    "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains",
    "dependentRequired", "dependentSchemas", "dependencies", "multipleOf", "propertyNames",
}  # fmt: skip
_LOOKAROUND = re.compile(r"\(\?<?[=!]")


def is_exotic(spec: GrammarSpec) -> bool:
    """Whether xgrammar would accept the grammar and enforce less than it says."""
    if spec.kind == "regex":
        return bool(_LOOKAROUND.search(spec.text))
    if spec.kind != "json_schema":
        return False
    return any(map(_is_overlooked, _schemas_in(json.loads(spec.text))))


def _is_overlooked(schema: dict[str, Any]) -> bool:
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    reference = schema.get("$ref", "#")
    elsewhere = isinstance(reference, str) and not reference.startswith("#")
    pattern = schema.get("pattern")
    looks = isinstance(pattern, str) and bool(_LOOKAROUND.search(pattern))
    named = any(schema.get(key) not in (None, False) for key in _OVERLOOKED & schema.keys())
    return several or elsewhere or looks or named


_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_NO_SCHEMAS = ("enum", "const", "default", "examples", "required")


def _schemas_in(schema: object) -> Iterator[dict[str, Any]]:
    """The schema and every one inside it; names of properties are not keywords."""
    if isinstance(schema, list):
        for item in schema:
            yield from _schemas_in(item)
    if not isinstance(schema, dict):
        return
    yield schema
    for key, value in schema.items():
        if key in _SCHEMA_MAPS and isinstance(value, dict):
            for member in value.values():
                yield from _schemas_in(member)
        elif key not in _NO_SCHEMAS:
            yield from _schemas_in(value)


def _depth(value: object) -> int:
    """Levels of nesting, found without recursion."""
    deepest, todo = 0, [(value, 1)]
    while todo:
        item, depth = todo.pop()
        deepest = max(deepest, depth)
        if isinstance(item, dict):
            todo += [(child, depth + 1) for child in item.values()]
        elif isinstance(item, list):
            todo += [(child, depth + 1) for child in item]
    return deepest
