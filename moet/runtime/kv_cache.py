"""A model's state as raw bytes: device tensors, and host memory for what has to leave them.

Built from the model's KVCacheSpec; what an entry means is the model's affair. Beside the pages and
rings there are two arenas: blocks of one page's bytes in host memory, for what has to leave the
device, and resume snapshots of the prefix cache on the device. Ids are handed out elsewhere; this
file only copies. On a GPU copies are queued like a step's work: what a step has queued is there
when its results are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moet.errors import CapacityError, ConfigError
from moet.models.base import KVCacheSpec, KVGroup

PAGES_AT_ONCE = 32  # gathered on the device; bounds what that takes beside the pages


def resume_bytes(spec: KVCacheSpec) -> int:
    """Bytes of one resume snapshot; 0 if any page border can be resumed without one."""
    return sum(g.page_bytes * len(g.layers) for g in spec.groups if g.kind == "ring" and g.resume)


class KVCache:
    """`tensors` is what Model.forward gets: name -> uint8 [layers, pages or slots, page_bytes]."""

    def __init__(
        self,
        spec: KVCacheSpec,
        *,
        num_pages: int,
        num_seq_slots: int,
        num_host_blocks: int,
        num_snapshots: int,
        device: str = "cpu",
    ) -> None:
        if spec.bytes_per_page == 0:
            raise ConfigError("the model keeps no paged state; the runtime has nothing to page")
        self.spec = spec
        self.block_bytes = spec.bytes_per_page
        self.ring_blocks = -(-spec.bytes_per_seq // self.block_bytes)  # per sequence
        self.num_host_blocks = num_host_blocks
        self.num_snapshots = num_snapshots
        sizes = {"paged": num_pages, "ring": num_seq_slots}
        self.tensors: dict[str, Tensor] = {
            g.name: torch.zeros(
                (len(g.held_layers), sizes[g.kind], g.page_bytes), dtype=torch.uint8, device=device
            )
            for g in spec.groups
        }
        self._paged = [g for g in spec.groups if g.kind == "paged"]
        self._rings = [g for g in spec.groups if g.kind == "ring"]
        self._resumable = [g for g in self._rings if g.resume]
        pinned = torch.device(device).type == "cuda"  # so that copies need not be waited for
        shape = num_host_blocks, self.block_bytes
        self._blocks = torch.zeros(shape, dtype=torch.uint8, pin_memory=pinned)
        held_bytes = sum(group.held_bytes for group in self._resumable)
        self._snapshots = torch.zeros((num_snapshots, held_bytes), dtype=torch.uint8, device=device)

    def resize(self, num_pages: int) -> None:
        """Another number of pages, empty ones; whoever captured steps must do so again.

        Raises CapacityError if the device has no room; there are as many as before then.
        """
        old = self.tensors[self._paged[0].name].shape[1]
        try:
            self._allocate_pages(num_pages)
        except torch.OutOfMemoryError as error:
            self._allocate_pages(old)
            wanted = num_pages * self.block_bytes
            raise CapacityError(f"the device has no room for {wanted} bytes of pages") from error

    def _allocate_pages(self, num_pages: int) -> None:
        device = self._snapshots.device
        for group in self._paged:
            self.tensors[group.name] = torch.empty(0, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        for group in self._paged:
            shape = len(group.held_layers), num_pages, group.page_bytes
            with torch.inference_mode(False):
                self.tensors[group.name] = torch.zeros(shape, dtype=torch.uint8, device=device)

    def pages_to_host(self, pages: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy page pages[i] of every paged group into host block blocks[i]."""
        for first in range(0, len(pages), PAGES_AT_ONCE):
            part = list(pages[first : first + PAGES_AT_ONCE])
            groups = [self.tensors[group.name][:, part] for group in self._paged]
            flat = torch.cat([g.transpose(0, 1).reshape(len(part), -1) for g in groups], 1)
            for row, block in zip(flat, blocks[first : first + PAGES_AT_ONCE], strict=True):
                self._blocks[block, : len(row)].copy_(row, non_blocking=True)

    def pages_from_host(self, pages: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy host block blocks[i] back into page pages[i]."""
        for first in range(0, len(pages), PAGES_AT_ONCE):
            part = list(pages[first : first + PAGES_AT_ONCE])
            flat = self._to_device(blocks[first : first + PAGES_AT_ONCE])
            offset = 0
            for group in self._paged:
                rows = flat[:, offset : offset + group.held_bytes]
                rows = rows.reshape(len(part), -1, group.page_bytes)
                self.tensors[group.name][:, part] = rows.transpose(0, 1)
                offset += group.held_bytes

    def rings_to_host(self, slot: int, blocks: Sequence[int]) -> None:
        """Copy all ring state of a sequence slot into `ring_blocks` host blocks."""
        if self._rings:
            self._to_host(self._gather(self._rings, slot), blocks)

    def rings_from_host(self, slot: int, blocks: Sequence[int]) -> None:
        """Copy ring state back from host blocks into a sequence slot."""
        self._scatter(self._rings, slot, self._to_device(blocks).reshape(-1))

    def save_snapshot(self, slot: int, snapshot: int) -> None:
        """Keep the resumable rings of a sequence slot, on the device."""
        self._snapshots[snapshot] = self._gather(self._resumable, slot)

    def restore_snapshot(self, slot: int, snapshot: int) -> None:
        """Put kept rings into a sequence slot."""
        self._scatter(self._resumable, slot, self._snapshots[snapshot])

    def snapshot_to_host(self, snapshot: int, blocks: Sequence[int]) -> None:
        """Copy a snapshot into host blocks, the last of which it may not fill."""
        self._to_host(self._snapshots[snapshot], blocks)

    def snapshot_from_host(self, snapshot: int, blocks: Sequence[int]) -> None:
        """Copy host blocks back into a snapshot."""
        for n, block in enumerate(blocks):
            part = self._snapshot_part(snapshot, n)
            part.copy_(self._blocks[block, : len(part)], non_blocking=True)

    def _to_host(self, flat: Tensor, blocks: Sequence[int]) -> None:
        """Bytes of the device into blocks, the last of which they may not fill."""
        parts = torch.split(flat, self.block_bytes)
        for part, block in zip(parts, blocks, strict=False):
            self._blocks[block, : len(part)].copy_(part, non_blocking=True)

    def _to_device(self, blocks: Sequence[int]) -> Tensor:
        """[n, block_bytes] uint8: blocks on the device."""
        device = self._snapshots.device
        flat = torch.empty(len(blocks), self.block_bytes, dtype=torch.uint8, device=device)
        for row, block in zip(flat, blocks, strict=True):
            row.copy_(self._blocks[block], non_blocking=True)
        return flat

    def _snapshot_part(self, snapshot: int, n: int) -> Tensor:
        return self._snapshots[snapshot, n * self.block_bytes : (n + 1) * self.block_bytes]

    def buffers(self, blocks: Sequence[int], num_bytes: int) -> list[memoryview]:
        """The first num_bytes of host blocks, in place: [bytes of a block] each."""
        parts = []
        for n, block in enumerate(blocks):
            size = min(num_bytes - n * self.block_bytes, self.block_bytes)
            parts.append(self._blocks[block, :size].numpy().data)
        return parts

    def copy_rings(self, slots: Sequence[int]) -> list[Tensor]:
        """All ring state of some sequence slots, on the device."""
        if not slots:
            return []
        return [self.tensors[g.name][:, list(slots)] for g in self._rings]

    def put_rings(self, slots: Sequence[int], rings: Sequence[Tensor]) -> None:
        """Put back what copy_rings made of the same slots."""
        for group, ring in zip(self._rings, rings, strict=False):
            self.tensors[group.name][:, list(slots)] = ring

    def _gather(self, groups: list[KVGroup], slot: int) -> Tensor:
        parts = [self.tensors[g.name][:, slot].reshape(-1) for g in groups]
        return torch.cat(parts) if parts else self._snapshots.new_zeros(0)

    def _scatter(self, groups: list[KVGroup], slot: int, flat: Tensor) -> None:
        offset = 0
        for group in groups:
            tensor = self.tensors[group.name]
            width = group.held_bytes
            rows = flat[offset : offset + width].reshape(-1, group.page_bytes)
            tensor[:, slot] = rows
            offset += width
