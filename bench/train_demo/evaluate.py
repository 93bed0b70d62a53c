"""Held-out questions scored through the training graph: whether a greedy answer would be right.

An answer is right if every token of it is the most likely one given the tokens before; the graph
sees all of them at once. Served models are scored by bench/quality.py instead."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.train_demo.corpus import TOKEN_MASK, WANTED, Renderer
from bench.train_demo.data import facts, records, retrieval, stories, sums, tools
from bench.train_demo.data.sample import Generator, Sample, draw
from bench.train_demo.v4 import V4

TASKS: dict[str, Generator] = {
    "story": stories.story,
    "question": facts.question,
    "sum": sums.bare,
    "problem": sums.problem,
    "compare": sums.compare,
    "tool_call": tools.call,
    "tool_result": tools.result,
    "copy": retrieval.copy,
    "passage": retrieval.passage,
    "list": retrieval.transform,
    "json": records.record,
    "needle_short": retrieval.short_needle,
}


@torch.no_grad()
def predictions(model: nn.Module, ids: Tensor, sparse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Most likely next tokens, losses of the true ones, and the draft's tokens two further on.

    ids: [B, T + 1]. Returns [B, T] each; drafts[:, i] is for the token at i + 2.
    """
    inputs, after = ids[:, :-1], ids[:, 1:]
    if isinstance(model, V4):
        state, _, _ = model.streams(inputs, sparse=sparse)
        logits = model.logits(state)
        drafted, _ = model.draft(after, state)
        drafts = model.draft_logits(drafted).argmax(-1)
    else:
        look = model.look(inputs.shape[1], sparse=sparse, stride=128)
        state, _, _ = model.hidden(inputs, look)
        logits = model.lm_head(state)
        drafts = model.lm_head(model.draft(after, state, look)[0]).argmax(-1)
    loss = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), after.flatten(), reduction="none"
    )
    return logits.argmax(-1), loss.view_as(after), drafts


def score(
    model: nn.Module, renderer: Renderer, samples: list[Sample], length: int, device: str
) -> dict[str, float]:
    """Share of exact answers, loss per answer token, share of right first drafts."""
    torch.compiler.set_stance("force_eager")  # each task has shapes of its own
    rng = random.Random(5)
    exact, loss_sum, num_tokens, agreed, drafted = 0, 0.0, 0, 0, 0
    batch = max(1, 16384 // length)
    for first in range(0, len(samples), batch):
        marked = np.full((batch, length + 1), renderer.pad, dtype=np.uint16)
        for row, sample in zip(marked, samples[first : first + batch], strict=False):
            tokens = renderer.sample_tokens(sample, rng)[: length + 1]
            row[: len(tokens)] = tokens
        raw = torch.from_numpy(marked.astype(np.int64)).to(device)
        ids, wanted = raw & TOKEN_MASK, (raw >= WANTED)[:, 1:]
        best, loss, drafts = predictions(model, ids, sparse=length > 1024)
        right = (best == ids[:, 1:]) | ~wanted
        asked = wanted.any(-1)
        exact += int((right.all(-1) & asked).sum())
        loss_sum += float(loss[wanted].sum())
        num_tokens += int(wanted.sum())
        follows = wanted[:, 1:] & wanted[:, :-1]
        agreed += int(((drafts[:, :-1] == best[:, 1:]) & follows).sum())
        drafted += int(follows.sum())
    torch.compiler.set_stance("default")
    return {
        "exact": exact / len(samples),
        "loss": loss_sum / max(num_tokens, 1),
        "first_draft": agreed / max(drafted, 1),
        "samples": len(samples),
    }


def look(model: nn.Module, renderer: Renderer, device: str) -> dict[str, float]:
    """A glance while training goes on: shares of exact answers to a few held-out questions."""
    rng, found = random.Random(12), {}
    for name in ("sum", "tool_call", "needle_short"):
        samples = [draw(TASKS[name], rng, held_out=True) for _ in range(48)]
        found[name] = score(model, renderer, samples, 1024, device)["exact"]
    samples = [draw(_codes(2600), rng, held_out=True) for _ in range(16)]
    found["codes_4096"] = score(model, renderer, samples, 4096, device)["exact"]
    return found


def _codes(num_words: int) -> Generator:
    """One of many codes in a text."""
    return lambda rng: retrieval.needle(rng, num_words)


def report(
    model: nn.Module, renderer: Renderer, device: str, num_samples: int = 128
) -> dict[str, Any]:
    """Scores per task, of needles among few by length and depth, and of codes among many."""
    rng = random.Random(11)
    found: dict[str, Any] = {}

    def add(name: str, samples: list[Sample], length: int) -> None:
        found[name] = score(model, renderer, samples, length, device)
        print(f"{name}: {found[name]['exact']:.3f}", flush=True)  # a run may end before the last

    for num_words, length in ((600, 1024), (1300, 2048), (2600, 4096), (5300, 8192)):
        samples = [draw(_codes(num_words), rng, held_out=True) for _ in range(num_samples // 4)]
        add(f"codes_{length}", samples, length)
    rng = random.Random(11)
    for name, generate in TASKS.items():
        add(name, [draw(generate, rng, held_out=True) for _ in range(num_samples)], 1024)
    for num_words, length in ((600, 1024), (1300, 2048), (2600, 4096), (5300, 8192)):
        samples = []
        while len(samples) < num_samples // 4:
            sample = retrieval.needle(rng, num_words, depth=(len(samples) + 0.5) * 4 / num_samples)
            if sample.held_out:
                samples.append(sample)
        add(f"needle_{length}", samples, length)
    return found
