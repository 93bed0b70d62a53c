"""One table of implementations per op: a torch reference, the contract, and accelerated forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar

from moet.errors import UnsupportedError

GPU_ARCHS = ("sm90a", "sm120a")
P = ParamSpec("P")
R = TypeVar("R")
Watch = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""Given an op's name and the form that was chosen, what is to be called in its place."""

_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Let `watch` stand before every op that is bound inside; what is bound outside stays bare."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


@dataclass(frozen=True, slots=True)
class Impl(Generic[P, R]):
    """One accelerated form; `supports(arch=..., ...)` says for which facts it may be used."""

    name: str
    supports: Callable[..., bool]
    load: Callable[[], Callable[P, R]]

    @property
    def fn(self) -> Callable[P, R]:
        """The form itself; what it needs is imported now."""
        return self.load()


class Op(Generic[P, R]):
    """A function on tensors. Calling it runs the reference; `bind` chooses a form once."""

    def __init__(self, reference: Callable[P, R], tolerance: float) -> None:
        self.reference = reference
        self.tolerance = tolerance
        self.name = reference.__name__
        self.impls: list[Impl[P, R]] = []
        self.__doc__ = reference.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.reference(*args, **kwargs)

    def impl(
        self, name: str, *, supports: Callable[..., bool]
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register an accelerated form; earlier registrations are preferred."""

        def register(fn: Callable[P, R]) -> Callable[P, R]:
            self.impls.append(Impl(name, supports, lambda: fn))
            return fn

        return register

    def impl_in(self, module: str, name: str, *, supports: Callable[..., bool]) -> None:
        """Register the function of this op's name and parameters in a module, which is imported
        when the form is chosen: what only a GPU needs is not loaded before."""

        def load() -> Callable[P, R]:
            form: Callable[P, R] = getattr(import_module(module), self.name)
            return form

        self.impls.append(Impl(name, supports, load))

    def bind(self, *, arch: str, **facts: Any) -> Callable[P, R]:
        """Return the first implementation that supports arch and facts.

        `arch="reference"` is torch, asked for by name.

        Raises UnsupportedError naming what was tried; never falls back in silence.
        """
        if arch == "reference":
            return self._watched(self.reference)
        for impl in self.impls:
            if impl.supports(arch=arch, **facts):
                return self._watched(impl.fn)
        tried = ", ".join(impl.name for impl in self.impls) or "none exist"
        raise UnsupportedError(
            f"no implementation of {self.name} for arch={arch} {facts}; tried: {tried}. "
            'arch="reference" runs it in torch.'
        )

    def _watched(self, fn: Callable[P, R]) -> Callable[P, R]:
        watch = _watch.get()
        return fn if watch is None else watch(self.name, fn)


def op(*, tolerance: float) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make a torch function an op. `tolerance`: max relative error allowed to accelerated forms."""

    def decorate(reference: Callable[P, R]) -> Op[P, R]:
        return Op(reference, tolerance)

    return decorate
