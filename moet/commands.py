"""What each command of the command line does, given its parsed flags.

Heavy parts are imported when a command runs, so that `moet --help` is quick.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table

from moet import __version__
from moet.config import (
    CacheConfig,
    EngineConfig,
    ExpertConfig,
    KVDtype,
    ModelSettings,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
    TargetConfig,
    api_keys_from_environment,
    launched,
)
from moet.errors import ConfigError

if TYPE_CHECKING:
    from moet.runtime.engine import Engine

DEMO_NOTICE = (
    "this is a tiny model, trained on little stories, sums and tools: it shows how moet works, and "
    "knows nothing of the world"
)


def serve(args: argparse.Namespace) -> int:
    """Answer over HTTP until a signal or the engine's death."""
    from moet.runtime.text_side import DEMOS
    from moet.server.reasoning import reasoning_defaults
    from moet.server.run import Service

    config = ServerConfig(
        host=args.host,
        port=args.port,
        served_model_names=tuple(args.served_model_name),
        api_keys=(*args.api_key, *_keys_of(args.api_key_file), *api_keys_from_environment()),
        max_body_bytes=args.max_body_bytes,
        shutdown_timeout_s=args.shutdown_timeout,
        keep_alive_s=args.sse_keep_alive_interval,
        max_thinking_tokens=args.max_thinking_tokens,
        reasoning_effort=args.reasoning_effort,
        default_chat_template_kwargs=args.default_chat_template_kwargs,
        request_timeout_s=args.request_timeout,
        raw_log_folder=args.log_raw_output,
        otlp_endpoint=args.otlp_traces_endpoint,
        allowed_origins=args.allowed_origins,
    )
    reasoning_defaults(config)  # wrong flags are told of before anything is loaded
    settled = _engine_config(args)
    _be_rank(settled)  # which answers no HTTP
    service = Service(
        lambda on_death: _engine(
            settled, own_process=not args.in_process, wait=False, on_death=on_death
        ),
        config,
    )
    if service.engine.model in DEMOS:
        sys.stderr.write(DEMO_NOTICE + "\n")
    service.run()
    return 0


def chat(args: argparse.Namespace) -> int:
    """Talk in the terminal; where stdin is none, each of its lines is a turn."""
    from moet.chat import Chat
    from moet.runtime.text_side import DEMOS

    given = {
        **_given_sampling(args),
        "reasoning_effort": args.reasoning_effort,
        "chat_template_kwargs": None if args.thinking is None else {"thinking": args.thinking},
    }
    with _opened(args) as engine:
        console = Console()
        if engine.model in DEMOS:
            console.print(DEMO_NOTICE, style="yellow")
        prompt = "> " if sys.stdin.isatty() else ""
        conversation = Chat(engine, console, system=args.system, fields=given)
        conversation.run(lambda: input(prompt))
    return 0


def generate(args: argparse.Namespace) -> int:
    """Continue each prompt and print the answers."""
    if args.n < 1:
        raise ConfigError(f"-n is {args.n}; it must be at least 1")
    prompts = args.prompt or [line.rstrip("\n") for line in sys.stdin]
    with _opened(args) as engine:
        params = msgspec.structs.replace(engine.text.defaults, **_given_sampling(args))
        for prompt in prompts:
            if args.json or args.n > 1:
                completion = engine.generate(prompt, params, n=args.n)[0]
                print(msgspec.json.encode(completion).decode(), flush=True)
                continue
            for output in engine.stream(prompt, params):
                print(output.text, end="", flush=True)
            print()
    return 0


def convert(args: argparse.Namespace) -> int:
    """Write a pack of a checkpoint."""
    from moet.console import byte_progress
    from moet.models.checkpoint import Checkpoint
    from moet.models.convert import convert as run
    from moet.models.convert_plan import ConvertOptions
    from moet.models.pack import is_pack
    from moet.runtime.text_side import TextSide

    if is_pack(args.checkpoint):
        raise ConfigError(f"{args.checkpoint} is a pack already; serve it, or give its checkpoint")
    checkpoint = Checkpoint.open(args.checkpoint)
    TextSide.from_folder(args.checkpoint)  # its faults are told before hours of conversion
    print(checkpoint.describe())
    options = ConvertOptions(scale_rule=args.scale_rule, dense_dtype=args.dense_dtype)
    with byte_progress(f"converting to {args.pack}") as progress:
        run(checkpoint, args.pack, options, progress)
    print(f"wrote {args.pack}")
    return 0


def verify(args: argparse.Namespace) -> int:
    """Read a pack whole and compare its checksums."""
    from moet.console import byte_progress
    from moet.models.pack import Pack
    from moet.models.progress import ProgressMeter

    pack = Pack.open(args.pack)
    with byte_progress(f"reading {args.pack}") as progress:
        meter = ProgressMeter(sum(pack.manifest.files.values()), progress)
        pack.verify(lambda num_bytes: meter.advance(num_bytes, str(args.pack)))
    print(f"{args.pack} is as it was made")
    return 0


def make_checkpoint(args: argparse.Namespace) -> int:
    """Write a synthetic checkpoint, or only say what would be written."""
    from moet.console import byte_progress
    from moet.models.synthetic import plan_checkpoint, write_checkpoint

    flavour = {} if args.flavour is None else {"flavour": args.flavour}
    plan = plan_checkpoint(args.size, model=args.model, **flavour)
    print(f"{plan.num_tensors:,} tensors, {plan.payload_bytes:,} bytes, {len(plan.shards)} shards")
    if args.dry_run:
        return 0
    folder = args.output or Path(f"{args.model}-{args.size}")
    with byte_progress(f"writing {folder}") as progress:
        write_checkpoint(
            folder,
            size=args.size,
            seed=args.seed,
            model=args.model,
            progress=progress,
            **flavour,
        )
    print(f"wrote {folder}")
    return 0


def plan(args: argparse.Namespace) -> int:
    """Say what fits on which cards, and how fast it will be."""
    import psutil

    from moet.plan import make_report, recipes, show
    from moet.runtime.hardware import GIB, hardware
    from moet.runtime.plan_types import PlanSettings

    if args.recipes:
        print(recipes(), end="")
        return 0
    if args.model is None:
        raise ConfigError("plan needs a MODEL, or --recipes")
    ram = psutil.virtual_memory().total if args.ram is None else int(args.ram * GIB)
    report = make_report(
        args.model,
        hardware(args.gpu, host_bytes=ram, memory_bytes=args.gpu_memory),
        PlanSettings(
            precision=args.precision,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            kv_cache_bytes=args.kv_cache_memory,
        ),
        kv_dtype=args.kv_cache_dtype,
        dense_dtype=args.dense_dtype,
        num_spec_tokens=args.spec_tokens,
        flavour=args.flavour,
    )
    if args.json:
        print(msgspec.json.encode(report.to_dict()).decode())
    else:
        show(report, Console())
    return 0


def bench(args: argparse.Namespace) -> int:
    """Measure a server, the engine, or a step."""
    from moet.bench.command import run

    return run(args)


def parse(args: argparse.Namespace) -> int:
    """Print the message that raw output makes, one JSON object a line."""
    from moet import parse as parsing
    from moet.types import FinishReason

    tools, tool_choice = parsing.read_tools(args.tools, args.tool_choice)
    how = parsing.Reading(
        tools=tools,
        tool_choice=tool_choice,
        thinking=args.thinking == "on",
        finish=None if args.finish is None else FinishReason(args.finish),
        chunk=args.chunk,
        stop=tuple(args.stop),
    )
    speech = parsing.Speech.of(args.model)
    raw = parsing.read_input(args.file)
    read = parsing.parse if args.stream else parsing.whole
    for line in read(raw, speech, how, name=args.file):
        print(json.dumps(line, ensure_ascii=False))
    return 0


def doctor(args: argparse.Namespace) -> int:
    """Report on this machine; exit code 1 if something will keep moet from serving."""
    from moet.doctor import report

    sections = report()
    problems = sections["problems"]
    if args.json:
        print(msgspec.json.encode(sections).decode())
        return 1 if problems else 0
    table = Table("what", "value", show_header=False)
    for name, section in sections.items():
        if isinstance(section, dict):
            for key, value in section.items():
                table.add_row(f"{name}.{key}", str(value))
        elif name == "gpus":
            _add_gpus(table, section)
    console = Console()
    console.print(table)
    for problem in problems:
        console.print(f"[red]problem:[/red] {problem}")
    if not problems:
        console.print("no problems found")
    return 1 if problems else 0


def _add_gpus(table: Table, gpus: Sequence[Mapping[str, Any]]) -> None:
    if not gpus:
        table.add_row("gpus", "none")
    for index, gpu in enumerate(gpus):
        for key, value in gpu.items():
            table.add_row(f"gpu {index}.{key}", str(value))


def launch(args: argparse.Namespace) -> int:
    """Start a coding agent, or say how; returns the agent's exit code."""
    from moet.launch import prepare, run

    keys = [args.api_key] if args.api_key else list(api_keys_from_environment())
    plan = prepare(args.client, args.url, key=keys[0] if keys else None, model=args.model)
    if args.print_only:
        print(plan.describe(args.passed_on))
        return 0
    return run(plan, args.passed_on)


def version(args: argparse.Namespace) -> int:
    """Print the version."""
    print(__version__)
    return 0


MTP_METHODS = ("mtp", "deepseek_mtp", "glm4_moe_mtp")  # names of the same thing elsewhere

COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "serve": serve,
    "chat": chat,
    "generate": generate,
    "convert": convert,
    "verify": verify,
    "make-checkpoint": make_checkpoint,
    "plan": plan,
    "bench": bench,
    "parse": parse,
    "doctor": doctor,
    "launch": launch,
    "version": version,
}


def _opened(args: argparse.Namespace) -> Engine:
    """An engine in this process, loaded; does not return where torchrun wants another rank."""
    config = _engine_config(args)
    _be_rank(config)
    return _engine(config)


def _engine(
    config: EngineConfig,
    *,
    own_process: bool = False,
    wait: bool = True,
    on_death: Callable[[], None] = lambda: None,
) -> Engine:
    from moet.runtime.engine import Engine

    return Engine(
        config.model,
        settings=config.settings,
        cache=config.cache,
        scheduler=config.scheduler,
        tensor_parallel=config.parallel.tensor,
        pipeline_parallel=config.parallel.pipeline,
        hang_timeout_s=config.parallel.hang_timeout_s,
        target=config.target,
        experts=config.experts,
        seed=config.seed,
        own_process=own_process,
        wait=wait,
        on_death=on_death,
    )


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    if args.model and args.model_flag and args.model != args.model_flag:
        message = f"MODEL is {args.model!r} and --model is {args.model_flag!r}; give one of them"
        raise ConfigError(message)
    prefix_cache = args.prefix_cache
    if prefix_cache is None:
        prefix_cache = "on" if args.enable_prefix_caching else "off"
    return EngineConfig(
        model=args.model or args.model_flag or "demo",
        settings=ModelSettings(
            rounding=args.rounding, precision="fp4" if args.precision == "fp4" else "w2"
        ),
        experts=_expert_config(args),
        cache=CacheConfig(
            kv_dtype=_kv_dtype(args),
            budget_bytes=args.kv_cache_memory,
            host_budget_bytes=args.host_cache_memory,
            snapshot_budget_bytes=args.snapshot_memory,
            host_cache_bytes=args.kv_host_cache,
            disk_cache_folder=args.kv_disk_cache[0],
            disk_cache_bytes=args.kv_disk_cache[1],
            prefix_cache=prefix_cache,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            prefill_share=args.prefill_share,
            max_model_len=args.max_model_len,
            max_queued_requests=args.max_num_queued_reqs,
            max_queued_tokens=args.max_num_queued_tokens,
            overlap=args.overlap,
            queue_timeout_s=args.queue_timeout,
            step_timeout_s=args.step_timeout,
            num_spec_tokens=num_spec_tokens(args),
            adaptive_spec=args.adaptive_spec,
        ),
        parallel=ParallelConfig(
            tensor=args.tensor_parallel_size,
            pipeline=args.pipeline_parallel_size,
            hang_timeout_s=args.hang_timeout,
        ),
        target=TargetConfig(
            device=args.device,
            weights=args.weights,
            dummy_seed=args.dummy_seed,
            dummy_skew=args.dummy_skew,
            enforce_eager=args.enforce_eager,
        ),
        seed=args.seed,
    )


def _expert_config(args: argparse.Namespace) -> ExpertConfig:
    return ExpertConfig(
        policy=None if args.precision in ("w2", "fp4") else args.precision,
        offered=tuple(name for name in args.precisions if name != args.precision),
        tau=args.gate_tau,
        prefill_precision=None if args.prefill_precision == "policy" else args.prefill_precision,
        pool_bytes=args.expert_pool,
        fp4_pool_bytes=args.fp4_pool,
        host_bytes=args.host_experts,
        static_bytes=args.static_experts,
        disk=args.disk_experts,
        staging_bytes=args.expert_staging,
        read_timeout_s=args.expert_read_timeout,
        heat_file=args.expert_heat,
        trace_file=args.expert_trace,
    )


def _be_rank(config: EngineConfig) -> None:
    """Where torchrun has started this process as another rank than 0, be that, and exit."""
    outside = launched()
    if outside is None:
        return
    from moet.runtime.parallel.start import be_rank, place_of

    place = place_of(outside, config)
    if place.rank > 0:
        be_rank(config, place, outside.local_rank)


def num_spec_tokens(args: argparse.Namespace) -> int:
    """From --spec-tokens, or the JSON that vLLM takes."""
    given = args.speculative_config
    if given is None:
        return args.spec_tokens or 0
    if args.spec_tokens is not None:
        raise ConfigError("--spec-tokens and --speculative-config say the same; give one of them")
    unknown = given.keys() - {"method", "num_speculative_tokens"}
    if unknown or given.get("method", "mtp") not in MTP_METHODS:
        raise ConfigError(
            f"--speculative-config is {given}; this server drafts with the model's own MTP block: "
            '{"method": "mtp", "num_speculative_tokens": N}'
        )
    number = given.get("num_speculative_tokens")
    if not isinstance(number, int) or isinstance(number, bool):
        raise ConfigError(
            f"--speculative-config has num_speculative_tokens {number!r}; it must be an integer"
        )
    return number


def _kv_dtype(args: argparse.Namespace) -> KVDtype:
    if args.kv_cache_dtype != "auto":
        named: KVDtype = args.kv_cache_dtype
        return named
    return "fp8" if args.rounding == "deployed" else "fp32"


def _given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    given = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "seed": args.sampling_seed,
    }
    return {name: value for name, value in given.items() if value is not None}


def _keys_of(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--api-key-file {path}: {error.strerror}") from None
    return [line.strip() for line in lines if line.strip()]
