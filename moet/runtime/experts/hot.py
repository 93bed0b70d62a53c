"""The policy w2+hot: 2-bit experts, but a fixed set in FP4; the pack lists which rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moet.errors import ConfigError
from moet.kernels.moe import ExpertTable
from moet.kernels.split_experts import SplitTable
from moet.models.base import ExpertProvider, ResidentProvider
from moet.models.pack import Pack

HOT_NAME = "hot.json"


def read_hot(pack: Pack) -> list[int]:
    """Rows of the hot set, ascending. Raises ConfigError if the pack lists none or wrong ones."""
    path = pack.folder / HOT_NAME
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        good = all(type(row) is int and 0 <= row < pack.experts.num_rows for row in rows)
    except FileNotFoundError:
        raise ConfigError(
            f"--precision w2+hot needs {path}; moet bench experts --trace FILE --hot-rows N "
            f"--pack {pack.folder} writes it"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no hot set: {error!r}; write it again") from None
    if not good:
        raise ConfigError(
            f"{path} names rows beyond the {pack.experts.num_rows} there are; write it again"
        )
    return sorted(set(rows))


def write_hot(pack: Pack, rows: Sequence[int]) -> None:
    """Make these rows the pack's hot set."""
    content = json.dumps({"rows": sorted(rows)}) + "\n"
    (pack.folder / HOT_NAME).write_text(content, encoding="utf-8")


class HotExperts:
    """An ExpertProvider over another one, with the hot rows in memory in FP4."""

    def __init__(self, pack: Pack, rows: Sequence[int], base: ExpertProvider) -> None:
        self.base = base
        form, experts = pack.format("fp4"), pack.experts
        bytes_of = torch.empty(len(rows), form.row_bytes, dtype=torch.uint8)
        slot_of = torch.full((experts.num_rows,), -1)
        for slot, row in enumerate(rows):
            place, expert_id = divmod(row, experts.num_experts)
            bytes_of[slot] = pack.expert_row("fp4", experts.layers[place], expert_id)
            slot_of[row] = slot
        self._tables = {}
        for layer_idx in experts.layers:
            first = experts.row(layer_idx, 0)
            of_layer = slot_of[first : first + experts.num_experts]
            self._tables[layer_idx] = ExpertTable(form, bytes_of, of_layer)

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        """As ExpertProvider.resolve; the base is asked only for experts that are not hot."""
        hot = self._tables[layer_idx]
        cold = torch.where(hot.slot_of[expert_ids.clamp(min=0)] >= 0, -1, expert_ids)
        base = self.base.resolve(layer_idx, cold)
        return SplitTable.over(base, hot)


class HotOnDevice:
    """A ResidentProvider over another one, with the hot rows on the GPU in FP4.

    hot: of layers that have hot rows, their tables with bases for all experts.
    """

    def __init__(self, base: ResidentProvider, hot: Mapping[int, ExpertTable]) -> None:
        self.base, self._hot = base, dict(hot)

    def resident(self, layer_idx: int, num_rows: int = 1) -> ExpertTable:
        """As the base's, the hot experts before its own."""
        base, hot = self.base.resident(layer_idx, num_rows), self._hot.get(layer_idx)
        return base if hot is None else SplitTable.over(base, hot)

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        """The same, its rows prepared."""
        table = self.resident(layer_idx, len(expert_ids))
        table.prepare(expert_ids.contiguous())
        table.join()
        return table
