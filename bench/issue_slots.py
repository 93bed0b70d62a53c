"""What sm_120a kernels take of the instruction issue: `python -m bench.issue_slots [--out FILE]`.

Read from the disassembled cubins, beside the figures of hand-written SASS for the same work. Needs
the disassembler, no GPU: it says how near a kernel is to being limited by its instructions, and
nothing of what else may limit it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from moet.bench.results import Row, report, write
from moet.kernels import audit, build

HARDWARE = "none; cubins disassembled, at the rates of an RTX PRO 6000"


def main() -> None:
    """Print the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/sm120a.json"))
    args = parser.parse_args()
    rows = [msgspec.convert(row, Row) for row in audit.slots(build.CUBINS)]
    for row in rows:
        theirs = f" (hand-written SASS {row.target})" if row.target else ""
        print(f"{row.case:42s} {row.value} {row.unit}{theirs}; {row.note}")
    write(args.out, report("python -m bench.issue_slots", rows, hardware=HARDWARE))


if __name__ == "__main__":
    main()
