"""Every accelerated form of an op can be called as its reference is, wherever it stands."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest

from moet.kernels.registry import Impl, Op

MODULES = (
    "attention",
    "attention_inputs",
    "cache",
    "compressor",
    "gemm",
    "greedy",
    "hyper_connection",
    "indexer",
    "latent_places",
    "mla_attention",
    "moe",
    "moe_layer",
    "norm",
    "query_heads",
    "rope",
    "window_places",
)


def ops() -> list[Op[..., Any]]:
    found: list[Op[..., Any]] = []
    for name in MODULES:
        module = import_module(f"moet.kernels.{name}")
        mine = [value for value in vars(module).values() if isinstance(value, Op)]
        found += [op for op in mine if op.reference.__module__ == module.__name__]
    return found


FORMS = [(op, impl) for op in ops() for impl in op.impls]


def parameters(fn: Any) -> list[tuple[str, Any]]:
    return [(each.name, each.kind) for each in inspect.signature(fn).parameters.values()]


def test_forms_are_found() -> None:
    assert len(FORMS) > 20


@pytest.mark.parametrize(("op", "impl"), FORMS, ids=[f"{op.name}-{i.name}" for op, i in FORMS])
def test_a_form_takes_what_its_reference_takes(op: Op[..., Any], impl: Impl[..., Any]) -> None:
    assert parameters(impl.fn) == parameters(op.reference)
