"""Errors as HTTP: the API's error object, the right status, a small body. Input is never echoed."""

from __future__ import annotations

import logging
from typing import Any

import orjson
from starlette.responses import Response

from moet.errors import EngineDeadError, MoetError, OverloadedError, RequestError

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 2000


class HttpError(MoetError):
    """A refusal that belongs to HTTP itself: status, OpenAI `type` and `code`, field name."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = headers or {}


def as_http_error(error: Exception) -> HttpError:
    """What a client is told about an exception; anything unforeseen is logged and stays vague."""
    match error:
        case HttpError():
            return error
        case RequestError():
            return HttpError(400, str(error), param=error.param, code=error.code)
        case OverloadedError(unavailable=True):
            return _busy(503, "service_unavailable", error)
        case OverloadedError():
            return _busy(429, "rate_limit_exceeded", error)
        case EngineDeadError():
            return HttpError(503, str(error), kind="server_error", code="engine_dead")
        case MoetError():
            return HttpError(500, str(error), kind="server_error", code="request_failed")
        case _:
            logger.error("unforeseen error", exc_info=error)
            return HttpError(
                500, "internal error; the server's log has more", kind="server_error", code="bug"
            )


def _busy(status: int, code: str, error: OverloadedError) -> HttpError:
    return HttpError(
        status,
        str(error),
        kind="overloaded_error",
        code=code,
        headers={"Retry-After": str(error.retry_after_s)},
    )


def shown_message(error: Exception) -> str:
    """What a client may read of an error: of bounded length, and valid Unicode."""
    message = str(error)
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + " ..."
    return message.encode("utf-8", "replace").decode()


def error_object(error: Exception) -> dict[str, Any]:
    """OpenAI's: {"error": {message, type, param, code}}."""
    known = as_http_error(error)
    return {
        "error": {
            "message": shown_message(known),
            "type": known.kind,
            "param": known.param,
            "code": known.code,
        }
    }


ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error_object(error: Exception) -> dict[str, Any]:
    """Anthropic's: {"type": "error", "error": {type, message}}; the message begins with the field.

    The reason of a refused field is always in the message, since this shape has no place for more.
    """
    known = as_http_error(error)
    message = shown_message(known)
    if known.param is not None and known.param not in message:
        message = f"{known.param}: {message}"
    kind = ANTHROPIC_TYPES.get(known.status, "api_error")
    if known.code == "engine_dead":  # which waiting does not mend
        kind = "api_error"
    if known.status < 500 and known.status not in ANTHROPIC_TYPES:
        kind = "invalid_request_error"
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_response(error: Exception, path: str = "") -> Response:
    """The answer to a request that failed before its first byte was sent, as its API shapes it."""
    known = as_http_error(error)
    shape = anthropic_error_object if path.startswith("/v1/messages") else error_object
    return Response(
        orjson.dumps(shape(known)),
        status_code=known.status,
        media_type="application/json",
        headers=known.headers,
    )
