"""Train one demo model on one accelerator within a time budget; resumable.

Progress is measured in seconds of training, so the learning rate and the phases (short rows, then
also long ones, then rounded weights) follow the clock whatever the speed. Example:

    python -m bench.train_demo.train deepseek-v4 --seconds 480 --total 960 --state STATE_FOLDER
"""

from __future__ import annotations

import argparse
import io
import json
import math
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.train_demo import quantise
from bench.train_demo.corpus import Renderer, token_counts
from bench.train_demo.evaluate import look, report
from bench.train_demo.export import export
from bench.train_demo.feed import ROWS_PER_MESSAGE, Feed, split
from bench.train_demo.glm import Glm, kept_in_bf16
from bench.train_demo.layers import Linear
from bench.train_demo.optim import Optimizer, Rounder
from bench.train_demo.presets import Size, glm_config, v4_config
from bench.train_demo.restore import restore
from bench.train_demo.snapshot import load_snapshot, save_snapshot, write_parts
from bench.train_demo.tokenizer import Family
from bench.train_demo.v4 import V4, fill_hash_tables

DRAFT_WEIGHT = 0.4
LONG_SHARE = 0.15  # of conversations in long rows
LONG_FROM, ROUNDED_FROM = 0.4, 0.75  # progress
BIAS_STEP = 2e-3  # of the router biases, decayed with the learning rate
LONG_ROWS = {"deepseek-v4": 4, "glm": 2}  # of 8192 tokens, computed at a time
PEAK_LR = 4e-3
LOOK_EVERY_S = 90.0
WARM_UP_STEPS = 100
STEPS = "steps"  # a file of the state that is there once a step is done


@dataclass(frozen=True)
class Phase:
    """What a moment of training looks like. long_every: 0 for short rows only."""

    lr: float
    long_every: int
    rounded: bool


def phase(progress: float, num_steps: int, long_every: int = 2, peak_lr: float = PEAK_LR) -> Phase:
    """progress: share of all training time that has passed."""
    warm = min(1.0, (num_steps + 1) / WARM_UP_STEPS)
    lr = peak_lr * warm * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))
    return Phase(lr, long_every if progress >= LONG_FROM else 0, progress >= ROUNDED_FROM)


def progress_of(seconds: float, args: argparse.Namespace, passed: float) -> float:
    """Share of training done. seconds: trained, `passed` of this call: one that exports ends with
    a low rate and rounded weights, however long compiling took."""
    total = args.total
    if args.deliver == "export":
        total = min(total, seconds + max(args.seconds - passed, 0.0))
    return seconds / total if total > 0 else 1.0


def build(family: Family, tokenizer: Path, dtype: torch.dtype, size: Size = "wide") -> nn.Module:
    """A fresh model over a tokenizer folder."""
    renderer = Renderer(family, tokenizer)
    vocab = renderer.tokenizer.vocab_size
    if family == "glm":
        names = ("<|endoftext|>", "<|user|>", "<|observation|>")
        ends = tuple(renderer.tokenizer.control_id(name) for name in names)
        return Glm(glm_config(vocab, ends, size), dtype)
    model = V4(v4_config(vocab, size), dtype)
    fill_hash_tables(
        model, torch.from_numpy(token_counts(renderer, 40 if size == "micro" else 300))
    )
    return model


def rounder(model: nn.Module) -> Rounder:
    """How each master is rounded for the official format of its model."""
    stores = {
        f"{name}.weight": module.store
        for name, module in model.named_modules()
        if isinstance(module, Linear)
    }
    glm = isinstance(model, Glm)

    def apply(name: str, master: Tensor) -> Tensor:
        store = "expert" if ".experts.w" in name else stores.get(name, "keep")
        if glm:
            keep = kept_in_bf16(model.config, name, store)
            return master if keep else quantise.nvfp4(master)
        if store == "expert":
            return quantise.mxfp4(master)
        return quantise.fp8_block(master) if store == "dense" else master

    return apply


def routers(model: nn.Module) -> list[Tensor | None]:
    """The selection biases in the order of Losses.loads; None where tokens are routed by id."""
    if isinstance(model, V4):
        blocks = [*model.layers, model.mtp[0].block]
        return [None if b.ffn.gate.hashed else b.ffn.gate.bias for b in blocks]
    layers = [layer for layer in model.model.layers if not layer.dense]
    return [layer.mlp.gate.e_score_correction_bias for layer in layers]


@torch.no_grad()
def balance(biases: list[Tensor | None], loads: list[Tensor], step: float) -> None:
    """Push the biases of busy experts down and of idle ones up."""
    for bias, load in zip(biases, loads, strict=True):
        if bias is not None:
            bias.add_(torch.sign(load.mean() - load), alpha=step)


def compile_blocks(model: nn.Module) -> None:
    """Compile each block by itself: blocks of a kind share their code."""
    torch._dynamo.config.recompile_limit = 64
    blocks = (
        [*model.layers, model.mtp[0].block] if isinstance(model, V4) else list(model.model.layers)
    )
    for block in blocks:
        block.compile(dynamic=False)


class Trainer:
    """Model, optimiser and clock."""

    def __init__(self, family: Family, tokenizer: Path, device: str, size: Size = "wide") -> None:
        torch.manual_seed(0)
        self.family, self.device = family, device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model = build(family, tokenizer, self.dtype, size).to(device)
        self.optimizer = Optimizer(self.model, self.dtype)
        self.round = rounder(self.model)
        self.biases = routers(self.model)
        self.seconds = 0.0
        self.rounded = False

    def step(
        self, ids: Tensor, weights: Tensor, now: Phase, rows: int, **how: Any
    ) -> dict[str, Tensor]:
        """One update. ids, weights: [B, T + 2], of which `rows` are computed at a time.

        Returns tensors, so that nothing waits.
        """
        total = weights[:, 1:-1].sum()
        parts, loads = [], []
        for piece in zip(ids.split(rows), weights.split(rows), strict=True):
            losses = self.model.losses(*piece, **how)
            share = len(piece[0]) / len(ids)
            per_token = (losses.main + DRAFT_WEIGHT * losses.draft) / total
            (per_token + share * losses.index).backward()
            parts.append(
                (losses.main.detach(), losses.draft.detach(), losses.index.detach() * share)
            )
            loads.append(losses.loads)
        main, draft, index = (torch.stack(values).sum() for values in zip(*parts, strict=True))
        busy = [torch.stack(layer).sum(0) for layer in zip(*loads, strict=True)]
        self.rounded = now.rounded
        norm = self.optimizer.step(now.lr, self.round if now.rounded else None)
        balance(self.biases, busy, BIAS_STEP * now.lr / PEAK_LR)
        spread = torch.stack([load.max() / load.mean() for load in busy]).max()
        return {
            "main": main / total,
            "draft": draft / total,
            "index": index,
            "norm": norm,
            "spread": spread,
        }

    def save(self, path: Path) -> None:
        """Everything, for going on here."""
        buffers = {n: b for n, b in self.model.named_buffers() if not b.is_floating_point()}
        buffers |= {n: b for n, b in self.model.named_buffers() if n.endswith("bias")}
        state = {"optimizer": self.optimizer.state(), "seconds": self.seconds, "buffers": buffers}
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)

    @torch.no_grad()
    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device)
        self.optimizer.load(state["optimizer"])
        self.seconds = state["seconds"]
        own = dict(self.model.named_buffers())
        for name, buffer in state["buffers"].items():
            own[name].copy_(buffer)
        self.optimizer.refresh(None)


def train(args: argparse.Namespace) -> None:
    trainer = Trainer(args.family, args.tokenizer, args.device, args.size)
    state = args.state / "state.pt"
    args.state.mkdir(parents=True, exist_ok=True)
    if state.exists():
        trainer.load(state)
    elif args.snapshot:
        trainer.seconds = load_snapshot(args.snapshot, trainer.optimizer, trainer.model)
    elif args.checkpoint:
        restore(args.checkpoint, trainer.optimizer, trainer.model)
        trainer.seconds = args.trained
    print(f"{args.family}: {sum(p.numel() for p in trainer.model.parameters()):,} parameters, "
          f"{trainer.seconds:.0f} s trained", flush=True)  # fmt: skip
    renderer = Renderer(args.family, args.tokenizer)
    seed = int(trainer.seconds) * 1000 + 1
    feeds = {
        long: Feed(
            args.family,
            args.tokenizer,
            (8192 if long else 1024) + 2,
            num_workers=args.workers // 3 if long else args.workers - args.workers // 3,
            seed=seed + 500 * long,
            long_share=LONG_SHARE if long else 0.0,
        )
        for long in (False, True)
    }
    if args.compile:
        compile_blocks(trainer.model)
    if args.until:
        args.seconds = args.until - time.time()
    begin = last_log = last_save = last_look = time.monotonic()
    num_tokens, warm = 0, {False: 0, True: 0}
    while time.monotonic() - begin < args.seconds and trainer.seconds < args.total:
        started = time.monotonic()
        progress = progress_of(trainer.seconds, args, started - begin)
        now = phase(progress, trainer.optimizer.num_steps, args.long_every, args.lr)
        long = bool(now.long_every) and trainer.optimizer.num_steps % now.long_every == 0
        num_rows, stride = (ROWS_PER_MESSAGE, 16) if long else (args.rows, 8)
        ids, weights = split(feeds[long].batch(num_rows), renderer.pad, args.device)
        offset = torch.randint(stride, (1,)).to(args.device)
        how = {"sparse": long, "offset": offset, "stride": stride}
        # Compiling the long shapes takes longer than all their steps.
        torch.compiler.set_stance("force_eager" if long else "default")
        at_a_time = LONG_ROWS[args.family] if long else min(args.at_a_time, num_rows)
        shown = trainer.step(ids, weights, now, at_a_time, **how)
        if warm[long] < 3 or trainer.optimizer.num_steps % 10 == 0:
            torch.cuda.synchronize() if args.device == "cuda" else None
        took = time.monotonic() - started
        # The first passes of a shape compile: their time is no training time.
        trainer.seconds += min(took, 1.0) if warm[long] < 3 else took
        warm[long] += 1
        if trainer.optimizer.num_steps == 1:
            (args.state / STEPS).touch()
        num_tokens += ids.numel()
        if time.monotonic() - last_log > 10 or (long and warm[True] < 4):
            values = " ".join(f"{k} {float(v):.3f}" for k, v in shown.items())
            rate = num_tokens / (time.monotonic() - last_log)
            waited = sum(feed.waited_s for feed in feeds.values())
            print(f"{trainer.seconds:6.0f} s {progress:.2f} step {trainer.optimizer.num_steps} "
                  f"lr {now.lr:.1e} {'long' if long else 'short'} {took:.2f} s {values} "
                  f"{rate / 1e3:.0f}k tok/s waited {waited:.0f} s", flush=True)  # fmt: skip
            last_log, num_tokens = time.monotonic(), 0
            if not math.isfinite(float(shown["norm"])):
                raise SystemExit(
                    f"the gradient is not finite at step {trainer.optimizer.num_steps}"
                )
        if time.monotonic() - last_look > LOOK_EVERY_S:
            print(f"    {look(trainer.model, renderer, args.device)}", flush=True)
            last_look = time.monotonic()
        if time.monotonic() - last_save > 120:
            trainer.save(state)
            last_save = time.monotonic()
    for feed in feeds.values():
        feed.close()
    trainer.save(state)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        deliver(trainer, args)
    trainer.optimizer.refresh(trainer.round if trainer.rounded else None)
    result = report(trainer.model, renderer, args.device)
    print(json.dumps(result, indent=1), flush=True)
    if args.out:
        (args.out / f"{args.family}.json").write_text(json.dumps(result, indent=1))


def deliver(trainer: Trainer, args: argparse.Namespace) -> None:
    """Leave what goes home: the official checkpoint, or a snapshot to go on from."""
    if args.deliver == "snapshot":
        save_snapshot(args.out, args.family, trainer.optimizer, trainer.model, trainer.seconds)
        return
    folder = args.state / "export"
    export(trainer.model, trainer.optimizer.masters, args.tokenizer, folder)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name)
    write_parts(args.out, f"{args.family}.tar.xz", buffer.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=("deepseek-v4", "glm"))
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--seconds", type=float, default=480, help="of this call")
    parser.add_argument("--until", type=float, help="Unix time at which this call exports, instead")
    parser.add_argument("--total", type=float, default=960, help="of training, over all calls")
    parser.add_argument("--state", type=Path, required=True, help="folder for going on")
    parser.add_argument("--snapshot", type=Path, help="folder of parts to begin from")
    parser.add_argument("--checkpoint", type=Path, help="folder of an export to go on from")
    parser.add_argument("--trained", type=float, default=0, help="seconds that made the export")
    parser.add_argument("--out", type=Path, help="folder for snapshot, export and report")
    parser.add_argument("--size", choices=("wide", "narrow", "micro"), default="wide")
    parser.add_argument("--deliver", choices=("snapshot", "export"), default="export")
    parser.add_argument("--rows", type=int, default=64, help="of 1024 tokens per step")
    parser.add_argument("--at-a-time", type=int, default=64, help="of them, for less memory")
    parser.add_argument("--lr", type=float, default=PEAK_LR, help="highest learning rate")
    parser.add_argument("--long-every", type=int, default=2, help="late in training; 0 for never")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args()
    if args.tokenizer is None:
        args.tokenizer = Path(__file__).parents[2] / "moet" / "demo" / args.family
    torch.backends.cuda.matmul.allow_tf32 = True
    train(args)


if __name__ == "__main__":
    main()
