"""Time what stands between the products of a V4-Flash layer against its byte floor, on one GPU.

    python -m bench.ops [--rows 1,3,8,32] [--context 1024,131072] [--chunk 2048,8192] [--out FILE]

First runs the comparisons with the references (tests/kernels/accelerated). An op is captured in a
graph of repeated calls, so that launch gaps count and host time does not. The floor is the bytes
that the op must move over the copy rate that the same run measures.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from bench.gpu import milliseconds
from moet.kernels import device_streams, triton_attention
from tests.kernels.accelerated.released import (
    DIM,
    HEADS,
    INDEX_DIM,
    INDEX_HEADS,
    RANK,
    TOP_K,
    WIDTH,
    WINDOW,
    Released,
)

ROW_BYTES, KEY_BYTES = 584, 68


def copy_rate() -> float:
    """Bytes per second that a large device copy reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (milliseconds(lambda: target.copy_(source)) * 1e-3)


def floor_bytes(rows: int, context: int) -> dict[str, int]:
    """Bytes that each op must at least read and write, of `rows` sequences of that context."""
    streams, x, post = 4 * DIM * 2, DIM * 2, (4 + 16) * 4
    site, entries = 24 * 4 * DIM * 4, context // 4
    heads, few = HEADS * WIDTH * 2, min(TOP_K, entries)
    scanned = entries * KEY_BYTES if entries > TOP_K else 0
    state = {"csa": 2 * 4 * 1024, "index": 2 * 4 * 256, "hca": 2 * 4 * 512}
    latent = 5 * RANK + 2 * WIDTH + ROW_BYTES
    each = {
        "hc_enter": streams + x + post,
        "hc_pass": 2 * streams + 2 * x + 2 * post,
        "hc_post": 2 * streams + x + post,
        "hc_head_norm": streams + x,
        "rms_norm": 2 * RANK * 2,
        "norm_rope_heads": 2 * heads,
        "write_kv": WIDTH * 2 + ROW_BYTES,
        "copy_entries": 2 * ROW_BYTES,
        "compress_csa": state["csa"] * (2 + 8 // 4) + ROW_BYTES // 4,
        "compress_index": state["index"] * (2 + 8 // 4) + KEY_BYTES // 4,
        "compress_hca": state["hca"] * (2 + 1) + ROW_BYTES // 128,
        "query_heads": 2 * heads + 2 * INDEX_HEADS * INDEX_DIM * 2,
        "index_query": 2 * INDEX_HEADS * INDEX_DIM * 2,
        "index_select": scanned + 2 * 4 * TOP_K,
        "attention_window": 2 * heads + min(WINDOW, context) * ROW_BYTES,
        "attention_csa": 2 * heads + (min(WINDOW, context) + few) * ROW_BYTES,
        "attention_hca": 2 * heads + (min(WINDOW, context) + context // 128) * ROW_BYTES,
        "inputs_window": latent,
        "inputs_csa": latent + (state["csa"] + state["index"]) * 4 + ROW_BYTES // 4,
        "inputs_hca": latent + state["hca"] * 3 + ROW_BYTES // 128,
    }
    once = {"hc_enter": site, "hc_pass": site, "hc_head_norm": site // 6}
    return {name: size * rows + once.get(name, 0) for name, size in each.items()}


def measure(rows: int, context: int, rate: float, *, chunk: bool) -> list[dict[str, Any]]:
    step = Released(rows, context, torch.device("cuda"), chunk=chunk)
    floors = floor_bytes(rows, context)
    found = []
    for name, call in step.ops().items():
        try:
            taken = milliseconds(call) * 1e3
        except Exception as error:  # one op that fails must not hide the others
            print(f"{name}, {rows} rows, context {context}: {error!r}"[:400], flush=True)
            continue
        entry: dict[str, Any] = {"op": name, "rows": rows, "context": context, "chunk": chunk}
        entry["us"] = round(taken, 2)
        if not chunk:  # a chunk's keys are shared by its rows, which the floors do not know
            entry["floor_us"] = round(floors[name.removesuffix("_triton")] / rate * 1e6, 2)
        found.append(entry)
        print(json.dumps(entry), flush=True)
    return found


def variants() -> list[dict[str, Any]]:
    """The attention kernels under other constants than theirs, one at a time."""
    tried: list[tuple[str, Any]] = [
        ("KEYS", 32),
        ("HEADS_JOINED", 2),
        ("TILES_AHEAD", 4),
        ("TILES_AHEAD", 16),
        ("MAX_PARTS", 0),
        ("MAX_PARTS", 4096),
    ]
    steps = [(1, 1024, False), (1, 131072, False), (32, 131072, False), (2048, 8192, True)]
    found = []
    for constant, value in tried:
        usual = getattr(triton_attention, constant)
        setattr(triton_attention, constant, value)
        for rows, context, chunk in steps:
            step = Released(rows, context, torch.device("cuda"), chunk=chunk)
            for name, call in step.ops().items():
                if not name.startswith("attention"):
                    continue
                try:
                    taken = round(milliseconds(call) * 1e3, 2)
                except Exception as error:  # a variant may not fit; the others still count
                    print(f"{constant}={value} {name}: {error!r}"[:200], flush=True)
                    continue
                print(f"{constant}={value} rows {rows} context {context} {name}: {taken} us")
                entry = {"op": name, "rows": rows, "context": context, "chunk": chunk}
                found.append(entry | {"us": taken, "note": f"{constant}={value}"})
        setattr(triton_attention, constant, usual)
    return found


def stream_variants() -> list[dict[str, Any]]:
    """The hyper-connection kernels with other borders between few and many rows."""
    tried = [
        ("FUSED_ROWS", 1),
        ("FUSED_ROWS", 8),
        ("FUSED_ROWS", 32),
        ("TILED_ROWS", 16),
        ("TILED_ROWS", 256),
        ("STEP_GROUPS", 8),
    ]
    found = []
    for constant, value in tried:
        usual = getattr(device_streams, constant)
        setattr(device_streams, constant, value)
        for rows in (1, 3, 8, 32, 128, 8192):
            call = Released(rows, max(1024, rows), torch.device("cuda"), chunk=True).ops()
            try:
                taken = round(milliseconds(call["hc_pass"]) * 1e3, 2)
            except Exception as error:  # as above
                print(f"{constant}={value} hc_pass, {rows} rows: {error!r}"[:200], flush=True)
                continue
            print(f"{constant}={value} hc_pass, {rows} rows: {taken} us", flush=True)
            entry = {"op": "hc_pass", "rows": rows, "context": max(1024, rows), "chunk": rows > 256}
            found.append(entry | {"us": taken, "note": f"{constant}={value}"})
        setattr(device_streams, constant, usual)
    return found


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def row(op: dict[str, Any]) -> dict[str, Any]:
    """One op's time as result files have it."""
    kind = "chunk of" if op["chunk"] else "decode,"
    return {
        "case": f"{op['op']}, {kind} {op['rows']} rows, context {op['context']}",
        "value": op["us"],
        "unit": "us",
        "better": "lower",
        "floor": op.get("floor_us"),
        "target": None,
        "note": op.get("note", ""),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=numbers, default=[1, 3, 8, 32])
    parser.add_argument("--context", type=numbers, default=[1024, 131072])
    parser.add_argument("--chunk", type=numbers, default=[2048, 8192])
    parser.add_argument("--out", type=Path, default=Path("bench/results/ops.json"))
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--variants", action="store_true", help="try other constants, too")
    parser.add_argument("--commit", default="", help="what to call the sources that are measured")
    args = parser.parse_args()
    if not args.skip_tests:
        subprocess.run([sys.executable, "-m", "pytest", "tests/kernels/accelerated"], check=False)
    torch.manual_seed(0)
    rate = copy_rate()
    ops = [
        entry
        for rows in args.rows
        for context in args.context
        for entry in measure(rows, context, rate, chunk=False)
    ]
    for rows in args.chunk:
        ops += measure(rows, max(8192, rows), rate, chunk=True)
    if args.variants:
        ops += stream_variants() + variants()
    hardware = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    result = {
        "hardware": f"{hardware}, copy rate {rate / 1e12:.2f} TB/s",
        "commit": args.commit,
        "command": " ".join(["python -m bench.ops", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "rows": [row(op) for op in ops],
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
