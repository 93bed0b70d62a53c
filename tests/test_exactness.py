"""The exactness contract from packs on, for both models: a request's tokens and log-probabilities
are the same bits alone, in company, after a prefix hit, in another process and after a restart.
What needs no pack is in runtime/test_core_models.py."""

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from moet.config import CacheConfig, EngineConfig, ModelSettings, Precision, SchedulerConfig
from moet.models import load_model
from moet.models.base import Model
from moet.models.checkpoint import Checkpoint
from moet.models.convert import convert
from moet.models.convert_plan import ConvertOptions
from moet.models.moe import UnpackedExperts
from moet.models.pack import Pack
from moet.models.synthetic import write_checkpoint
from moet.runtime.core import EngineCore
from moet.runtime.experts.store import ResidentExpertStore
from moet.runtime.host import ThreadHost
from moet.runtime.loader import load_core
from moet.runtime.process import ProcessHost
from moet.types import Request, TokenEvent
from tests.fakes import drain, request, tokens_of

MODELS = ("deepseek-v4-flash", "glm-5.2")
PREFIX = [(37 * i + 11) % 250 + 2 for i in range(256)]  # a page of either model, beyond index_topk
REQUESTS = [
    request("long", [*PREFIX, *PREFIX[40:70]], max_tokens=8, logprobs=1),
    request("branch", [*PREFIX, 3, 5], max_tokens=6, temperature=1.0, seed=5, logprobs=1),
    request("crosses", PREFIX[3:253], max_tokens=10, logprobs=1),
    request("short", [42], max_tokens=10, temperature=0.7, top_p=0.9, seed=6, logprobs=1),
]
BY_NAME = {one.request_id: one for one in REQUESTS}
Content = tuple[object, ...]


class Served:
    """A pack of a synthetic model and what each request gives by itself."""

    def __init__(self, pack: Path) -> None:
        self.pack = pack
        opened = Pack.open(pack)
        self.model: Model = load_model(opened.config, opened, ModelSettings(), "fp8")
        self.experts = {
            tier: UnpackedExperts(ResidentExpertStore(opened, tier)) for tier in get_args(Precision)
        }
        self._alone: dict[tuple[str, Precision], Content] = {}

    def config(self, precision: Precision = "w2", **options: object) -> EngineConfig:
        cache = {name: options.pop(name) for name in ("prefix_cache",) if name in options}
        return EngineConfig(
            model=str(self.pack),
            settings=ModelSettings(precision=precision),
            cache=CacheConfig(**{"prefix_cache": "off", **cache}),  # type: ignore[arg-type]
            scheduler=SchedulerConfig(**{"overlap": False, **options}),  # type: ignore[arg-type]
        )

    def core(self, precision: Precision = "w2", **options: object) -> EngineCore:
        """A core over parts that are loaded once: only the runtime is new."""
        config = self.config(precision, **options)
        return EngineCore(
            self.model,
            self.experts[precision],
            cache=config.cache,
            scheduler=config.scheduler,
            precision=precision,
            vocab_size=self.model.vocab_size,
            seed=0,
        )

    def alone(self, name: str, precision: Precision = "w2") -> Content:
        """By itself, the prompt in one step, nothing cached, plain loop."""
        key = (name, precision)
        if key not in self._alone:
            core = self.core(precision)
            self._alone[key] = run(core, [BY_NAME[name]])[name]
            core.shutdown()
        return self._alone[key]

    def all_alone(self) -> dict[str, Content]:
        return {name: self.alone(name) for name in BY_NAME}


@pytest.fixture(scope="session", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp(request.param)
    write_checkpoint(folder / "checkpoint", size="tiny", model=request.param)
    convert(Checkpoint.open(folder / "checkpoint"), folder / "pack", ConvertOptions())
    return Served(folder / "pack")


def content(events: list[TokenEvent]) -> Content:
    """What a client sees, however it was cut into events."""
    logprobs = [entry for event in events for entry in event.logprobs or []]
    return (
        tokens_of(events),
        [(tuple(one.token_ids), tuple(one.logprobs), one.rank) for one in logprobs],
        events[-1].finish_reason,
    )


def run(core: EngineCore, requests: list[Request]) -> dict[str, Content]:
    """Submit together, run dry, and leave nothing behind."""
    for one in requests:
        core.submit(one)
    outputs = {name: content(events) for name, events in drain(core).items()}
    core.check()
    assert core.stats().num_used_pages == 0
    return outputs


def test_the_requests_differ_and_precision_matters(served: Served) -> None:
    outputs = [str(served.alone(name)) for name in BY_NAME]
    assert len(set(outputs)) == len(outputs)
    assert served.alone("long", "fp4") != served.alone("long", "w2")


def test_mates_chunks_and_loop(served: Served) -> None:
    core = served.core(overlap=True, max_num_batched_tokens=100)
    assert run(core, REQUESTS[::-1]) == served.all_alone()
    core.shutdown()


@pytest.mark.deep  # a core without a pack shows it, too
def test_prefix_hits(served: Served) -> None:
    core = served.core(prefix_cache="on")
    assert run(core, REQUESTS) == served.all_alone()
    before = core.stats().cached_tokens
    again = [BY_NAME["long"], BY_NAME["branch"]]
    assert run(core, again) == {one.request_id: served.alone(one.request_id) for one in again}
    assert core.stats().cached_tokens - before == 512


@pytest.mark.parametrize("host", [ThreadHost, ProcessHost])
def test_hosts_and_restart_from_the_pack(
    served: Served, host: Callable[..., ThreadHost | ProcessHost]
) -> None:
    """A second load, in a thread and in another process, moves no bit."""
    events: dict[str, list[TokenEvent]] = {name: [] for name in BY_NAME}
    ended = threading.Semaphore(0)

    def deliver(step: list[TokenEvent]) -> None:
        for event in step:
            events[event.request_id].append(event)
            if event.finish_reason is not None:
                ended.release()

    running = host(functools.partial(load_core, served.config(overlap=True)))
    running.start(deliver)
    try:
        running.ready.result(timeout=120)
        for one in REQUESTS:
            running.submit(one).result(timeout=60)
        for _ in REQUESTS:
            assert ended.acquire(timeout=120)
    finally:
        running.close()
    assert {name: content(one) for name, one in events.items()} == served.all_alone()
