"""Sends requests to an OpenAI-compatible server and notes when each piece of the answer came.

The client shares its cores with the server it measures, so while an answer arrives it only stores
(time, bytes); the bytes are parsed once the answer is complete.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from benchmarks.workload import Item

ENDPOINTS = {"openai-chat": "/v1/chat/completions", "openai": "/v1/completions"}


@dataclass(slots=True)
class Record:
    """What one request got. Times are seconds after it was sent; `start` is on the run's clock."""

    item_id: str
    start: float = 0.0
    output_times: list[float] = field(default_factory=list)  # of chunks that carry output
    end: float = 0.0  # of the last chunk, the usage chunk included
    server_times: list[float] = field(default_factory=list)  # of output chunks, on the server's clock
    server_end: float | None = None  # server clock of the last chunk that has one
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # when the server returns them
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    output_tokens: int | None = None
    speculation: dict[str, Any] | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how to speak to it."""

    base_url: str
    backend: str  # a key of ENDPOINTS
    model: str
    fields: Mapping[str, Any] = field(default_factory=dict)  # merged over every payload
    endpoint: str | None = None  # None: the backend's own
    api_key: str | None = None

    @property
    def url(self) -> str:
        return self.base_url.rstrip("/") + (self.endpoint or ENDPOINTS[self.backend])

    @property
    def headers(self) -> dict[str, str]:
        # Two headers ask Outrider for its figures and its clock; other servers do not look at them.
        headers = {"Content-Type": "application/json"}
        headers |= {"X-Outrider-Speculation": "1", "X-Outrider-Timing": "1"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return headers


def build_payload(target: Target, item: Item, seed: int | None = None) -> dict[str, Any]:
    """The request body: the data set's fields, with the target's merged over them.

    With the completion backend a chat item is sent as its last message's text. The chat backend gets
    token ids as `prompt_token_ids`, which not every server knows.
    """
    payload: dict[str, Any] = {
        "model": target.model,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.backend == "openai":
        payload["prompt"] = item.text if item.token_ids is None else item.token_ids
    elif item.token_ids is None:
        payload["messages"] = item.messages
    else:
        payload["messages"] = []
        payload["prompt_token_ids"] = item.token_ids
    if item.max_tokens is not None:
        payload["max_tokens"] = item.max_tokens
    if seed is not None:
        payload["seed"] = seed
    return {**payload, **item.fields, **target.fields}


def parse_answer(item_id: str, reads: Iterable[tuple[float, bytes]]) -> Record:
    """Turn the raw reads of one event stream into a record.

    An event has the time of the read that completed it. A stream without `[DONE]` was cut off.
    """
    record = Record(item_id)
    done = False
    for when, data in _events(reads):
        if data == b"[DONE]":
            done = True
            break
        try:
            chunk = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            record.error = f"not JSON in the stream: {error}: {data[:200]!r}"
            return record
        record.end = when
        if not isinstance(chunk, dict) or chunk.get("error"):
            record.error = f"error in the stream: {data[:500].decode(errors='replace')}"
            return record
        _take_chunk(record, when, chunk)
    if not done:
        record.error = "the stream ended without [DONE]"
    elif record.finish_reason is None:
        record.error = "the stream ended without a finish_reason"
    return record


def _events(reads: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data lines of a server-sent event stream; comments and other fields are passed over."""
    rest = b""
    for when, data in reads:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield when, line[5:].strip()


def _take_chunk(record: Record, when: float, chunk: dict[str, Any]) -> None:
    for choice in chunk.get("choices") or ():
        text, carries_output = _output_of(choice)
        arrival = choice.get("arrival_time")
        if arrival is not None:
            record.server_end = arrival
        if carries_output:
            record.output_times.append(when)
            record.text += text
            record.token_ids += choice.get("token_ids") or ()
            if arrival is not None:
                record.server_times.append(arrival)
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
        record.speculation = choice.get("speculation") or record.speculation
    record.speculation = chunk.get("speculation") or record.speculation
    usage = chunk.get("usage")
    if usage:
        record.prompt_tokens = usage.get("prompt_tokens")
        record.output_tokens = usage.get("completion_tokens")
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _output_of(choice: dict[str, Any]) -> tuple[str, bool]:
    """(text, does this choice of a chunk carry output?) The chunk that only names the role does not."""
    delta = choice.get("delta")
    if delta is None:
        text = choice.get("text") or ""
        return text, bool(text or choice.get("token_ids"))
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    text = reasoning + (delta.get("content") or "")
    return text, bool(text or delta.get("tool_calls") or choice.get("token_ids"))


class Client:
    """One connection pool; `send` never raises for what a server does wrong, the record says it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, timeout_s: float = 3600) -> None:
        self._clock = clock
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=self._timeout, auto_decompress=False
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def send(
        self, target: Target, item: Item, seed: int | None = None, run_start: float = 0.0
    ) -> Record:
        assert self._session is not None, "use `async with Client()`"
        body = msgspec.json.encode(build_payload(target, item, seed))
        reads: list[tuple[float, bytes]] = []
        clock = self._clock
        start = clock()
        try:
            async with self._session.post(target.url, data=body, headers=target.headers) as response:
                if response.status != 200:
                    text = (await response.text())[:500]
                    return Record(item.id, start - run_start, error=f"HTTP {response.status}: {text}")
                content = response.content
                while data := await content.readany():
                    reads.append((clock() - start, data))
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            return Record(item.id, start - run_start, error=f"{type(error).__name__}: {error}")
        record = parse_answer(item.id, reads)
        record.start = start - run_start
        return record


@dataclass(frozen=True, slots=True)
class Load:
    """What a run sends: items, when each may leave, and how many may be under way at once."""

    items: Sequence[Item]
    offsets: Sequence[float]
    max_concurrency: int | None = None
    seed: int | None = None  # request i carries seed + i


async def run_load(
    client: Client, target: Target, load: Load, on_done: Callable[[Record], None] = lambda record: None
) -> tuple[list[Record], float]:
    """Send a whole load; the records in the items' order, and the seconds from first send to last chunk.

    A request waits for its offset, then for a free place; its own clock starts when it is sent.
    """
    places = asyncio.Semaphore(load.max_concurrency or len(load.items))
    run_start = time.perf_counter()

    async def one(index: int) -> Record:
        async with places:
            seed = None if load.seed is None else load.seed + index
            record = await client.send(target, load.items[index], seed, run_start)
        on_done(record)
        return record

    tasks = []
    try:
        for index, offset in enumerate(load.offsets):
            delay = run_start + offset - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(one(index)))
        records = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return list(records), time.perf_counter() - run_start


async def fetch_json(base_url: str, path: str, api_key: str | None = None, timeout_s: float = 10) -> Any:
    """GET a JSON document; None when nobody answers there with 200."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(base_url.rstrip("/") + path) as response,
        ):
            return await response.json(content_type=None) if response.status == 200 else None
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError):
        return None


async def first_model(base_url: str, api_key: str | None = None) -> str:
    """The name of the first model the server lists."""
    listing = await fetch_json(base_url, "/v1/models", api_key)
    try:
        return str(listing["data"][0]["id"])
    except (TypeError, LookupError):
        raise RuntimeError(f"{base_url}/v1/models names no model: start the server or give --model") from None
