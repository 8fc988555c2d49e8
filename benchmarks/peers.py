"""The engines that benchmark_peers.py knows, each a server that takes token ids over OpenAI's API."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.client import Client, Record, Target, first_model
from benchmarks.server_process import ServerProcess, free_port
from benchmarks.workload import Item


@dataclass(frozen=True, slots=True)
class Peer:
    """How to start an engine and what its requests need.

    `command` may hold {model}, {threads}, {port}, {slots} (requests at once) and {context} (tokens
    for all of them together).
    """

    name: str
    command: tuple[str, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)  # in every request
    env: Mapping[str, str] = field(default_factory=dict)
    salted: bool = False  # give each request a `cache_salt` of its own, so that no prompt is found cached


def outrider_peer(method: str) -> Peer:
    """This checkout's server with speculation `method`."""
    command = [sys.executable, "-m", "outrider.entrypoints.cli", "serve", "{model}", "--host", "127.0.0.1"]
    command += ["--port", "{port}", "--num-threads", "{threads}"]
    command += ["--speculative-config", json.dumps({"method": method}).replace("{", "{{").replace("}", "}}")]
    return Peer(f"outrider {method}", tuple(command), salted=True)


# llama.cpp's server. A cached prompt would make the time to first token meaningless, so none is kept.
_LLAMA_SERVER = (
    "-m {model} -t {threads} -tb {threads} -c {context} -np {slots} --host 127.0.0.1 --port {port}"
)
_LLAMA_FIELDS = {"cache_prompt": False, "top_k": 1, "repeat_penalty": 1.0}


def llama_server_peer(path: str, name: str = "llama-server", flags: Sequence[str] = ()) -> Peer:
    return Peer(name, (path, *_LLAMA_SERVER.split(), "--no-webui", *flags), _LLAMA_FIELDS)


# Name -> (programs that may be on the path, how to make the peer from the program found).
KNOWN = {"llama-server": (("llama-server", "llama-cpp-server"), llama_server_peer)}


def find_peers(given: Mapping[str, str], peers_file: Path | None) -> list[Peer]:
    """All engines that are installed: given by path, on $PATH, or described in a JSON file.

    The file maps names to {"command": [...], "fields": {...}, "env": {...}}; ${VARIABLES} in it are
    taken from the environment.
    """
    unknown = set(given) - set(KNOWN)
    if unknown:
        raise ValueError(
            f"--peer knows {', '.join(KNOWN)}, got {sorted(unknown)[0]!r}; describe others in a --peers-file"
        )
    peers = []
    for name, (programs, make) in KNOWN.items():
        path = given.get(name) or next((found for p in programs if (found := shutil.which(p))), None)
        if path is not None:
            if not os.access(path, os.X_OK):
                raise ValueError(f"--peer {name}={path}: there is no program to run at that path")
            peers.append(make(path))
    if peers_file is not None:
        described = json.loads(os.path.expandvars(peers_file.read_text(encoding="utf-8")))
        peers += [
            Peer(name, tuple(one["command"]), one.get("fields", {}), one.get("env", {}))
            for name, one in described.items()
        ]
    return peers


class RunningPeer:
    """A started peer. Its requests are greedy, streamed and given as token ids."""

    def __init__(self, peer: Peer, model: str, threads: int, slots: int, context: int, log_dir: Path) -> None:
        self.peer = peer
        port = free_port()
        values = {
            "model": model,
            "threads": threads,
            "port": port,
            "slots": slots,
            "context": context * slots,
        }
        command = [part.format(**values) for part in peer.command]
        log = log_dir / f"peer-{peer.name.replace(' ', '-')}-{port}.log"
        self.server = ServerProcess(command, f"http://127.0.0.1:{port}", log, env=peer.env)
        self._target: Target | None = None
        self._num_requests = 0

    async def prepare(self) -> None:
        """Ask for the model's name and send one short request, so that later ones find all warm."""
        model = await first_model(self.server.base_url)
        self._target = Target(self.server.base_url, "openai", model, {"temperature": 0, **self.peer.fields})
        async with Client() as client:
            record = await client.send(self.target(), Item("warm-up", token_ids=[1, 2, 3, 4], max_tokens=4))
        if not record.ok:
            raise RuntimeError(f"{self.peer.name} refused the first request: {record.error}")

    def target(self) -> Target:
        """Where the next request goes."""
        assert self._target is not None, "prepare() comes first"
        if not self.peer.salted:
            return self._target
        self._num_requests += 1
        fields = {**self._target.fields, "cache_salt": f"peers-{self._num_requests}"}
        return Target(self._target.base_url, "openai", self._target.model, fields)

    async def generate(self, items: Sequence[Item]) -> list[Record]:
        """All items at once; a failure ends the benchmark."""
        async with Client() as client:
            records = await asyncio.gather(*(client.send(self.target(), item) for item in items))
        for record in records:
            if not record.ok:
                raise RuntimeError(f"{self.peer.name} failed at {record.item_id}: {record.error}")
        return list(records)
