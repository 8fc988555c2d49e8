"""An engine client without a model, for tests of the HTTP edge. Run as a script it serves.

The "model" is a function of prompt, seed and position, so answers are reproducible, and steps bring one
to three tokens, so chunks are ragged. Token ids below 256 are bytes. Words in the prompt ask for more:
`crash`, `slow`, `say: ` (repeats what follows), `lossy` (other tokens without speculation: a broken engine).
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

from outrider.config import EngineConfig, load
from outrider.engine.output import OutputStream, Vocabulary
from outrider.request import AddRequest, FinishReason, RequestOutput, SpeculationStats, TokenLogprobs

EOS = 256
VOCAB_SIZE = 300
MAX_MODEL_LEN = 2048
TEXT = "The quick brown fox äöü jumps € over 🙂 the lazy dog. ".encode()
VOCABULARY = Vocabulary(
    [bytes([i]) for i in range(256)] + [b"<eos>"] + [b""] * 43, frozenset({EOS}), frozenset({EOS})
)


class FakeTokenizer:
    """A token a byte; the template is one line a message."""

    chat_template = "{{ messages }} <think></think>"
    special_ids = VOCABULARY.special_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(VOCABULARY.token_bytes[i] for i in token_ids).decode("utf-8", "replace")

    def token_bytes(self) -> list[bytes]:
        return VOCABULARY.token_bytes

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        if "fail" in kwargs:
            raise ValueError("told to fail")
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages)


class FakeEngineClient:
    """The interface of `EngineClient` over nothing."""

    def __init__(self, config: EngineConfig, on_death: Callable[[str], None], step_s: float = 0.001) -> None:
        self.on_death = on_death
        self.step_s = step_s
        self.live: dict[str, FinishReason | None] = {}
        self.aborted: list[str] = []
        self.death: str | None = None
        self.num_tokens = 7

    async def start(self) -> Any:
        return SimpleNamespace(max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE)

    @property
    def is_alive(self) -> bool:
        return self.death is None

    def die(self, reason: str) -> None:
        self.death = reason
        self.on_death(reason)

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if request_id in self.live:
                self.live[request_id] = FinishReason.ABORT
                self.aborted.append(request_id)

    async def stats(self) -> dict[str, Any]:
        return {
            "num_requests_running": len(self.live), "num_generation_tokens": self.num_tokens,
            "num_finished": {"stop": 2, "abort": 1},
            "step_duration": {"bounds": [0.1, 1.0], "counts": [3, 2, 1], "sum": 4.5},
            "num_draft_tokens": {"ngram": 10}, "num_accepted_tokens": {"ngram": 4},
            "num_draft_tokens_per_position": {"ngram": [7, 3]},
            "num_accepted_per_position": {"ngram": [3, 1]}, "num_emitting_windows": 3,
            "speculation": {
                "method": "auto", "profit": {"ratio": 1.5, "gain": 0.5},
                "controller": {"acceptance": {"ngram": [{"depth": "0", "curve": [
                    {"guessed": 0.5, "accepted": 0.4, "outcomes": 10.0},
                    {"guessed": 0.9, "accepted": 0.95, "outcomes": 20.0},
                ]}]}, "decisions": [
                    {"requests": 1, "model_steps": 0, "proposed": 4, "admitted": 3, "expected_gain": 1.5},
                ]},
            },
        }  # fmt: skip

    async def shutdown(self, drain: bool = False) -> None:
        self.death = self.death or "shut down"

    async def add_request(self, request: AddRequest) -> AsyncIterator[RequestOutput]:
        prompt = bytes(i % 256 for i in request.prompt_token_ids)
        if b"crash" in prompt:
            self.die("told to crash")
        self.live[request.request_id] = None
        room = MAX_MODEL_LEN - len(prompt)
        stream = OutputStream(request.params, min(request.params.max_tokens or room, room), VOCABULARY)
        stats = SpeculationStats()
        try:
            while stream.finish_reason is None:
                await asyncio.sleep(self.step_s * (100 if b"slow" in prompt else 1))
                if self.death is not None:
                    raise RuntimeError(f"the engine has stopped: {self.death}")
                yield self.step(request, prompt, stream, stats)
        finally:
            del self.live[request.request_id]

    def step(
        self, request: AddRequest, prompt: bytes, stream: OutputStream, stats: SpeculationStats
    ) -> RequestOutput:
        tokens: list[int] = []
        if self.live[request.request_id] is FinishReason.ABORT:
            stream.close(FinishReason.ABORT)
        else:
            for _ in range(1 + stream.num_tokens % 3):
                tokens.append(draw(request, prompt, stream.num_tokens))
                if stream.append(tokens[-1]):
                    break
            self.num_tokens += len(tokens)
            stats.steps += 1
            stats.draft_tokens += 2
            stats.accepted_tokens += len(tokens) - 1
            stats.by_source = {"ngram": [stats.draft_tokens, stats.accepted_tokens]}
        wanted = request.params.logprobs
        return RequestOutput(
            request.request_id, tokens, stream.take_text(),
            ["ngram"] * (len(tokens) - 1) + ["model"] * bool(tokens),
            None if wanted is None else [
                TokenLogprobs(-0.5, 1, [t, 97, 0xC3][:wanted], [-0.5, -1.5, -2.5][:wanted]) for t in tokens
            ],
            stream.finish_reason, stream.stop_reason, None, len(prompt), 0, stream.num_tokens,
            request.params.seed or 0, speculation=stats if stream.finish_reason else None,
            prompt_logprobs=score_prompt(request) if stream.num_tokens == len(tokens) else None,
        )  # fmt: skip


def score_prompt(request: AddRequest) -> list[TokenLogprobs] | None:
    count = request.params.prompt_logprobs
    if count is None:
        return None
    return [TokenLogprobs(-3.5, 3, [97, 98][:count], [-0.5, -1.5][:count])] * (
        len(request.prompt_token_ids) - 1
    )


def draw(request: AddRequest, prompt: bytes, position: int) -> int:
    """Greedy: a fixed text. Else: letters by prompt, seed and position."""
    _, asked, said = prompt.rpartition(b"say: ")
    if asked:
        return [*said.removesuffix(b"\n"), EOS][position]
    if request.params.temperature == 0:
        return TEXT[position % len(TEXT)]
    is_plain = request.params.speculation is not None and request.params.speculation.method == "off"
    fault = b"off" if b"lossy" in prompt and is_plain else b""
    digest = hashlib.sha256(prompt + fault + b"%d %d" % (request.params.seed or 0, position)).digest()
    return 97 + digest[0] % 26


class FakeEngine:
    """The same answers in the caller's process, with the interface of `Engine`."""

    max_model_len = MAX_MODEL_LEN
    vocabulary = VOCABULARY

    def __init__(self) -> None:
        self._client = FakeEngineClient(EngineConfig(), lambda reason: None)
        self._running: dict[str, tuple[AddRequest, bytes, OutputStream, SpeculationStats]] = {}
        self.cancelled: list[str] = []
        self.requests: list[AddRequest] = []

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def stats(self) -> dict[str, Any]:
        return asyncio.run(self._client.stats())

    def add_request(self, request: AddRequest) -> None:
        self.requests.append(request)
        prompt = bytes(request.prompt_token_ids)
        max_tokens = min(request.params.max_tokens or MAX_MODEL_LEN, MAX_MODEL_LEN - len(prompt))
        self._client.live[request.request_id] = None
        stream = OutputStream(request.params, max_tokens, VOCABULARY)
        self._running[request.request_id] = (request, prompt, stream, SpeculationStats())

    def step(self) -> list[RequestOutput]:
        outputs = [self._client.step(*parts) for parts in self._running.values()]
        for output in outputs:
            if output.finish_reason is not None:
                del self._running[output.request_id]
        return outputs

    def cancel(self, request_ids: list[str]) -> list[RequestOutput]:
        self.cancelled += [name for name in request_ids if self._running.pop(name, None)]
        return []


def main() -> int:
    """`fake_engine.py KEY=VALUE ...`: serve with these configuration values."""
    from outrider.entrypoints.api_server import serve

    flags = dict(argument.split("=", 1) for argument in sys.argv[1:])
    return serve(load(flags), FakeEngineClient, lambda config: FakeTokenizer())


if __name__ == "__main__":
    sys.exit(main())
