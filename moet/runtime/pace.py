"""How many rows of prefill a step may carry beside decoding sequences. Numbers in, numbers out.

A sequence that decodes gets a token per step, so whatever lengthens a step slows it down. Sizes and
timing of chunks never show in a result, so the measured times that decide here may vary freely.
"""

from __future__ import annotations

MIN_ROWS = 256  # a smaller chunk reads as many weights, so it saves little time
LONGEST_S = 0.09  # of a step that carries prefills, if what it may cost on average is less
WORTH = 1.25  # times the least chunk: less would save little, for most of its time is no row's
SMOOTHING = 0.2  # weight of the newest measurement
PART_S = 0.008  # of a step, that parts of a divided pass may take in any case
FEW_PARTS = 4  # whatever they were thought to take, twice as many do no harm
CREDIT = 2  # steps whose allowance may be taken later: what is measured is known so many late


class PrefillPace:
    """Keeps what prefills take from decoding sequences under a share of their rate.

    If a step of the decoding sequences alone takes d seconds, steps with prefills beside them may
    take d / (1 - share) on average. What steps cost beyond it is a debt, and while there is one no
    step carries prefills; so the share holds whatever a chunk turns out to cost. Large chunks read
    weights less often: they grow until a step takes LONGEST_S, or what it may take on average, or
    WORTH times what the least chunk costs, whichever is most. share 1 limits nothing.

    A pass that can be divided need not be small: as many of its parts go with a step as PART_S or
    the average allows, whichever is more.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.debt_s = 0.0
        self._alone_s: dict[int, float] = {}  # by size class of the decoding batch
        self._chunk = MIN_ROWS
        self._least_s: float | None = None  # that the least chunk costs, or some larger one did
        self._part_s: dict[int, float] = {}  # of a divided pass, by size class of its rows
        self._last_parts = 1  # that the last step with parts has had

    def rows(self, num_decoding: int, budget: int) -> int:
        """Rows of prefill that the next step may carry, at most budget."""
        if self.share >= 1 or num_decoding == 0:
            return budget
        if num_decoding.bit_length() not in self._alone_s or self.debt_s > 0:
            return 0  # a step without prefills is measured, or pays
        return min(budget, self._chunk)

    def parts(self, num_decoding: int, num_rows: int) -> int:
        """Parts of a divided pass over num_rows that the next step may carry."""
        alone_s = self._nearest_alone_s(num_decoding)
        if alone_s is None or self.debt_s > 0:
            return 0
        part_s = self._part_s.get(num_rows.bit_length())
        if part_s is None:
            return 1
        longest_s = max(PART_S, self._allowance(alone_s) - self.debt_s)
        wanted = int(longest_s / max(part_s, 1e-9))
        return min(max(1, wanted), 2 * max(self._last_parts, FEW_PARTS))

    def _nearest_alone_s(self, num_decoding: int) -> float | None:
        """Time of a step of about so many decoding sequences; None if none was measured."""
        size, known = num_decoding.bit_length(), self._alone_s
        return known[min(known, key=lambda each: abs(each - size))] if known else None

    def observe(self, num_decoding: int, num_prefill_rows: int, seconds: float) -> None:
        """Take the measured time of a step."""
        if self.share >= 1:
            return
        if num_decoding == 0:
            self.debt_s = 0.0
            return
        size = num_decoding.bit_length()
        if num_prefill_rows == 0:
            self._alone_s[size] = _smooth(self._alone_s.get(size), seconds)
        alone_s = self._alone_s.get(size)
        if alone_s is None:  # the batch has grown since the step was made
            return
        extra_s = max(seconds - alone_s, 0.0) if num_prefill_rows else 0.0
        if num_prefill_rows:
            least_s = self._learn_least(num_prefill_rows, extra_s)
            longest_s = max(self._allowance(alone_s), LONGEST_S - alone_s, WORTH * least_s)
            self._resize(num_prefill_rows, longest_s / max(extra_s, 1e-9))
        self._owe(extra_s, alone_s)

    def observe_parts(
        self, num_decoding: int, num_rows: int, num_parts: int, seconds: float
    ) -> None:
        """Take the time of a step that carried parts of a divided pass over num_rows.

        num_decoding may be 0: those who decode wait for results of their last step.
        """
        alone_s = (self._nearest_alone_s(num_decoding) or 0.0) if num_decoding else 0.0
        extra_s = max(seconds - alone_s, 0.0)
        size, self._last_parts = num_rows.bit_length(), num_parts
        self._part_s[size] = _smooth(self._part_s.get(size), extra_s / num_parts)
        self._owe(extra_s, alone_s)

    def _owe(self, extra_s: float, alone_s: float) -> None:
        allowance_s = self._allowance(alone_s)
        self.debt_s = max(self.debt_s + extra_s - allowance_s, -CREDIT * allowance_s)

    def _learn_least(self, num_rows: int, extra_s: float) -> float:
        if num_rows <= MIN_ROWS or self._least_s is None:
            self._least_s = _smooth(self._least_s, extra_s)
        else:
            self._least_s = min(self._least_s, extra_s)
        return self._least_s

    def _resize(self, num_rows: int, room: float) -> None:
        """A chunk of num_rows took 1 / room of the longest time that it may take.

        Chunks end at borders of pages, so that one of more than half of what it may be has told
        what such chunks cost. A shorter one, as the last of a prompt, tells only of excess.
        """
        if room < 1:
            self._chunk = max(MIN_ROWS, int(num_rows * room))
        elif 2 * num_rows > self._chunk:
            self._chunk = int(self._chunk * min(room, 2.0))

    def _allowance(self, alone_s: float) -> float:
        """Seconds that a step may take beyond its decoding."""
        return alone_s * self.share / (1 - self.share)


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
