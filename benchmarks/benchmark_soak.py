"""Many streams with random cancels for minutes: no error, no leak, no stall.

Starts `outrider serve` on a free port (its cache bounded, so that memory can be flat), keeps a number of
streams under way for a while, cancels some of them in the middle, and then looks at what is left: errors,
the longest gap inside a stream, resident memory over time, blocks and requests still held.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

TOPICS = [
    "tides",
    "bread",
    "prime numbers",
    "glaciers",
    "chess",
    "old maps",
    "bees",
    "printing",
    "jazz",
    "bridges",
]


@dataclass
class Tally:
    """What the streams saw."""

    finished: int = 0
    cancelled: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0  # between two chunks of a stream that had begun
    longest_first_s: float = 0.0  # to the first chunk


def body_of(rng: random.Random) -> dict[str, Any]:
    """A request like others, and unlike all of them."""
    topic = rng.choice(TOPICS)
    text = f"Request {rng.randrange(10**6)}: tell me about {topic}. " + f"I like {topic}. " * rng.randrange(
        60
    )
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": rng.choice([8, 32, 64, 128, 256]),
        "temperature": rng.choice([0, 0.7, 1.2]),
        "top_p": rng.choice([1, 0.9]),
        "repetition_penalty": rng.choice([1, 1.1]),
        "seed": rng.randrange(2**31),
        "stream": True,
    }


async def one_stream(session: aiohttp.ClientSession, url: str, rng: random.Random, tally: Tally) -> None:
    chunks_wanted = rng.randrange(1, 60) if rng.random() < 0.3 else None  # then the client leaves
    begin = last = time.monotonic()
    seen = 0
    async with session.post(url + "/v1/chat/completions", json=body_of(rng)) as reply:
        if reply.status != 200:
            tally.errors.append(f"{reply.status}: {(await reply.text())[:200]}")
            return
        async for line in reply.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            now = time.monotonic()
            if b'"error"' in line[:20]:
                tally.errors.append(line.decode()[:200])
                return
            if seen:
                tally.longest_gap_s = max(tally.longest_gap_s, now - last)
            else:
                tally.longest_first_s = max(tally.longest_first_s, now - begin)
            last = now
            seen += 1
            tally.tokens += 1
            if seen == chunks_wanted:
                tally.cancelled += 1
                return
    tally.finished += 1


async def streams(url: str, concurrency: int, seconds: float, seed: int, tally: Tally) -> None:
    """Keep `concurrency` streams under way until the time is over; then let them end."""
    end = time.monotonic() + seconds

    async def worker(number: int) -> None:
        rng = random.Random(f"{seed}-{number}")
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            while time.monotonic() < end:
                try:
                    await one_stream(session, url, rng, tally)
                except (aiohttp.ClientError, OSError) as error:
                    tally.errors.append(repr(error))

    await asyncio.gather(*(worker(i) for i in range(concurrency)))


def resident_mib(pid: int) -> float:
    """Of a process and its children, proportional shares of what they share not taken out."""
    total = 0.0
    for task in [pid, *children(pid)]:
        status = Path(f"/proc/{task}/status").read_text()
        total += int(status.split("VmRSS:")[1].split()[0]) / 1024
    return total


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(url + "/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def start_server(extra: list[str]) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "outrider.entrypoints.api_server", "--port", str(port), *extra]
    server = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}")
        try:
            urllib.request.urlopen(url + "/health", timeout=2).close()
            return server, url
        except OSError:
            time.sleep(0.1)
    server.kill()
    raise SystemExit("the server did not become ready in a minute")


async def run(args: argparse.Namespace, server: subprocess.Popen[bytes], url: str) -> dict[str, Any]:
    tally = Tally()
    memory: list[float] = []
    work = asyncio.create_task(streams(url, args.concurrency, args.seconds, args.seed, tally))
    begin = time.monotonic()
    while not work.done():
        await asyncio.wait([work], timeout=max(1.0, args.seconds / 20))
        memory.append(resident_mib(server.pid))
        print(
            f"{time.monotonic() - begin:5.0f} s: {memory[-1]:.0f} MiB, {tally.finished} finished, "
            f"{tally.cancelled} cancelled, {len(tally.errors)} errors, gap {tally.longest_gap_s:.2f} s",
            flush=True,
        )
    await work
    for _ in range(50):  # what was cancelled last is let go within a step
        if not metric(url, "outrider:num_requests_running"):
            break
        await asyncio.sleep(0.1)
    return {
        "seconds": time.monotonic() - begin,
        "finished": tally.finished,
        "cancelled": tally.cancelled,
        "chunks": tally.tokens,
        "errors": tally.errors[:20],
        "num_errors": len(tally.errors),
        "longest_gap_s": tally.longest_gap_s,
        "longest_time_to_first_s": tally.longest_first_s,
        "memory_mib": memory,
        "running_at_end": metric(url, "outrider:num_requests_running"),
        "waiting_at_end": metric(url, "outrider:num_requests_waiting"),
        "cache_usage_at_end": metric(url, "outrider:kv_cache_usage_perc"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-gap", type=float, default=5.0, help="seconds a stream may stall")
    parser.add_argument("--server-args", nargs=argparse.REMAINDER, default=["--num-kv-blocks", "512"])
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()
    server, url = start_server(args.server_args)
    try:
        result = asyncio.run(run(args, server, url))
    finally:
        server.terminate()
        server.wait(60)
    settled = result["memory_mib"][len(result["memory_mib"]) // 2 :]
    result["growth_mib"] = settled[-1] - settled[0]
    print(json.dumps({k: v for k, v in result.items() if k != "memory_mib"}, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result))
    is_good = (
        not result["num_errors"]
        and result["longest_gap_s"] <= args.max_gap
        and not result["running_at_end"]
        and not result["waiting_at_end"]
        and not result["cache_usage_at_end"]
        and result["growth_mib"] < 20
    )
    print("passed" if is_good else "FAILED")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
