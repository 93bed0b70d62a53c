"""Brings a group up: places of the ranks, what they must have in common, and each one's core."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import msgspec
import torch

from moet import __version__
from moet.config import EngineConfig, Launched, launched
from moet.errors import ConfigError, MoetError
from moet.kernels.device_gemm import Device
from moet.models.base import ExpertProvider, Model
from moet.models.pack import Pack
from moet.models.pipeline_stages import check_divisible
from moet.runtime.core import EngineCore
from moet.runtime.device_start import load_dummy, load_rank, plan_device, settle_device
from moet.runtime.experts.serving import Served
from moet.runtime.host import Progress
from moet.runtime.loader import (
    build_core,
    core_on,
    dummy_config,
    dummy_identity,
    known_config,
    kv_identity,
    open_pack,
)
from moet.runtime.parallel.core import LeadingCore, follow
from moet.runtime.parallel.device import STEP_WAIT_S, connect
from moet.runtime.parallel.group import LOOPBACK, Group, Place
from moet.runtime.parallel.monitor import GroupError
from moet.runtime.parallel.ranks import Ranks

logger = logging.getLogger(__name__)


def load_leading_core(config: EngineConfig, progress: Progress) -> EngineCore:
    """The core of rank 0, with the other ranks started (unless torchrun did) and loaded."""
    require_supported(config)
    outside, ranks, listener = launched(), Ranks(), None
    source = _Source.open(config, 0 if outside is None else outside.local_rank, progress)
    check_divisible(source.raw_config, config.parallel.tensor, config.parallel.pipeline)
    if outside is None:
        _require_gpus(source, config.parallel.num_ranks)
        listener = socket.create_server((LOOPBACK, 0))
        place = Place(0, LOOPBACK, listener.getsockname()[1], hosts_store=True)
        _share_threads(source.config)
        root = logging.getLogger("moet")
        level = logging.getLevelName(root.level) if root.handlers else None
        ranks.start(config, place, level)
    else:
        place = place_of(outside, config)
    try:
        group = Group.join(place, config.parallel, claims(source), listener)
        group.lost = ranks.lost
        ranks.watch(group.monitor.mourn)
        core = source.core(group, progress, LeadingCore)
        assert isinstance(core, LeadingCore)
        core.lead(group, ranks)
        _all_loaded(group)
    except BaseException as error:
        lost = ranks.lost()
        ranks.kill()
        if lost is not None and not isinstance(error, GroupError):
            raise GroupError(f"{lost} while the group was starting: {error}") from error
        raise
    return core


def run_rank(config: EngineConfig, place: Place, local_rank: int) -> int:
    """Be a rank other than 0 until the group ends; returns the exit code.

    local_rank: its number on this host, and that of its GPU.
    """
    try:
        require_supported(config)
        source = _Source.open(config, local_rank, _unheard)
        group = Group.join(place, config.parallel, claims(source))
        try:
            core = source.core(group, _unheard, EngineCore)
            _all_loaded(group)
        except Exception as error:
            group.monitor.fail(f"{group.name} failed while loading: {error}")
            raise
        leave_signals_to_rank_0()
        follow(group, core)
    except MoetError as error:
        logger.error("%s", error)
        return 1
    except Exception:
        logger.exception("rank %d cannot go on", place.rank)
        return 1
    return 0


def leave_signals_to_rank_0() -> None:
    """SIGINT and SIGTERM reach every rank; rank 0 decides what becomes of requests under way."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def be_rank(config: EngineConfig, place: Place, local_rank: int) -> NoReturn:
    """As run_rank, and end this process, whose connections' threads may need the interpreter as it
    goes and would abort it.
    """
    code = run_rank(config, place, local_rank)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _unheard(stage: str, done: float) -> None:
    """Progress is told by rank 0."""


def _all_loaded(group: Group) -> None:
    """From here on ranks wait for each other no longer than a step may take."""
    group.meet("loading")
    group.comm.wait_at_most(max(STEP_WAIT_S, group.config.hang_timeout_s))


@dataclass(frozen=True, slots=True)
class _Source:
    """What a rank loads, and where to. config: settled for this device. pack: None if the weights
    are random."""

    config: EngineConfig
    raw_config: Mapping[str, Any]
    gpu: Device | None
    pack: Pack | None

    @classmethod
    def open(cls, config: EngineConfig, local_rank: int, progress: Progress) -> _Source:
        """Take a GPU, if it is to be one, and find the weights; makes the pack if there is none."""
        num_gpus = torch.cuda.device_count()
        if config.target.share_gpus and num_gpus:
            local_rank %= num_gpus
        if config.target.device != "cpu" and local_rank < num_gpus:
            torch.cuda.set_device(local_rank)
        known = known_config(config)
        config, gpu = settle_device(config, known)
        if config.target.weights == "dummy":
            return cls(config, dummy_config(config, known, gpu), gpu, None)
        pack = open_pack(config.model, progress)
        return cls(config, pack.config, gpu, pack)

    def core(self, group: Group, progress: Progress, kind: type[EngineCore]) -> EngineCore:
        """Load this rank's part, and wire a core around it."""
        config, gpu, pack = self.config, self.gpu, self.pack
        if gpu is None:
            assert pack is not None
            return build_core(config, pack, progress, shard=group.shard, kind=kind)
        connect(group, gpu, shared=config.target.share_gpus)
        config, made = plan_device(config, self.raw_config, gpu, group.shard)
        config = _common(group, config)
        model: Model
        experts: ExpertProvider
        served: Served | None = None
        if pack is None:
            model, experts = load_dummy(config, self.raw_config, gpu, progress, group.shard)
            identity = dummy_identity(config, self.raw_config)
        else:
            model, served = load_rank(config, pack, gpu, progress, made, group.shard)
            experts, identity = served.precisions.drafting, kv_identity(pack, config)
        return core_on(
            config,
            gpu,
            model,
            experts,
            identity,
            progress,
            served,
            kind=kind,
            watch=group.monitor.require_sound,
        )


def _common(group: Group, config: EngineConfig) -> EngineConfig:
    """The config with the pages and the window that every rank has room for."""
    budget_bytes, window = config.cache.budget_bytes, config.scheduler.max_model_len
    assert budget_bytes is not None
    assert window is not None
    return replace(
        config,
        cache=replace(config.cache, budget_bytes=group.least(budget_bytes, "sizing the KV cache")),
        scheduler=replace(config.scheduler, max_model_len=group.least(window, "sizing windows")),
    )


def _require_gpus(source: _Source, num_ranks: int) -> None:
    """Raise ConfigError if the ranks on this host would have to share GPUs."""
    if source.config.target.share_gpus:
        return
    if source.gpu is not None and torch.cuda.device_count() < num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks need as many GPUs; this host has {torch.cuda.device_count()}: use "
            "fewer, torchrun on several hosts, or --device cpu"
        )


def place_of(outside: Launched, config: EngineConfig) -> Place:
    """Where torchrun has put this process. Raises ConfigError if it started another number."""
    wanted = config.parallel.num_ranks
    if outside.num_ranks != wanted:
        raise ConfigError(
            f"torchrun started {outside.num_ranks} processes, but -tp {config.parallel.tensor} "
            f"-pp {config.parallel.pipeline} makes {wanted}"
        )
    host = LOOPBACK if outside.host == "localhost" else outside.host
    return Place(outside.rank, host, outside.port, outside.hosts_store, outside.attempt)


def claims(source: _Source) -> dict[str, str]:
    """What must be equal on all ranks."""
    common = replace(source.config, model="")  # packs may lie in another folder on another host
    pack = source.pack
    weights = source.raw_config if pack is None else msgspec.to_builtins(pack.manifest)
    told = msgspec.json.decode(msgspec.json.encode(common), type=EngineConfig)  # 60 is 60.0 there
    return {
        "moet's version": __version__,
        "torch's version": torch.__version__,
        "the kind of processor": platform.machine(),
        "the settings": _hash(msgspec.json.encode(told)),
        "the pack": _hash(msgspec.json.encode(weights)),
    }


def require_supported(config: EngineConfig) -> None:
    """Refuse what a group cannot do yet."""
    if config.cache.disk_cache_folder is not None or config.cache.host_cache_bytes:
        raise ConfigError(
            "--kv-host-cache and --kv-disk-cache keep pages of one process; with -tp or -pp leave "
            "them out"
        )


def _share_threads(config: EngineConfig) -> None:
    """Ranks on the processors of one machine divide them."""
    if config.settings.arch == "reference":
        torch.set_num_threads(max(1, torch.get_num_threads() // config.parallel.num_ranks))


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
