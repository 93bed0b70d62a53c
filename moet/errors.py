"""The exception hierarchy. A message holds the offending value, the limit and the remedy."""


class MoetError(Exception):
    """Base of everything moet raises on purpose."""


class ConfigError(MoetError):
    """A flag or a model directory is wrong; raised before the device is touched. Exit code 2."""


class CheckpointError(MoetError):
    """A tensor or file of a checkpoint or pack is missing, unexpected or misshapen. Exit code 2."""


class KernelError(MoetError):
    """A kernel cannot be found, loaded or bound. Exit code 2."""


class CubinError(KernelError):
    """A cubin is absent, has a wrong checksum, or was built for another architecture."""


class UnsupportedError(KernelError):
    """No implementation of an op serves what was asked for; names what was tried."""


class CapacityError(MoetError):
    """No free page, sequence slot or expert slot. The scheduler waits or preempts."""


class ExpertReadError(MoetError):
    """A routed expert could not be read; names file and row. Ends the requests that need it."""


class RequestError(MoetError):
    """The caller's fault (HTTP 400). `param` names the request field, `code` the OpenAI code."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """Prompt plus requested output does not fit the window."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class OverloadedError(MoetError):
    """The queue is full (HTTP 429) or the engine is loading or draining (HTTP 503)."""

    def __init__(self, message: str, *, retry_after_s: int = 1, unavailable: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.unavailable = unavailable


class EngineDeadError(MoetError):
    """The step loop has ended because of a fault; no request can be served (HTTP 503)."""
