"""`outrider generate`: one prompt, or a JSONL file of requests, answered as JSON lines.

A line is the body of a completion (`prompt`) or of a chat request (`messages`), with the fields of the
HTTP API; an answer is written when it is complete, so the order may differ: `index` is the line's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import IO, Any

from outrider.config import EngineConfig
from outrider.entrypoints.arguments import Parser, add_config_flags, configuration_from


def main(arguments: Sequence[str]) -> int:
    """Answer; the exit code is 1 if a request failed in the engine."""
    from outrider.entrypoints.local import LocalEngine, add_sampling_flags, sampling_fields

    parser = Parser(
        prog="outrider generate", usage="outrider generate [MODEL] (--prompt TEXT | -f FILE) [flags]"
    )
    parser.add_argument("--prompt", action="append", help="a prompt; repeatable")
    parser.add_argument(
        "--chat", action="store_true", help="the prompts are messages of a user to a chat model"
    )
    parser.add_argument(
        "-f", "--file", metavar="FILE.jsonl", help="requests, one a line; - reads standard input"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE.jsonl", help="where to write (default: standard output)"
    )
    parser.add_argument("--text", action="store_true", help="write the texts only, not JSON")
    add_sampling_flags(parser)
    add_config_flags(parser, EngineConfig)
    options = parser.parse_args(arguments)
    if (options.prompt is None) == (options.file is None):
        parser.error("give either --prompt or -f")
    configuration = configuration_from(options)
    bodies = _from_prompts(options) if options.prompt else list(_from_file(options.file))
    requests = [_parse(where, sampling_fields(options) | body) for where, body in bodies]
    engine = LocalEngine(configuration)
    prepared = [
        _prepare(engine, where, request) for (where, _), request in zip(bodies, requests, strict=True)
    ]
    with open(options.output, "w", encoding="utf-8") if options.output else _Standard() as out:
        return _answer(engine, prepared, options, out)


class _Standard:
    """Standard output as a context that leaves it open."""

    def __enter__(self) -> IO[str]:
        return sys.stdout

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()


def _from_prompts(options: Any) -> list[tuple[str, dict[str, Any]]]:
    if options.chat:
        return [("--prompt", {"messages": [{"role": "user", "content": text}]}) for text in options.prompt]
    return [("--prompt", {"prompt": text}) for text in options.prompt]


def _from_file(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    name = "standard input" if path == "-" else path
    try:
        with sys.stdin if path == "-" else open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    body = json.loads(line)
                    if not isinstance(body, dict):
                        raise ValueError(f"{name}:{number}: a line must be a JSON object")
                    yield f"{name}:{number}", body
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}:{number}: not valid JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error}") from None


def _parse(where: str, body: dict[str, Any]) -> Any:
    from outrider.entrypoints.errors import ApiError
    from outrider.entrypoints.protocol import ChatCompletionRequest, CompletionRequest, parse

    model = ChatCompletionRequest if "messages" in body else CompletionRequest
    try:
        return parse(model, json.dumps(body).encode())
    except ApiError as error:
        raise ValueError(f"{where}: {error.message}") from None


def _prepare(engine: Any, where: str, request: Any) -> Any:
    try:
        return engine.prepare(request)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _answer(engine: Any, prepared: list[Any], options: Any, out: IO[str]) -> int:
    from tqdm import tqdm

    from outrider.entrypoints.responses import Choice

    choices = [[Choice() for _ in request.params] for request in prepared]
    texts_in_order: list[str | None] = [None] * len(prepared)
    failed = False
    bar = tqdm(total=len(prepared), unit="prompt", disable=len(prepared) == 1 or not sys.stderr.isatty())
    with bar:
        for index, sequence, output in engine.run(prepared):
            choices[index][sequence].add(output)
            failed = failed or output.error is not None
            if any(choice.finish_reason is None for choice in choices[index]):
                continue
            bar.update()
            if options.text:
                texts_in_order[index] = "\n".join("".join(choice.text) for choice in choices[index])
            else:
                record = _record(index, prepared[index], choices[index], output.error)
                print(json.dumps(record, ensure_ascii=False), file=out, flush=True)
    for text in texts_in_order:
        if text is not None:
            print(text, file=out)
    return 1 if failed else 0


def _record(index: int, request: Any, choices: Sequence[Any], error: str | None) -> dict[str, Any]:
    from outrider.entrypoints.responses import total_speculation

    texts = ["".join(choice.text) for choice in choices]
    prompt = sum(map(len, request.prompts))
    completion = sum(choice.num_output_tokens for choice in choices)
    record: dict[str, Any] = {
        "index": index,
        "text": texts[0] if len(texts) == 1 else texts,
        "finish_reason": [choice.finish_reason.value for choice in choices],
        "seed": request.seed,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
        "speculation": total_speculation(choices),
    }
    if len(texts) == 1:
        record["finish_reason"] = record["finish_reason"][0]
    if error is not None:
        record["error"] = error
    return record
