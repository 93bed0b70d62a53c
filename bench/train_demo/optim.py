"""Muon for matrices and Adam for the rest, over fp32 masters; the model holds working copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Rounder = Callable[[str, Tensor], Tensor]
MOMENTUM = 0.95
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.05
MATCH_ADAM = 0.2  # root mean square of an orthogonal update, times sqrt of the larger dimension


def orthogonalise(x: Tensor, steps: int = 5) -> Tensor:
    """Nearly the closest semi-orthogonal matrices, as Muon does it. x: [n, rows, cols]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    y = x.bfloat16()
    tall = y.shape[-2] > y.shape[-1]
    if tall:
        y = y.mT
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y.mT if tall else y).float()


class Optimizer:
    """Owns the masters. `rounder` says how a working copy is made of a master."""

    def __init__(self, model: nn.Module, working_dtype: torch.dtype) -> None:
        self.model = model
        self.masters: dict[str, Tensor] = {}
        self.groups: dict[tuple[int, int], list[str]] = {}
        self.first: dict[str, Tensor] = {}
        self.second: dict[str, Tensor] = {}
        self.num_steps = 0
        for name, parameter in model.named_parameters():
            self.masters[name] = parameter.detach().clone().float()
            self.first[name] = torch.zeros_like(self.masters[name])
            if is_matrix(name, parameter):
                parameter.data = parameter.data.to(working_dtype)
                self.groups.setdefault(tuple(parameter.shape[-2:]), []).append(name)
            else:
                self.second[name] = torch.zeros_like(self.masters[name])
                if (parameter.dim() == 2 and "embed" in name) or name.endswith("head.weight"):
                    parameter.data = parameter.data.to(working_dtype)
        self.parameters = dict(model.named_parameters())

    @torch.no_grad()
    def step(self, lr: float, rounder: Rounder | None) -> float:
        """One update from the gradients; returns their norm before clipping, and clears them."""
        self.num_steps += 1
        grads = {n: p.grad.float() for n, p in self.parameters.items() if p.grad is not None}
        norms = torch.stack(torch._foreach_norm(list(grads.values())))
        norm = norms.square().sum().sqrt()
        torch._foreach_mul_(list(grads.values()), (1.0 / norm.clamp(min=1.0)))
        for shape, names in self.groups.items():
            self._muon(shape, [name for name in names if name in grads], grads, lr)
        self._adam([name for name in self.second if name in grads], grads, lr)
        self.refresh(rounder)
        for parameter in self.parameters.values():
            parameter.grad = None
        return norm

    @torch.no_grad()
    def refresh(self, rounder: Rounder | None) -> None:
        """Make the working copies anew."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            parameter.data.copy_(rounder(name, master) if rounder else master)

    def _muon(
        self, shape: tuple[int, int], names: list[str], grads: dict[str, Tensor], lr: float
    ) -> None:
        if not names:
            return
        stacked = []
        for name in names:
            momentum = self.first[name].mul_(MOMENTUM).add_(grads[name])
            stacked.append((grads[name] + MOMENTUM * momentum).view(-1, *shape))
        update = orthogonalise(torch.cat(stacked)) * (MATCH_ADAM * max(shape) ** 0.5)
        parts = update.split([len(part) for part in stacked])
        for name, part in zip(names, parts, strict=True):
            master = self.masters[name]
            master.mul_(1 - lr * WEIGHT_DECAY).sub_(part.view_as(master), alpha=lr)

    def _adam(self, names: list[str], grads: dict[str, Tensor], lr: float) -> None:
        if not names:
            return
        grad = [grads[name] for name in names]
        first = [self.first[name] for name in names]
        second = [self.second[name] for name in names]
        torch._foreach_lerp_(first, grad, 1 - BETAS[0])
        torch._foreach_mul_(second, BETAS[1])
        torch._foreach_addcmul_(second, grad, grad, 1 - BETAS[1])
        fix1, fix2 = (1 - beta**self.num_steps for beta in BETAS)
        below = torch._foreach_sqrt(torch._foreach_div(second, fix2))
        torch._foreach_add_(below, 1e-9)
        update = torch._foreach_div(torch._foreach_div(first, fix1), below)
        torch._foreach_add_([self.masters[name] for name in names], update, alpha=-lr)

    def state(self) -> dict[str, Any]:
        return {
            "masters": self.masters,
            "first": self.first,
            "second": self.second,
            "num_steps": self.num_steps,
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        for kind in ("masters", "first", "second"):
            own = getattr(self, kind)
            for name, tensor in state[kind].items():
                own[name].copy_(tensor)
        self.num_steps = state["num_steps"]


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon updates it: matrices inside blocks that are not routers, tables or mHC parts."""
    if parameter.dim() < 2 or "embed" in name or name.endswith(("head.weight", "ape", ".fn")):
        return False
    return not name.endswith(("gate.weight", "weights_proj.weight"))
