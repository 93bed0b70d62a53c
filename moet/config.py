"""Frozen settings, one dataclass per concern. The only reader of os.environ."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from moet.errors import ConfigError

KVDtype = Literal["fp32", "bf16", "fp8", "nvfp4"]
Precision = Literal["w2", "fp4"]
Policy = Literal["w2", "gate", "fp4", "w2+hot"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
Rounding = Literal["none", "deployed"]
DeviceChoice = Literal["auto", "cpu", "cuda"]
WeightsChoice = Literal["checkpoint", "dummy"]
DEFAULT_PAGE_BYTES = 256 << 20  # of KV pages on the CPU reference
MAX_SPEC_TOKENS = 8  # the draft blocks were trained for 1 to 5


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _require_seconds(flag: str, value: float | None, *, least: float | None = None) -> None:
    """Raise ConfigError unless a time is None, or finite and positive (with `least`: no less)."""
    if value is not None:
        fits = value > 0 if least is None else value >= least
        limit = "positive" if least is None else f"at least {least:g} s"
        finite = math.isfinite(value)
        _require(fits and finite, f"{flag} is {value}; it must be finite and {limit}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """How the model's numbers are treated.

    rounding "deployed" rounds activations, KV rows and index keys as the checkpoints were trained
    for; "none" computes in fp32 without it. arch "reference" is torch on the CPU.
    """

    arch: str = "reference"
    rounding: Rounding = "deployed"
    precision: Precision = "w2"


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """KV pages, resume snapshots and the prefix cache."""

    kv_dtype: KVDtype = "fp8"
    budget_bytes: int | None = None  # device bytes for pages; None: what a GPU has left
    host_budget_bytes: int = 256 << 20  # host bytes for the pages of preempted sequences
    snapshot_budget_bytes: int = 64 << 20  # resume snapshots of the prefix cache
    prefix_cache: Literal["on", "exact", "off"] = "on"  # "exact" keeps prefill-written pages only
    host_cache_bytes: int = 0  # host bytes for prefix-cache pages that had to leave the device
    disk_cache_folder: str | None = None  # where they survive a restart
    disk_cache_bytes: int = 0

    def __post_init__(self) -> None:
        _require(
            self.disk_cache_folder is None or self.disk_cache_bytes > 0,
            f"--kv-disk-cache gives {self.disk_cache_folder} {self.disk_cache_bytes} bytes; it "
            "must give more than 0: FOLDER,GIB",
        )
        _require(
            self.prefix_cache != "off"
            or (self.host_cache_bytes == 0 and self.disk_cache_folder is None),
            "--kv-host-cache and --kv-disk-cache keep pages of the prefix cache, which is off; "
            "give --prefix-cache on or exact",
        )
        _require(
            self.page_bytes > 0, f"--kv-cache-memory is {self.budget_bytes}; it must be positive"
        )

    @property
    def page_bytes(self) -> int:
        """Device bytes for pages, where nothing plans them."""
        return DEFAULT_PAGE_BYTES if self.budget_bytes is None else self.budget_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertConfig:
    """Where routed experts live, and how exactly a request gets them.

    policy None: what ModelSettings.precision says. `offered`: policies that a request may ask for
    besides. Sizes None: all rows, as far as memory goes.
    """

    policy: Policy | None = None
    offered: tuple[Policy, ...] = ()
    tau: float = 0.6  # `gate` computes rows again whose likeliest token has at most this chance
    prefill_precision: Precision | None = None  # of prompts; None: as the policy's own rows
    pool_bytes: int | None = None  # slots on the device
    fp4_pool_bytes: int | None = None  # the same for FP4 rows, where two formats are served
    host_bytes: int | None = None  # rows in host memory
    static_bytes: int = 0  # of the pool, for rows that never leave it and live nowhere else
    disk: bool = True  # rows may be read from the pack while steps run
    staging_bytes: int = 2 << 30  # that a prompt's experts pass through
    num_readers: int = 4  # threads that read the pack
    read_timeout_s: float = 30.0  # after which a row counts as unreadable
    heat_file: str | None = None  # rows to begin with, written at the end; None: beside the packs
    trace_file: str | None = None  # where what is asked for is recorded

    def __post_init__(self) -> None:
        _require(0 <= self.tau <= 1, f"--gate-tau is {self.tau}; it must be from 0 to 1")
        for flag, size in (
            ("--expert-pool", self.pool_bytes),
            ("--fp4-pool", self.fp4_pool_bytes),
            ("--host-experts", self.host_bytes),
        ):
            _require(size is None or size > 0, f"{flag} is {size}; it must be positive, or auto")
        _require_seconds("--expert-read-timeout", self.read_timeout_s)

    @property
    def is_plain(self) -> bool:
        """Whether all rows of one format are on the device and every request gets the same."""
        asks = self.policy or self.offered or self.prefill_precision or self.trace_file
        return not (asks or self.has_tiers)

    @property
    def has_tiers(self) -> bool:
        """Whether rows may be elsewhere than on the device."""
        return self.pool_bytes is not None or self.fp4_pool_bytes is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """How much runs at once and how much may wait."""

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048  # rows of one step
    prefill_share: float = 0.5  # of their rate that prefills may cost decoding sequences; 1: all
    max_model_len: int | None = None  # None: what the model and the pages allow
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4_000_000
    queue_timeout_s: float | None = None  # how long a request may wait for its first step
    step_timeout_s: float = 300.0  # after which a step is told of as late
    snapshot_interval: int = 4096  # tokens between resume snapshots of a long prompt
    overlap: bool = True  # launch step n+1 before the results of step n are read
    num_spec_tokens: int = 0  # drafted per sequence and step
    adaptive_spec: bool = True  # fewer while they do not pay

    def __post_init__(self) -> None:
        _require(
            0 <= self.num_spec_tokens <= MAX_SPEC_TOKENS,
            f"--spec-tokens is {self.num_spec_tokens}; it must be from 0 to {MAX_SPEC_TOKENS}",
        )
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_queued_requests"):
            value = getattr(self, name)
            flag = "--" + name.replace("_", "-").replace("queued-requests", "num-queued-reqs")
            _require(value >= 1, f"{flag} is {value}; it must be at least 1")
        _require_seconds("--queue-timeout", self.queue_timeout_s)
        _require_seconds("--step-timeout", self.step_timeout_s)
        _require(
            0 < self.prefill_share <= 1,
            f"--prefill-share is {self.prefill_share}; it must be above 0 and at most 1",
        )
        rows_per_seq = 1 + self.num_spec_tokens
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs * rows_per_seq,
            f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --max-num-seqs "
            f"{self.max_num_seqs} times {rows_per_seq}; every running sequence needs a row per "
            "step, and one more per draft (--spec-tokens)",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Over how many processes a model is divided, and how long each may be silent."""

    tensor: int = 1  # ranks that share every layer
    pipeline: int = 1  # stages that hold some of the layers each
    hang_timeout_s: float = 15.0  # after which a rank without a sign of life ends the group

    def __post_init__(self) -> None:
        for flag, value in (("-tp", self.tensor), ("-pp", self.pipeline)):
            _require(value >= 1, f"{flag} is {value}; it must be at least 1")
        _require(self.tensor in (1, 2, 4), f"-tp is {self.tensor}; it must be 1, 2 or 4")
        _require_seconds("--hang-timeout", self.hang_timeout_s, least=1)

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetConfig:
    """Where the model runs, and whether its weights are those of a checkpoint.

    device "auto": a GPU if there is one that kernels were built for. weights "dummy": random ones
    of the size that config.json says, of a seed, some experts as much more popular as `dummy_skew`
    says. enforce_eager: launch every kernel of a step anew instead of replaying captured graphs.
    share_gpus: let ranks have a GPU together where there are fewer: to try them, not to be fast.
    """

    device: DeviceChoice = "auto"
    weights: WeightsChoice = "checkpoint"
    dummy_seed: int = 0
    dummy_skew: float = 0.0
    enforce_eager: bool = False
    share_gpus: bool = False

    def __post_init__(self) -> None:
        _require(
            0 <= self.dummy_skew <= 4,
            f"--dummy-skew is {self.dummy_skew}; it must be from 0 to 4",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Everything the engine core needs to build itself: a model folder (checkpoint or pack)."""

    model: str
    settings: ModelSettings = field(default_factory=ModelSettings)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    experts: ExpertConfig = field(default_factory=ExpertConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    seed: int = 0  # for requests that bring none


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """The HTTP surface."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 64 << 20
    shutdown_timeout_s: float = 30.0
    keep_alive_s: float = 15.0  # silence on a stream before a comment is sent
    max_thinking_tokens: int | None = None  # of an answer, whatever the request allows
    reasoning_effort: str | None = None  # of requests that say nothing about it
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    request_timeout_s: float | None = None  # from arrival to the last token
    raw_log_folder: Path | None = None  # where each answer's tokens are written; None: nowhere
    otlp_endpoint: str | None = None  # where a span of each request is sent; needs moet[otel]
    allowed_origins: tuple[str, ...] = ()  # of web pages that may call; ("*",): any

    def __post_init__(self) -> None:
        limit = self.max_thinking_tokens
        _require(
            limit is None or limit >= 0,
            f"--max-thinking-tokens is {limit}; it must be at least 0",
        )
        _require(0 <= self.port <= 65535, f"--port is {self.port}; it must be from 0 to 65535")
        _require_seconds("--request-timeout", self.request_timeout_s)
        _require_seconds("--shutdown-timeout", self.shutdown_timeout_s, least=0)
        _require_seconds("--sse-keep-alive-interval", self.keep_alive_s)


def cache_dir() -> Path:
    """Where converted packs live: $MOET_CACHE_DIR or ~/.cache/moet."""
    base = os.environ.get("MOET_CACHE_DIR")
    return Path(base) if base else Path.home() / ".cache" / "moet"


@dataclass(frozen=True, slots=True)
class Launched:
    """What torchrun, or whatever else starts the ranks of a group, tells each of them."""

    rank: int
    num_ranks: int
    host: str
    port: int
    hosts_store: bool  # whether rank 0 opens the port; torchrun's agent does it otherwise
    local_rank: int
    attempt: str  # differs between restarts


def launched() -> Launched | None:
    """This process's place in a group that was started from outside, by torchrun's variables."""
    given = os.environ
    if "RANK" not in given or int(given.get("WORLD_SIZE", "1")) == 1:
        return None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in given]
    _require(not missing, f"RANK is set, but {', '.join(missing)} is not; start with torchrun")
    rank = int(given["RANK"])
    agent_store = given.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    run_id = given.get("TORCHELASTIC_RUN_ID", "")
    return Launched(
        rank=rank,
        num_ranks=int(given["WORLD_SIZE"]),
        host=given["MASTER_ADDR"],
        port=int(given["MASTER_PORT"]),
        hosts_store=rank == 0 and not agent_store,
        local_rank=int(given.get("LOCAL_RANK", rank)),
        attempt=f"{run_id}.{given.get('TORCHELASTIC_RESTART_COUNT', '0')}",
    )


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with more variables, for a process that it starts."""
    return {**os.environ, **variables}


def leave_nccl_to_the_monitor() -> None:
    """Tell torch, which hears it by variables alone, that a rank that is gone must not end this
    process: whoever started the group is told why instead."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")


def api_keys_from_environment() -> tuple[str, ...]:
    """Keys in $MOET_API_KEY, separated by commas."""
    return tuple(key for key in os.environ.get("MOET_API_KEY", "").split(",") if key)
