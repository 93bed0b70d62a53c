"""Command line of the kernel bench; see the package."""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

import torch

from bench.kernels import decode, peers, prefill, rows
from bench.kernels.rig import DEVICE, Bench, read_rate
from moet.kernels.cubin import Kernels

PARTS = {
    "decode": decode.measure,
    "rows": rows.measure,
    "prefill": prefill.measure,
    "peers": peers.measure,
}


def main() -> None:
    """Run the parts that are asked for and write their rows. Exits 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; all by default")
    parser.add_argument("--out", type=Path, default=Path("bench/results/kernels.json"))
    parser.add_argument("--commit", default="unknown", help="what is measured")
    parser.add_argument("--cubins", type=Path, help="a folder of another flavour to measure")
    args = parser.parse_args()
    torch.manual_seed(0)
    kernels = Kernels(DEVICE, args.cubins)
    bench = Bench(kernels, torch.zeros(1, dtype=torch.int32, device=DEVICE))
    bench.attempt(read_rate)
    for part in args.only or PARTS:
        PARTS[part](bench)
    if int(bench.error):
        bench.failures.append(f"a kernel reported error {int(bench.error)}")
    only = "".join(f" --only {part}" for part in args.only or ())
    only += f" --cubins {args.cubins}" if args.cubins else ""
    result = {
        "hardware": f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}",
        "commit": args.commit,
        "command": f"python -m bench.kernels{only}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "rows": bench.rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for failure in bench.failures:
        print(f"FAILED {failure}", flush=True)
    if bench.failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
