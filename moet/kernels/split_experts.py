"""A layer whose experts come from two tables, some of them in another format: each row's parts are
made by the table that has the expert, then summed in the order of its choices. Knows tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moet.kernels.moe import ExpertTable


@dataclass(frozen=True, slots=True)
class SplitTable(ExpertTable):
    """A layer's table in which some experts are those of another one.

    rows, slot_of, bases and format are those of `base`. hot: -1 in its slot_of where an expert is
    the base's; on a GPU it has bases for all experts.
    """

    base: ExpertTable | None = None
    hot: ExpertTable | None = None

    @classmethod
    def over(cls, base: ExpertTable, hot: ExpertTable) -> SplitTable:
        """hot before base."""
        return cls(base.format, base.rows, base.slot_of, base.bases, base=base, hot=hot)

    def parts(self) -> tuple[ExpertTable, ExpertTable]:
        """Base and hot."""
        assert self.base is not None
        assert self.hot is not None
        return self.base, self.hot

    def is_hot(self, expert_ids: Tensor) -> Tensor:
        """The same shape, bool; ids below 0 are not."""
        _, hot = self.parts()
        return (hot.slot_of[expert_ids.clamp(min=0)] >= 0) & (expert_ids >= 0)

    def prepare(self, expert_ids: Tensor, *lists: tuple[Tensor, Tensor]) -> None:
        """As ExpertTable.prepare: the base is asked for what is not hot."""
        assert not lists, "a list names the slots of one table"
        self.parts()[0].prepare(torch.where(self.is_hot(expert_ids), -1, expert_ids))

    def join(self) -> None:
        """As ExpertTable.join."""
        self.parts()[0].join()

    def matrices(self, expert_id: int) -> tuple[Tensor, Tensor, Tensor]:
        """As ExpertTable.matrices."""
        base, hot = self.parts()
        return (hot if hot.slot_of[expert_id] >= 0 else base).matrices(expert_id)

    def places(self) -> tuple[Tensor, Tensor]:
        """Slots of all experts in base and in hot, for products over all choices of which those of
        the other table are not read: there they have any slot, so that nothing is fetched."""
        base, hot = self.parts()
        there = hot.slot_of >= 0
        return torch.where(there, 0, base.slot_of), torch.where(there, hot.slot_of, 0)
