"""A span for each answer, sent by OpenTelemetry if that is installed and asked for.

Attribute names are those of the GenAI conventions. Spans carry counts and times, never text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from moet.errors import ConfigError

if TYPE_CHECKING:
    from moet.server.operations import Clock

NS = 1_000_000_000


class Span(Protocol):
    """One answer under way."""

    def fail(self, error: Exception) -> None:
        """Mark the answer as failed, by the error's kind."""
        ...

    def end(self, clock: Clock) -> None:
        """The answer is complete, or given up."""
        ...


class Tracer(Protocol):
    """Starts spans."""

    def start(self, answer_id: str, model: str, clock: Clock) -> Span: ...

    def close(self) -> None:
        """Send what is not sent yet."""
        ...


class _NoTraces:
    """Both a tracer and its only span."""

    def start(self, answer_id: str, model: str, clock: Clock) -> Span:
        return self

    def fail(self, error: Exception) -> None: ...

    def end(self, clock: Clock) -> None: ...

    def close(self) -> None: ...


NO_TRACES = _NoTraces()


class OtelTracer:
    """Spans through an OpenTelemetry tracer provider; `make_tracer` makes one for an endpoint."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("moet")

    def start(self, answer_id: str, model: str, clock: Clock) -> Span:
        attributes = {
            "gen_ai.system": "moet",
            "gen_ai.request.id": answer_id,
            "gen_ai.request.model": model,
            "gen_ai.usage.input_tokens": clock.num_prompt_tokens,
        }
        start_ns = int(clock.opened_at * NS)
        return _OtelSpan(
            self._tracer.start_span("llm_request", None, start_time=start_ns), attributes
        )

    def close(self) -> None:
        self._provider.shutdown()


class _OtelSpan:
    def __init__(self, span: Any, attributes: dict[str, Any]) -> None:
        self._span = span
        self._span.set_attributes(attributes)

    def fail(self, error: Exception) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_status(Status(StatusCode.ERROR, type(error).__name__))

    def end(self, clock: Clock) -> None:
        attributes: dict[str, Any] = {
            "gen_ai.usage.output_tokens": clock.num_tokens,
            "gen_ai.usage.cached_tokens": clock.num_cached_tokens,
            "gen_ai.response.finish_reasons": clock.finish_reasons,
        }
        if clock.first:
            attributes["gen_ai.latency.time_to_first_token"] = clock.first - clock.opened
            attributes["gen_ai.latency.time_in_model_decode"] = clock.last - clock.first
        self._span.set_attributes(attributes)
        self._span.end()


def make_tracer(endpoint: str | None) -> Tracer:
    """A tracer that sends to an OTLP/HTTP endpoint; one that does nothing without one.

    Raises ConfigError if OpenTelemetry is not installed.
    """
    if endpoint is None:
        return NO_TRACES
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        message = "--otlp-traces-endpoint needs OpenTelemetry; run: pip install 'moet[otel]'"
        raise ConfigError(message) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "moet"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return OtelTracer(provider)
