"""Sampling, plainly: the oracle of the sampler's tests, written from the documented order alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

MASK32 = 0xFFFFFFFF


def philox4x32(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & MASK32, (p0 >> 32) ^ c[3] ^ k[1], p0 & MASK32]
        k = [(k[0] + 0x9E3779B9) & MASK32, (k[1] + 0xBB67AE85) & MASK32]
    return c


def uniform(seed: int, position: int, token: int) -> float:
    """40 random bits and a half: a coarse byte shared out among 16 tokens, then 32 fine bits."""
    key, place = [seed & MASK32, seed >> 32], [position & MASK32, position >> 32]
    coarse = philox4x32([token // 16, 0, *place], key)[token % 16 // 4] >> (8 * (token % 4)) & 0xFF
    fine = philox4x32([token, 1, *place], key)[0]
    return ((coarse << 32 | fine) + 0.5) / 2**40


def gumbel(seed: int, position: int, token: int) -> float:
    return -math.log(-math.log(uniform(seed, position, token)))


@dataclass
class Settings:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    ending: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)


def processed(logits: np.ndarray, settings: Settings, prompt: list[int], output: list[int]) -> np.ndarray:
    """Penalties, bias and masks over everything emitted so far, in 32-bit floats."""
    row = np.array(logits, np.float32)
    f32 = np.float32
    for token in range(len(row)):
        count = output.count(token)
        if settings.repetition_penalty != 1 and (count or token in prompt):
            penalty = f32(settings.repetition_penalty)
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        if count:
            row[token] -= f32(settings.frequency_penalty) * f32(count)
            row[token] -= f32(settings.presence_penalty)
    for token, bias in settings.logit_bias.items():
        row[token] += f32(bias)
    if len(output) < settings.min_tokens:
        row[settings.ending] = -np.inf
    text = [*prompt, *output]
    for word in settings.bad_words:
        if text[len(text) - len(word) + 1 :] == word[:-1] and len(text) >= len(word) - 1:
            row[word[-1]] = -np.inf
    return row


def scaled(row: np.ndarray, temperature: float) -> np.ndarray:
    return (row - row.max()) * (np.float32(1) / np.float32(temperature))


class Doubtful(Exception):
    """Rounding decides this case, and the reference rounds otherwise."""


def survivors(values: np.ndarray, settings: Settings) -> np.ndarray:
    """The tokens left by top-k, top-p and min-p, best first; equal values by id."""
    order = np.argsort(-values, kind="stable")
    if settings.top_k > 0:
        order = order[: settings.top_k]
    if settings.top_p < 1:
        weights = np.round(np.exp(values[order].astype(np.float64)) * 2**30)
        mass = np.cumsum(weights)
        target = settings.top_p * mass[-1]
        kept = max(1, int(np.searchsorted(mass, target)) + 1)
        is_exact = set(weights) <= {0.0, 2.0**30}
        if not is_exact and np.abs(mass - target).min() < 2e-7 * mass[-1]:
            raise Doubtful
        order = order[:kept]
    if settings.min_p > 0:
        distance = values[order] - math.log(settings.min_p)
        if ((distance != 0) & (np.abs(distance) < 1e-5)).any():
            raise Doubtful
        order = order[distance >= 0]
    return order


def probabilities(row: np.ndarray, settings: Settings) -> np.ndarray:
    """The exact distribution of the drawn token, by enumeration."""
    values = scaled(row, settings.temperature)
    kept = survivors(values, settings)
    result = np.zeros(len(row))
    result[kept] = np.exp(values[kept].astype(np.float64))
    return result / result.sum()


def sample(row: np.ndarray, settings: Settings, seed: int, position: int) -> int:
    """The token of a processed row: argmax of value plus noise over the survivors."""
    if np.isnan(row).any() or not np.isfinite(row.max()):
        return -1
    if settings.temperature == 0:
        return int(np.argmax(row))
    values = scaled(row, settings.temperature)
    kept = [int(i) for i in survivors(values, settings) if values[i] > -np.inf]
    scores = sorted(((float(values[i]) + gumbel(seed, position, i), i) for i in kept), reverse=True)
    if len(scores) > 1 and scores[0][0] - scores[1][0] < 1e-9:
        raise Doubtful
    return scores[0][1]
