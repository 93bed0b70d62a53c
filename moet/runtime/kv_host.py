"""Cached KV in blocks of host memory: books only. Knows names and block ids, and no bytes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moet.runtime.page_pool import PagePool


def page_name(key: bytes) -> str:
    """The object that holds a page's bytes."""
    return f"{key.hex()}.page"


def rings_name(key: bytes) -> str:
    """The object that holds the resumable rings at a page's end."""
    return f"{key.hex()}.rings"


def object_names(keys: Sequence[bytes]) -> list[str]:
    """All objects that a chain of pages may have, head first."""
    return [name(key) for key in keys for name in (page_name, rings_name)]


@dataclass(frozen=True, slots=True)
class ObjectSizes:
    """page_bytes: of a page, and of a block. rings_bytes: of a resume snapshot."""

    page_bytes: int
    rings_bytes: int

    def num_bytes(self, name: str) -> int:
        """Bytes of an object."""
        return self.page_bytes if name.endswith(".page") else self.rings_bytes

    def num_blocks(self, name: str) -> int:
        """Blocks that an object takes."""
        return -(-self.num_bytes(name) // self.page_bytes)


class HostTier:
    """Objects in host blocks, least recently used first to go; those in use are held.

    The blocks are first_block and up of the host arena. A block's first reference is its object's,
    others are of those who use it.
    """

    def __init__(self, first_block: int, num_blocks: int) -> None:
        self.pool = PagePool(num_blocks)
        self._first = first_block
        self._blocks: OrderedDict[str, list[int]] = OrderedDict()  # oldest first

    def __contains__(self, name: str) -> bool:
        return name in self._blocks

    @property
    def num_objects(self) -> int:
        return len(self._blocks)

    @property
    def num_available(self) -> int:
        """Blocks that `take` could give now. O(objects)."""
        objects = self._blocks.values()
        return self.pool.num_free + sum(len(b) for b in objects if self._is_free_to_go(b))

    def take(self, num_blocks: int) -> list[int] | None:
        """Blocks for a new object, at the expense of old ones; None, if too many are held."""
        if num_blocks > self.pool.num_free:
            self._evict(num_blocks)
        if num_blocks > self.pool.num_free:
            return None
        return [self._first + block for block in self.pool.allocate(num_blocks)]

    def put(self, name: str, blocks: list[int]) -> None:
        """Keep an object in blocks that were taken for it."""
        assert name not in self._blocks
        self._blocks[name] = blocks

    def hold(self, name: str) -> list[int]:
        """The blocks of an object, which keep its bytes until they are released."""
        blocks = self._blocks[name]
        self.pool.retain([block - self._first for block in blocks])
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give back blocks that were held, or taken and not put."""
        self.pool.release([block - self._first for block in blocks])

    def touch(self, names: Sequence[str]) -> None:
        """Count objects as just used, the first one last."""
        for name in reversed(names):
            if name in self._blocks:
                self._blocks.move_to_end(name)

    def drop(self, name: str) -> None:
        """Forget an object, if it is there."""
        blocks = self._blocks.pop(name, None)
        if blocks is not None:
            self.release(blocks)

    def clear(self) -> None:
        """Forget every object."""
        for name in list(self._blocks):
            self.drop(name)

    def check(self, used: Iterable[int]) -> None:
        """Raise AssertionError unless exactly the objects and those in `used` refer to blocks."""
        self.pool.check()
        owned = [block for blocks in self._blocks.values() for block in blocks]
        assert len(owned) == len(set(owned)), "two objects share a block"
        expected = Counter([*owned, *used])
        for block in range(self.pool.num_pages):
            number = expected[self._first + block]
            assert self.pool.ref_count(block) == number, f"block {block} should have {number} refs"

    def _evict(self, num_blocks: int) -> None:
        """Drop the oldest objects that nobody holds until num_blocks are free, or all of them."""
        victims, missing = [], num_blocks - self.pool.num_free
        for name, blocks in self._blocks.items():
            if missing <= 0:
                break
            if self._is_free_to_go(blocks):
                victims.append(name)
                missing -= len(blocks)
        for name in victims:
            self.drop(name)

    def _is_free_to_go(self, blocks: list[int]) -> bool:
        return self.pool.ref_count(blocks[0] - self._first) == 1
