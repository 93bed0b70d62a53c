"""NVFP4 experts as rows of bytes, exactly as shipped; the planes are those of layout.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moet.kernels.layout import ALIGNMENT_BYTES, Mxfp4Rows, Quantised, round_up
from moet.kernels.nvfp4 import BLOCK

NUM_MATRICES = 3


@dataclass(frozen=True, slots=True)
class Nvfp4Rows(Mxfp4Rows):
    """e2m1 codes, an e4m3 scale per 16 inputs and an fp32 scale per matrix, gate and up apart.

    The three fp32 scales (gate, up, down) follow the scale planes of every sub-row, so that a
    sub-row can be read alone.
    """

    name: ClassVar[str] = "nvfp4"
    scale_block: ClassVar[int] = BLOCK

    @property
    def part_bytes(self) -> tuple[int, int, int, int]:
        """Bytes of a sub-row's gate, up, down and scale parts, each a multiple of 4 KiB."""
        gate, up, down = (
            round_up(n * k * self.code_bits // 8, ALIGNMENT_BYTES) for n, k in self.shapes
        )
        scales = sum(self.scale_bytes) + 4 * NUM_MATRICES
        return gate, up, down, round_up(scales, ALIGNMENT_BYTES)

    def pack_scaled(
        self, w1: Quantised, w3: Quantised, w2: Quantised, global_scales: Tensor
    ) -> Tensor:
        """Codes and e4m3 bytes [N, K/16] of gate, up, down; global_scales [3] fp32 in that order.

        Returns [row_bytes] uint8. Raises ValueError as `pack` does.
        """
        if global_scales.shape != (NUM_MATRICES,) or global_scales.dtype != torch.float32:
            shape, dtype = tuple(global_scales.shape), global_scales.dtype
            raise ValueError(f"global scales are {shape} {dtype}; three fp32 are needed")
        row = self.pack(w1, w3, w2)
        self._global_bytes(row).copy_(global_scales.view(torch.uint8))
        return row

    def _global_bytes(self, row: Tensor) -> Tensor:
        """[num_sub_rows, 12], sharing memory with row."""
        scale_part = row.view(self.num_sub_rows, -1)[:, sum(self.part_bytes[:3]) :]
        start = sum(self.scale_bytes)
        return scale_part[:, start : start + 4 * NUM_MATRICES]

    def global_scales(self, row: Tensor) -> Tensor:
        """row [row_bytes] uint8. Returns [3] fp32: gate, up, down."""
        return self._global_bytes(row)[0].contiguous().view(torch.float32)

    def unpack(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """row [row_bytes] uint8. Returns w1 and w3 [I, D] and w2 [D, I], fp32.

        A code times its block scale is exact; the global scale rounds once.
        """
        scales = self.global_scales(row)
        matrices = self.unpack_codes(row)
        w1, w3, w2 = (
            self.values(*matrix) * scale for matrix, scale in zip(matrices, scales, strict=True)
        )
        return w1, w3, w2

    def values(self, codes: Tensor, scales: Tensor) -> Tensor:
        """codes [N, K], e4m3 bytes [N, K/16] -> fp32 [N, K], exact, without the global scale."""
        levels = torch.tensor(self.levels, dtype=torch.float32)[codes.long()]
        factors = scales.contiguous().view(torch.float8_e4m3fn).float()
        return (torch.unflatten(levels, -1, (-1, BLOCK)) * factors.unsqueeze(-1)).flatten(-2)

    def row_base(self, row: Tensor) -> Tensor:
        """Nothing: e4m3 scales are no exponents. Returns [num_sub_rows, 0] uint8."""
        return row.new_empty(self.num_sub_rows, 0)
