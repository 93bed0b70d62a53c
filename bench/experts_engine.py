"""The whole engine at V4-Flash's full size behind a pool of experts on one GPU, as a user has it.

    python -m bench.experts_engine [--pool GIB] [--skew S] [--drafts K] [--layers N] [--out FILE]
    python -m bench.experts_engine --prompts fp4 --streams 1 [...]

Dummy weights, 72.6 GiB of 2-bit experts in pinned host memory: start-up, one stream and four, a
prompt of 32k tokens. Rates are what token events tell; hits are those of each phase. --prompts fp4:
prompts are computed with FP4 experts, 137 GiB more in host memory (--layers fewer for less).
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

from bench.experts_rig import link_rate
from moet.bench.results import Row, report, write
from moet.config import CacheConfig, EngineConfig, ExpertConfig, SchedulerConfig, TargetConfig
from moet.runtime import dummy
from moet.runtime.core import EngineCore
from moet.runtime.experts.host import Arena, touch
from moet.runtime.loader import load_core
from moet.types import Request, SamplingParams

GIB = 1 << 30
PROMPT, ANSWER, LONG = 1024, 200, 32768
CHUNK = 16384
WHOLE_MODEL = 43  # layers
LINK_BYTES = 3 * GIB  # that are copied to see what the link brings
# Of a prompt of LONG tokens, by the format of its experts: the least rate, or the least share of
# the link's.
LEAST_TOKENS_PER_S, LEAST_LINK_PERCENT = 7500.0, 80.0


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


def long_prompt(core: EngineCore, link: float, first_s: float, num_layers: int) -> dict[str, Any]:
    """What a prompt of LONG tokens streamed, against what the link brings.

    Its chunks are of CHUNK tokens or less, so this is the least that it can have been.
    """
    tiers = core.expert_stats().tiers
    tier = max(tiers, key=lambda each: each.row_bytes)  # prompts are read in the better format
    moved = -(-LONG // CHUNK) * tier.row_bytes * tier.num_rows
    return {
        "experts": tier.format,
        "GiB a chunk": round(tier.row_bytes * tier.num_rows / GIB, 2),
        "tok/s, 43 layers": round(LONG / first_s * num_layers / WHOLE_MODEL),
        "of link rate %": round(100 * moved / first_s / link, 1),
    }


def long_rows(found: dict[str, Any]) -> list[Row]:
    """The prompt of LONG tokens as the table of targets asks for it."""
    case, where = found.get("of the prompt of 32k"), f"{found['layers']} layers"
    if case is None:
        return []
    is_fp4 = found["prompts"] == "fp4"
    told = f"{case['GiB a chunk']} GiB a chunk of {CHUNK}; {where}"
    rate = Row(
        case=f"prompt of {LONG}, {found['prompts'].upper()} experts, whole engine",
        value=case["tok/s, 43 layers"],
        unit="tok/s, 43 layers",
        better="higher",
        target=None if is_fp4 else LEAST_TOKENS_PER_S,
        note=told,
    )
    share = Row(
        case=f"{rate.case}, of the link's rate",
        value=case["of link rate %"],
        unit="%",
        better="higher",
        floor=100,
        target=LEAST_LINK_PERCENT if is_fp4 else None,
        note=f"link {found['link GB/s']} GB/s; {told}",
    )
    return [rate, share]


def content(found: dict[str, Any], commit: str) -> dict[str, Any]:
    """The result file so far."""
    where = f"pool of {found['pool GiB']:g} GiB, skew {found['skew']:g}, {found['drafts']} drafts"
    start = f"{where}, {found['layers']} layers, {found['pinned GiB']} GiB pinned"
    rows = [Row(case="start", value=found["start s"], unit="s", better="lower", note=start)]
    for name, case in found.items():
        if not isinstance(case, dict) or "hits while decoding %" not in case:
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
    phases = [case for case in found.values() if isinstance(case, dict) and "errors" in case]
    command = " ".join(["python -m bench.experts_engine", *sys.argv[1:]])
    more = {
        "model": "deepseek-v4-flash, w2, dummy weights of seed 0, experts in pinned host memory",
        "prompts": found["prompts"],
        "errors": [error for case in phases for error in case["errors"]],
    }
    rows += long_rows(found)
    made = report(command, rows, hardware=found["hardware"], more=more)
    return made | ({} if commit == "unknown" else {"commit": commit})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool", type=float, default=14.0)
    parser.add_argument("--skew", type=float, default=2.5)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--streams", type=int, default=4, help="at most")
    parser.add_argument("--prompts", choices=("w2", "fp4"), default="w2", help="experts of these")
    parser.add_argument("--layers", type=int, default=None, help="the first ones alone")
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
            max_num_seqs=args.streams,
            max_model_len=LONG + 2048,
            max_num_batched_tokens=CHUNK,
            num_spec_tokens=args.drafts,
        ),
        experts=ExpertConfig(
            pool_bytes=int(args.pool * GIB),
            prefill_precision="fp4" if args.prompts == "fp4" else None,
            host_bytes=512 * GIB,  # all rows, on machines too whose memory grows as it is used
        ),
    )
    began = perf_counter()
    core = load_core(config, lambda stage, share: None)
    tiers = core.expert_stats().tiers
    found: dict[str, Any] = {
        "hardware": torch.cuda.get_device_name(),
        "commit": args.commit,
        "pool GiB": args.pool,
        "skew": args.skew,
        "drafts": args.drafts,
        "prompts": args.prompts,
        "layers": args.layers or WHOLE_MODEL,
        "pinned GiB": round(sum(t.row_bytes * t.num_host_places for t in tiers) / GIB, 1),
        "start s": round(perf_counter() - began, 1),
    }
    link = link_rate(Arena(LINK_BYTES >> 20, 1 << 20, pin=True, fill=touch))
    found["link GB/s"] = round(link / 1e9, 2)
    print(found, flush=True)
    for name, streams, length, answer in (
        ("cold, 1 stream", 1, PROMPT, ANSWER),
        ("prompt of 32k", 1, LONG, 8),
        ("after it, 1 stream", 1, PROMPT + 3, ANSWER // 2),
        ("warm, 1 stream", 1, PROMPT + 1, ANSWER),
        ("warm, 4 streams", 4, PROMPT + 2, ANSWER),
    ):
        if streams > args.streams:
            continue
        if perf_counter() - began > args.seconds:
            found[name] = f"left out: {args.seconds:g} s are over"
            continue
        case = found[name] = phase(core, streams, length, answer)
        if length == LONG:
            first_s = case["first token s"]
            found["of the prompt of 32k"] = long_prompt(core, link, first_s, found["layers"])
            print(found["of the prompt of 32k"], flush=True)
        print(name, case, flush=True)
        write(args.out, content(found, args.commit))
    print(json.dumps(found), flush=True)
    core.shutdown()


if __name__ == "__main__":
    main()
