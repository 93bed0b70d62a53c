"""How many tokens to draft for a sequence in the next step. Pure functions of what was accepted so
far, of the load and of a table of step costs; the tokens at temperature 0 never depend on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DECAY = 0.9  # of what is known, per verified step: about the last ten count
PRIOR_WEIGHT = 1.0  # steps
PRIOR_RATE = 0.7  # of a draft, if those before it were accepted; a guess until there are numbers
COST_DECAY = 0.99  # of what is known about costs, per step
COST_TRUST = 0.2  # steps that the shape of the guess is worth
PROBE_INTERVAL = 32  # steps without drafts, after which one draft tells whether that is still right


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step costs, in any one unit: `fixed`, `per_row`, and `per_draft` round of drafting.

    The default is the shape of a step that streams weights: fixed costs are most of it until a few
    dozen rows are in it. `CostMeter` learns a machine's own.
    """

    fixed: float = 1.0
    per_row: float = 0.03
    per_draft: float = 0.08

    def of(self, num_rows: int, num_drafts: int) -> float:
        return self.fixed + self.per_row * num_rows + self.per_draft * num_drafts


GPU_COSTS = StepCosts(fixed=1.0, per_row=0.1, per_draft=0.1)
"""A guess for V4-Flash on a GPU, from bench/results/step.json: every row brings experts along."""


class CostMeter:
    """Learns what steps cost from steps that ran, in seconds: least squares over the last hundred
    or so, drawn to the shape of a guess, as steps of one kind alone do not tell its parts apart.

    The device waits while this is done: plain numbers are ten times as fast as arrays of three.
    """

    def __init__(self, guess: StepCosts = GPU_COSTS) -> None:
        self._guess = guess.fixed, guess.per_row, guess.per_draft
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3

    def observe(self, num_rows: int, num_drafts: int, time_s: float) -> None:
        """One step of so many rows and rounds of drafting, and no prompts, took this long."""
        parts = 1.0, float(num_rows), float(num_drafts)
        weight = 1.0 / _dot(self._guess, parts) ** 2  # errors count by their share of a step
        for i, part in enumerate(parts):
            line, factor = self._squares[i], weight * part
            self._products[i] = COST_DECAY * self._products[i] + factor * time_s
            for j in range(3):
                line[j] = COST_DECAY * line[j] + factor * parts[j]

    @property
    def costs(self) -> StepCosts:
        """What is known now; the guess before anything is."""
        guess = self._guess
        expected = _dot(guess, [_dot(line, guess) for line in self._squares])
        if expected == 0.0:
            return StepCosts(*guess)
        scale = _dot(guess, self._products) / expected
        lines = []
        for i, line in enumerate(self._squares):
            trust = COST_TRUST / (3 * guess[i] ** 2)
            lines.append([*line, self._products[i] + trust * scale * guess[i]])
            lines[i][i] += trust
        least = [0.01 * scale * part for part in guess]
        return StepCosts(*map(max, _solved(lines), least))


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def _solved(lines: list[list[float]]) -> list[float]:
    """x of A x = b. lines: of A, 3 x 3 and positive definite, each with its number of b behind."""
    for i, line in enumerate(lines):
        for other in lines[i + 1 :]:
            factor = other[i] / line[i]
            for j in range(i + 1, 4):
                other[j] -= factor * line[j]
    z = lines[2][3] / lines[2][2]
    y = (lines[1][3] - lines[1][2] * z) / lines[1][1]
    x = (lines[0][3] - lines[0][1] * y - lines[0][2] * z) / lines[0][0]
    return [x, y, z]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of one sequence: how often its draft j was looked at and accepted, lately.

    offered[j] counts steps in which drafts 0..j-1 held and there was a draft j.
    """

    offered: tuple[float, ...] = ()
    accepted: tuple[float, ...] = ()

    def after(self, num_drafts: int, num_accepted: int) -> Acceptance:
        """With one more step in which num_accepted of num_drafts held."""
        size = max(num_drafts, len(self.offered))
        offered = [DECAY * x for x in self.offered] + [0.0] * (size - len(self.offered))
        accepted = [DECAY * x for x in self.accepted] + [0.0] * (size - len(self.accepted))
        for j in range(min(num_drafts, num_accepted + 1)):
            offered[j] += 1.0
            accepted[j] += j < num_accepted
        return Acceptance(tuple(offered), tuple(accepted))

    def rates(self, num_drafts: int) -> list[float]:
        """Chance of each draft, given the ones before it; a guess is worth PRIOR_WEIGHT steps."""
        rates, guess = [], PRIOR_RATE
        for j in range(num_drafts):
            offered = self.offered[j] if j < len(self.offered) else 0.0
            accepted = self.accepted[j] if j < len(self.accepted) else 0.0
            guess = (accepted + PRIOR_WEIGHT * guess) / (offered + PRIOR_WEIGHT)
            rates.append(guess)  # a later draft is thought to be no better than this one
        return rates


def draft_length(
    max_drafts: int,
    acceptance: Acceptance,
    *,
    num_decoding: int,
    costs: StepCosts,
    num_plain_steps: int = 0,
) -> int:
    """The number of drafts, 0..max_drafts, with the most tokens per cost; of equals, the smaller.

    num_decoding: sequences that share the step, each taken to draft as many. num_plain_steps: steps
    without drafts since the last one with some.
    """
    if num_plain_steps >= PROBE_INTERVAL and max_drafts > 0:
        return 1
    best, most = 0, 1.0 / costs.of(num_decoding, 0)
    tokens, chance = 1.0, 1.0
    for k, rate in enumerate(acceptance.rates(max_drafts), start=1):
        chance *= rate
        tokens += chance
        gain = tokens / costs.of(num_decoding * (1 + k), k)
        if gain > most:
            best, most = k, gain
    return best


def fitted(times: Mapping[tuple[int, int], float]) -> StepCosts:
    """Costs that come nearest to times of steps, by their numbers of rows and of drafts."""
    meter = CostMeter()
    for (num_rows, num_drafts), time_s in times.items():
        meter.observe(num_rows, num_drafts, time_s)
    return meter.costs
