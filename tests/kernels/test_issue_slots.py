"""Issue slots are read from the way that works, and stay below those of hand-written SASS."""

from __future__ import annotations

from moet.kernels import audit, build, issue_slots

LOOP = [
    "MOV R1, R2",
    ".L_x_1:",
    "@P0 BRA `(.L_x_2)",
    "LDGSTS [R1], [R2]",
    "IADD3 R2, R2, 0x1, RZ",
    ".L_x_2:",
    "ISETP.NE P1, R3, RZ",
    "BRA P1, `(.L_x_3)",
    "MUFU.RCP R4, R4",
    "IMAD R5, R5, R5, RZ",
    "IMAD R5, R5, R5, RZ",
    ".L_x_3:",
    "QMMA.SF.16832.F32.E5M2.E4M3.E8 R8, R1, R2, R8",
    "@P2 BRA `(.L_x_4)",
    "QMMA.SF.16832.F32.E4M3.E4M3.E8 R8, R1, R2, R8",
    ".L_x_4:",
    "@!P3 BRA `(.L_x_1)",
    "EXIT",
]


def test_the_way_that_copies_and_multiplies_with_the_least_besides_counts() -> None:
    loop = issue_slots.hottest_loop(LOOP, "E5M2")
    assert loop is not None
    assert loop.matrix == 1
    # all but the division and the product of another format
    assert loop.instructions == 8
    other = issue_slots.hottest_loop(LOOP, "E4M3.E4M3")
    assert other is not None
    assert other.matrix == 1
    assert issue_slots.hottest_loop(LOOP, "BF16") is None


def test_a_wait_that_stands_apart_is_no_inner_loop() -> None:
    """A spin is placed after the end and jumps back into the middle."""
    spin = [*LOOP[:2], "@!P5 BRA `(.L_x_9)", ".L_x_8:", *LOOP[2:]]
    spin += [".L_x_9:", "SYNCS.TRYWAIT P5", "@!P5 BRA `(.L_x_9)", "BRA `(.L_x_8)"]
    loop = issue_slots.hottest_loop(spin, "E5M2")
    assert loop is not None
    assert loop.instructions == 9


def test_every_kernel_takes_no_more_than_hand_written_sass() -> None:
    rows = audit.slots(build.CUBINS)
    assert len(rows) == len(issue_slots.CASES)
    for row in rows:
        assert row["value"] > 1
        if row["target"] is not None:
            assert row["value"] <= row["target"], row["case"]
