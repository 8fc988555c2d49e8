"""What is told of every request when it ends: a line in the log, and spans for a tracer.

Figures and names only; no word of a prompt or an answer.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.request import RequestOutput

# Lines about single requests, those that were refused included; its level turns them off.
logger = logging.getLogger("outrider.requests")

# Outcomes that are the server's fault.
FAULTS = ("engine_dead", "engine_error", "internal_error")


@dataclass
class Record:
    """One request from arrival to end; times are of `time.monotonic`, 0 where it did not get that far."""

    request_id: str
    model: str = ""
    owner: str = ""  # names the API key, is not the key
    client_request_id: str = ""
    trace: dict[str, str] = field(default_factory=dict)  # the headers that say which trace this is part of
    arrival: float = field(default_factory=time.monotonic)
    scheduled: float = 0.0
    first_token: float = 0.0
    end: float = 0.0
    failure: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def note(self, output: RequestOutput) -> None:
        """Take what an increment says; most of it is on the last one of a sequence."""
        if not self.first_token and output.token_ids:
            self.first_token = time.monotonic()
        if output.finish_reason is None:
            return
        self.finish_reasons.append(output.finish_reason.value)
        self.prompt_tokens = max(self.prompt_tokens, output.num_prompt_tokens)
        self.cached_tokens = max(self.cached_tokens, output.num_cached_tokens)
        self.completion_tokens += output.num_output_tokens
        if output.scheduled_time and not 0.0 < self.scheduled <= output.scheduled_time:
            self.scheduled = output.scheduled_time
        if output.speculation is not None:
            self.steps += output.speculation.steps
            self.draft_tokens += output.speculation.draft_tokens
            self.accepted_tokens += output.speculation.accepted_tokens

    @property
    def outcome(self) -> str:
        """The error's code, or why its sequences ended."""
        return self.failure or "+".join(sorted(set(self.finish_reasons))) or "unfinished"

    def fields(self) -> dict[str, Any]:
        """For the log."""
        fields: dict[str, Any] = {
            "request_id": self.request_id, "outcome": self.outcome, "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens, "completion_tokens": self.completion_tokens,
            "total_s": round(self.end - self.arrival, 6),
        }  # fmt: skip
        if self.scheduled:
            fields["queue_s"] = round(max(0.0, self.scheduled - self.arrival), 6)
        if self.first_token:
            fields["first_token_s"] = round(self.first_token - self.arrival, 6)
        if self.draft_tokens:
            fields |= {"draft_tokens": self.draft_tokens, "accepted_tokens": self.accepted_tokens}
            fields["tokens_per_step"] = round(1 + self.accepted_tokens / max(self.steps, 1), 3)
        for name in ("owner", "client_request_id"):
            if getattr(self, name):
                fields[name] = getattr(self, name)
        return fields


class SpanSink(Protocol):
    """What the journal needs of `outrider.entrypoints.tracing.Tracer`."""

    def record(self, record: Record) -> None: ...
    def shutdown(self) -> None: ...


class Journal:
    """Tells of requests when they end."""

    def __init__(self, tracer: SpanSink | None = None) -> None:
        self.tracer = tracer

    def ended(self, record: Record) -> None:
        record.end = time.monotonic()
        level = logging.WARNING if record.failure in FAULTS else logging.INFO
        if logger.isEnabledFor(level):
            fields = record.fields()
            logger.log(level, "%s", _Line(fields), extra={"fields": fields})
        if self.tracer is not None:
            self.tracer.record(record)


class _Line:
    """The fields as a sentence, made only when the line is written."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        f = self._fields
        first = f", first after {f['first_token_s']:.3f} s" if "first_token_s" in f else ""
        steps = f", {f['tokens_per_step']:.2f} a step" if "tokens_per_step" in f else ""
        counts = f"{f['prompt_tokens']} + {f['completion_tokens']} tokens"
        return f"{f['request_id']}: {f['outcome']}, {counts} in {f['total_s']:.3f} s{first}{steps}"
