"""Answers guided by the parser's coverage: `python -m tests.server.chat.fuzz_parser [CORPUS]`.

CORPUS is a folder that keeps what reached new code; libFuzzer's flags, such as -max_total_time=600,
may stand before it. The bytes of a failure are left in a file, which is run again by giving it in
the folder's place. Needs atheris.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["moet.server.chat"]):
    from tests.server.chat.invariants import check


def run(data: bytes) -> None:
    """One answer."""
    check(data)


if __name__ == "__main__":
    atheris.Setup(sys.argv, run)
    atheris.Fuzz()
