"""Requests as OpenTelemetry spans; needs the extra `otel`.

A request is one span with a child for each phase: `queue`, `prefill`, `decode`. They are written when the
request has ended, with the times at which things happened, so a running request pays nothing for them.
"""

from __future__ import annotations

import time
from typing import Any

from outrider import __version__
from outrider.config import ConfigError
from outrider.entrypoints.journal import FAULTS, Record

EXPORT_TIMEOUT_S = 5


class Tracer:
    """Writes ended requests to an OpenTelemetry tracer provider."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("outrider", __version__)

    def record(self, record: Record) -> None:
        """The spans of one request."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        shift = time.time_ns() - time.monotonic_ns()  # spans have times of day

        def at(seconds: float) -> int:
            return int(seconds * 1e9) + shift

        span = self._tracer.start_span(
            "request", TraceContextTextMapPropagator().extract(record.trace), SpanKind.SERVER,
            attributes=_attributes(record), start_time=at(record.arrival),
        )  # fmt: skip
        for name, begin, end in phases(record):
            child = self._tracer.start_span(name, set_span_in_context(span), start_time=at(begin))
            child.end(at(end))
        if record.failure in FAULTS:
            span.set_status(Status(StatusCode.ERROR, record.failure))
        span.end(at(record.end))

    def shutdown(self) -> None:
        """Send what has not been sent yet."""
        self._provider.shutdown()


def phases(record: Record) -> list[tuple[str, float, float]]:
    """(name, begin, end) of the phases that a request came to, without gaps."""
    marks = [("queue", record.arrival), ("prefill", record.scheduled), ("decode", record.first_token)]
    reached = [(name, begin) for name, begin in marks if begin]
    ends = [begin for _, begin in reached[1:]] + [record.end]
    return [(name, begin, max(begin, end)) for (name, begin), end in zip(reached, ends, strict=True)]


def _attributes(record: Record) -> dict[str, Any]:
    """In the vocabulary of OpenTelemetry's conventions for generative models."""
    attributes: dict[str, Any] = {
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.model": record.model,
        "gen_ai.response.finish_reasons": record.finish_reasons,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "outrider.cached_tokens": record.cached_tokens,
        "outrider.outcome": record.outcome,
        "outrider.steps": record.steps,
        "outrider.draft_tokens": record.draft_tokens,
        "outrider.accepted_tokens": record.accepted_tokens,
    }
    if record.client_request_id:
        attributes["outrider.client_request_id"] = record.client_request_id
    return attributes


def make_tracer(endpoint: str) -> Tracer:
    """A tracer that sends to an OTLP collector over HTTP; ConfigError where the extra is missing."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(
            "otlp_traces_endpoint needs OpenTelemetry: pip install 'outrider[otel]', or remove the option"
        ) from None
    resource = Resource.create({"service.name": "outrider", "service.version": __version__})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=EXPORT_TIMEOUT_S)))
    return Tracer(provider)
