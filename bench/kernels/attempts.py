"""What was tried for figures that miss their target, and what would be next; by how cases begin.

Percentages are of the read rate of an H200. A profile is a timeline of all CTAs of a launch, as
they wrote it themselves, or the disassembly.
"""

from __future__ import annotations

W2 = (
    "tried: a start without divisions (43/60/70/78 -> 54/69/77/84 % at 6/18/48/128 experts), "
    "a layer in one persistent launch (49 us against 38), loads of a stage ahead of the matrix "
    "units with an entry's rows kept (+1 to +2 at 128). Profile: at 128 experts CTAs end after "
    "154 to 187 us, 163 on average, so the slowest decide; at 6 a CTA has one item, activations "
    "take 1.5 us and 4 us lie between the first and the last; reading alone reaches 80 % at that "
    "size. Next: CTAs that are done take what slow ones have left"
)
LAYER = (
    "tried: one persistent launch (49 / 103 us at 1 / 3 rows), the shared expert beside the choice "
    "and the routed ones (37.8 / 66.8), other shares of the CTAs for it (36.4 to 38.7 / 63.7 to "
    "68.5). Profile, 1 row: experts are chosen after 8.3 us, gate and up take 17 us from there, of "
    "which 4 until activations are there behind the first weights, down 7. Next: activations of "
    "all rows before the choice"
)
NVFP4 = (
    "tried: a block of 16 columns a matrix instruction (57/63 %), blocks summed while the next are "
    "decoded with all loads of a stage first (59/65). Profile: 560 instructions a stage of a warp, "
    "w2 has 355 for as many bytes. Next: every other block of the activations zero in a second "
    "copy, so that codes need no masks"
)
FP8 = (
    "tried: a start without divisions (65 -> 69 %), weights asked into L2 ahead (a step lost .4 to "
    "1.4 ms), rings of 6 stages (lost). Reading alone reaches 80 % at 34 MB"
)
SLICES = (
    "tried: a start without divisions (53 -> 58 %), all parts read at once by the last slice to "
    "arrive (61), clusters (won at 8 slices, lost at 4). Reading alone reaches 80 % at 34 MB"
)
TEXTS = {
    "moe layer in pairs": LAYER,
    "w2 grouped": W2,
    "nvfp4 grouped": NVFP4,
    "fp8 dense, 32768x1024": FP8,
    "fp8 dense, 4096x8192": SLICES,
    "chain of": FP8,
}


def of(case: str) -> str:
    """The text for a case that missed its target; empty if there is none."""
    return next((text for start, text in TEXTS.items() if case.startswith(start)), "")
