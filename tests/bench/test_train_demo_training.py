"""Training graphs against the served models, and that training and export do what they say."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from bench.train_demo.corpus import rows
from bench.train_demo.export import export
from bench.train_demo.feed import split
from bench.train_demo.restore import adopt, decode, restore
from bench.train_demo.sinkhorn import sinkhorn
from bench.train_demo.snapshot import load_snapshot, save_snapshot
from bench.train_demo.tokenizer import Family
from bench.train_demo.train import Phase, Trainer, phase
from moet.models.checkpoint import Checkpoint
from tests.bench.demo_rig import DEMO, graph_logits, reference_logits, renderer

FAMILIES: tuple[Family, ...] = get_args(Family)


def trainer(family: Family) -> Trainer:
    return Trainer(family, DEMO / family, "cpu", "micro")


@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(f, marks=pytest.mark.deep) for f in FAMILIES[1:])]
)
def test_steps_lower_the_loss(family: Family) -> None:
    small, source = trainer(family), rows(renderer(family), 130, 1)
    offset, losses = torch.zeros(1, dtype=torch.long), []
    for step in range(9):
        batch = np.stack([next(source) for _ in range(2)])
        ids, weights = split(batch, renderer(family).pad, "cpu")
        now = Phase(4e-3 * min(1, (step + 1) / 4), 0, step >= 7)
        shown = small.step(
            ids, weights, now, len(ids), sparse=step % 2 == 0, offset=offset, stride=8
        )
        losses.append(float(shown["main"]))
        assert float(shown["index"]) > 0
        assert float(shown["draft"]) > 0
    assert sum(losses[-3:]) < 0.92 * sum(losses[:3]), losses


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_checkpoint_is_the_graph(family: Family, tmp_path: Path) -> None:
    small = trainer(family)
    generator = torch.Generator().manual_seed(1)
    for name, master in small.optimizer.masters.items():
        if not name.endswith(".scale"):
            master.add_(0.03 * torch.randn(master.shape, generator=generator))
    for bias in small.biases:
        if bias is not None:
            bias.copy_(0.2 * torch.randn(bias.shape, generator=generator))
    export(small.model, small.optimizer.masters, DEMO / family, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    decoded = decode(checkpoint)
    adopt(small.model, decoded)
    vocab = small.model.config.vocab_size
    # Beyond index_topk entries of both models, so that a selection is made.
    ids = torch.randint(vocab, (385,), generator=generator)
    want, want_draft = reference_logits(small.model, decoded, ids)
    got, got_draft = graph_logits(small.model, ids)
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(got_draft, want_draft, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_rounded_copies_are_what_is_exported(family: Family, tmp_path: Path) -> None:
    small = trainer(family)
    export(small.model, small.optimizer.masters, DEMO / family, tmp_path)
    decoded = decode(Checkpoint.open(tmp_path))
    small.optimizer.refresh(small.round)
    rounded = {name: p.detach().clone() for name, p in small.model.named_parameters()}
    adopt(small.model, decoded)
    for name, parameter in small.model.named_parameters():
        differs = ((parameter - rounded[name]).abs() > 0.01 * parameter.abs().amax()).float()
        assert differs.mean() < 1e-3, name


@pytest.mark.parametrize("family", FAMILIES)
def test_training_goes_on_from_an_export(family: Family, tmp_path: Path) -> None:
    one, other = trainer(family), trainer(family)
    for master in other.optimizer.masters.values():
        master.zero_()
    export(one.model, one.optimizer.masters, DEMO / family, tmp_path)
    restore(tmp_path, other.optimizer, other.model)
    one.optimizer.refresh(one.round)
    for name, parameter in one.model.named_parameters():
        differs = (parameter - other.optimizer.masters[name]).abs() > 0.01 * parameter.abs().amax()
        assert differs.float().mean() < 1e-3, name


def test_a_snapshot_restores_weights_nearly(tmp_path: Path) -> None:
    one, other = trainer("glm"), trainer("glm")
    for master in one.optimizer.masters.values():
        master.mul_(1.5)
    save_snapshot(tmp_path, "glm", one.optimizer, one.model, 12.0)
    assert load_snapshot(tmp_path / "glm", other.optimizer, other.model) == 12.0
    for name, master in one.optimizer.masters.items():
        error = (other.optimizer.masters[name] - master).abs().amax()
        assert error <= master.abs().amax() / 200, name


def test_a_saved_trainer_goes_on_alike(tmp_path: Path) -> None:
    one, other, source = trainer("glm"), trainer("glm"), rows(renderer("glm"), 130, 2)
    how = {"sparse": False, "offset": torch.zeros(1, dtype=torch.long), "stride": 8}
    batches = []
    for _ in range(3):
        batch = np.stack([next(source) for _ in range(2)])
        batches.append(split(batch, renderer("glm").pad, "cpu"))
    now = Phase(1e-3, 0, False)
    one.step(*batches[0], now, 1, **how)
    one.step(*batches[1], now, 1, **how)
    one.save(tmp_path / "state.pt")
    other.load(tmp_path / "state.pt")
    a, b = one.step(*batches[2], now, 1, **how), other.step(*batches[2], now, 1, **how)
    assert float(a["main"]) == float(b["main"])
    for name, master in one.optimizer.masters.items():
        assert torch.equal(master, other.optimizer.masters[name]), name


def test_phases_follow_the_clock() -> None:
    assert phase(0.3, 1000) == Phase(phase(0.3, 1000).lr, 0, False)
    assert phase(0.75, 1000).long_every > 0
    assert not phase(0.7, 1000).rounded
    assert phase(0.9, 1000).rounded
    assert phase(0.0, 0).lr < phase(0.0, 500).lr > phase(0.9, 500).lr > 0


def test_balancing_has_the_gradient_of_its_iteration() -> None:
    logits = torch.randn(5, 4, 4, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(5, 4, 4, dtype=torch.float64)
    mix = logits.softmax(-1) + 1e-6
    mix = mix / (mix.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        mix = mix / (mix.sum(-1, keepdim=True) + 1e-6)
        mix = mix / (mix.sum(-2, keepdim=True) + 1e-6)
    (want,) = torch.autograd.grad((mix * pull).sum(), logits)
    (got,) = torch.autograd.grad((sinkhorn(logits, 20, 1e-6) * pull).sum(), logits)
    torch.testing.assert_close(got, want)
