"""Paged allocator. Hands out page ids and counts references; knows nothing of tensors or tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moet.errors import CapacityError


class PagePool:
    """`num_pages` ids, 0 and up. A page is free, or has at least one reference."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._ref_counts = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def ref_count(self, page: int) -> int:
        return self._ref_counts[page]

    def allocate(self, num_pages: int) -> list[int]:
        """Take num_pages free pages, each with reference count 1.

        Raises CapacityError, changing nothing, if fewer are free. O(num_pages), host only.
        """
        if num_pages > len(self._free):
            raise CapacityError(
                f"{num_pages} pages wanted, {len(self._free)} of {self.num_pages} are free"
            )
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._ref_counts[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to pages that have one already."""
        for page in pages:
            assert self._ref_counts[page] > 0, f"page {page} is free"
            self._ref_counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference of each page; those left without any become free."""
        for page in pages:
            count = self._ref_counts[page] - 1
            assert count >= 0, f"page {page} is free already"
            self._ref_counts[page] = count
            if count == 0:
                self._free.append(page)

    def resize(self, num_pages: int) -> None:
        """Another number of pages, while all are free."""
        assert self.num_used == 0, "pages are in use"
        self.num_pages = num_pages
        self._ref_counts = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    def check(self) -> None:
        """Raise AssertionError if a page is lost, free twice, or free and referenced."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is in the free list twice"
        for page, count in enumerate(self._ref_counts):
            assert count >= 0, f"page {page} has {count} references"
            assert (count == 0) == (page in free), f"page {page}: {count} references, free list"
