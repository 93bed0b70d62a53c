"""The command line: parses flags into settings and hands over. Flags are spelled as vLLM's.

Exit codes: 0 done, 1 the engine failed, 2 a flag, model folder or kernel is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from moet import __version__, log, pasted_flags
from moet.bench.command import add_flags as add_bench_flags
from moet.commands import COMMANDS
from moet.config import POLICIES
from moet.errors import CheckpointError, ConfigError, KernelError, MoetError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    words, passed_on = for_client(with_dashes(sys.argv[1:] if argv is None else argv))
    args, rest = parser().parse_known_args(words)
    if rest:
        return _fail(ConfigError(pasted_flags.unknown(rest)), 2)
    args.words, args.passed_on = words, passed_on
    log.set_up(level=args.log_level, json_lines=args.log_json)
    try:
        return COMMANDS[args.command](args)
    except (ConfigError, CheckpointError, KernelError) as error:
        return _fail(error, 2)
    except MoetError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130


def _fail(error: MoetError, code: int) -> int:
    sys.stderr.write(f"moet: {error}\n")
    return code


def with_dashes(argv: Sequence[str]) -> list[str]:
    """The same words, with --max_num_seqs spelled --max-num-seqs."""
    words = []
    options_end = False
    for word in argv:
        options_end = options_end or word == "--"
        if word.startswith("--") and not options_end:
            name, equals, value = word.partition("=")
            word = name.replace("_", "-") + equals + value
        words.append(word)
    return words


def for_client(words: list[str]) -> tuple[list[str], list[str]]:
    """The words for moet, and those behind a `--` of `moet launch`, which are for the client."""
    if words[:1] != ["launch"] or "--" not in words:
        return words, []
    end = words.index("--")
    return words[:end], words[end + 1 :]


def parser() -> argparse.ArgumentParser:
    """All commands and their flags."""
    top = argparse.ArgumentParser(
        prog="moet", description="Serve DeepSeek-V4-Flash and GLM-5.2 from one machine."
    )
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _serve(_command(commands, "serve", "answer over HTTP"))
    _chat(_command(commands, "chat", "talk to a model in the terminal"))
    _generate(_command(commands, "generate", "continue prompts"))
    _convert(_command(commands, "convert", "turn a checkpoint into a pack"))
    verify = _command(commands, "verify", "read a pack whole and compare its checksums")
    verify.add_argument("pack", type=Path)
    _make(_command(commands, "make-checkpoint", "write a synthetic checkpoint"))
    _plan(_command(commands, "plan", "say what fits on which cards, and how fast it will be"))
    bench = _command(commands, "bench", "measure a server, the engine, or a step")
    add_bench_flags(bench, num_tokens)
    _parse(_command(commands, "parse", "print a model's raw output as the message it makes"))
    doctor_parser = _command(commands, "doctor", "report on this machine")
    doctor_parser.add_argument("--json", action="store_true", help="as one JSON object")
    _launch(_command(commands, "launch", "start a coding agent that talks to this server"))
    _command(commands, "version", "print the version")
    return top


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    text: str,
) -> argparse.ArgumentParser:
    made = commands.add_parser(name, help=text, description=text)
    made.set_defaults(command=name)
    group = made.add_argument_group("logging")
    group.add_argument(
        "--log-level", default="INFO", type=str.upper,
        choices=["DEBUG", "INFO", "WARNING", "ERROR"],
    )  # fmt: skip
    group.add_argument(
        "--log-json", action=argparse.BooleanOptionalAction, default=None,
        help="log lines as JSON objects (default: unless stderr is a terminal)",
    )  # fmt: skip
    return made


# Flags that several commands share


def _engine_flags(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "model", nargs="?", default=None, metavar="MODEL",
        help="checkpoint or pack folder, demo or demo-glm: tiny trained models (default demo)",
    )  # fmt: skip
    made.add_argument("--model", dest="model_flag", default=None, help=argparse.SUPPRESS)
    model = made.add_argument_group("model")
    model.add_argument("--precision", choices=list(POLICIES), default="w2",
                       help="routed experts: 2-bit; FP4 as shipped; 2-bit, and FP4 for tokens that "
                       "are uncertain (gate) or for the pack's hot experts")  # fmt: skip
    model.add_argument("--rounding", choices=["deployed", "none"], default="deployed",
                       help="round activations as the checkpoint was trained for")  # fmt: skip
    model.add_argument("--seed", type=int, default=0, help="for requests that bring none")
    target = made.add_argument_group("device")
    target.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto",
                        help="where the model runs (default: a GPU if there is one)")  # fmt: skip
    target.add_argument("--enforce-eager", action="store_true",
                        help="launch each kernel instead of replaying graphs")  # fmt: skip
    target.add_argument("--weights", choices=["checkpoint", "dummy"], default="checkpoint",
                        help="dummy: random ones of MODEL's size, a config folder or a name as in "
                        "make-checkpoint; for measuring speed")  # fmt: skip
    target.add_argument("--dummy-seed", type=int, default=0, help=argparse.SUPPRESS)
    target.add_argument("--dummy-skew", type=float, default=0.0, metavar="S",
                        help="popularity of experts falls as rank to the -S")  # fmt: skip
    group = made.add_argument_group("several processes")
    group.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, metavar="N",
                       help="ranks that share every layer: 1, 2 or 4")  # fmt: skip
    group.add_argument("--pipeline-parallel-size", "-pp", type=int, default=1, metavar="N",
                       help="stages that hold some of the layers each")  # fmt: skip
    group.add_argument("--hang-timeout", type=float, default=15.0, metavar="SECONDS",
                       help="after which a rank without a sign of life ends all")  # fmt: skip
    _expert_flags(made.add_argument_group("experts"))
    cache = made.add_argument_group("cache")
    cache.add_argument("--kv-cache-dtype", choices=["auto", "fp8", "nvfp4", "bf16", "fp32"],
                       default="auto", help="nvfp4: GLM-5.2 only")  # fmt: skip
    cache.add_argument("--kv-cache-memory", "--kv-cache-memory-bytes", type=num_bytes,
                       default=None, metavar="SIZE",
                       help="such as 4GiB (default: what a GPU has left, or 256MiB)")  # fmt: skip
    cache.add_argument("--host-cache-memory", type=num_bytes, default=256 << 20, metavar="SIZE",
                       help="host memory for the pages of preempted requests")  # fmt: skip
    cache.add_argument("--snapshot-memory", type=num_bytes, default=64 << 20, metavar="SIZE",
                       help="states from which the prefix cache resumes")  # fmt: skip
    cache.add_argument("--kv-host-cache", type=gib, default=0, metavar="GIB",
                       help="host memory for prefix-cache pages that leave the device")  # fmt: skip
    cache.add_argument("--kv-disk-cache", type=folder_and_gib, default=(None, 0),
                       metavar="FOLDER,GIB",
                       help="keep prefix-cache pages on disk, also for the next start")  # fmt: skip
    cache.add_argument("--prefix-cache", choices=["on", "exact", "off"], default=None)
    cache.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction,
                       default=True, help="the same as --prefix-cache on or off")  # fmt: skip
    steps = made.add_argument_group("steps")
    steps.add_argument("--max-model-len", type=num_tokens, default=None, metavar="TOKENS",
                       help="prompt and answer together, such as 32k")  # fmt: skip
    steps.add_argument("--max-num-seqs", type=int, default=32)
    steps.add_argument("--max-num-batched-tokens", type=num_tokens, default=2048)
    steps.add_argument("--prefill-share", type=float, default=0.5, metavar="SHARE",
                       help="of its rate a long prompt may cost a decoding request")  # fmt: skip
    steps.add_argument("--max-num-queued-reqs", type=int, default=1024)
    steps.add_argument("--max-num-queued-tokens", type=num_tokens, default=4_000_000)
    steps.add_argument("--queue-timeout", type=float, default=None, metavar="SECONDS",
                       help="how long a request may wait for its first step")  # fmt: skip
    steps.add_argument("--step-timeout", type=float, default=300.0, metavar="SECONDS",
                       help="a longer step is logged and makes /health answer 503")  # fmt: skip
    steps.add_argument("--overlap", "--async-scheduling", action=argparse.BooleanOptionalAction,
                       default=True, help="make a step while the last one runs")  # fmt: skip
    steps.add_argument("--spec-tokens", type=int, default=None, metavar="N",
                       help="drafted by the MTP block per step (default: none)")  # fmt: skip
    steps.add_argument("--adaptive-spec", action=argparse.BooleanOptionalAction, default=True,
                       help="draft fewer while that does not pay")  # fmt: skip
    steps.add_argument("--speculative-config", type=json_object, default=None, metavar="JSON",
                       help='{"method": "mtp", "num_speculative_tokens": N}')  # fmt: skip


def _sampling_flags(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=num_tokens, default=None)
    group.add_argument("--temperature", type=float, default=None)
    group.add_argument("--top-p", type=float, default=None)
    group.add_argument("--top-k", type=int, default=None)
    group.add_argument("--sampling-seed", type=int, default=None)


def _serve(made: argparse.ArgumentParser) -> None:
    _engine_flags(made)
    http = made.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1")
    http.add_argument("--port", type=int, default=8000)
    http.add_argument("--served-model-name", nargs="+", action="extend", default=[],
                      metavar="NAME")  # fmt: skip
    http.add_argument("--api-key", nargs="+", action="extend", default=[], metavar="KEY",
                      help="also from MOET_API_KEY, separated by commas")  # fmt: skip
    http.add_argument("--api-key-file", type=Path, metavar="FILE", help="one key a line")
    http.add_argument("--max-body-bytes", type=num_bytes, default=64 << 20, metavar="SIZE")
    http.add_argument("--shutdown-timeout", type=float, default=30.0, metavar="SECONDS",
                      help="how long requests under way may take after SIGTERM")  # fmt: skip
    http.add_argument("--sse-keep-alive-interval", type=float, default=15.0, metavar="SECONDS")
    http.add_argument("--max-thinking-tokens", type=num_tokens, default=None, metavar="TOKENS",
                      help="of reasoning in an answer; a request may ask for less")  # fmt: skip
    http.add_argument("--reasoning-effort", default=None, metavar="EFFORT",
                      help="of requests that name none: none, minimal, low, medium, high, "
                      "xhigh or max")  # fmt: skip
    http.add_argument("--default-chat-template-kwargs", type=json_object, default={},
                      metavar="JSON", help="of requests that say nothing of their own, such as "
                      '{"enable_thinking": false}')  # fmt: skip
    http.add_argument("--request-timeout", type=float, default=None, metavar="SECONDS",
                      help="from a request's arrival to its last token")  # fmt: skip
    http.add_argument("--allowed-origins", type=origins, default=(), metavar="URL,...",
                      help="web pages that may call, or * (default: none but ours)")  # fmt: skip
    http.add_argument("--log-raw-output", type=Path, default=None, metavar="FOLDER",
                      help="write every answer as the model made it, one file each")  # fmt: skip
    http.add_argument("--otlp-traces-endpoint", default=None, metavar="URL",
                      help="send a span of each request there; needs moet[otel]")  # fmt: skip
    http.add_argument("--in-process", action="store_true",
                      help="run the engine on a thread of the server's process")  # fmt: skip
    http.add_argument("--enable-auto-tool-choice", action="store_true", help=argparse.SUPPRESS)


def _chat(made: argparse.ArgumentParser) -> None:
    _engine_flags(made)
    _sampling_flags(made)
    made.add_argument("--system", default=None, help="system message")
    made.add_argument("--reasoning-effort", default=None)
    made.add_argument("--thinking", action=argparse.BooleanOptionalAction, default=None)


def _generate(made: argparse.ArgumentParser) -> None:
    _engine_flags(made)
    _sampling_flags(made)
    made.add_argument("--prompt", "-p", action="append", default=[],
                      help="repeat for several; without it, each line of stdin is one")  # fmt: skip
    made.add_argument("-n", type=int, default=1, help="answers per prompt")
    made.add_argument("--json", action="store_true", help="one JSON object per prompt")


def _convert(made: argparse.ArgumentParser) -> None:
    made.add_argument("checkpoint", type=Path)
    made.add_argument("pack", type=Path)
    made.add_argument("--scale-rule", choices=["mse", "inherit"], default="mse",
                      help="2-bit scales: of least squared error, or the source's own")  # fmt: skip
    made.add_argument("--dense-dtype", choices=["keep", "fp8", "bf16"], default="keep",
                      help="GLM-5.2: linears outside of routed experts; fp8 is block-128, made "
                      "at conversion, with the error of each tensor in report.json")  # fmt: skip


def _expert_flags(experts: argparse._ArgumentGroup) -> None:
    experts.add_argument("--expert-pool", type=gib_or_auto, default=None, metavar="GIB|auto",
                         help="device memory for experts; the rest stays in host memory and on "
                         "disk, and answers are the same (default: what a GPU has left; "
                         "on the CPU all of them)")  # fmt: skip
    experts.add_argument("--host-experts", type=gib_or_auto, default=None, metavar="GIB|auto",
                         help="host memory for experts beside a pool (default: all)")  # fmt: skip
    experts.add_argument("--disk-experts", action=argparse.BooleanOptionalAction, default=True,
                         help="read from the pack what memory does not hold")  # fmt: skip
    experts.add_argument("--static-experts", type=gib, default=0, metavar="GIB",
                         help="of the pool, for rows that live nowhere else")  # fmt: skip
    experts.add_argument("--precisions", type=policies, default=(), metavar="NAME,...",
                         help="what requests may ask for beside --precision")  # fmt: skip
    experts.add_argument("--fp4-pool", type=gib_or_auto, default=None, metavar="GIB|auto",
                         help="as --expert-pool, for FP4 rows beside 2-bit ones")  # fmt: skip
    experts.add_argument("--prefill-precision", choices=["policy", "w2", "fp4"], default="policy",
                         help="of prompts (default: as the request's own policy)")  # fmt: skip
    experts.add_argument("--gate-tau", type=float, default=0.6, metavar="P",
                         help="gate: tokens of at most this probability are uncertain")  # fmt: skip
    experts.add_argument("--expert-staging", type=gib, default=2 << 30, metavar="GIB",
                         help="host memory that a prompt's experts pass through")  # fmt: skip
    experts.add_argument("--expert-read-timeout", type=float, default=30.0, metavar="SECONDS",
                         help="after which an expert on disk counts as unreadable")  # fmt: skip
    experts.add_argument("--expert-heat", default=None, metavar="FILE",
                         help="experts to begin with, kept from the last run")  # fmt: skip
    experts.add_argument("--expert-trace", default=None, metavar="FILE",
                         help="record what is asked for, for moet bench experts")  # fmt: skip


def _plan(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "model", nargs="?", default=None, metavar="MODEL",
        help="deepseek-v4-flash, glm-5.2, or a checkpoint or pack folder",
    )  # fmt: skip
    made.add_argument("--recipes", action="store_true",
                      help="print docs/recipes.md: one command per model and card set")  # fmt: skip
    made.add_argument("--json", action="store_true", help="as one JSON object")
    machine = made.add_argument_group("machine")
    machine.add_argument("--gpu", default="rtx-5090", metavar="NAME[xN]",
                         help="rtx-5090, rtx-pro-6000 or h200, alone or x2 or x4")  # fmt: skip
    machine.add_argument("--ram", type=float, default=None, metavar="GIB",
                         help="host memory (default: this machine's)")  # fmt: skip
    machine.add_argument("--gpu-memory", type=num_bytes, default=None, metavar="SIZE",
                         help="what may be used of each card, such as 30GiB")  # fmt: skip
    model = made.add_argument_group("model")
    model.add_argument("--flavour", default=None, help="of a named model, as in make-checkpoint")
    model.add_argument("--precision", choices=["w2", "fp4"], default="w2")
    model.add_argument("--dense-dtype", choices=["keep", "fp8", "bf16"], default=None,
                       help="GLM-5.2: linears outside of routed experts")  # fmt: skip
    model.add_argument("--kv-cache-dtype", choices=["fp8", "nvfp4", "bf16"], default="fp8")
    model.add_argument("--spec-tokens", type=int, default=2, help="drafted per step; 0: none")
    steps = made.add_argument_group("steps")
    steps.add_argument("--max-model-len", type=num_tokens, default=None, metavar="TOKENS",
                       help="default: what fits; 128k if it costs expert slots")  # fmt: skip
    steps.add_argument("--max-num-seqs", type=int, default=4)
    steps.add_argument("--max-num-batched-tokens", type=num_tokens, default=8192)
    steps.add_argument("--kv-cache-memory", type=num_bytes, default=None, metavar="SIZE")


def _parse(made: argparse.ArgumentParser) -> None:
    made.add_argument("file", metavar="FILE",
                      help="raw output: text, a JSON list of token ids (if MODEL is a folder), or "
                      "a file of --log-raw-output; - is stdin")  # fmt: skip
    made.add_argument("--model", required=True, metavar="MODEL",
                      help="deepseek-v4-flash, glm-5.2, or a folder with a tokenizer")  # fmt: skip
    made.add_argument("--tools", default=None, metavar="JSON_FILE",
                      help="the request's tools, or the whole request")  # fmt: skip
    made.add_argument("--tool-choice", default=None, metavar="CHOICE",
                      help="auto, none, required or a tool's name")  # fmt: skip
    made.add_argument("--thinking", choices=["on", "off"], default="on",
                      help="whether the prompt left reasoning open")  # fmt: skip
    made.add_argument("--finish", choices=["stop", "length"], default=None,
                      help="why the model ended (default: as logged, or stop)")  # fmt: skip
    made.add_argument("--chunk", type=chunk, default=1, metavar="N",
                      help="tokens or characters at a time, or all (default: 1)")  # fmt: skip
    made.add_argument("--stop", action="append", default=[], metavar="TEXT",
                      help="a stop string; repeat for several")  # fmt: skip
    made.add_argument("--stream", action="store_true", help="print each delta, too")


def _launch(made: argparse.ArgumentParser) -> None:
    made.add_argument("client", choices=["claude", "codex", "opencode"])
    made.add_argument("--url", default="http://127.0.0.1:8000", help="where the server listens")
    made.add_argument("--api-key", default=None, metavar="KEY",
                      help="default: the first of MOET_API_KEY")  # fmt: skip
    made.add_argument("--model", default=None, metavar="NAME",
                      help="default: the first that the server has")  # fmt: skip
    made.add_argument("--print", dest="print_only", action="store_true",
                      help="say what would be set and run, and start nothing")  # fmt: skip
    made.epilog = "What stands behind -- is passed on to the client."


def _make(made: argparse.ArgumentParser) -> None:
    made.add_argument("model", help="deepseek-v4-flash or glm-5.2")
    made.add_argument("--size", default="tiny", help="tiny, small or full")
    made.add_argument("--flavour", default=None)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--output", "-o", type=Path, default=None, metavar="FOLDER",
                      help="default: MODEL-SIZE in the current folder")  # fmt: skip
    made.add_argument("--dry-run", action="store_true", help="print totals, write nothing")


_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_UNITS |= {"t": 1000**4, "tib": 2**40}
_MOST = 2**60  # of anything


def num_bytes(text: str) -> int:
    """Parse a size: bytes, or with a unit such as MiB, GiB or GB."""
    return _quantity(text.lower().removesuffix("b") if text.lower()[-2:-1] != "i" else text, text)


def gib(text: str) -> int:
    """Parse a size in bytes: a number of GiB, or with another unit."""
    return num_bytes(f"{text}GiB" if text.replace(".", "", 1).isdigit() else text)


def gib_or_auto(text: str) -> int | None:
    """Parse a size as gib does, or "auto", which is None."""
    return None if text == "auto" else gib(text)


def policies(text: str) -> tuple[str, ...]:
    """Parse names of precision policies, separated by commas."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(POLICIES)}")
    return names


def folder_and_gib(text: str) -> tuple[str, int]:
    """Parse FOLDER,GIB: a folder and a size in bytes."""
    folder, comma, size = text.rpartition(",")
    if not comma or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is no folder and size, such as ~/kv,100")
    return folder, gib(size)


def num_tokens(text: str) -> int:
    """Parse a count: 32768, 32k (1,000 each) or 32K (1,024 each), as vLLM does."""
    if text[-1:] in ("K", "M", "G"):
        return _quantity(text.lower() + "ib", text)
    return _quantity(text, text)


def chunk(text: str) -> int | None:
    """Parse a number of tokens above 0, or "all", which is None."""
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number above 0 nor all")
    return int(text)


def json_object(text: str) -> dict[str, object]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def origins(text: str) -> tuple[str, ...]:
    """Parse origins of web pages: separated by commas, or a JSON list, as vLLM takes them."""
    text = text.strip()
    if text.startswith("["):
        try:
            listed = json.loads(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list") from None
        if not all(isinstance(each, str) for each in listed):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of strings")
        return tuple(listed)
    return tuple(each.strip() for each in text.split(",") if each.strip())


def _quantity(text: str, said: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{said!r} is not a number with a unit such as k or GiB")
    number = float(match[1]) * _UNITS[match[2]]
    if number > _MOST:
        raise argparse.ArgumentTypeError(f"{said[:40]!r} is more than {_MOST}")
    return int(number)
