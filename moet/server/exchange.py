"""One request to an endpoint and its answer, whatever the API: queueing, usage, and the end."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from moet.errors import EngineDeadError, MoetError, RequestError
from moet.runtime.engine import Engine, Generation
from moet.runtime.output import Output
from moet.server.errors import error_object
from moet.server.operations import Clock, Operations
from moet.server.stream import DATA_FRAMES, Framing
from moet.types import Request

logger = logging.getLogger(__name__)


class Usage:
    """Tokens of one answer. A prompt counts once, however many samples it has."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self._cached: dict[int, int] = {}

    def add(self, output: Output, *, samples: int) -> None:
        """Count an increment; `samples` is n, since samples of a prompt share its cached tokens."""
        self.completion_tokens += len(output.token_ids)
        if output.num_cached_tokens and output.index % samples == 0:
            self._cached[output.index] = output.num_cached_tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that needed no work."""
        return sum(self._cached.values())

    def body(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


class Exchange(ABC):
    """One request to an endpoint: opened first, then either streamed or collected."""

    framing: Framing = DATA_FRAMES

    def __init__(
        self, engine: Engine, requests: Sequence[Request], name: str, *, samples: int, field: str
    ) -> None:
        """name: the answer's id. samples: requests per prompt. field: the prompt's, for errors."""
        self.engine = engine
        self.usage = Usage(sum(len(r.prompt_token_ids) for r in requests[::samples]))
        self._requests = requests
        self._name = name
        self.clock = Clock(self.usage.prompt_tokens)
        self.operations = Operations()
        self.request_id = "-"  # as the client knows it
        self._samples = samples
        self._field = field

    async def open(self) -> Generation:
        """Queue all requests; a refusal is raised here, before any byte is sent."""
        try:
            return await self.engine.open(self._requests)
        except RequestError as error:
            if error.param in ("prompt", "messages"):
                error.param = self._field
            raise

    @abstractmethod
    def chunks(self, generation: Generation) -> AsyncGenerator[dict[str, Any], None]:
        """The answer bit by bit."""

    @abstractmethod
    async def collect(self, generation: Generation) -> dict[str, Any]:
        """The answer as one body."""

    @property
    def num_malformed(self) -> int | None:
        """Tags and calls that a parser had to drop or mend; None where there is no parser."""
        return None

    def failure(self, error: Exception) -> dict[str, Any]:
        """The chunk that ends a stream when something goes wrong."""
        return error_object(error)

    async def _outputs(self, generation: Generation) -> AsyncGenerator[Output, None]:
        followed = self.operations.follow(
            generation, self.clock, answer_id=self._name, model=self.engine.model
        )
        async with aclosing(followed):
            try:
                async for output in followed:
                    self.usage.add(output, samples=self._samples)
                    self.clock.num_cached_tokens = self.usage.cached_tokens
                    yield output
            except MoetError as error:
                if self.engine.state in ("dead", "closed"):  # not this request's own failure
                    reason = self.engine.error or "the engine was shut down"
                    raise EngineDeadError(str(reason)) from error
                raise
        self.operations.count(self.num_malformed)
        logger.info("finished %s request=%s: %s", self._name, self.request_id, self.usage.body())
