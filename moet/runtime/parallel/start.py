"""Brings a group up: places of the ranks, what they must have in common, and each one's core."""

from __future__ import annotations

import hashlib
import logging
import platform
import socket
from dataclasses import replace

import msgspec
import torch

from moet import __version__
from moet.config import EngineConfig, Launched, launched
from moet.errors import ConfigError, MoetError
from moet.models.pack import Pack
from moet.models.sharding import check_divisible
from moet.runtime.core import EngineCore
from moet.runtime.host import Progress
from moet.runtime.loader import build_core, open_pack
from moet.runtime.parallel.core import LeadingCore, follow
from moet.runtime.parallel.group import LOOPBACK, Group, Place
from moet.runtime.parallel.monitor import GroupError
from moet.runtime.parallel.ranks import Ranks

logger = logging.getLogger(__name__)


def load_leading_core(config: EngineConfig, progress: Progress) -> EngineCore:
    """The core of rank 0, with the other ranks started (unless torchrun did) and loaded."""
    require_supported(config)
    pack = open_pack(config.model, progress)  # once, before others look for it
    check_divisible(pack.config, config.parallel.tensor, config.parallel.pipeline)
    outside, ranks, listener = launched(), Ranks(), None
    if outside is None:
        listener = socket.create_server((LOOPBACK, 0))
        place = Place(0, LOOPBACK, listener.getsockname()[1], hosts_store=True)
        _share_threads(config)
        root = logging.getLogger("moet")
        level = logging.getLevelName(root.level) if root.handlers else None
        ranks.start(config, place, level)
    else:
        place = place_of(outside, config)
    try:
        group = Group.join(place, config.parallel, claims(config, pack), listener)
        group.lost = ranks.lost
        ranks.watch(group.monitor.fail)
        core = build_core(config, pack, progress, shard=group.shard, kind=LeadingCore)
        assert isinstance(core, LeadingCore)
        core.lead(group, ranks)
        group.meet("loading")
    except BaseException as error:
        lost = ranks.lost()
        ranks.kill()
        if lost is not None and not isinstance(error, GroupError):
            raise GroupError(f"{lost} while the group was starting: {error}") from error
        raise
    return core


def run_rank(config: EngineConfig, place: Place) -> int:
    """Be a rank other than 0 until the group ends; returns the exit code."""
    try:
        require_supported(config)
        pack = open_pack(config.model, lambda stage, done: None)
        group = Group.join(place, config.parallel, claims(config, pack))
        try:
            core = build_core(config, pack, lambda stage, done: None, shard=group.shard)
            group.meet("loading")
        except Exception as error:
            group.monitor.fail(f"{group.name} failed while loading: {error}")
            raise
        follow(group, core)
    except MoetError as error:
        logger.error("%s", error)
        return 1
    return 0


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


def claims(config: EngineConfig, pack: Pack) -> dict[str, str]:
    """What must be equal on all ranks."""
    common = replace(config, model="")  # packs may lie in another folder on another host
    return {
        "moet's version": __version__,
        "torch's version": torch.__version__,
        "the kind of processor": platform.machine(),
        "the settings": _hash(msgspec.json.encode(common)),
        "the pack": _hash(msgspec.json.encode(pack.manifest)),
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
