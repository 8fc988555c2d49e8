"""What is told of requests: log lines and spans with figures and names, and never any text."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_fake import CHAT, running

from outrider import logs
from outrider.config import ConfigError
from outrider.entrypoints.journal import Journal, Record
from outrider.entrypoints.tracing import Tracer, make_tracer, phases
from outrider.request import FinishReason, RequestOutput, SpeculationStats

SECRET = "xyzzy my secret words"


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 5, **fields}


@pytest.mark.server
def test_json_logs_name_every_request_and_hold_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY", "the-key")
    with running("log_format=json") as (url, process):
        headers = {"authorization": "Bearer the-key", "x-request-id": "mine-1"}
        with httpx.Client(base_url=url, headers=headers) as client:
            answered = client.post(CHAT, json=body(SECRET))
            client.post(CHAT, json=body(SECRET, stream=True))
            client.post(CHAT, json=body(SECRET, temperature="xyzzy"))
            client.post(CHAT, json=body(SECRET, xyzzy=1))
            client.post(CHAT, json=body(SECRET), headers={"authorization": "Bearer xyzzy"})
            with pytest.raises(httpx.ReadTimeout):
                client.post(CHAT, json=body("slow " + SECRET), timeout=0.3)
        process.terminate()
        log = process.stderr.read().decode()  # type: ignore[union-attr]
    lines = [json.loads(line) for line in log.splitlines()]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    assert "xyzzy" not in log and "the-key" not in log
    assert answered.text not in log and "quick" not in log
    told = [line for line in lines if "outcome" in line]
    assert [line["outcome"] for line in told] == ["length", "length", "client_gone"]
    assert told[0]["request_id"] == answered.json()["id"] == answered.headers["x-request-id"]
    assert told[0]["client_request_id"] == "mine-1" and len(told[0]["owner"]) == 16
    assert told[0]["completion_tokens"] == 5 and told[0]["draft_tokens"] > 0
    assert 0 < told[0]["first_token_s"] <= told[0]["total_s"]
    refused = [line for line in lines if line.get("status")]
    assert {(line["status"], line["code"]) for line in refused} >= {(400, "unknown_field")}


@pytest.mark.server
def test_the_log_of_requests_can_be_turned_off() -> None:
    with running("log_requests=false") as (url, process):
        assert httpx.post(url + CHAT, json=body("Hello")).status_code == 200
        assert httpx.post(url + CHAT, json=body("Hello", x=1)).status_code == 400
        process.terminate()
        log = process.stderr.read().decode()  # type: ignore[union-attr]
    assert "chatcmpl-" not in log and "unknown_field" not in log and "ready after" in log


def test_a_line_for_people_says_the_same(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Journal().ended(ended_record())
    assert "cmpl-1: length, 7 + 30 tokens in " in caplog.text
    assert "first after 0.300 s, 3.00 a step" in caplog.text


def test_exceptions_are_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError("broken\nin two lines")
    except ValueError:
        record = logging.LogRecord("name", logging.ERROR, __file__, 1, "it %s", ("broke",), sys.exc_info())
    line = logs.JsonFormatter().format(record)
    content = json.loads(line)
    assert "\n" not in line and content["message"] == "it broke" and "ValueError" in content["exception"]


# --- spans -----------------------------------------------------------------------------------------


def ended_record(**fields: Any) -> Record:
    record = Record("cmpl-1", "fake", arrival=100.0, **fields)
    stats = SpeculationStats(steps=10, draft_tokens=40, accepted_tokens=20)
    record.note(RequestOutput("cmpl-1-0", [1], "a"))
    record.first_token = 100.3
    record.note(
        RequestOutput(
            "cmpl-1-0", [2], "b", finish_reason=FinishReason.LENGTH, num_prompt_tokens=7,
            num_output_tokens=30, scheduled_time=100.1, speculation=stats,
        )
    )  # fmt: skip
    return record


def spans_of(*records: Record) -> list[Any]:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    journal = Journal(Tracer(provider))
    for record in records:
        journal.ended(record)
    return list(exporter.get_finished_spans())


def test_a_request_is_a_span_with_its_phases() -> None:
    pytest.importorskip("opentelemetry.sdk")
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    spans = {
        span.name: span for span in spans_of(ended_record(trace={"traceparent": f"00-{trace}-{parent}-01"}))
    }
    assert set(spans) == {"request", "queue", "prefill", "decode"}
    request = spans["request"]
    assert (
        format(request.context.trace_id, "032x") == trace and format(request.parent.span_id, "016x") == parent
    )
    assert all(
        spans[name].parent.span_id == request.context.span_id for name in ("queue", "prefill", "decode")
    )
    assert spans["queue"].start_time == request.start_time
    assert spans["queue"].end_time == spans["prefill"].start_time
    assert spans["prefill"].end_time == spans["decode"].start_time
    assert spans["decode"].end_time == request.end_time
    assert (spans["prefill"].end_time - spans["prefill"].start_time) / 1e9 == pytest.approx(0.2, abs=1e-5)
    assert request.attributes["gen_ai.usage.output_tokens"] == 30
    assert request.attributes["outrider.accepted_tokens"] == 20
    assert request.attributes["gen_ai.response.finish_reasons"] == ("length",)


def test_a_request_that_failed_early_has_the_phases_it_came_to() -> None:
    pytest.importorskip("opentelemetry.sdk")
    early = Record("cmpl-2", failure="engine_dead")
    spans = spans_of(early)
    assert [span.name for span in spans] == ["queue", "request"]
    assert not spans[1].status.is_ok and spans[1].attributes["outrider.outcome"] == "engine_dead"
    unscheduled = Record("cmpl-3", arrival=1.0, first_token=2.0, end=3.0)
    assert phases(unscheduled) == [("queue", 1.0, 2.0), ("decode", 2.0, 3.0)]


def test_traces_without_the_extra_are_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"outrider\[otel\]"):
        make_tracer("http://127.0.0.1:4318/v1/traces")


@pytest.mark.server
def test_a_collector_gets_the_spans_of_a_live_server(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    got: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                content = gzip.decompress(content)
            got.append(content)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    Thread(target=collector.serve_forever, daemon=True).start()
    endpoint = f"otlp_traces_endpoint=http://127.0.0.1:{collector.server_port}/v1/traces"
    with running(endpoint) as (url, process):
        answered = httpx.post(url + CHAT, json=body(SECRET))
        process.terminate()
        assert process.wait(60) == 0
    collector.shutdown()
    sent = b"".join(got)
    assert answered.json()["id"].encode() in sent and b"decode" in sent
    assert b"xyzzy" not in sent
