"""Flags of each `moet bench` kind, and what runs for it. Flags are spelled as vLLM's."""

from __future__ import annotations

import argparse
import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from moet.config import (
    CacheConfig,
    EngineConfig,
    ExpertConfig,
    ModelSettings,
    SchedulerConfig,
    TargetConfig,
)
from moet.errors import ConfigError


def add_flags(made: argparse.ArgumentParser, number: Callable[[str], int]) -> None:
    """Sub-commands and their flags. number: parses counts such as 32k."""
    kinds = made.add_subparsers(title="benches", required=True, metavar="BENCH", dest="bench")
    _serve(kinds.add_parser("serve", help="load on any OpenAI endpoint"), number)
    _engine(kinds.add_parser("engine", help="steps/s of the engine, without HTTP"), number)
    _experts(kinds.add_parser("experts", help="replacement policies on a routing trace"))
    _step(kinds.add_parser("step", help="time of a step by op, against its bytes"), number)


def run(args: argparse.Namespace) -> int:
    """Carry out `moet bench`; prints a table and, with --output, writes a result file."""
    return _RUN[args.bench](args)


def _output(made: argparse.ArgumentParser) -> None:
    made.add_argument("--output", "-o", type=Path, default=None, metavar="FILE",
                      help="write the result there as JSON")  # fmt: skip


def _serve(made: argparse.ArgumentParser, number: Callable[[str], int]) -> None:
    made.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL")
    made.add_argument("--backend", choices=["openai", "openai-chat", "completions", "chat"],
                      default="openai", help="/v1/completions or /v1/chat/completions")  # fmt: skip
    made.add_argument("--model", default=None, help="default: the first that the server has")
    made.add_argument("--api-key", default=None, metavar="KEY")
    load = made.add_argument_group("load")
    load.add_argument("--num-prompts", type=number, default=100)
    load.add_argument("--request-rate", type=float, default=math.inf, metavar="PER_SECOND",
                      help="a Poisson process; inf: all at once (default)")  # fmt: skip
    load.add_argument("--burstiness", type=float, default=1.0,
                      help="shape of the gaps: 1 is Poisson, less is burstier")  # fmt: skip
    load.add_argument("--max-concurrency", type=int, default=None)
    load.add_argument("--num-warmups", type=int, default=1, help="requests before, not counted")
    load.add_argument("--seed", type=int, default=0)
    asked = made.add_argument_group("prompts")
    asked.add_argument("--dataset-path", type=Path, default=None, metavar="FILE",
                       help="conversations, JSON or JSON lines; default: random words")  # fmt: skip
    asked.add_argument("--random-input-len", type=number, default=1024, metavar="TOKENS")
    asked.add_argument("--random-output-len", type=number, default=128, metavar="TOKENS")
    asked.add_argument("--random-range-ratio", type=float, default=0.0, metavar="SHARE",
                       help="lengths vary by this share up and down")  # fmt: skip
    asked.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
                       help="answers of full length; off for servers that refuse it")  # fmt: skip
    asked.add_argument("--temperature", type=float, default=0.0)
    _output(made)


def _local(made: argparse.ArgumentParser, number: Callable[[str], int]) -> None:
    """Flags of the benches that load a model themselves."""
    made.add_argument("model", nargs="?", default="demo", metavar="MODEL",
                      help="checkpoint or pack folder, or demo (default)")  # fmt: skip
    made.add_argument("--precision", choices=["w2", "fp4"], default="w2")
    made.add_argument("--rounding", choices=["deployed", "none"], default="deployed")
    made.add_argument("--kv-cache-dtype", choices=["fp8", "nvfp4", "bf16", "fp32"], default="fp8")
    made.add_argument("--context", type=number, default=1024, metavar="TOKENS",
                      help="that each sequence has before the step")  # fmt: skip
    made.add_argument("--steps", type=int, default=20, help="measured steps")
    _output(made)


def _engine(made: argparse.ArgumentParser, number: Callable[[str], int]) -> None:
    _local(made, number)
    made.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="sequences at once")
    made.add_argument("--rows", type=int, nargs="+", default=[1], metavar="ROWS",
                      help="per sequence and step; 3 is what 2 drafts take")  # fmt: skip
    made.add_argument("--accept", type=float, default=None, metavar="TOKENS",
                      help="tokens that a step of several rows yields, for tokens/s")  # fmt: skip
    made.add_argument("--kv-cache-memory-mib", type=int, default=256, metavar="MIB")


def _step(made: argparse.ArgumentParser, number: Callable[[str], int]) -> None:
    _local(made, number)
    made.add_argument("--batch", type=int, default=1, help="sequences at once")
    made.add_argument("--rows", type=int, default=1, help="per sequence")
    made.add_argument("--packed-experts", action="store_true",
                      help="unpack an expert whenever it is used; on the CPU")  # fmt: skip
    made.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    made.add_argument("--weights", choices=["checkpoint", "dummy"], default="checkpoint",
                      help="dummy: random ones of full size, on a GPU; MODEL may be a "
                      "preset such as deepseek-v4-flash")  # fmt: skip
    made.add_argument("--enforce-eager", action="store_true", help="capture no graphs")
    made.add_argument("--expert-pool", type=float, default=None, metavar="GIB",
                      help="experts behind a pool on a GPU, with its hits and waits")  # fmt: skip


def _experts(made: argparse.ArgumentParser) -> None:
    made.add_argument("--trace", type=Path, default=None, metavar="FILE",
                      help="written by --expert-trace (default: a synthetic one)")  # fmt: skip
    made.add_argument("--pool", type=float, nargs="+", default=[0.152, 0.193, 0.5],
                      metavar="SHARE", help="of all experts")  # fmt: skip
    made.add_argument("--policy", nargs="+", default=None, metavar="NAME",
                      help="default: all of them")  # fmt: skip
    made.add_argument("--hot-rows", type=int, default=None, metavar="N",
                      help="write the N rows asked for most as the hot set of --pack")  # fmt: skip
    made.add_argument("--pack", type=Path, default=None, metavar="FOLDER")
    drawn = made.add_argument_group("synthetic trace")
    drawn.add_argument("--skew", type=float, nargs=2, default=[0.193, 0.987],
                       metavar=("SHARE", "MASS"),
                       help="so much of a layer's experts get so much of its choices")  # fmt: skip
    drawn.add_argument("--steady", type=int, default=0, metavar="STEPS",
                       help="steps before a tenth of the experts change places")  # fmt: skip
    drawn.add_argument("--steps", type=int, default=400)
    drawn.add_argument("--rows", type=int, default=1, help="per step")
    drawn.add_argument("--layers", type=int, default=43)
    drawn.add_argument("--experts", type=int, default=256, help="per layer")
    drawn.add_argument("--top-k", type=int, default=6)
    drawn.add_argument("--seed", type=int, default=0)
    _output(made)


def _run_experts(args: argparse.Namespace) -> int:
    from moet.bench import experts
    from moet.models.pack import Pack
    from moet.runtime.experts.hot import write_hot
    from moet.runtime.experts.policy import POLICIES
    from moet.runtime.experts.traces import Skew

    options = experts.ExpertBench(
        trace=args.trace,
        shares=args.pool,
        policies=args.policy or tuple(POLICIES),
        skew=Skew(args.skew[0], args.skew[1], args.steady),
        num_layers=args.layers,
        num_experts=args.experts,
        top_k=args.top_k,
        num_steps=_num_steps(args),
        num_tokens=args.rows,
        seed=args.seed,
    )
    if args.hot_rows is not None:
        if args.pack is None:
            raise ConfigError("--hot-rows needs --pack, the folder whose hot set it is to be")
        pack = Pack.open(args.pack)
        shape = len(pack.experts.layers), pack.experts.num_experts
        rows_to_keep = experts.hot_rows(options, args.hot_rows, shape)
        write_hot(pack, rows_to_keep)
        print(f"{len(rows_to_keep)} of {pack.experts.num_rows} rows are the hot set of {args.pack}")
        return 0
    rows = experts.compare(options)
    experts.show(rows, Console())
    _write(args, rows, experts.describe(options))
    return 0


def _run_serve(args: argparse.Namespace) -> int:
    from moet.bench import serve

    options = serve.ServeOptions(
        base_url=args.base_url.rstrip("/").removesuffix("/v1"),
        api="chat" if args.backend.endswith("chat") else "completions",
        model=args.model,
        api_key=args.api_key,
        num_prompts=args.num_prompts,
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        max_concurrency=args.max_concurrency,
        dataset_path=args.dataset_path,
        input_len=args.random_input_len,
        output_len=args.random_output_len,
        range_ratio=args.random_range_ratio,
        num_warmups=args.num_warmups,
        ignore_eos=args.ignore_eos,
        temperature=args.temperature,
        seed=args.seed,
    )
    fields = asyncio.run(serve.run(options))
    serve.show(fields, Console())
    _write(args, serve.rows(fields), fields, hardware=f"client of {options.base_url}")
    return 0


def _run_engine(args: argparse.Namespace) -> int:
    from moet.bench import engine

    config = EngineConfig(
        model=args.model,
        settings=_settings(args),
        cache=CacheConfig(
            kv_dtype=args.kv_cache_dtype,
            budget_bytes=args.kv_cache_memory_mib << 20,
            prefix_cache="off",
        ),
        scheduler=SchedulerConfig(max_num_seqs=max(args.batch)),
    )
    rows = engine.measure(
        config,
        batches=args.batch,
        rows=args.rows,
        context=args.context,
        num_steps=_num_steps(args),
        accept=args.accept,
    )
    engine.show(rows, Console())
    _write(args, rows)
    return 0


def _run_step(args: argparse.Namespace) -> int:
    from moet.bench import on_device, step
    from moet.bench.rig import Shape

    config = EngineConfig(
        model=args.model,
        settings=_settings(args),
        cache=CacheConfig(kv_dtype=args.kv_cache_dtype),
        target=TargetConfig(
            device=args.device, weights=args.weights, enforce_eager=args.enforce_eager
        ),
        experts=ExpertConfig(
            pool_bytes=None if args.expert_pool is None else int(args.expert_pool * (1 << 30))
        ),
    )
    config, gpu = on_device.device_for(config)
    if gpu is not None:
        shape = Shape(num_seqs=args.batch, num_rows=args.rows, context=args.context)
        rows = on_device.measure(config, gpu, shape, num_steps=_num_steps(args))
        on_device.show(rows, Console())
        _write(args, rows, hardware=on_device.hardware())
        return 0
    if args.expert_pool is not None:
        raise ConfigError("--expert-pool is measured on a GPU, and the model would run on the CPU")
    times = step.time_step(
        args.model,
        _settings(args),
        args.kv_cache_dtype,
        Shape(num_seqs=args.batch, num_rows=args.rows, context=args.context),
        num_steps=_num_steps(args),
        unpacked=not args.packed_experts,
    )
    step.show(times, Console())
    _write(args, times.rows())
    return 0


def _settings(args: argparse.Namespace) -> ModelSettings:
    return ModelSettings(rounding=args.rounding, precision=args.precision)


def _num_steps(args: argparse.Namespace) -> int:
    steps: int = args.steps
    if steps < 1:
        raise ConfigError(f"--steps is {steps}; it must be at least 1")
    return steps


def _write(
    args: argparse.Namespace,
    rows: Sequence[Any],
    more: Mapping[str, Any] | None = None,
    *,
    hardware: str | None = None,
) -> None:
    if args.output is None:
        return
    from moet.bench.results import report, this_machine, write

    command = without_key(f"moet {' '.join(args.words)}")
    content = report(command, rows, hardware=hardware or this_machine(), more=more)
    write(args.output, content)


def without_key(command: str) -> str:
    """A command line that may be shown: the key is not in it."""
    return re.sub(r"(--api-key[ =])\S+", r"\1...", command)


_RUN: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "serve": _run_serve,
    "engine": _run_engine,
    "step": _run_step,
    "experts": _run_experts,
}
