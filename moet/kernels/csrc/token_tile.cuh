// A stage of a tile of tokens: 128 bytes of each, as a shared-memory operand lies, behind their scales, fp32 in
// their order, if there are any. A token's sixteen-byte pieces are PIECE_BYTES apart: of each 32 e4m3 values the
// even words of four, then the odd ones.
#pragma once
#include "device.cuh"

constexpr int PIECE_BYTES = 128;
DEVICE constexpr int scale_bytes(int tokens, bool scaled) { return scaled ? tokens * 4 : 0; }
DEVICE constexpr int stage_bytes(int tokens, bool scaled) { return tokens * (128 + (scaled ? 4 : 0)); }
// Where a token's first piece lies, in bytes behind the scales.
DEVICE int piece_of_token(int token) { return token / 8 * 1024 + token % 8 * 16; }
