"""Sequence: one request's tokens, pages and status. Holds facts; the scheduler decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from moet.runtime.draft_length import Acceptance
from moet.runtime.grammar import Constraint
from moet.runtime.prefix_cache import page_key
from moet.runtime.sampler import Proposal
from moet.types import Request, TokenLogprobs


class Status(Enum):
    """Where a sequence is. A preempted sequence waits again, with or without host blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request as it is worked on.

    token_ids holds the prompt and every sampled token the host knows; `num_pending` more have been
    scheduled and not yet read. Rows 0..num_computed-1 are scheduled or done, and their state lies
    in `pages` (page n holds tokens n*page_size and up). `max_len` bounds len(token_ids).
    `epoch` counts preemptions: what an older step wrote does not lie in today's pages.

    At most num_spec_tokens are drafted for it per step. `proposals` are those for the next one, and
    go wherever the sequence goes; with drafts scheduled, num_computed is what it is if all hold.
    is_guessing: its newest step verifies drafts or makes some.
    """

    request: Request
    arrival: int
    seed: int
    max_len: int
    root: bytes  # where the chain of its page keys starts
    stop_ids: frozenset[int]
    token_ids: list[int]
    status: Status = Status.WAITING
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_pending: int = 0
    epoch: int = 0
    keys: list[bytes] = field(default_factory=list)  # of full pages, as far as worked out
    num_registered: int = 0  # pages offered to the prefix cache
    turn_snapshot: tuple[bytes, int] | None = None  # newest one past the prompt
    host_pages: list[int] = field(default_factory=list)  # blocks, while preempted
    host_rings: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_logprobs_scheduled: int = 0  # prompt rows
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    was_placed: bool = False  # ever
    was_fetched: bool = False  # the disk was asked for pages, or there is none
    has_event: bool = False
    constraint: Constraint | None = None  # has taken every token of token_ids past the prompt
    num_spec_tokens: int = 0
    adapts: bool = False  # drafts fewer than that while they do not pay
    proposals: tuple[Proposal, ...] = ()
    is_guessing: bool = False
    acceptance: Acceptance = field(default_factory=Acceptance)
    num_plain_steps: int = 0  # since the last one with drafts
    num_drafted: int = 0
    num_accepted: int = 0
    gated: set[int] = field(default_factory=set)  # positions that the runner computed again in FP4
    shares_generated: bool = True  # pages past the prompt may serve as prefixes of others
    fault: str | None = None  # why the runner could not set it up; written by the runner
    times: Times = field(default_factory=lambda: Times())

    prompt_len: int = field(init=False)
    rank: tuple[int, int] = field(init=False)  # lower runs first and is preempted last
    wants_prompt_logprobs: bool = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.request.prompt_token_ids)
        self.rank = (self.request.priority, self.arrival)
        self.wants_prompt_logprobs = self.request.params.prompt_logprobs is not None

    @property
    def num_scheduled(self) -> int:
        """Tokens that exist once every step in flight has been read."""
        return len(self.token_ids) + self.num_pending

    @property
    def is_decoding(self) -> bool:
        """Whether its next step is one row, after which it makes one more token.

        With a constraint or drafts, the newest token must be known: the mask of the next depends on
        it, or how many there are.
        """
        if self.num_pending and (self.constraint is not None or self.is_guessing):
            return False
        num_scheduled = len(self.token_ids) + self.num_pending
        return self.prompt_len <= self.num_computed == num_scheduled - 1 < self.max_len - 1

    @property
    def is_prefilling(self) -> bool:
        """Whether rows of tokens it has are to be scheduled: of the prompt, or replayed."""
        return self.num_computed < self.prompt_len or self.num_computed < self.num_scheduled - 1

    @property
    def is_on_host(self) -> bool:
        return bool(self.host_pages or self.host_rings)

    def page_keys(self, num_pages: int, page_size: int) -> list[bytes]:
        """Keys of the first num_pages pages; their tokens must be known."""
        assert num_pages * page_size <= len(self.token_ids)
        while len(self.keys) < num_pages:
            start = len(self.keys) * page_size
            parent = self.keys[-1] if self.keys else self.root
            self.keys.append(page_key(parent, self.token_ids[start : start + page_size]))
        return self.keys[:num_pages]


@dataclass(slots=True)
class Times:
    """Moments of a sequence's life, in seconds of time.perf_counter; 0.0 until they happen."""

    submitted: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
