"""The whole engine at V4-Flash's full size behind a pool of experts on one GPU, as a user has it.

    python -m bench.experts_engine [--pool GIB] [--skew S] [--drafts K] [--layers N] [--out FILE]

Dummy weights, 72.6 GiB of 2-bit experts in pinned host memory: start-up, one stream and four, a
prompt of 32k tokens. Rates are what token events tell; hits are those of each phase.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from moet.bench.results import Row, report, write
from moet.config import CacheConfig, EngineConfig, ExpertConfig, SchedulerConfig, TargetConfig
from moet.runtime import dummy
from moet.runtime.core import EngineCore
from moet.runtime.loader import load_core
from moet.types import Request, SamplingParams

GIB = 1 << 30
PROMPT, ANSWER, LONG = 1024, 200, 32768


def submit(core: EngineCore, name: str, length: int, max_tokens: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    prompt = torch.randint(2, 100_000, (length,), generator=rng).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    core.submit(Request(request_id=name, prompt_token_ids=prompt, params=params))


def totals(core: EngineCore) -> tuple[float, float]:
    torch.cuda.synchronize()
    tiers = core.expert_stats().tiers
    return sum(t.total("num_hits") for t in tiers), sum(t.total("num_misses") for t in tiers)


def phase(core: EngineCore, num_streams: int, length: int, max_tokens: int) -> dict[str, Any]:
    """Requests together: seconds to the first token of all, and the rate from there on."""
    began, before = perf_counter(), totals(core)
    for n in range(num_streams):
        submit(core, f"{num_streams}-{length}-{n}", length, max_tokens, seed=length + n)
    firsts: dict[str, float] = {}
    at_first, made, made_since = before, 0, 0
    errors = []
    while core.has_work:
        for event in core.step():
            if event.error:
                errors.append(event.error)
            if event.token_ids:
                if len(firsts) == num_streams:
                    made_since += len(event.token_ids)
                firsts.setdefault(event.request_id, perf_counter())
                made += len(event.token_ids)
                if len(firsts) == num_streams and at_first == before:
                    at_first = totals(core)
    ended, after = perf_counter(), totals(core)
    first_s = max(firsts.values()) - began if firsts else float("nan")
    asked = sum(after) - sum(at_first)
    return {
        "first token s": round(first_s, 3),
        "prompt tok/s": round(num_streams * length / first_s),
        "tokens": made,
        "tok/s": round(made_since / max(1e-9, ended - began - first_s), 1),
        "hits while decoding %": round(100 * (1 - (after[1] - at_first[1]) / max(1.0, asked)), 2),
        "errors": errors[:2],
    }


def content(found: dict[str, Any], commit: str) -> dict[str, Any]:
    """The result file so far."""
    where = f"pool of {found['pool GiB']:g} GiB, skew {found['skew']:g}, {found['drafts']} drafts"
    rows = [Row(case="start", value=found["start s"], unit="s", better="lower", note=where)]
    for name, case in found.items():
        if not isinstance(case, dict):
            continue
        hits = f"{case['hits while decoding %']} % hits while decoding"
        rows += [
            Row(case=name, value=case["tok/s"], unit="tok/s", better="higher", note=hits),
            Row(
                case=f"{name}, to the first token of all",
                value=case["first token s"],
                unit="s",
                better="lower",
                note=f"{case['prompt tok/s']} tokens/s of the prompts",
            ),
        ]
    errors = [
        error for case in found.values() if isinstance(case, dict) for error in case["errors"]
    ]
    command = " ".join(["python -m bench.experts_engine", *sys.argv[1:]])
    more = {
        "model": "deepseek-v4-flash, w2, dummy weights of seed 0, experts in pinned host memory",
        "errors": errors,
    }
    made = report(command, rows, hardware=found["hardware"], more=more)
    return made | ({} if commit == "unknown" else {"commit": commit})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool", type=float, default=14.0)
    parser.add_argument("--skew", type=float, default=2.5)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--layers", type=int, default=None, help="the first ones alone, to try it")
    parser.add_argument("--seconds", type=float, default=100.0, help="after which no phase begins")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, default=Path("experts_engine.json"))
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    folder = dummy.preset_folder("deepseek-v4-flash")
    if args.layers is not None:
        raw = dummy.preset_config("deepseek-v4-flash", "full", args.layers)
        folder = Path(shutil.copytree(folder, Path(tempfile.mkdtemp()) / folder.name))
        (folder / "config.json").write_text(json.dumps(raw))
    config = EngineConfig(
        model=str(folder),
        target=TargetConfig(device="cuda", weights="dummy", dummy_skew=args.skew),
        cache=CacheConfig(budget_bytes=2 * GIB, prefix_cache="off"),
        scheduler=SchedulerConfig(
            max_num_seqs=4,
            max_model_len=LONG + 2048,
            max_num_batched_tokens=16384,
            num_spec_tokens=args.drafts,
        ),
        experts=ExpertConfig(pool_bytes=int(args.pool * GIB)),
    )
    began = perf_counter()
    core = load_core(config, lambda stage, share: None)
    found: dict[str, Any] = {
        "hardware": torch.cuda.get_device_name(),
        "commit": args.commit,
        "pool GiB": args.pool,
        "skew": args.skew,
        "drafts": args.drafts,
        "start s": round(perf_counter() - began, 1),
    }
    for name, streams, length, answer in (
        ("cold, 1 stream", 1, PROMPT, ANSWER),
        ("warm, 1 stream", 1, PROMPT + 1, ANSWER),
        ("warm, 4 streams", 4, PROMPT + 2, ANSWER),
        ("prompt of 32k", 1, LONG, 8),
        ("after it, 1 stream", 1, PROMPT + 3, ANSWER // 2),
    ):
        if perf_counter() - began > args.seconds:
            found[name] = f"left out: {args.seconds:g} s are over"
            continue
        found[name] = phase(core, streams, length, answer)
        print(name, found[name], flush=True)
        write(args.out, content(found, args.commit))
    print(json.dumps(found), flush=True)
    core.shutdown()


if __name__ == "__main__":
    main()
