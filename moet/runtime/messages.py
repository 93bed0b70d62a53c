"""What a core's host and its loop say to each other. Data only."""

from __future__ import annotations

import msgspec

from moet.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    KernelError,
    MoetError,
    OverloadedError,
    RequestError,
)
from moet.runtime.metrics import CoreInfo, CoreStats, ExpertStats
from moet.types import FinishReason, Request, TokenEvent

_PLAIN = {
    kind.__name__: kind for kind in (ConfigError, CheckpointError, KernelError, EngineDeadError)
}


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An exception as data: its kind by name, and what its handlers need."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int = 1
    unavailable: bool = False

    @classmethod
    def of(cls, error: Exception) -> ErrorInfo:
        """Describe an exception. One that is not moet's own becomes an EngineDeadError."""
        match error:
            case ContextLengthError():
                return cls(kind="ContextLengthError", message=str(error), param=error.param)
            case RequestError():
                return cls(
                    kind="RequestError", message=str(error), param=error.param, code=error.code
                )
            case OverloadedError():
                return cls(
                    kind="OverloadedError",
                    message=str(error),
                    retry_after_s=error.retry_after_s,
                    unavailable=error.unavailable,
                )
            case MoetError():
                names = (kind.__name__ for kind in type(error).__mro__)
                return cls(
                    kind=next((n for n in names if n in _PLAIN), "MoetError"), message=str(error)
                )
            case _:
                return cls(kind="EngineDeadError", message=f"{type(error).__name__}: {error}")

    def exception(self) -> MoetError:
        """The exception again, of the same kind."""
        match self.kind:
            case "ContextLengthError":
                return ContextLengthError(self.message, param=self.param)
            case "RequestError":
                return RequestError(self.message, param=self.param, code=self.code)
            case "OverloadedError":
                return OverloadedError(
                    self.message, retry_after_s=self.retry_after_s, unavailable=self.unavailable
                )
            case kind:
                return _PLAIN.get(kind, MoetError)(self.message)


class Submit(msgspec.Struct, frozen=True, tag=True):
    ticket: int
    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    reason: FinishReason = FinishReason.ABORT


class Ask(msgspec.Struct, frozen=True, tag=True):
    ticket: int


class AskExperts(msgspec.Struct, frozen=True, tag=True):
    """What is not None is changed first."""

    ticket: int
    tau: float | None = None
    pool_bytes: int | None = None
    kv_bytes: int | None = None


class ForgetPrefixes(msgspec.Struct, frozen=True, tag=True):
    ticket: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    pass


Command = Submit | Abort | Ask | AskExperts | ForgetPrefixes | Stop


class Loading(msgspec.Struct, frozen=True, tag=True):
    stage: str
    done: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: CoreInfo
    stats: CoreStats


class Alive(msgspec.Struct, frozen=True, tag=True):
    """A process's sign of life, when it has nothing else to say."""


class Accepted(msgspec.Struct, frozen=True, tag=True):
    ticket: int


class Answer(msgspec.Struct, frozen=True, tag=True):
    ticket: int
    stats: CoreStats


class ExpertAnswer(msgspec.Struct, frozen=True, tag=True):
    ticket: int
    stats: ExpertStats


class Refused(msgspec.Struct, frozen=True, tag=True):
    ticket: int
    error: ErrorInfo


class Events(msgspec.Struct, frozen=True, tag=True):
    events: list[TokenEvent]


class Late(msgspec.Struct, frozen=True, tag=True):
    """A step takes too long; `doing` None: it ended after all."""

    doing: str | None


class Failed(msgspec.Struct, frozen=True, tag=True):
    error: ErrorInfo


class Closed(msgspec.Struct, frozen=True, tag=True):
    pass


Message = (
    Loading
    | Ready
    | Alive
    | Accepted
    | Answer
    | ExpertAnswer
    | Refused
    | Events
    | Late
    | Failed
    | Closed
)
