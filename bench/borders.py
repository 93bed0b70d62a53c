"""Where a prompt in chunks first differs from the same in one, on a GPU: op by op, cache by cache.

    python -m bench.borders [--layers N] [--out FILE]

Every run starts from the same state. Each is made twice: what differs then is no matter of borders.
The first op that differs is called again with the inputs it had, whole and in part, with other
garbage in free memory. Dummy weights; also the small models of the tests. `bench.races` launches
its most likely suspects as often as it takes.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bench.gpu import open_gpu
from moet.config import ModelSettings
from moet.kernels import device_moe, prefill_gemm, stream_experts
from moet.kernels.device_gemm import Device
from moet.kernels.quant import Activations
from moet.kernels.stream_experts import ExpertPool
from moet.kernels.stream_gemm import Launcher
from moet.models.base import ForwardInput
from moet.models.deepseek_v4 import DeepseekV4
from moet.models.dummy import DummyOptions
from moet.runtime.dummy import dummy_model, preset_config

SPLITS = ((2048, (1024, 1024)), (2048, (700, 1348)), (1024, (512, 512)), (700, (256, 444)))
PAGE = 256
Results = dict[str, Any]
Kept = list[tuple[str, Tensor]]


class Recorder:
    """Stands before a callable and keeps copies of what it returned."""

    def __init__(self, name: str, call: Callable[..., Any], kept: Kept) -> None:
        self.name, self.call, self.kept = name, call, kept

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.call(*args, **kwargs)
        for part, value in enumerate(result if isinstance(result, tuple) else (result,)):
            if isinstance(value, Activations):
                for kind in ("values", "codes", "scale"):
                    field = getattr(value, kind)
                    if field is not None:
                        self.kept.append((f"{self.name}.{part}.{kind}", field.clone()))
            elif isinstance(value, Tensor):
                self.kept.append((f"{self.name}.{part}", value.clone()))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.call, name)


def watch(model: DeepseekV4, kept: Kept) -> None:
    """Record what the parts of every layer return."""
    for n, layer in enumerate(model.layers):
        attn = layer.attn
        for name in ("wqa_wkv", "_project_both", "_inputs", "queries", "_heads", "_attend", "wo_a"):
            setattr(attn, name, Recorder(f"{n}.{name}", getattr(attn, name), kept))
        if attn.indexer is not None:
            attn.indexer._select = Recorder(f"{n}.select", attn.indexer._select, kept)
        for site in ("hc_attn", "hc_ffn"):
            hc = getattr(layer, site)
            for name in ("_pass", "_enter"):
                setattr(hc, name, Recorder(f"{n}.{site}{name}", getattr(hc, name), kept))
        layer.attn = Recorder(f"{n}.attn", attn, kept)
        layer.ffn = Recorder(f"{n}.ffn", layer.ffn, kept)


@dataclass(frozen=True, slots=True)
class MixtureCall:
    """What a call of prefill_gemm.mixture got, and the hidden values that it made."""

    launcher: Launcher
    pool: ExpertPool
    x: Tensor
    expert_ids: Tensor
    weights: Tensor
    slot_of: Tensor
    limit: float | None
    error: Tensor
    hidden: Tensor

    def streamed(self, tokens: Tensor) -> Tensor:
        """The same hidden values of some tokens by the streaming kernel, a token at a time."""
        found = []
        for token in tokens.tolist():
            one = slice(token, token + 1)
            codes, scale = stream_experts.quantise(self.launcher, self.x[one].contiguous())
            ids = self.expert_ids[one].contiguous()
            work = stream_experts.plan(self.launcher, ids, self.slot_of, error=self.error)
            found.append(
                self.pool.gate_up(
                    self.launcher,
                    codes,
                    scale,
                    work,
                    top_k=ids.shape[1],
                    pair_weight=self.weights[one].contiguous(),
                    limit=self.limit,
                    error=self.error,
                )
            )
        return torch.cat(found)

    def alone(self, tokens: Tensor, choices: Tensor) -> Tensor:
        """Hidden values of these tokens' one expert, in a launch that has nothing else."""
        ids = self.expert_ids[tokens, choices].unsqueeze(1)
        rows = prefill_gemm.entry_rows(self.launcher, "w2")
        work = prefill_gemm.plan_rows(ids, self.slot_of, rows)
        x = self.x[tokens].contiguous()
        tiles = prefill_gemm.make_tiles(self.launcher, x, work=work, top_k=1)
        weights = self.weights[tokens, choices].contiguous()
        return prefill_gemm.gate_up(
            self.launcher,
            self.pool,
            tiles,
            work,
            pair_weight=weights,
            limit=self.limit,
            error=self.error,
        )


class MixtureCalls:
    """Stands before prefill_gemm.mixture and keeps what it got."""

    def __init__(self, call: Callable[..., Tensor], kept: Kept, calls: list[MixtureCall]) -> None:
        self.call, self.kept, self.calls = call, kept, calls

    def __call__(self, launcher: Any, pool: Any, *args: Any, **kwargs: Any) -> Tensor:
        result = self.call(launcher, pool, *args, **kwargs)
        hidden = next(v for name, v in reversed(self.kept) if name.startswith("moe.gate_up"))
        limit, error = kwargs["limit"], kwargs["error"]
        self.calls.append(MixtureCall(launcher, pool, *args, limit, error, hidden))
        return result


def explain(whole: MixtureCall, part: MixtureCall, first: int) -> Results | None:
    """Which of two launches made a row that differs, right or wrong, and what its tile was.

    first: token of `whole` that is the part's first.
    """
    top_k = part.expert_ids.shape[1]
    other = whole.hidden[first * top_k :][: len(part.hidden)]
    rows = (part.hidden != other).any(1).nonzero().flatten()
    if not len(rows):
        return None
    found: Results = {"rows": rows.tolist()[:8]}
    tokens, choices = (rows // top_k)[:4], (rows % top_k)[:4]
    right = part.streamed(tokens)[torch.arange(len(tokens), device=rows.device) * top_k + choices]
    for name, made in (("part", part.hidden[rows[:4]]), ("whole", other[rows[:4]])):
        found[f"{name}: values that differ from streams"] = (made != right).sum(1).tolist()
    unequal = (part.hidden[rows[0]] != other[rows[0]]).nonzero().flatten()
    for name, made in (
        ("stream", right[0]),
        ("part", part.hidden[rows[0]]),
        ("whole", other[rows[0]]),
    ):
        found[f"{name} at {unequal[:8].tolist()}"] = made[unequal[:8]].tolist()
    expert = int(part.expert_ids[tokens[0], choices[0]])
    for name, call, shift in (("part", part, 0), ("whole", whole, first)):
        pairs = (call.expert_ids.flatten() == expert).nonzero().flatten()
        at = (pairs == rows[0] + shift * top_k).nonzero().flatten().tolist()
        found[f"{name}: tokens of expert {expert}, place"] = [len(pairs), at]
    pairs = (whole.expert_ids.flatten() == expert).nonzero().flatten()
    of, which = pairs // top_k, pairs % top_k
    exact = whole.streamed(of)[torch.arange(len(of), device=rows.device) * top_k + which]
    wrong = {}
    for count in range(1, len(of) + 1):
        made = whole.alone(of[:count], which[:count])
        bad = (made != exact[:count]).any(1).nonzero().flatten().tolist()
        if bad:
            wrong[count] = bad[:6]
    found["wrong rows by number of tokens, alone"] = wrong or "none"
    return found


@contextmanager
def watching_experts(kept: Kept, calls: list[MixtureCall]) -> Iterator[None]:
    """Record what the parts of the experts' layer return, too."""
    places = [
        (device_moe, "route"),
        (prefill_gemm, "gate_up"),
        (prefill_gemm, "down"),
        (prefill_gemm, "shared_expert"),
        (prefill_gemm, "mixture"),
        (stream_experts, "combine"),
    ]
    held = [(place, name, getattr(place, name)) for place, name in places]
    for place, name, call in held:
        setattr(place, name, Recorder(f"moe.{name}", call, kept))
    prefill_gemm.mixture = MixtureCalls(prefill_gemm.mixture, kept, calls)  # type: ignore[assignment]
    try:
        yield
    finally:
        for place, name, call in held:
            setattr(place, name, call)


def soil() -> None:
    """Leave other bytes in free memory."""
    torch.cuda.synchronize()
    junk = [torch.empty(1 << 28, dtype=torch.uint8, device="cuda") for _ in range(24)]
    for i, block in enumerate(junk):
        block.fill_((0x7F, 0x80, 0xFF, 0x3C)[i % 4])
    small = [
        torch.full((size,), 0x7F, dtype=torch.uint8, device="cuda")
        for size in (512, 4096, 1 << 16, 1 << 19, 1 << 20, 1 << 22)
        for _ in range(64)
    ]
    del junk, small
    torch.cuda.synchronize()


def difference(name: str, found: Tensor, wanted: Tensor) -> str | None:
    """One line about two tensors that should be equal."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{name}: {tuple(found.shape)} {found.dtype} and {tuple(wanted.shape)}"
    if torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)):
        return None
    a, b = found.reshape(len(found), -1), wanted.reshape(len(wanted), -1)
    unequal = (a != b) & ~((a != a) & (b != b))
    rows = unequal.any(1).nonzero().flatten()
    columns = unequal.any(0).nonzero().flatten()
    gap = (a.float() - b.float()).abs().nan_to_num(1e30).max()
    return (
        f"{name}: {len(rows)} of {len(a)} rows {rows[:6].tolist()}, {len(columns)} columns "
        f"{columns[:6].tolist()}, {int(unequal.sum())} values, by {float(gap):.3g} of "
        f"{float(b.float().abs().max()):.3g}, NaN {int(a.float().isnan().sum())}"
    )


def compare(found: Kept, wanted: Kept, part: slice, total: int, most: int = 8) -> list[str]:
    """Lines about what differs. part: rows of `wanted` that `found` has, of `total`."""
    lines = []
    names = [name for name, _ in wanted]
    at = 0
    for name, value in found:
        if name not in names[at:] or (name == "logits" and part.stop < total):
            continue
        at = names.index(name, at)
        other = wanted[at][1]
        at += 1
        if len(other) % total == 0 and len(value) != len(other):
            each = len(other) // total
            other = other[part.start * each : part.stop * each]
        if len(value) != len(other) and len(value) != 1:
            continue
        line = difference(name, value, other[-len(value) :])
        if line is not None:
            lines.append(line)
        if len(lines) == most:
            break
    return lines


def compare_state(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Which bytes of which layers of which caches differ."""
    lines = []
    for name, tensor in found.items():
        unequal = tensor != wanted[name]
        for layer in unequal.flatten(1).any(1).nonzero().flatten().tolist()[:3]:
            at = unequal[layer].nonzero()
            lines.append(f"{name} layer {layer}: {len(at)} bytes, first {at[:3].tolist()}")
    return lines


class Trial:
    """One model, its state, and prompts through it."""

    def __init__(self, size: str, num_layers: int | None, device: Device, seed: int) -> None:
        raw = preset_config("deepseek-v4-flash", size, num_layers)  # type: ignore[arg-type]
        settings = ModelSettings(arch=device.arch)
        made = dummy_model(raw, settings, device, options=DummyOptions(seed=seed))
        assert isinstance(made.model, DeepseekV4)
        self.model, self.experts = made.model, made.experts
        self.kept: Kept = []
        self.calls: list[MixtureCall] = []
        watch(self.model, self.kept)
        sizes = {"paged": 12, "ring": 2}
        self.kv = {
            group.name: torch.full(
                (len(group.layers), sizes[group.kind], group.page_bytes),
                0x3C,
                dtype=torch.uint8,
                device="cuda",
            )
            for group in self.model.kv_cache_spec().groups
        }
        self.ids = torch.randint(self.model.vocab_size, (4096,))

    def run(self, first: int, last: int) -> Kept:
        soil()
        self.kept.clear()
        self.calls = []
        inputs = ForwardInput(
            token_ids=self.ids[first:last],
            positions=torch.arange(first, last),
            cu_seqlens_q=(0, last - first),
            seq_slots=torch.zeros(1, dtype=torch.int64),
            page_table=torch.arange(10).view(1, -1),
            seq_lens=(last,),
            logits_indices=torch.tensor([last - first - 1]),
        )
        with watching_experts(self.kept, self.calls):
            logits = self.model.forward(inputs, self.kv, self.experts).logits
        self.kept.append(("logits", logits))
        torch.cuda.synchronize()
        return list(self.kept)

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.kv.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        for name, tensor in state.items():
            self.kv[name].copy_(tensor)

    def borders(self, total: int, sizes: tuple[int, ...]) -> Results:
        before = self.state()
        whole, whole_calls = self.run(0, total), self.calls
        after = self.state()
        self.restore(before)
        found: Results = {"whole twice": compare(self.run(0, total), whole, slice(0, total), total)}
        found["state of whole twice"] = compare_state(self.state(), after)
        self.restore(before)
        start = 0
        for size in sizes:
            end, middle = start + size, self.state()
            part, calls = self.run(start, end), self.calls
            done = self.state()
            found[f"{start}..{end}"] = compare(part, whole, slice(start, end), total)
            told = None
            for a, b in zip(whole_calls, calls, strict=True) if calls else ():
                told = told or explain(a, b, start)
            found[f"{start}..{end} experts"] = told
            self.restore(middle)
            again = compare(self.run(start, end), part, slice(0, size), size)
            found[f"{start}..{end} twice"] = again
            self.restore(done)
            start = end
        found["state"] = compare_state(self.state(), after)
        found["counters"] = int(self.model.device.counters.abs().sum())  # type: ignore[union-attr]
        found["error"] = int(self.model.device.error)  # type: ignore[union-attr]
        self.restore(before)
        return {name: value or "the same" for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16, help="of the full size")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = open_gpu()
    results: Results = {"hardware": torch.cuda.get_device_name()}
    trials = [("full", args.layers, 1), ("small", None, 0), ("small", None, 3), ("tiny", None, 0)]
    for size, layers, seed in trials:
        try:
            trial = Trial(size, layers, device, seed)
        except Exception:
            results[f"{size} FAILED"] = traceback.format_exc(limit=-4)
            continue
        for total, sizes in SPLITS:
            began_s, name = perf_counter(), f"{size} seed {seed}: {total} = {sizes}"
            try:
                results[name] = trial.borders(total, sizes)
            except Exception:
                results[name] = traceback.format_exc(limit=-4)
            print(f"== {name} ({perf_counter() - began_s:.1f} s)", flush=True)
            print(json.dumps(results[name], indent=1), flush=True)
            if args.out:
                args.out.write_text(json.dumps(results, indent=1, default=str))
        del trial
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
