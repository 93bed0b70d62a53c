"""What the handlers of one server share: its engine, its names, its books."""

from __future__ import annotations

from functools import cached_property

import orjson
from starlette.responses import Response

from moet.config import ServerConfig
from moet.runtime.engine import Engine
from moet.server.chat_format import ChatFormat, chat_format
from moet.server.errors import HttpError
from moet.server.gate import Traffic
from moet.server.operations import Operations
from moet.server.raw_log import RawLog
from moet.server.tracing import make_tracer


class Served:
    """An engine as it is served."""

    def __init__(self, engine: Engine, config: ServerConfig, traffic: Traffic) -> None:
        self.engine = engine
        self.config = config
        self.traffic = traffic
        self.names = config.served_model_names or (engine.model,)
        self.operations = Operations(
            request_timeout_s=config.request_timeout_s,
            raw_log=None if config.raw_log_folder is None else RawLog(config.raw_log_folder),
            tracer=make_tracer(config.otlp_endpoint),
        )

    @cached_property
    def form(self) -> ChatFormat:
        """The model's chat format; there is one as soon as the model is loaded."""
        return chat_format(self.engine.text)

    def name_of(self, name: str | None) -> str:
        """A model's name as the client gives it, or the first one; 404 if it is not served."""
        if not name:
            return self.names[0]
        if name not in self.names:
            served = ", ".join(self.names)
            message = f"that model is not served here; this server has: {served}"
            raise HttpError(404, message, code="model_not_found", param="model")
        return name


def json_response(body: object, *, status: int = 200) -> Response:
    """A JSON body."""
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")
