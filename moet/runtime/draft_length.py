"""How many tokens to draft for a sequence in the next step. Pure functions of what was accepted so
far, of the load and of a table of step costs; the tokens at temperature 0 never depend on it."""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.9  # of what is known, per verified step: about the last ten count
PRIOR_WEIGHT = 1.0  # steps
PRIOR_RATE = 0.7  # of a draft, if those before it were accepted; a guess until there are numbers
PROBE_INTERVAL = 32  # steps without drafts, after which one draft tells whether that is still right


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step costs, in any one unit: `fixed`, `per_row`, and `per_draft` round of drafting.

    The default is the shape of a step that streams weights: fixed costs are most of it until a few
    dozen rows are in it. `bench step` measures a machine's own.
    """

    fixed: float = 1.0
    per_row: float = 0.03
    per_draft: float = 0.08

    def of(self, num_rows: int, num_drafts: int) -> float:
        return self.fixed + self.per_row * num_rows + self.per_draft * num_drafts


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
