"""What was tried for figures that miss their target, and what would be next; by how cases begin.

Percentages are of the read rate of an H200. A profile is a timeline of all CTAs of a launch, as
they wrote it themselves, or the disassembly.
"""

from __future__ import annotations

W2 = (
    "tried: a start without divisions (43/60/70/78 -> 54/69/77/84 % at 6/18/48/128 experts), "
    "a layer in one persistent launch (49 us against 38), loads of a stage ahead of the matrix "
    "units with an entry's rows kept (+1 to +2 at 128), CTAs that take what slow ones have left "
    "(+2 at 128, 1 to 8 lost elsewhere, the layer the same), more CTAs than fit at once (0 at 2 "
    "times, -6 % at 3), lists read before the kernel ahead ends (0 to +1). Profile: at 128 experts "
    "CTAs end after 154 to 187 us, 163 on average; 355 instructions a stage of a warp, 240 of them "
    "decode and multiply; at 6 a CTA has one item, activations take 1.5 us and 4 us lie between "
    "the first and the last. Next: stages of eight chunks, which share what surrounds a stage"
)
LAYER = (
    "tried: one persistent launch (49 / 103 us at 1 / 3 rows), the shared expert beside the choice "
    "and the routed ones (37.8 / 66.8), other shares of the CTAs for it (36.4 to 38.7 / 63.7 to "
    "68.5), activations before the choice (-0.7 / -1.0). Profile, 1 row: experts are chosen after "
    "8.3 us, gate and up take 17 us from there, down 7; each launch begins 2 to 3 us after what "
    "it waits for. Next: fewer arrivals before the choice"
)
FP8 = (
    "tried: a start without divisions (65 -> 69 %), weights asked into L2 ahead (-8 % alone, a "
    "step lost .4 to 1.4 ms), rings of 6 stages (lost), activations' loads side by side (0 to +2 "
    "%). Reading alone reaches 80 % at that size"
)
SLICES = (
    "tried: a start without divisions (53 -> 58 %), all parts read at once by the last slice to "
    "arrive (61), clusters (won at 8 slices, lost at 4), weights asked into L2 ahead (-10 %). "
    "Reading alone reaches 80 % at that size"
)
HEAD = (
    "tried: tiles dealt out in turn (-1 %), weights asked into L2 ahead (0), activations' loads "
    "side by side (+.4 %), twice as many CTAs as fit at once (+1 %; 4 times: less with 8 rows)"
)
MANY = (
    "tried: the shared expert on a stream of its own (-22 us of 354 at 32 rows), loads of a stage "
    "ahead of the matrix units (-13), CTAs that take what slow ones have left (0). Next: choice "
    "and list in one launch"
)
CHAIN = FP8 + ". Each of the chain waits for the one ahead"
DOWN = (
    "of 2048 columns, so that a launch has half the bytes of gate and up, which meet the target; "
    "activations are rounded on the way in"
)
TEXTS = {
    "moe layer in pairs": LAYER,
    "moe layer, decode": MANY,
    "w2 grouped": W2,
    "mxfp4 grouped w2": DOWN,
    "nvfp4 grouped w2": DOWN,
    "fp8 dense, 32768x1024": FP8,
    "fp8 dense, 4096x8192": SLICES,
    "fp8 dense, 129280x4096": HEAD,
    "chain of": CHAIN,
}


def of(case: str) -> str:
    """The text for a case that missed its target; empty if there is none."""
    return next((text for start, text in TEXTS.items() if case.startswith(start)), "")
