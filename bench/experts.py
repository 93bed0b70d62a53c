"""Experts in host memory and on disk behind a pool on one GPU: what steps and prompts cost.

    python -m bench.experts [--layers N] [--fp4-layers N] [--disk-layers N] [--parts A,B] [--out F]

V4-Flash with dummy weights, cut to layers whose rows fit host memory (1.7 GiB a layer of 2-bit
rows, 3.2 of FP4). The router's popularity is set so that a pool has the stated hit rate; rate, skew
and seed stand with each figure. Every case is timed beside the same step with all experts resident
and compared with it bit for bit, and the link is measured in the same run. What fails is printed
and the rest goes on.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter

import torch

from bench.experts_decode import decode, launches, uniform
from bench.experts_disk import first_layers, one_read, over_a_file, start, write_rows
from bench.experts_parts import (
    LARGE_POOL,
    START_ROWS,
    Bench,
    Results,
    open_bench,
)
from bench.experts_prompts import fp4_prefill, policies, prefill
from bench.experts_rig import (
    GIB,
    SEED,
)
from bench.experts_rows import missed, rows
from bench.gpu import open_gpu
from moet.bench.results import report, write


def kept_rows(bench: Bench, folder: Path) -> Path:
    """A file of the rows of the layers that are tried over a file."""
    path = folder / "moet-bench-rows.w2"
    if path not in bench.files:
        seconds = write_rows(bench.host.arena, path, bench.num_file_rows)
        size = bench.num_file_rows * bench.rig.form.row_bytes / GIB
        bench.files[path] = f"{size:.2f} GiB written in {seconds:.1f} s"
        print(path, bench.files[path], flush=True)
    return path


def from_file(bench: Bench) -> Results:
    path = kept_rows(bench, bench.folder)
    found = start(bench.rig, path, min(bench.num_file_rows, START_ROWS))
    print(found, flush=True)
    return {"start from a file in the page cache": found}


def over_disk(bench: Bench) -> Results:
    path = kept_rows(bench, bench.folder)
    found: Results = {
        "one row read alone, ms": one_read(path, bench.rig.form.row_bytes, bench.num_file_rows)
    }
    print(found, flush=True)
    small = first_layers(bench.rig, bench.disk_layers)
    found |= over_a_file(small, bench.host, path, LARGE_POOL)
    return found


PARTS: dict[str, Callable[[Bench], Results]] = {
    "open": open_bench,
    "decode": decode,
    "disk": over_disk,
    "prefill": prefill,
    "uniform": uniform,
    "fp4": fp4_prefill,
    "policies": policies,
    "start": from_file,
    "launches": launches,
}


def file_of(results: Results, bench: Bench, commit: str) -> Results:
    """The result file so far."""
    opened, made = results.get("open", {}), rows(results)
    more = {
        "model": f"deepseek-v4-flash, first {bench.layers} of 43 layers, w2, dummy weights of seed "
        f"{SEED}, experts made popular by the skew that each row states (moet/models/dummy.py)",
        "link_gb_per_s": opened.get("link GB/s"),
        "filled_and_pinned_gib_per_s": opened.get("filled and pinned GiB/s"),
        "faults": {name: text for name, text in results.items() if isinstance(text, str)},
        "missed": missed(made),
        "kernels": {
            name: case["top"]
            for name, case in results.get("launches", {}).items()
            if isinstance(case, dict) and "top" in case
        },
    }
    command = " ".join(["python -m bench.experts", *sys.argv[1:]])
    content = report(command, made, hardware=torch.cuda.get_device_name(), more=more)
    return content | ({} if commit == "unknown" else {"commit": commit})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--fp4-layers", type=int, default=10)
    parser.add_argument("--disk-layers", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="for a file of rows")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=250.0, help="after which no part begins")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    device = open_gpu()
    results: Results = {}
    bench = Bench(device, args.layers, args.fp4_layers, args.disk_layers, args.folder)
    out = args.out or Path(os.environ.get("OUT", ".")) / "experts.json"
    started = perf_counter()
    for part in dict.fromkeys(["open", *args.parts.split(",")]):
        begin = perf_counter()
        if begin - started > args.seconds:
            results[f"{part} LEFT OUT"] = f"{args.seconds:g} s are over"
            continue
        try:
            results[part] = PARTS[part](bench)
        except Exception:
            results[f"{part} FAILED"] = traceback.format_exc()
            print(traceback.format_exc(), flush=True)
        print(f"-- {part}: {perf_counter() - begin:.1f} s", flush=True)
        gc.collect()
        with suppress(RuntimeError):  # a device that is lost has said so above
            torch.cuda.empty_cache()
        write(out, file_of(results, bench, args.commit))
    for path in bench.files:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
