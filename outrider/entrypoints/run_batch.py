"""`outrider run-batch`: a file of requests in OpenAI's batch format, answered without a server.

A line of the input is `{"custom_id", "method": "POST", "url", "body"}`; a line of the output holds the
same `custom_id` and the answer, or the error, of that request alone. Lines are written as answers are
complete. Run again, the command goes on where it stopped: what the output has is not done again.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from outrider.config import EngineConfig, ServerConfig
from outrider.entrypoints.arguments import Parser, add_config_flags, configuration_from

_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class Job:
    """A line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Answer; the exit code is 1 if a request got an error."""
    parser = Parser(prog="outrider run-batch", usage="outrider run-batch [MODEL] -i IN -o OUT [flags]")
    parser.add_argument("-i", "--input-file", metavar="IN.jsonl", required=True, help="requests, one a line")
    parser.add_argument("-o", "--output-file", metavar="OUT.jsonl", required=True, help="answers, one a line")
    add_config_flags(parser, EngineConfig, ServerConfig)
    options = parser.parse_args(arguments)
    configuration = configuration_from(options)
    jobs = read_jobs(options.input_file)
    done = read_done(options.output_file)
    unknown = done - {job.custom_id for job in jobs}
    if unknown:
        raise ValueError(
            f"{options.output_file} has answers to other requests ({min(unknown)!r} is not in "
            f"{options.input_file}); name another output file"
        )
    left = [job for job in jobs if job.custom_id not in done]
    if done:
        print(f"{len(done)} of {len(jobs)} requests are answered already", file=sys.stderr)
    if not left:
        return 0
    from outrider.entrypoints.local import LocalEngine

    engine = LocalEngine(configuration)
    with open(options.output_file, "a", encoding="utf-8") as out:
        num_failed = Batch(engine, left, out, 2 * configuration.engine.max_num_seqs).run(len(done))
    if num_failed:
        print(
            f"{num_failed} of {len(left)} requests got an error; see {options.output_file}", file=sys.stderr
        )
    return 1 if num_failed else 0


def read_jobs(path: str) -> list[Job]:
    """The lines of the input. Whatever is wrong with the file is found before anything is computed."""
    jobs: list[Job] = []
    lines: dict[str, int] = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: not valid JSON: {error}") from None
            job = _job(record, f"{path}:{number}")
            if job.custom_id in lines:
                raise ValueError(
                    f"{path}:{number}: custom_id {job.custom_id!r} is that of line {lines[job.custom_id]} too"
                )
            lines[job.custom_id] = number
            jobs.append(job)
    return jobs


def _job(record: Any, where: str) -> Job:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a line must be a JSON object")
    for name in _FIELDS:
        if name not in record:
            raise ValueError(f"{where}: {name} is missing; a line has {', '.join(_FIELDS)}")
    if not isinstance(record["custom_id"], str) or not isinstance(record["body"], dict):
        raise ValueError(f"{where}: custom_id must be a text and body an object")
    if record["method"] != "POST":
        raise ValueError(f"{where}: method must be POST, got {record['method']!r}")
    return Job(record["custom_id"], str(record["url"]), record["body"])


def read_done(path: str) -> set[str]:
    """Ids that the output has. A last line that was cut off, as by a full disk or a kill, is removed."""
    done: set[str] = set()
    if not os.path.exists(path):
        return done
    end = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                done.add(json.loads(line)["custom_id"])
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{path}:{number} is no answer of a batch; name another output file"
                ) from None
            end += len(line)
    if end < os.path.getsize(path):
        os.truncate(path, end)
    return done


class Batch:
    """Answers jobs and writes them down."""

    def __init__(self, engine: Any, jobs: Sequence[Job], out: IO[str], window: int) -> None:
        self._engine = engine
        self._jobs = jobs
        self._out = out
        self._window = window
        self._open: dict[int, tuple[Job, Any]] = {}  # by place in the engine's order
        self._num_failed = 0
        self._bar: Any = None

    def run(self, num_done: int) -> int:
        """Answer all; the number of errors."""
        from tqdm import tqdm

        total = num_done + len(self._jobs)
        self._bar = tqdm(total=total, initial=num_done, unit="request", disable=not sys.stderr.isatty())
        with self._bar:
            for place, sequence, output in self._engine.run(self._prepared(), window=self._window):
                job, answer = self._open[place]
                answer.choices[sequence].add(output)
                if output.error is not None:
                    answer.choices[sequence].error = output.error
                if answer.is_finished:
                    del self._open[place]
                    self._end(job, answer)
        return self._num_failed

    def _prepared(self) -> Iterator[Any]:
        """The jobs as the engine takes them; those that it cannot take are answered with their error."""
        from outrider.entrypoints.errors import ApiError

        place = 0
        for job in self._jobs:
            try:
                prepared, answer = self._prepare(job)
            except ApiError as error:
                self._write(job, error.status, error.body())
                continue
            self._open[place] = (job, answer)
            place += 1
            yield prepared

    def _prepare(self, job: Job) -> tuple[Any, Any]:
        from outrider.entrypoints.errors import ApiError, bad_request
        from outrider.entrypoints.protocol import ChatCompletionRequest, CompletionRequest, parse
        from outrider.entrypoints.responses import Answer, wanted_of

        preparer = self._engine.preparer
        body = json.dumps(job.body).encode()
        if job.url == "/v1/chat/completions":
            request: Any = parse(ChatCompletionRequest, body)
            prepare = preparer.chat
        elif job.url == "/v1/completions":
            request = parse(CompletionRequest, body)
            prepare = preparer.completion
        else:
            raise ApiError(
                404, f"there is no route {job.url!r} for a batch", param="url", code="route_not_found"
            )
        if request.stream:
            raise bad_request("stream has no meaning in a batch", "stream")
        prepared = asyncio.run(prepare(request))
        wanted = wanted_of(request)
        request_id = ("chatcmpl-" if wanted.chat else "cmpl-") + uuid.uuid4().hex
        answer = Answer(
            request_id, prepared.model, "", prepared.seed, prepared.prompts, prepared.n, wanted,
            preparer.token_bytes, prepared.texts, prepared.parsing,
        )  # fmt: skip
        return prepared, answer

    def _end(self, job: Job, answer: Any) -> None:
        from outrider.entrypoints.errors import ApiError

        error = next((choice.error for choice in answer.choices if choice.error is not None), None)
        if error is None:
            self._write(job, 200, json.loads(answer.body()))
        else:
            self._write(job, 500, ApiError(500, error, code="engine_error").body())

    def _write(self, job: Job, status: int, body: dict[str, Any]) -> None:
        self._num_failed += status != 200
        response = {"status_code": status, "request_id": body.get("id", ""), "body": body}
        record = {
            "id": f"batch_req_{uuid.uuid4().hex[:24]}", "custom_id": job.custom_id, "response": response,
            "error": None,
        }  # fmt: skip
        print(json.dumps(record, ensure_ascii=False), file=self._out, flush=True)
        self._bar.update()
