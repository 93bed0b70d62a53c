"""Precision as a policy of the request: which experts compute a row, and which rows go twice.

    w2      every row with 2-bit experts
    fp4     every row with FP4 experts
    w2+hot  2-bit, but a fixed set of experts that the pack lists in FP4
    gate    2-bit; a generated row whose likeliest next token has at most the probability tau is
            computed again with FP4 experts, and the token comes from that

Rows of the prompt follow the policy, in FP4 for `gate`, or one precision for all where the server
says so; they are never judged. What a policy computes is a function of tokens and weights: never of
what happens to be resident, of drafts or of batch mates. With drafts, the first row that is
accepted and uncertain is the last of its step: what was written for those behind it is written
again, as for drafts that do not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moet.models.base import ExpertProvider, ForwardInput, ModelOutput
from moet.runtime.batch import Row
from moet.runtime.passes import Passes
from moet.runtime.sequence import Sequence as Seq

ROWS_OF: Mapping[str, str] = {"w2": "w2", "fp4": "fp4", "w2+hot": "w2+hot", "gate": "w2"}
"""Policy -> the provider that computes a row at first."""

PROMPTS_OF: Mapping[str, str] = {**ROWS_OF, "gate": "fp4"}
"""Policy -> the provider of a prompt's rows: what is read in 2 bits costs more later than it saves,
so a policy that has FP4 experts reads with them."""


class PrecisionSet:
    """The policies of a server. `tau` may change between steps; requests under way follow it.

    providers: "w2", "fp4" and "w2+hot", those that there are. prefill: the provider of all rows of
    prompts, or None. offered: policies that a request may ask for besides the default one.
    """

    def __init__(
        self,
        default: str,
        providers: Mapping[str, ExpertProvider],
        *,
        offered: Sequence[str] = (),
        prefill: str | None = None,
        tau: float = 0.6,
    ) -> None:
        self.default = default
        self.providers = dict(providers)
        self.prefill = prefill
        self.offered = tuple(name for name in offered if name != default)
        self.tau = tau
        self.num_judged = 0
        self.num_again = 0
        for policy in (default, *self.offered):
            needed = {ROWS_OF.get(policy, policy)} | ({"fp4"} if policy == "gate" else set())
            assert needed <= self.providers.keys(), f"{policy} needs {needed}"
        assert prefill is None or prefill in self.providers

    @classmethod
    def single(cls, provider: ExpertProvider, name: str = "w2") -> PrecisionSet:
        """One provider for every row there is."""
        return cls(name, {ROWS_OF.get(name, name): provider})

    @property
    def is_single(self) -> bool:
        """Whether no row can be computed in two ways."""
        return len(self.providers) == 1

    @property
    def drafting(self) -> ExpertProvider:
        """What drafts are made with. They are proposals, so the cheapest will do."""
        return next(iter(self.providers.values()))

    @property
    def decoding(self) -> ExpertProvider:
        """What computes generated rows of the default policy, at first."""
        return self.providers[self.of_rows(self.default)]

    def policy(self, asked: str | None) -> str:
        """The policy of a request."""
        return asked or self.default

    def of_rows(self, policy: str) -> str:
        """The provider of generated rows, at first."""
        return ROWS_OF.get(policy, policy)

    def of_prompt(self, policy: str) -> str:
        """The provider of a prompt's rows: pages may be shared by policies where it is equal."""
        return self.prefill or PROMPTS_OF.get(policy, policy)

    def is_usual(self, policy: str, *, of_prompt: bool) -> bool:
        """Whether the experts of the default policy compute such a row, once and for all."""
        of = self.of_prompt if of_prompt else self.of_rows
        return of(policy) == of(self.default) and (of_prompt or policy != "gate")

    def unusual(self) -> list[ExpertProvider]:
        """What computes generated rows that are not usual."""
        names = list[str]()
        for policy in (self.default, *self.offered):
            if not self.is_usual(policy, of_prompt=False):
                names += [self.of_rows(policy), *(["fp4"] if policy == "gate" else [])]
        return [self.providers[name] for name in dict.fromkeys(names)]

    def shares_generated(self, policy: str) -> bool:
        """Whether generated tokens leave the pages that a prompt of them would leave."""
        return policy != "gate" and self.of_rows(policy) == self.of_prompt(policy)


def max_probability(logits: Tensor) -> Tensor:
    """[n] float64: the largest probability of each row at temperature 1, where the logits are.

    logits: [n, vocab_size] fp32. Row by row, so that a row's value does not depend on the others.
    """
    rows = [row - row.max() for row in logits.double()]
    return torch.stack([row.exp().sum() for row in rows]).reciprocal()


@dataclass(slots=True)
class _Part:
    """Some rows of a sequence that one provider computes; their outputs, once known."""

    row: Row
    name: str
    logits: Tensor | None = None
    hidden_states: Tensor | None = None


Target = Callable[[ForwardInput, ExpertProvider], ModelOutput]
"""Runs the model on a step's input with these experts."""


class PrecisePasses:
    """Passes of the target model, each row with the experts that its policy names.

    `unserved` and `num_splits` are those of the last `run` and of `again` since.
    """

    def __init__(self, passes: Passes, target: Target, precisions: PrecisionSet) -> None:
        self.passes = passes
        self._target = target
        self.precisions = precisions
        self.unserved: dict[int, str] = {}
        self.num_splits = 0

    def run(self, rows: list[Row]) -> ModelOutput:
        """As Passes.run, over the rows of a step."""
        self.unserved, self.num_splits = {}, 0
        if self.precisions.is_single:
            return self._pass(rows, next(iter(self.precisions.providers)))
        parts = [self._parts(row) for row in rows]
        names = {part.name for of_row in parts for part in of_row}
        if len(names) == 1 and all(len(of_row) == 1 for of_row in parts):
            return self._pass(rows, names.pop())
        for turn in range(max(len(of_row) for of_row in parts)):
            coming = [of_row[turn] for of_row in parts if turn < len(of_row)]
            for name in dict.fromkeys(part.name for part in coming):
                self._together([part for part in coming if part.name == name], name)
        return self._joined([part for of_row in parts for part in of_row])

    def uncertain(
        self, rows: Sequence[Row], depth: int, logits: Tensor, known: Callable[[Tensor], Tensor]
    ) -> list[int]:
        """Which of the rows are to be computed again, at `depth` of those that may make a token.

        logits: [len(rows), vocab_size], as they came. known: takes padding of the vocabulary out.
        """
        judged = [n for n, row in enumerate(rows) if self._is_judged(row, depth)]
        if not judged:
            return []
        is_uncertain = max_probability(known(logits[judged])) <= self.precisions.tau
        again = [n for n, yes in zip(judged, is_uncertain.tolist(), strict=True) if yes]
        self.precisions.num_judged += len(judged)
        self.precisions.num_again += len(again)
        return again

    def again(self, rows: Sequence[Row], depth: int) -> ModelOutput:
        """The rows' positions at that depth once more, with FP4 experts, one row a sequence."""
        return self._pass([_single(row, depth) for row in rows], "fp4")

    def _is_judged(self, row: Row, depth: int) -> bool:
        policy = self.precisions.policy(row.seq.request.params.precision)
        if policy != "gate":
            return False
        position = position_of(row, depth)
        return position >= row.seq.prompt_len and position not in row.seq.gated

    def _parts(self, row: Row) -> list[_Part]:
        """A row's tokens by the provider that computes them; a replay repeats what was done."""
        precisions, seq = self.precisions, row.seq
        policy = precisions.policy(seq.request.params.precision)
        if row.start < seq.prompt_len:
            assert row.end <= seq.prompt_len
            return [_Part(row, precisions.of_prompt(policy))]
        name = precisions.of_rows(policy)
        parts: list[_Part] = []
        for border in _borders(row, seq):
            front, row = row.split(border)
            parts.append(_Part(front, "fp4" if front.start in seq.gated else name))
        return [*parts, _Part(row, "fp4" if row.start in seq.gated else name)]

    def _together(self, parts: list[_Part], name: str) -> None:
        going = [part for part in parts if part.row.slot not in self.unserved]
        if not going:
            return
        output = self._pass([part.row for part in going], name)
        num_logits = [len(part.row.targets) + part.row.num_samples for part in going]
        logits = torch.split(output.logits, num_logits)
        hidden = torch.split(output.hidden_states, [part.row.num_tokens for part in going])
        for part, own, states in zip(going, logits, hidden, strict=True):
            part.logits, part.hidden_states = own, states

    def _joined(self, parts: list[_Part]) -> ModelOutput:
        """All outputs in order; zeros for rows that could not be computed."""
        known = [part.hidden_states for part in parts if part.hidden_states is not None]
        for part in parts:
            if part.logits is None or part.hidden_states is None:
                num_logits = len(part.row.targets) + part.row.num_samples
                part.logits = torch.zeros(num_logits, self.passes.vocab_size)
                part.hidden_states = known[0].new_zeros(part.row.num_tokens, *known[0].shape[1:])
        logits = [part.logits for part in parts if part.logits is not None]
        hidden = [part.hidden_states for part in parts if part.hidden_states is not None]
        return ModelOutput(torch.cat(logits), torch.cat(hidden))

    def _pass(self, rows: list[Row], name: str) -> ModelOutput:
        provider = self.precisions.providers[name]

        def call(inputs: ForwardInput, _: slice) -> ModelOutput:
            return self._target(inputs, provider)

        output = self.passes.run(rows, call)
        self.unserved.update(self.passes.unserved)
        self.num_splits += self.passes.num_splits
        return output


def position_of(row: Row, depth: int) -> int:
    """Position of the depth-th of a row's tokens that may make a token."""
    return row.end - row.num_samples + depth


def _borders(row: Row, seq: Seq) -> list[int]:
    """Positions within a row before which the provider changes."""
    if not seq.gated:
        return []
    inside = range(row.start + 1, row.end)
    return [p for p in inside if (p in seq.gated) != (p - 1 in seq.gated)]


def _single(row: Row, depth: int) -> Row:
    """The same position by itself."""
    start = position_of(row, depth)
    token_ids = None if row.token_ids is None else [row.token_ids[start - row.start]]
    return replace(
        row,
        start=start,
        num_tokens=1,
        token_ids=token_ids,
        sample=True,
        first_logprob=-1,
        targets=[],
        snapshot=None,
        proposals=(),
        masks=None,
        next_token=None,
    )
