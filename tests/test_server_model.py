"""The whole way: the real `openai` client, HTTP, engine process, the built-in model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from conftest import free_port, wait_until_ready
from live_fake import CHAT, HELLO, HTTP, error_of, post

pytestmark = [pytest.mark.server, pytest.mark.model]

PROMPTS = [
    "Repeat after me: the cat sat on the mat, the cat sat on the mat.",
    "Write a haiku about rivers.",
    "List the numbers from one to ten.",
    "Schreibe einen Satz über Äpfel.",
]


@pytest.fixture
def client(served_model: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=served_model + "/v1", api_key="none", max_retries=0)


def gauge(url: str, name: str) -> float:
    text = HTTP.get(url + "/metrics").text
    return float(re.search(rf"^outrider:{name} (\S+)$", text, re.M)[1])  # type: ignore[index]


def wait_for_idle(url: str) -> None:
    end = time.monotonic() + 20
    while gauge(url, "num_requests_running") or gauge(url, "num_requests_waiting"):
        assert time.monotonic() < end, "requests are still in the engine"
        time.sleep(0.05)


def ask(client: openai.OpenAI, prompt: str, **fields: Any) -> str:
    answer = client.chat.completions.create(
        model="smollm2-135m", messages=[{"role": "user", "content": prompt}], max_tokens=32, **fields
    )
    return answer.choices[0].message.content or ""


def test_a_prediction_is_counted_in_the_usage_and_changes_no_token(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "smollm2-135m", "max_tokens": 48, "temperature": 0,
        "messages": [{"role": "user", "content": "Write two sentences about rivers."}],
        "extra_body": {"speculation": "off"},
    }  # fmt: skip
    plain = client.chat.completions.create(**request)
    text = plain.choices[0].message.content or ""
    words = text.split(" ")
    edited = " ".join([*words[:8], "(as they say)", *words[9:]])
    request["extra_body"] = {}
    for prediction in (text, [{"type": "text", "text": edited[:40]}, {"type": "text", "text": edited[40:]}]):
        answer = client.chat.completions.create(
            **request, prediction={"type": "content", "content": prediction}
        )
        assert answer.choices[0].message.content == text
        assert answer.usage and answer.usage.completion_tokens_details
        details = answer.usage.completion_tokens_details
        assert (details.accepted_prediction_tokens or 0) > 10
        assert (details.rejected_prediction_tokens or 0) < (details.accepted_prediction_tokens or 0)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 0.7, "seed": 11}], ids=["greedy", "sampled"]
)
def test_streams_batches_and_speculation_all_give_the_same_text(
    client: openai.OpenAI, served_model: str, sampling: dict[str, Any]
) -> None:
    alone = [ask(client, prompt, **sampling, extra_body={"speculation": "off"}) for prompt in PROMPTS]
    assert all(alone)
    assert [ask(client, prompt, **sampling) for prompt in PROMPTS] == alone

    async def streamed(many: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await many.chat.completions.create(
            model="smollm2-135m", messages=[{"role": "user", "content": prompt}], max_tokens=32, stream=True,
            **sampling,
        )  # fmt: skip
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=served_model + "/v1", api_key="none", max_retries=0) as many:
            return await asyncio.gather(*(streamed(many, prompt) for prompt in PROMPTS * 4))

    assert asyncio.run(together()) == alone * 4


def test_a_prompt_that_repeats_is_drafted_from_and_cached(served_model: str) -> None:
    body = {"prompt": "one two three four five six seven eight. " * 6, "temperature": 0, "max_tokens": 24}
    post(served_model, "/v1/completions", body)
    answer = post(served_model, "/v1/completions", body | {"return_speculation": True}).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert answer["speculation"]["by_source"]["ngram"]["accepted_tokens"] > 0
    assert answer["speculation"]["steps"] < answer["usage"]["completion_tokens"]


def test_logprobs_are_those_of_the_tokens_chosen(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2-135m", messages=HELLO, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    text = answer.choices[0].message.content
    assert content is not None and "".join(e.token for e in content).removesuffix("<|im_end|>") == text
    assert all(entry.logprob == entry.top_logprobs[0].logprob <= 0 for entry in content)
    assert all(entry.token == entry.top_logprobs[0].token for entry in content)


def test_a_megabyte_of_prompt_is_refused_and_others_go_on(client: openai.OpenAI, served_model: str) -> None:
    stream = client.completions.create(model="smollm2-135m", prompt="Once", max_tokens=24, stream=True)
    first = next(chunks := iter(stream))
    for text in ("word " * 210_000, "x" * (1 << 20)):
        error = error_of(post(served_model, CHAT, {"messages": [{"role": "user", "content": text}]}), 400)
        assert error["code"] == "context_length_exceeded" and "8192" in error["message"]
    assert first.choices and [chunk.choices[0].finish_reason for chunk in chunks][-1] is not None


def test_clients_that_leave_free_their_blocks(client: openai.OpenAI, served_model: str) -> None:
    wait_for_idle(served_model)
    usage = gauge(served_model, "kv_cache_usage_perc")
    streams = [
        client.completions.create(
            model="smollm2-135m", prompt=f"{i}: once upon a time", max_tokens=4000, stream=True,
            extra_body={"ignore_eos": True},
        )
        for i in range(4)
    ]  # fmt: skip
    for stream in streams:
        next(iter(stream))
    assert gauge(served_model, "num_requests_running") == 4
    for stream in streams:
        stream.close()
    wait_for_idle(served_model)
    assert gauge(served_model, "kv_cache_usage_perc") == usage


def test_tokenize_uses_the_models_template(served_model: str) -> None:
    reply = post(served_model, "/tokenize", {"messages": HELLO, "return_token_strs": True}).json()
    assert "".join(reply["token_strs"]).endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert post(served_model, "/detokenize", {"tokens": reply["tokens"]}).json()["prompt"].count("Hello") == 1


@pytest.fixture
def own_server(builtin_model: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    command = [sys.executable, "-m", "outrider.entrypoints.cli", "serve", "--port", str(port)]
    with subprocess.Popen(command) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, process)
            yield url, process
        finally:
            process.kill()


def engine_of(process: subprocess.Popen[bytes]) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return next(int(pid) for pid in children if b"core_process" in Path(f"/proc/{pid}/cmdline").read_bytes())


def test_a_killed_engine_is_told_at_once_and_ends_the_server(own_server: Any) -> None:
    url, process = own_server
    body = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with HTTP.stream("POST", url + "/v1/completions", json=body) as reply:
        next(lines := reply.iter_lines())
        os.kill(engine_of(process), signal.SIGKILL)
        events = [line for line in lines if line]
    error = json.loads(events[-2][6:])["error"]
    assert error["code"] == "engine_dead" and "signal 9" in error["message"]
    assert error_of(httpx.get(url + "/health"), 503)["code"] == "engine_dead"
    assert process.wait(15) == 1


def test_sigterm_leaves_no_process_behind(own_server: Any) -> None:
    url, process = own_server
    engine = engine_of(process)
    with HTTP.stream(
        "POST", url + "/v1/completions", json={"prompt": "A", "max_tokens": 16, "stream": True}
    ) as reply:
        next(lines := reply.iter_lines())
        process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.wait(15) == 0
    assert not Path(f"/proc/{engine}").exists()


def test_a_truncated_model_is_told_in_one_sentence(builtin_model: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    with builtin_model.open("rb") as file:
        cut.write_bytes(file.read(10 << 20))
    result = subprocess.run(
        [sys.executable, "-m", "outrider.entrypoints.cli", "serve", str(cut), "--port", "0"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode in (1, 2) and "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("outrider: error:") and "cut.gguf" in last
