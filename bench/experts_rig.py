"""A model of V4-Flash's first layers on a GPU with its experts resident and in host memory, whose
router can be made as skewed as a hit rate needs; and steps and prompts of it. For bench.experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bench.gpu_model import PAGE, decode_rows, state
from moet.config import ModelSettings, Precision
from moet.kernels.device_gemm import Device
from moet.models.base import ForwardInput, ResidentProvider
from moet.models.deepseek_v4 import DeepseekV4
from moet.models.dummy import DummyOptions, hash_table
from moet.runtime.dummy import dummy_model, preset_config
from moet.runtime.experts.gpu import CachedExperts, HostSide
from moet.runtime.experts.host import Arena, touch
from moet.runtime.experts.store import DeviceExperts

GIB = 1 << 30
SEED = 1
CONTEXT = 1024
TOP_K = 6
MOST_ROWS = 8  # of a step


class Rig:
    """The model, its rows resident, and tokens at random."""

    def __init__(self, device: Device, num_layers: int, precision: Precision = "w2") -> None:
        raw = preset_config("deepseek-v4-flash", "full", num_layers)
        settings = ModelSettings(arch=device.arch, precision=precision)
        options = DummyOptions(seed=SEED, skew=1.0)
        made = dummy_model(
            raw, settings, device, num_spec_tokens=MOST_ROWS - 1, options=options
        )  # whose draft block is not used, but whose rings have room for as many rows
        assert isinstance(made.model, DeepseekV4)
        assert isinstance(made.experts, DeviceExperts)
        self.device, self.model, self.resident = device, made.model, made.experts
        self.layers = list(range(num_layers))
        table = self.resident.resident(0)
        self.form: Any = table.format
        self.bases = torch.cat([self._bases(layer) for layer in self.layers])
        self.generator = torch.Generator("cpu").manual_seed(SEED)
        routers = [layer.ffn.router for layer in self.model.layers]
        self._biases = [(r.bias, r.bias.clone()) for r in routers if r.bias is not None]
        self._tables = [r.table for r in routers if r.table is not None]
        self.skew = 1.0
        self.kv = state(self.model, -(-2 * CONTEXT // PAGE), 2)
        with torch.inference_mode():
            self.model.forward(chunk_of(self.tokens(CONTEXT), 0), self.kv, self.resident)
        self._kept = {name: tensor.clone() for name, tensor in self.kv.items()}

    def _bases(self, layer: int) -> Tensor:
        bases = self.resident.resident(layer).bases
        assert bases is not None
        return bases

    @property
    def total_bytes(self) -> int:
        return len(self.bases) * self.form.row_bytes

    @torch.inference_mode()
    def set_skew(self, skew: float) -> None:
        """Make experts as popular as DummyOptions says, in place: captured steps see it."""
        for bias, at_one in self._biases:
            bias.copy_(at_one * skew)
        for n, table in enumerate(self._tables):
            rng = torch.Generator(table.device).manual_seed(n)
            num_experts = len(self.bases) // len(self.layers)
            table.copy_(hash_table(tuple(table.shape), num_experts, skew, rng, table.device))
        self.skew = skew

    @torch.inference_mode()
    def restore(self) -> None:
        """The state behind the context, as it was before any step."""
        for name, tensor in self._kept.items():
            self.kv[name].copy_(tensor)

    def tokens(self, count: int) -> Tensor:
        return torch.randint(self.model.vocab_size, (count,), generator=self.generator)

    def to_host(self) -> tuple[Arena, dict[str, float]]:
        """All rows into pinned memory; how long its parts took."""
        begin = perf_counter()
        arena = Arena(len(self.bases), self.form.row_bytes, pin=True, fill=touch)
        pinned_s, first = perf_counter() - begin, 0
        for chunk in arena.chunks:
            chunk.copy_(self.resident.rows[first : first + len(chunk)], non_blocking=True)
            first += len(chunk)
        torch.cuda.synchronize()
        size = self.total_bytes / GIB
        return arena, {
            "GiB": round(size, 2),
            "pinned GiB/s": round(size / pinned_s, 2),
            "filled and pinned GiB/s": round(size / (perf_counter() - begin), 2),
        }

    def pool(
        self,
        host: HostSide,
        num_slots: int,
        layers: Sequence[int] = (),
    ) -> CachedExperts:
        """A cold pool; layers: the first ones of the rig's, by default all."""
        layers = layers or self.layers
        num_rows = len(layers) * (len(self.bases) // len(self.layers))
        return CachedExperts(
            self.device.launcher,
            self.form,
            host,
            self.bases[:num_rows],
            layers,
            num_slots,
            error=self.device.error,
        )


def chunk_of(tokens: Tensor, first: int) -> ForwardInput:
    """A chunk of one sequence at slot 0, of whose logits the last row's are wanted."""
    last = first + len(tokens)
    return ForwardInput(
        token_ids=tokens,
        positions=torch.arange(first, last),
        cu_seqlens_q=(0, len(tokens)),
        seq_slots=torch.zeros(1, dtype=torch.int64),
        page_table=torch.arange(-(-last // PAGE)).view(1, -1),
        seq_lens=(last,),
        logits_indices=torch.tensor([len(tokens) - 1]),
    )


class CapturedStep:
    """A decode step of one sequence, captured once and replayed with other tokens."""

    def __init__(self, rig: Rig, experts: ResidentProvider, num_rows: int) -> None:
        rig.model.kv_cache_spec().require_room(num_rows)
        self.ids = torch.zeros(num_rows, dtype=torch.int64, device="cuda")
        rows = decode_rows(1, num_rows, CONTEXT + num_rows)
        stream = torch.cuda.Stream()
        self.run: Callable[[], Tensor] = lambda: (
            rig.model.compute(self.ids, rows, None, rig.kv, experts).logits
        )
        with torch.inference_mode():
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self.run()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.logits = self.run()
        torch.cuda.synchronize()

    def __call__(self, tokens: Tensor) -> float:
        """Milliseconds of a step."""
        self.ids.copy_(tokens)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)


@dataclass(frozen=True, slots=True)
class Difference:
    """Whether steps with a pool gave the logits and the state of resident ones, and whether these
    gave them twice. what: of the first step that differs, by how much and where."""

    same: bool
    twice: bool
    what: str


def compare(rig: Rig, step: CapturedStep, resident: CapturedStep, times: int = 6) -> Difference:
    """Steps from the same state, with a pool and without."""
    same, twice, what = True, True, ""
    for n in range(times):
        tokens, made = rig.tokens(len(step.ids)), []
        for run in (resident, resident, step):
            rig.restore()
            run(tokens)
            made.append({"logits": run.logits.clone(), **{k: t.clone() for k, t in rig.kv.items()}})
        once, again, found = made
        twice &= all(torch.equal(once[name], again[name]) for name in once)
        differ = [name for name in once if not torch.equal(once[name], found[name])]
        if differ and same:
            gap = float((once["logits"] - found["logits"]).abs().max())
            finite = bool(once["logits"].isfinite().all()), bool(found["logits"].isfinite().all())
            what = f"step {n}: {differ[:6]}, logits by {gap:.3g}, finite {finite}"
        same &= not differ
    rig.restore()
    return Difference(same, twice, what)


def link_rate(arena: Arena) -> float:
    """Bytes a second from pinned memory by the copy engine."""
    out = torch.empty_like(arena.chunks[0], device="cuda")
    best = 0.0
    for chunk in arena.chunks[:3]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        out[: len(chunk)].copy_(chunk, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        best = max(best, chunk.numel() / begin.elapsed_time(end) * 1e3)
    return best
