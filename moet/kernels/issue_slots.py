"""Issue slots of the GEMM kernels' steady state, read from their disassembly.

A kernel's hottest loop is the innermost one that multiplies. Of the ways through it, the one counts
that multiplies and copies most with the fewest other instructions: what runs again and again while
an item lasts. Knows SASS, not what the kernels are for. Needs no GPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

MATRIX = ("QMMA", "HMMA", "QGMMA", "HGMMA")
COPIES = ("LDGSTS", "UBLKCP", "LDG")
WORK = 1_000_000  # a matrix instruction or copy outweighs any number of others
# Rates that the estimate is for: RTX PRO 6000, as specs of kernels for sm_120 are.
READ_BYTES_PER_S, SCHEDULERS, CLOCK_HZ = 1.79e12, 752, 2.4e9


@dataclass(frozen=True, slots=True)
class Block:
    """Instructions that run one after the other, and the blocks that may come next."""

    ops: tuple[str, ...]
    next: tuple[int, ...]

    def value(self, kind: str) -> int:
        """Of passing here. Matrix instructions of another kind than wanted make a detour."""
        work = self.matrix(kind) + sum(op.startswith(COPIES) for op in self.ops)
        return WORK * (work - 8 * (self.matrix("") > self.matrix(kind))) - len(self.ops)

    def matrix(self, kind: str) -> int:
        """Matrix instructions whose operand types contain `kind`."""
        return sum(op.startswith(MATRIX) and kind in op for op in self.ops)


@dataclass(frozen=True, slots=True)
class Loop:
    """A way through a loop: all instructions on it, and those that multiply."""

    instructions: int
    matrix: int


def blocks(lines: list[str]) -> list[Block]:
    """lines: instructions with predicates, and labels (`.L_x_1:`), in order."""
    groups: list[list[str]] = [[]]
    labels: dict[str, int] = {}
    for line in lines:
        if line.endswith(":"):
            if groups[-1]:
                groups.append([])
            labels[line[:-1]] = len(groups) - 1
        else:
            groups[-1].append(line)
            if re.search(r"\b(BRA|EXIT|RET)\b", line):
                groups.append([])
    found = []
    for i, group in enumerate(groups):
        following: list[int] = []
        last = group[-1] if group else ""
        target = re.search(r"\bBRA\b.*`\((\S+)\)", last)
        if target and target.group(1) in labels:
            following.append(labels[target.group(1)])
        conditional = last.startswith("@") or re.search(r"BRA\S* !?U?[PR]\w+,", last)
        ends = re.search(r"\b(BRA|EXIT|RET)\b", last) and not conditional
        if not ends and i + 1 < len(groups):
            following.append(i + 1)
        ops = tuple(re.sub(r"^@!?U?P\w+\s+", "", op) for op in group)
        found.append(Block(ops, tuple(following)))
    return found


def best_way(graph: list[Block], first: int, last: int, kind: str) -> Loop | None:
    """The most working way from block `first` to block `last`, forwards only; None if there is
    none."""

    @cache
    def value(at: int) -> tuple[int, int] | None:
        """Value of the best way from `at` to last, and the block after `at`."""
        if at == last:
            return graph[at].value(kind), at
        ways = [(v[0], n) for n in graph[at].next if at < n <= last and (v := value(n))]
        if not ways:
            return None
        best = max(ways)
        return graph[at].value(kind) + best[0], best[1]

    if value(first) is None:
        return None
    at, instructions, matrix = first, 0, 0
    while True:
        instructions += len(graph[at].ops)
        matrix += graph[at].matrix(kind)
        if at == last:
            return Loop(instructions, matrix)
        step = value(at)
        assert step is not None
        at = step[1]


def hottest_loop(lines: list[str], kind: str = "") -> Loop | None:
    """Of the innermost loops with matrix instructions of a kind, the one with the most; None
    without any. kind: what stands in the instruction's name, as E5M2."""
    graph = blocks(lines)
    spans = sorted(
        {(n, i) for i, block in enumerate(graph) for n in block.next if n <= i},
        key=lambda span: span[1] - span[0],
    )
    found: list[tuple[int, int, Loop]] = []
    for first, last in spans:
        if any(first <= a and b <= last for a, b, _ in found):
            continue  # has an inner loop that multiplies
        way = best_way(graph, first, last, kind)
        if way and way.matrix:
            found.append((first, last, way))
    return max((way for _, _, way in found), key=lambda way: way.matrix, default=None)


def needed_ipc(instructions_per_kib: float) -> float:
    """Instructions a cycle and scheduler that reading at full memory speed takes."""
    per_second = READ_BYTES_PER_S / SCHEDULERS / 1024 * instructions_per_kib
    return per_second / CLOCK_HZ


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel of sm_120a, and what a hand-written SASS kernel of the same work takes.

    Decode (unit_bytes): instructions per KiB of weights, where `matrix_per_unit` instructions
    multiply unit_bytes (16 x 32 weights with their scales). Prefill: instructions per matrix
    instruction.
    """

    kernel: str
    kind: str
    unit_bytes: int = 0
    matrix_per_unit: int = 1
    theirs: float | None = None


CASES = (
    Case("stream_w2_n8_swiglu", "E5M2", 144, 1, 437.0),
    Case("stream_w2_n8_quant_bf16", "E5M2", 144, 1, 437.0),
    Case("stream_w2_n16_swiglu_wide", "E5M2", 144, 2, 437.0),
    Case("stream_mxfp4_n8_swiglu", "E5M2", 272, 1, 292.0),
    Case("stream_mxfp4_n8_quant_bf16_wide", "E5M2", 272, 1, 292.0),
    Case("stream_fp8_n8_bf16_wide", "E4M3.E4M3", 512),
    Case("stream_nvfp4_n4_swiglu_wide", "E5M2", 288, 1),
    Case("stream_nvfp4_n8_swiglu_wide", "E5M2", 288, 2),
    Case("pair_w2", "E5M2", 144, 1, 437.0),
    Case("pair_w2_listed", "E5M2", 144, 1, 437.0),
    Case("pair_mxfp4", "E5M2", 272, 1, 292.0),
    Case("prefill_w2_swiglu", "E5M2", theirs=34.8),
    Case("prefill_w2_bf16", "E5M2", theirs=34.8),
    Case("prefill_mxfp4_swiglu", "E5M2", theirs=38.8),
    Case("prefill_nvfp4_swiglu", "E5M2"),
    Case("prefill_fp8_bf16", "E4M3.E4M3"),
)


def row(case: Case, loop: Loop, facts: dict[str, int]) -> dict[str, object]:
    """A result of bench/results. facts: the manifest's of the kernel."""
    note = f"{loop.instructions} instructions for {loop.matrix} that multiply; "
    note += f"{facts['registers']} registers, {facts['ctas_per_sm']} CTAs an SM declared"
    if case.unit_bytes:
        units = loop.matrix / case.matrix_per_unit
        value = loop.instructions / units / case.unit_bytes * 1024
        unit = "instructions per KiB of weights"
        note += f"; {needed_ipc(value):.2f} of a slot a cycle and scheduler at 1.79 TB/s"
    else:
        value, unit = loop.instructions / loop.matrix, "instructions per matrix instruction"
    return {
        "case": f"sm_120a {case.kernel}",
        "value": round(value, 1),
        "unit": unit,
        "better": "lower",
        "floor": None,
        "target": case.theirs,
        "note": note,
    }
