"""Rows that a device waits for: the feeder's books and rules, and a storm over the kernels."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch

from moet.errors import ExpertReadError
from moet.kernels.layout import W2Rows
from moet.runtime.experts.disk import RowFile
from moet.runtime.experts.feeder import RowFeeder
from moet.runtime.experts.host import Arena
from moet.runtime.experts.staged import StagedRows
from tests.kernels import emulation
from tests.runtime.experts.device_storm import FlakyFile, storm

FORM = W2Rows(64, 32)


class Fed:
    """A feeder over six rows with four places, polled by hand; requests are written as a device
    writes them."""

    def __init__(self, folder: Path, in_flight: int = 2) -> None:
        self.content = torch.arange(6, dtype=torch.uint8).repeat_interleave(FORM.row_bytes)
        (folder / "rows").write_bytes(self.content.numpy().tobytes())
        self.disk, self.arena = FlakyFile(), Arena(4, FORM.row_bytes)
        self.place_of = torch.full((6,), -1, dtype=torch.int32)
        self.requests = torch.zeros(1 + 8, dtype=torch.int32)
        file = RowFile(folder / "rows", FORM.row_bytes, preadv=self.disk.preadv)
        self.feeder = RowFeeder(
            self.arena,
            file,
            self.place_of,
            self.requests,
            file_rows=range(6),
            in_flight=in_flight,
            retry_after_s=0.02,
        )

    def ask(self, *rows: int) -> None:
        for row in rows:
            self.requests[1 + int(self.requests[0]) % 8] = row
            self.requests[0] += 1

    def until(self, *rows: int) -> None:
        """Poll until these rows are settled, one way or the other."""
        limit = time.monotonic() + 20
        while any(self.place_of[row] == -1 for row in rows) or self.feeder._reading:
            assert time.monotonic() < limit
            self.feeder.poll()
        self.feeder.check()

    def fill(self) -> None:
        """Rows 0..3 are there, read in that order and used once more."""
        for row in range(4):
            self.ask(row)
            self.until(row)
        self.ask(0, 1, 2, 3)
        self.feeder.poll()

    def holds(self, row: int) -> bool:
        place = int(self.place_of[row])
        return place >= 0 and bool((self.arena.place(place) == row).all())


def test_rows_come_when_they_are_asked_for_and_those_used_least_leave(tmp_path: Path) -> None:
    fed = Fed(tmp_path)
    fed.fill()
    assert all(fed.holds(row) for row in range(4))
    fed.ask(0)  # used again, so 1 is the next to leave
    fed.feeder.poll()
    fed.ask(4)
    fed.until(4)
    assert fed.holds(4)
    assert [int(fed.place_of[row]) for row in (1, 5)] == [-1, -1]
    assert fed.holds(0)
    fed.feeder.close()


def test_rows_that_a_fetch_may_be_reading_stay(tmp_path: Path) -> None:
    fed = Fed(tmp_path, in_flight=4)
    fed.fill()
    fed.ask(4)  # of five requests the last four may be in flight: 1, 2, 3, 4
    fed.until(4)
    assert int(fed.place_of[0]) == -1
    fed.ask(1, 2, 3, 4, 5)
    for _ in range(3):
        fed.feeder.poll()
    assert int(fed.place_of[1]) == -1, "the first of the five is the only one that may leave"
    fed.until(5)
    assert all(fed.holds(row) for row in (2, 3, 4, 5))
    fed.feeder.close()


def test_a_row_that_is_asked_for_while_it_leaves_stays(tmp_path: Path) -> None:
    fed = Fed(tmp_path, in_flight=1)
    fed.fill()

    class Late:
        """A place table whose device asks for a row at the moment its place is withdrawn."""

        def __init__(self, inner: object) -> None:
            self.inner, self.done = inner, False

        def __getitem__(self, row: int) -> int:
            return self.inner[row]  # type: ignore[index]

        def __setitem__(self, row: int, value: int) -> None:
            self.inner[row] = value  # type: ignore[index]
            if value == -1 and row == 0 and not self.done:
                self.done = True
                fed.ask(0)

    fed.feeder._place_of = Late(fed.feeder._place_of)  # type: ignore[assignment]
    fed.ask(4)
    fed.until(4)
    assert fed.holds(0)
    assert int(fed.place_of[1]) == -1
    fed.feeder.close()


def test_a_row_that_fails_is_named_and_tried_again(tmp_path: Path) -> None:
    fed = Fed(tmp_path)
    fed.disk.bad = {2}
    fed.ask(2, 3)
    fed.until(2, 3)
    assert int(fed.place_of[2]) == -2
    assert fed.holds(3)
    assert "rows, row 2" in (fed.feeder.message() or "")
    fed.disk.bad = set()
    time.sleep(0.03)
    fed.feeder.poll()
    assert int(fed.place_of[2]) != -2, "what failed a while ago counts as on disk or is read"
    assert fed.feeder.message() is None
    fed.ask(2)
    fed.until(2)
    assert fed.holds(2)
    fed.feeder.close()


def test_more_requests_than_the_ring_holds_lose_the_oldest_uses_alone(tmp_path: Path) -> None:
    fed = Fed(tmp_path)
    fed.ask(*[row % 3 for row in range(30)])
    fed.until(0, 1, 2)
    assert fed.feeder.num_rows == 3
    fed.feeder.close()


def test_a_storm_leaves_every_row_right_or_absent(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    kernels = emulation.build(("expert_cache",), 90, num_sms=2)
    happened = storm(kernels, torch.device("cpu"), tmp_path, 30)
    assert min(happened.values()) > 0, happened


def test_rows_in_bulk_come_through_a_small_buffer_or_say_which_did_not(tmp_path: Path) -> None:
    content = torch.randint(0, 256, (11, FORM.row_bytes), dtype=torch.uint8)
    (tmp_path / "rows").write_bytes(content.numpy().tobytes())
    disk = FlakyFile()
    file = RowFile(tmp_path / "rows", FORM.row_bytes, preadv=disk.preadv)
    staged = StagedRows(file, [10 - n for n in range(11)], pin=False, rows_at_once=2)
    out = torch.zeros(9, FORM.row_bytes, dtype=torch.uint8)
    staged.copy(1, out)
    assert torch.equal(out, content.flip(0)[1:10])
    disk.bad = {4}
    with pytest.raises(ExpertReadError, match="rows, row 4"):
        staged.copy(0, out)
    staged.close()
