"""Stand-ins that make every rule of the engine testable in milliseconds, and an oracle without its code.

`HashModel` keeps (token, position) in each slot of its cache, and its logits are a pseudo-random function
of everything read back through the block table: a wrong slot, a stale block, a missing rollback or a
leaked draft changes tokens. `plain_decode` says what each request must get.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from grammar_oracle import automaton_of

from outrider.config import EngineConfig
from outrider.engine.batch import Batch, SamplingBatch
from outrider.engine.drafting import Drafting
from outrider.engine.engine import Engine
from outrider.engine.kv_cache import KVCacheManager
from outrider.engine.output import Vocabulary
from outrider.engine.runner import Runner
from outrider.engine.scheduler import Scheduler
from outrider.engine.state import Request
from outrider.request import FinishReason, SamplingParams, TokenLogprobs
from outrider.spec_decode.proposer import Drafts, NoProposer

MASK = 2**64 - 1
EOS = 3
# Text that can be cut inside a character, and an end of sequence that has none.
VOCABULARY = Vocabulary([b"a", b"\xc3", b"\xa9", b"<end>"], frozenset({EOS}), frozenset({EOS}))


def mix(state: int, token: int, position: int) -> int:
    state = (
        (state ^ (token * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F)) * 0xD6E8FEB86659FD93
    ) & MASK
    return state ^ (state >> 29)


def hash_logits(state: int, vocab_size: int = 4) -> list[float]:
    """Coarse values, so that ties happen; the end of sequence is a little rarer."""
    logits = [((mix(state, token, 1) >> 17) & 15) * 0.25 for token in range(vocab_size)]
    logits[EOS] -= 1.5
    return logits


@dataclass
class HashOutput:
    logits: np.ndarray
    hidden: np.ndarray | None = None


class HashModel:
    """An executable whose cache remembers what was written where."""

    def __init__(self, num_blocks: int, block_size: int, nan_after: tuple[int, ...] = ()) -> None:
        self.block_size = block_size
        self.slots: list[tuple[int, int]] = [(-7, -7)] * (num_blocks * block_size)
        self.nan_after = nan_after  # context of these tokens: logits are NaN
        self.num_steps = 0
        self.num_moves = 0

    def run(self, batch: Batch) -> HashOutput:
        self.num_steps += 1
        slots, size = self.slots, self.block_size
        tokens, positions = batch.token_ids.tolist(), batch.positions.tolist()
        for row, slot in enumerate(batch.slot_mapping.tolist()):
            slots[slot] = (tokens[row], positions[row])
        states: list[int] = []
        contexts: list[tuple[int, ...]] = []
        starts, parents = batch.query_start_loc.tolist(), batch.parents.tolist()
        where = batch.slot_mapping.tolist()
        for i, (begin, end) in enumerate(itertools.pairwise(starts)):
            table = batch.block_tables[i].tolist()
            state, context = 0, ()
            for at in range(positions[begin] if begin < end else 0):
                token, seen_at = slots[table[at // size] * size + at % size]
                state, context = mix(state, token, seen_at), (*context, token)
            for row in range(begin, end):
                parent, at = row - 1, positions[row]
                slot = table[at // size] * size + at % size
                if parents:  # a node of a tree is found where it was written
                    parent, slot = parents[row], where[row]
                if parent >= begin:
                    state, context = states[parent], contexts[parent]
                token, seen_at = slots[slot]
                states.append(mix(state, token, seen_at))
                contexts.append((*context, token))
        rows = []
        for index in batch.logits_indices.tolist():
            poisoned = bool(self.nan_after) and contexts[index][: len(self.nan_after)] == self.nan_after
            rows.append([math.nan] * 4 if poisoned else hash_logits(states[index]))
        return HashOutput(np.array(rows, np.float32).reshape(-1, 4))

    def move_slots(self, from_slots: np.ndarray, to_slots: np.ndarray) -> None:
        for source, target in zip(from_slots.tolist(), to_slots.tolist(), strict=True):
            self.slots[target] = self.slots[source]
        self.num_moves += len(from_slots)


# --- A sampler in plain Python: the rules of csrc/sampling.h, written for reading ---------------------------


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox 4x32-10."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def gumbel(seed: int, position: int, token: int) -> float:
    """The noise of a token: a function of (seed, position, token) alone."""
    key = (seed & 0xFFFFFFFF, seed >> 32)
    place = (position & 0xFFFFFFFF, position >> 32)
    words = philox((token >> 4, 0, *place), key)
    coarse = (words[(token >> 2) & 3] >> (8 * (token & 3))) & 0xFF
    fine = philox((token, 1, *place), key)[0]
    u = ((coarse << 32 | fine) + 0.5) * 2.0**-40
    return -math.log(-math.log(u))


def processed(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: set[int],
) -> list[float]:
    """Logits after penalties, bias and masks, with `output` (drafted tokens included) as what was emitted."""
    values = list(logits)
    counts = Counter(output)
    for token in {*prompt, *output}:
        value = values[token]
        values[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token, count in counts.items():
        values[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias.items():
        values[token] += bias
    if len(output) < params.min_tokens:
        for token in stop_ids:
            values[token] = -math.inf
    history = [*prompt, *output]
    for word in params.bad_words:
        if len(word) == 1 or history[-(len(word) - 1) :] == word[:-1]:
            values[word[-1]] = -math.inf
    return values


def masked(values: list[float], mask: Any | None) -> list[float]:
    """Without the tokens whose bit is not set."""
    if mask is None:
        return values
    return [value if mask[t // 32] >> (t % 32) & 1 else -math.inf for t, value in enumerate(values)]


def draw(values: Sequence[float], params: SamplingParams, seed: int, position: int) -> int:
    """The token drawn from processed logits; -1 when there is none to draw."""
    if any(math.isnan(v) for v in values) or max(values) == -math.inf:
        return -1
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if params.temperature == 0:
        return order[0]
    scaled = [v / params.temperature for v in values]
    kept = [token for token in order if scaled[token] > -math.inf][: params.top_k or None]
    weights = [math.exp(scaled[token] - scaled[kept[0]]) for token in kept]
    limit, total, count = params.top_p * sum(weights), 0.0, 0
    while count < len(kept) and (count == 0 or total < limit):
        total += weights[count]
        count += 1
    survivors = [token for token, w in zip(kept[:count], weights, strict=False) if w >= params.min_p]
    return max(survivors, key=lambda token: (scaled[token] + gumbel(seed, position, token), -token))


def raw_logprobs(logits: Sequence[float], token: int, count: int) -> TokenLogprobs:
    order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
    norm = math.log(sum(math.exp(v) for v in logits))
    top = order[:count]
    return TokenLogprobs(logits[token] - norm, order.index(token) + 1, top, [logits[t] - norm for t in top])


@dataclass
class ReferenceState:
    params: SamplingParams
    prompt: list[int]
    stop_ids: set[int]
    seed: int
    output: list[int] = field(default_factory=list)

    def append(self, token_ids: Sequence[int]) -> None:
        self.output += token_ids


@dataclass
class ReferenceSampled:
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class ReferenceSampler:
    """The engine's sampler interface over the functions above."""

    def make_state(
        self, params: SamplingParams, prompt_ids: Sequence[int], eos_ids: Sequence[int], seed: int
    ) -> ReferenceState:
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        return ReferenceState(params, list(prompt_ids), stop_ids, seed)

    def sample(self, logits: Any, sampling: SamplingBatch) -> ReferenceSampled:
        sampled = ReferenceSampled([], [])
        for row, values in enumerate(logits.tolist()):
            state: ReferenceState = sampling.states[sampling.row_state[row]]
            prefix = sampling.prefix_ids[sampling.prefix_start[row] : sampling.prefix_start[row + 1]].tolist()
            which = -1 if sampling.row_mask is None else int(sampling.row_mask[row])
            mask = sampling.masks[which].tolist() if which >= 0 else None  # type: ignore[index]
            self.sample_row(values, state, prefix, int(sampling.positions[row]), sampled, mask)
        return sampled

    def sample_row(
        self,
        logits: list[float],
        state: ReferenceState,
        prefix: list[int],
        position: int,
        sampled: ReferenceSampled,
        mask: list[int] | None = None,
    ) -> None:
        params = state.params
        values = processed(logits, params, state.prompt, state.output + prefix, state.stop_ids)
        values = masked(values, mask)
        token = draw(values, params, state.seed, position)
        wanted = params.logprobs is not None and token >= 0
        sampled.token_ids.append(token)
        sampled.logprobs.append(raw_logprobs(logits, token, params.logprobs or 0) if wanted else None)


# --- The oracle: one request, alone, from scratch at every token --------------------------------------------


@dataclass
class Expected:
    """What a request must get. `texts[k]` is what may be shown after k tokens; `error_text` all that is when
    it ends with an error, which leaves nothing held back."""

    token_ids: list[int]
    texts: list[str]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason
    stop_reason: int | str | None
    error_text: str = ""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


def plain_decode(prompt: Sequence[int], params: SamplingParams, seed: int, max_model_len: int) -> Expected:
    """Plain decoding by the rules, with no engine."""
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else {EOS})}
    limit = min(params.max_tokens or max_model_len, max_model_len - len(prompt))
    expected = Expected([], [""], [], FinishReason.LENGTH, None)
    state = 0
    for position, token in enumerate(prompt):
        if position > 0:
            scores = raw_logprobs(hash_logits(state), token, params.prompt_logprobs or 0)
            expected.prompt_logprobs.append(scores)
        state = mix(state, token, position)
    output = expected.token_ids
    while True:
        logits = hash_logits(state)
        position = len(prompt) + len(output)
        values = processed(logits, params, prompt, output, stop_ids)
        if params.grammar is not None:
            text = b"".join(VOCABULARY.token_bytes[token] for token in output)
            allowed = automaton_of(params.grammar).allowed(text, VOCABULARY)
            allowed -= {EOS} if params.ignore_eos else set()
            values = [value if token in allowed else -math.inf for token, value in enumerate(values)]
        token = draw(values, params, seed, position)
        if token < 0:
            expected.finish_reason = FinishReason.ERROR
            expected.error_text = b"".join(_pieces(output, params)).decode(errors="replace")
            return expected
        expected.logprobs.append(raw_logprobs(logits, token, params.logprobs or 0))
        output.append(token)
        state = mix(state, token, position)
        ended, text = _read(output, params, stop_ids, limit, expected)
        expected.texts.append(text)
        if ended:
            return expected


def _pieces(output: list[int], params: SamplingParams) -> list[bytes]:
    return [
        b"" if token == EOS and params.skip_special_tokens else VOCABULARY.token_bytes[token]
        for token in output
    ]


def _read(
    output: list[int], params: SamplingParams, stop_ids: set[int], limit: int, expected: Expected
) -> tuple[bool, str]:
    """Whether these tokens end a request, and what may be shown of them."""
    pieces = _pieces(output, params)
    whole, last = b"".join(pieces), output[-1]
    if last in stop_ids and len(output) > params.min_tokens:
        expected.finish_reason = FinishReason.STOP
        expected.stop_reason = last if last != EOS or params.ignore_eos else None
        shown = whole if params.include_stop_str_in_output else b"".join(pieces[:-1])
        return True, shown.decode(errors="replace")
    if len(output) >= params.min_tokens:
        for end in range(len(whole) - len(pieces[-1]) + 1, len(whole) + 1):
            for stop in sorted(params.stop, key=lambda s: -len(s.encode())):
                if whole[:end].endswith(stop.encode()):
                    expected.finish_reason, expected.stop_reason = FinishReason.STOP, stop
                    cut = end if params.include_stop_str_in_output else end - len(stop.encode())
                    return True, whole[:cut].decode(errors="replace")
    if params.grammar is not None and automaton_of(params.grammar).is_over(whole):
        expected.finish_reason = FinishReason.STOP
        return True, whole.decode(errors="replace")
    if len(output) >= limit:
        return True, whole.decode(errors="replace")
    held = max(
        (k for stop in params.stop for k in range(len(stop.encode())) if whole.endswith(stop.encode()[:k])),
        default=0,
    )
    shown = whole[: len(whole) - held]
    # In this vocabulary only one byte can begin a character that is not complete yet.
    return False, shown.removesuffix(b"\xc3").decode(errors="replace")


# --- Adversaries -------------------------------------------------------------------------------------------


class ScriptedProposer:
    """Right with probability `hit`, else random; sometimes a tree; `misbehave` breaks every rule as well."""

    needs_hidden = False

    def __init__(
        self, rng: random.Random, hit: float, answers: dict[str, list[int]], misbehave: bool = False
    ) -> None:
        self.rng = rng
        self.hit = hit
        self.answers = answers  # request id -> what plain decoding emits
        self.misbehave = misbehave
        self.num_calls = 0

    def propose(self, requests: Sequence[Any], limits: Sequence[int]) -> list[Drafts]:
        self.num_calls += 1
        if self.misbehave and self.rng.random() < 0.1:
            raise RuntimeError("a proposer that fails")
        proposals = [self._drafts(request, limit) for request, limit in zip(requests, limits, strict=True)]
        return proposals[1:] if self.misbehave and self.rng.random() < 0.1 else proposals

    def observe(self, results: Sequence[Any], hidden: Any) -> None:
        if self.misbehave and self.rng.random() < 0.1:
            raise RuntimeError("a proposer that fails to learn")

    def forget(self, request_id: str) -> None:
        if self.misbehave and self.rng.random() < 0.1:
            raise RuntimeError("a proposer that cannot forget")

    def stats(self) -> dict[str, Any]:
        return {"calls": self.num_calls}

    def _drafts(self, request: Request, limit: int) -> Drafts:
        rng = self.rng
        answer = self.answers.get(request.request_id, [])[request.num_output_tokens :]
        length = rng.randint(0, limit)
        if self.misbehave and rng.random() < 0.2:
            length = limit + rng.randint(1, 3)
        parents = tree_parents(rng, length)
        depths = Drafts((0,) * length, parents).depths()
        tokens: list[int] = []
        for i, depth in enumerate(depths):
            right = depth < len(answer) and rng.random() < self.hit
            tokens.append(answer[depth] if right else rng.randrange(4))
            twin = i > 0 and parents[i] == parents[i - 1]
            if twin and rng.random() < 0.7 and depth < len(answer):  # the right one comes late, or twice
                tokens[i], tokens[i - 1] = answer[depth], rng.choice([answer[depth], rng.randrange(4)])
        if self.misbehave and tokens and rng.random() < 0.2:
            tokens[-1] = rng.choice([-1, 4, 2**31])
        survival = tuple(0.9 ** (depth + 1) for depth in depths)
        return Drafts(tuple(tokens), parents, survival, ("script",) * length)


def tree_parents(rng: random.Random, size: int) -> tuple[int, ...]:
    """A tree of any shape that is likely to be got wrong."""
    shape = rng.choice(["chain", "chain", "any", "pairs", "chains", "star"])
    parents: list[int] = []
    for i in range(size):
        if shape == "any":
            parents.append(rng.randrange(-1, i))
        elif shape == "pairs":  # two children at every depth, of which the first or the second goes on
            parents.append(-1 if i < 2 else parents[-1] if i % 2 else i - rng.choice([1, 1, 1, 2]))
        elif shape == "star":
            parents.append(-1)
        else:
            parents.append(rng.randrange(-1, i) if shape == "chains" and rng.random() < 0.3 else i - 1)
    return tuple(parents)


class FailingAllocator(KVCacheManager):
    """A cache manager whose n-th allocation fails, whatever is free."""

    def __init__(self, num_blocks: int, block_size: int, fail_at: int) -> None:
        super().__init__(num_blocks, block_size)
        self.fail_at = fail_at
        self.num_allocations = 0

    def allocate(self, request: Request, num_tokens: int) -> bool:
        self.num_allocations += 1
        return self.num_allocations != self.fail_at and super().allocate(request, num_tokens)


# --- An engine for other processes -------------------------------------------------------------------------


class SlowHashModel(HashModel):
    """Takes as long as a small model would."""

    def run(self, batch: Batch) -> HashOutput:
        time.sleep(0.002)
        if 2 in batch.token_ids.tolist() and 2 in batch.positions.tolist() and len(batch.token_ids) == 33:
            raise RuntimeError("the model broke")  # a prompt of 33 tokens with a 2 in it is its undoing
        return super().run(batch)


def build_hash_engine(config: EngineConfig) -> Engine:
    """What `EngineClient(config, factory="fakes:build_hash_engine")` runs."""
    if config.model == "missing":
        raise FileNotFoundError("no model called 'missing'")
    kv_cache = KVCacheManager(64, 16)
    return Engine(
        scheduler=Scheduler(kv_cache, max_num_seqs=8, max_num_batched_tokens=64),
        runner=Runner(SlowHashModel(64, 16)),
        sampler=ReferenceSampler(),
        drafting=Drafting(NoProposer(), method="off", max_draft_tokens=0, vocab_size=4),
        vocabulary=VOCABULARY,
        max_model_len=1000,
        seed=config.seed,
    )
