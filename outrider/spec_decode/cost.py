"""What a step costs: T(rows, context) of verifying, and the time that a drafting model takes.

Both start from something measured or assumed and are corrected by every step that runs.
"""

from __future__ import annotations

import math
from operator import mul
from typing import Any

from outrider.spec_decode.calibration import Calibration, interpolate


class StepCost:
    """T(rows, context, requests): the calibrated curve, bent by what was observed.

    The curve was measured with the rows of one request. What every further request adds (a context of its
    own to attend to, a sampler's state, an answer) is learned while serving, as is a factor for all and one
    for each stretch between calibrated row counts. A machine that became slower as a whole changes no
    decision.
    """

    NOISE = 0.1  # of an observation, as a part of it
    FIRST_DOUBT, DRIFT = 0.5, 0.01  # of the common factor; drift is an observation's
    REQUEST_DOUBT, REQUEST_DRIFT = 0.1, 0.002  # of a request's part, in plain steps
    BEND_RATE = 0.02  # weight of an observation in the factor of its own row count
    DOUBTFUL_BEND_RATE = 0.1  # where the machine was busy as the curve was measured
    MOST_SURPRISE = 0.25  # of the logarithm; a step that the machine interrupted must not bend the curve
    FIRST_STEPS = 16  # in which a calibration that was disturbed is set right quickly
    REFRESH = 32  # observations between two looks at the correction
    CONTEXT_STEP = 256  # contexts that share a curve

    def __init__(self, calibration: Calibration) -> None:
        """Of a calibration that other work disturbed little is believed, and steps bend it more."""
        is_steady = calibration.is_steady
        self._calibration = calibration = calibration if is_steady else calibration.hopeful()
        self._bend_rate = self.BEND_RATE if is_steady else self.DOUBTFUL_BEND_RATE
        known = calibration.rows
        self._most_rows = 2 * known[-1]
        self._nearest = [
            min(range(len(known)), key=lambda i: abs(known[i] - rows)) for rows in range(self._most_rows + 1)
        ]
        plain = calibration.seconds[0][0]
        self._factor, self._per_request = 1.0, 0.0
        self._drift = (self.DRIFT**2, (self.REQUEST_DRIFT * plain) ** 2)
        self._cov = [self.FIRST_DOUBT**2, 0.0, (self.REQUEST_DOUBT * plain) ** 2]  # (f, f), (f, r), (r, r)
        self._bends = [1.0] * len(known)
        self._num_observed = 0
        self._plain: dict[int, list[float]] = {}  # by context step, without correction
        self._curves: dict[int, list[float]] = {}

    def curve(self, context: int, num_rows: int) -> list[float]:
        """Seconds of a step of one request with 0.. at least `num_rows` rows; never decreasing."""
        step = context // self.CONTEXT_STEP
        curve = self._curves.get(step)
        if curve is None or len(curve) <= num_rows:
            plain = self._plain_curve(step, num_rows)
            curve = [self._factor * seconds * self._bend(rows) for rows, seconds in enumerate(plain)]
            for rows in range(1, len(curve)):
                curve[rows] = max(curve[rows], curve[rows - 1])
            self._curves[step] = curve
        return curve

    def of_requests(self, num_requests: int) -> float:
        """Seconds that the requests beside the first add to a step, whatever their rows."""
        return self._per_request * (num_requests - 1) if num_requests > 1 else 0.0

    def plain_step(self, num_requests: int, context: int) -> float:
        """Seconds of a step that gives every request one token without drafts."""
        return self.curve(context, num_requests)[num_requests] + self.of_requests(num_requests)

    def _plain_curve(self, step: int, num_rows: int) -> list[float]:
        plain = self._plain.get(step)
        if plain is None or len(plain) <= num_rows:
            length = max(self._most_rows, 2 * num_rows)
            plain = self._plain[step] = self._calibration.curve(step * self.CONTEXT_STEP, length)
        return plain

    def _bend(self, rows: int) -> float:
        """The correction at `rows`, linear between the calibrated counts so that the curve has no steps."""
        known = self._calibration.rows
        return interpolate(known, self._bends, min(rows, known[-1]))

    def observe(self, rows: int, context: int, seconds: float, num_requests: int = 1) -> None:
        """A step with this many rows took so long."""
        if not 1 <= rows <= self._most_rows or not seconds > 0:
            return  # a long prompt's step says nothing about verifying
        bent = self._plain_curve(context // self.CONTEXT_STEP, rows)[rows] * self._bend(rows)
        others = max(num_requests - 1, 0)
        expected = self._factor * bent + self._per_request * others
        is_early = self._num_observed < self.FIRST_STEPS
        most = self.MOST_SURPRISE * (4 if is_early else 1)
        surprise = max(-most, min(most, math.log(seconds / expected)))
        self._correct(bent, float(others), expected, math.exp(surprise))
        self._bends[self._nearest[rows]] *= math.exp(self._bend_rate * surprise)
        self._num_observed += 1
        if is_early or self._num_observed % self.REFRESH == 0:
            self._curves.clear()

    def _correct(self, bent: float, others: float, expected: float, ratio: float) -> None:
        """Move factor and per-request part by a Kalman filter; the step took `ratio` times the expected."""
        ff, fr, rr = self._cov
        f, r = ff * bent + fr * others, fr * bent + rr * others
        gain = 1.0 / (f * bent + r * others + (self.NOISE * expected * ratio) ** 2)
        error = expected * (ratio - 1.0) * gain
        self._factor = max(self._factor + f * error, 1e-3)
        self._per_request = max(self._per_request + r * error, 0.0)
        drift_f, drift_r = self._drift
        self._cov = [ff - f * f * gain + drift_f, fr - f * r * gain, rr - r * r * gain + drift_r]

    def stats(self) -> dict[str, Any]:
        return {
            "rows": list(self._calibration.rows),
            "contexts": list(self._calibration.contexts),
            "seconds": [list(row) for row in self._calibration.seconds],
            "correction": [round(self._factor * bend, 4) for bend in self._bends],
            "request_seconds": self._per_request,
            "observed_steps": self._num_observed,
            "is_steady": self._calibration.is_steady,
        }


class DraftCost:
    """Seconds of drafting with a model: linear in its calls, their rows and the tokens fed to it before.

    One call drafts the next token of every request that still wants one. A request must first be caught up
    with: fed what became final since it was last drafted for. A Kalman filter over the coefficients: it
    begins with a guess in parts of the target's times and believes what it sees.
    """

    GUESS = (0.03, 0.08)  # once, each call: parts of a plain step
    ROW_GUESS, FED_GUESS = 0.07, 0.04  # each row, each fed token: parts of what a row adds to a step
    NOISE = 0.2  # of an observation, as a part of it
    DRIFT = 0.002  # of a coefficient's variance, an observation
    MOST_SURPRISE = 3.0  # how many times the expectation an observation may count

    def __init__(self, plain_seconds: float, row_seconds: float) -> None:
        """The times of the target: a step of one row, and a row more."""
        row_seconds = max(row_seconds, 0.01 * plain_seconds)
        row, fed = self.ROW_GUESS * row_seconds, self.FED_GUESS * row_seconds
        once, call = (part * plain_seconds for part in self.GUESS)
        self._guess = [once, call, row, fed]
        self._theta = list(self._guess)
        # A row may also cost much more than guessed: a fifth of a call.
        self._doubt = [once, call, max(row, 0.2 * call), max(fed, 0.05 * call)]
        self._cov = _diagonal(self._doubt)
        self._num_surprises = 0  # in a row
        self.num_observed = 0

    def seconds(self, num_calls: int, num_rows: int, num_fed: float = 0.0) -> float:
        """What drafting takes: nothing without a call."""
        once, call, row, fed = self._theta
        return once + call * num_calls + row * num_rows + fed * num_fed if num_calls else 0.0

    @property
    def per_row(self) -> float:
        return self._theta[2]

    @property
    def per_fed_token(self) -> float:
        return self._theta[3]

    def observe(self, num_calls: int, num_rows: int, num_fed: int, seconds: float) -> None:
        """That many calls with that many rows in all, after so many fed tokens, took so long."""
        if not num_calls or not seconds > 0:
            return
        self.num_observed += 1
        if self.num_observed == 1:
            return  # it pays for cold caches
        expected = self.seconds(num_calls, num_rows, num_fed)
        limited = max(expected / self.MOST_SURPRISE, min(expected * self.MOST_SURPRISE, seconds))
        self._num_surprises = self._num_surprises + 1 if limited != seconds else 0
        if self._num_surprises >= 3:  # no accident: the drafter has changed
            self._cov = _diagonal([max(pair) for pair in zip(self._theta, self._doubt, strict=True)])
        seconds = limited
        x = (1.0, float(num_calls), float(num_rows), float(num_fed))
        spread = [sum(map(mul, row, x)) for row in self._cov]
        total = sum(map(mul, spread, x)) + (self.NOISE * seconds) ** 2
        surprise = (seconds - expected) / total
        for i, row in enumerate(self._cov):
            gain = spread[i] / total
            self._theta[i] = max(self._theta[i] + spread[i] * surprise, 1e-3 * self._guess[i])
            for j in range(4):
                row[j] -= gain * spread[j]
            # Costs change with the machine's load: certainty fades.
            row[i] += self.DRIFT * self._doubt[i] ** 2

    def stats(self) -> dict[str, Any]:
        once, call, row, fed = self._theta
        return {
            "once_seconds": once,
            "call_seconds": call,
            "row_seconds": row,
            "fed_token_seconds": fed,
            "observed": self.num_observed,
        }


def _diagonal(deviations: list[float]) -> list[list[float]]:
    return [[value**2 if i == j else 0.0 for j in range(4)] for i, value in enumerate(deviations)]
