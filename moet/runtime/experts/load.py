"""A pack's expert rows into the memory of a GPU, as fast as files and link allow.

Readers of their own take pieces of the file in turn, each through a pinned buffer and a stream of
its own, so that reading, copying and the next piece's reading overlap. Knows packs and rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock, local

import torch
from torch import Tensor

from moet.errors import CheckpointError
from moet.kernels.nvfp4_rows import Nvfp4Rows
from moet.models.expert_encoder import Tier
from moet.models.pack import Pack
from moet.models.progress import ProgressCallback, ProgressMeter
from moet.models.sharding import WHOLE, Shard
from moet.models.tensor_files import read_into
from moet.runtime.experts.store import DeviceExperts
from moet.runtime.parallel.experts import share_of

NUM_READERS = 6
PIECE_BYTES = 64 << 20  # of each reader's pinned buffer


@dataclass(frozen=True, slots=True)
class _Piece:
    path: Path
    offset: int  # in the file
    out: Tensor  # flat, on the device


def pack_experts(
    pack: Pack,
    tier: Tier,
    layers: Sequence[int],
    device: torch.device,
    progress: ProgressCallback | None = None,
    shard: Shard = WHOLE,
) -> DeviceExperts:
    """What a tensor rank has of all experts of these layers on the device, with their row bases.

    Raises CheckpointError if the pack has no such tier or no row bases, or cannot be read.
    """
    whole, num_experts = pack.format(tier), pack.experts.num_experts
    form, first, last = share_of(whole, shard)
    count = len(layers) * num_experts
    rows = torch.empty(count, form.row_bytes, dtype=torch.uint8, device=device)
    meter = ProgressMeter(rows.numel(), progress)
    pieces = _pieces if shard.size == 1 else partial(_parts, first * whole.sub_row_bytes)
    _read(pieces(pack, tier, layers, rows), device, meter)
    bases = [
        pack.row_base(tier, layer_idx, expert_id)[first:last]
        for layer_idx in layers
        for expert_id in range(num_experts)
    ]
    if bases[0].numel() == 0 and not isinstance(form, Nvfp4Rows):  # whose scales need none
        raise CheckpointError(f"{pack.folder} has no row bases of its {tier} experts for a GPU")
    return DeviceExperts(form, rows, torch.stack(bases).to(device), layers)


def _pieces(pack: Pack, tier: Tier, layers: Sequence[int], rows: Tensor) -> Iterator[_Piece]:
    num_experts = pack.experts.num_experts
    for n, layer_idx in enumerate(layers):
        path, offset = pack.row_place(tier, layer_idx, 0)
        of_layer = rows[n * num_experts : (n + 1) * num_experts].view(-1)
        for part in torch.split(of_layer, PIECE_BYTES):
            yield _Piece(path, offset, part)
            offset += part.numel()


def _parts(
    offset: int, pack: Pack, tier: Tier, layers: Sequence[int], rows: Tensor
) -> Iterator[_Piece]:
    """Of each row the bytes from `offset` on, as many as a row of `rows` has."""
    num_experts = pack.experts.num_experts
    for n, row in enumerate(rows):
        path, start = pack.row_place(tier, layers[n // num_experts], n % num_experts)
        yield _Piece(path, start + offset, row)


def _read(pieces: Iterator[_Piece], device: torch.device, meter: ProgressMeter) -> None:
    mine, told = local(), Lock()
    on_gpu = device.type == "cuda"

    def set_up() -> None:
        if on_gpu:
            torch.cuda.set_device(device)  # pinning would wake another one
        mine.buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
        mine.stream = (
            torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        )

    def read(piece: _Piece) -> None:
        size = piece.out.numel()
        buffer: Tensor = mine.buffer[:size]
        descriptor = os.open(piece.path, os.O_RDONLY)
        try:
            read_into(descriptor, buffer, piece.offset, piece.path)
        finally:
            os.close(descriptor)
        with torch.cuda.stream(mine.stream) if on_gpu else nullcontext():
            piece.out.copy_(buffer, non_blocking=True)
        if on_gpu:
            mine.stream.synchronize()
        with told:
            meter.advance(size, piece.path.name)

    with ThreadPoolExecutor(NUM_READERS, initializer=set_up) as readers:
        for _ in readers.map(read, pieces):
            pass
