"""Which shapes of steps get graphs of their own, and which of them serves a step. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from moet.errors import ConfigError

REACH_FACTOR = 8  # between the widths of page tables that have graphs of their own
MIN_REACH_PAGES = 16


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """What a graph was captured for: so many sequences of so many rows, over so many pages each."""

    num_seqs: int
    num_rows: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class Shapes:
    """All combinations of numbers of sequences, rows per sequence and pages, ascending each."""

    buckets: tuple[int, ...]
    rows_per_seq: tuple[int, ...]
    reaches: tuple[int, ...]

    def all(self) -> list[Shape]:
        """Every shape, the largest first."""
        sizes = (reversed(each) for each in (self.reaches, self.buckets, self.rows_per_seq))
        return [Shape(num_seqs, num_rows, pages) for pages, num_seqs, num_rows in product(*sizes)]

    def most(self) -> tuple[int, int, int]:
        """The largest of each."""
        return self.buckets[-1], self.rows_per_seq[-1], self.reaches[-1]

    def bucket(self, num_seqs: int) -> int:
        """The least number of sequences that has graphs and is not below num_seqs."""
        return self.least(num_seqs, 1, 1).num_seqs

    def least(self, num_seqs: int, num_rows: int, num_pages: int) -> Shape:
        """The least shape that a step fits. num_rows: most of any sequence; num_pages likewise.

        Raises ConfigError if there is none.
        """
        seqs = _first(self.buckets, num_seqs)
        rows = _first(self.rows_per_seq, num_rows)
        pages = _first(self.reaches, num_pages)
        if seqs is None or rows is None or pages is None:
            most_seqs, most_rows, most_pages = self.most()
            raise ConfigError(
                f"a step of {num_seqs} sequences with {num_rows} rows and {num_pages} pages fits "
                f"none of the graphs: at most {most_seqs} sequences, {most_rows} rows and "
                f"{most_pages} pages"
            )
        return Shape(seqs, rows, pages)


def _first(sizes: tuple[int, ...], least: int) -> int | None:
    return next((size for size in sizes if size >= least), None)


def reaches(max_pages: int) -> tuple[int, ...]:
    """Widths of page tables that get graphs of their own, ascending; the last one is max_pages.

    What a step's kernels launch grows with the width, though its result does not.
    """
    widths, width = [], MIN_REACH_PAGES
    while width < max_pages:
        widths.append(width)
        width *= REACH_FACTOR
    return (*widths, max_pages)


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of sequences that get graphs of their own: powers of two and what lies halfway."""
    sizes = {1, max_num_seqs}
    for exponent in range(1, max_num_seqs.bit_length()):
        sizes |= {2**exponent, 3 * 2 ** (exponent - 1)}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))


def row_counts(max_rows: int) -> tuple[int, ...]:
    """Rows per sequence that get graphs of their own: powers of two, and the most there may be."""
    counts = {2**exponent for exponent in range(max_rows.bit_length())} | {max_rows}
    return tuple(sorted(counts))
