"""The time of a step by its rows, measured through the engine's own runner and sampler."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence

from outrider.engine.batch import build_batch
from outrider.engine.output import OutputStream, Vocabulary
from outrider.engine.runner import Runner
from outrider.engine.scheduler import Plan, PlanRow
from outrider.engine.state import Request
from outrider.request import SamplingParams
from outrider.sampling.sampler import Sampler
from outrider.spec_decode.calibration import CONTEXTS, ROWS, Calibration, load_or_measure
from outrider.spec_decode.proposer import Drafts


class StepTimer:
    """Runs steps in which one request verifies drafts. Only for an engine that has no requests yet: it
    writes to the first blocks of the cache."""

    def __init__(self, runner: Runner, sampler: Sampler, block_size: int) -> None:
        self._runner = runner
        self._sampler = sampler
        self._block_size = block_size

    def __call__(self, num_rows: int, context: int) -> float:
        """Seconds of a step with `num_rows` rows after `context` tokens."""
        params = SamplingParams(temperature=0)
        state = self._sampler.make_state(params, [0], [], 0)
        stream = OutputStream(params, 1, Vocabulary([b""]))
        request = Request("calibration", [0] * (context + 1), params, stream, state)
        request.block_table = array("i", range(-(-(context + num_rows) // self._block_size)))
        drafts = Drafts.chain([0] * (num_rows - 1), [0.5] * (num_rows - 1), "calibration")
        batch = build_batch(Plan((PlanRow(request, context, num_rows, drafts, True),)), self._block_size)
        begin = time.perf_counter()
        output = self._runner.run(batch)
        self._sampler.sample(output.logits, batch.sampling)
        return time.perf_counter() - begin


def calibrate(
    timer: StepTimer, key: Mapping[str, str | int], *, max_rows: int, max_context: int
) -> Calibration:
    """The calibration for `key`, from disk or measured now, within what a step and the cache can hold."""
    rows = [num for num in ROWS if num <= max_rows] or [1]
    contexts: Sequence[int] = [n for n in CONTEXTS if n + rows[-1] <= max_context]
    if not contexts:
        rows, contexts = [1], [1]
    return load_or_measure({**key, "max_context": max_context}, timer, rows=rows, contexts=contexts)
