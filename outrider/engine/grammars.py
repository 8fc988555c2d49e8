"""Grammars of the requests that come in: compiled beside the engine, kept for the next request.

Compiling may take a while, so it has a thread of its own; a request waits here until its grammar is there,
and the others go on. Only the engine's thread touches this object; the thread is given a specification and
gives back a grammar.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from outrider.engine.state import Request
from outrider.request import GrammarSpec
from outrider.sampling.grammar import Grammar, GrammarCompiler
from outrider.sampling.grammar_source import GrammarError

logger = logging.getLogger(__name__)

_MOST_KEPT = 64  # grammars, of at most some 25 MB each; of the usual ones some 100 kB
_MOST_KEPT_BYTES = 1 << 20  # of their specifications
_PATIENCE_S = 20.0  # for one grammar
_THREADS = 2  # so that one slow grammar does not hold up all others


class Ready(NamedTuple):
    """A request whose grammar is there, or cannot be had."""

    request: Request
    error: str | None


class Grammars:
    """Grammars by specification, the last used ones, and the requests that wait for theirs."""

    def __init__(
        self,
        compiler: GrammarCompiler | None,
        *,
        most_kept: int = _MOST_KEPT,
        most_kept_bytes: int = _MOST_KEPT_BYTES,
        patience_s: float = _PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
        executor: Executor | None = None,
    ) -> None:
        """Without a compiler there are none, and requests that want one are refused."""
        self._compiler = compiler
        self._most_kept = most_kept
        self._most_kept_bytes = most_kept_bytes
        self._patience_s = patience_s
        self._clock = clock
        self._threads = executor
        self._kept: OrderedDict[GrammarSpec, Grammar] = OrderedDict()
        self._compiling: dict[GrammarSpec, Future[Grammar]] = {}
        self._waiting: dict[str, tuple[Request, float]] = {}  # by id; and until when
        self.num_compiled = 0
        self.num_hits = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def prepare(self, request: Request) -> bool:
        """Give `request` its grammar. False: it is being compiled, and `take_ready` will name the request."""
        spec = request.params.grammar
        if spec is None:
            return True
        if self._compiler is None:
            raise ValueError("this engine has no grammars")
        kept = self._kept.get(spec)
        if kept is not None:
            self.num_hits += 1
            self._kept.move_to_end(spec)
            self._start(request, kept)
            return True
        if spec not in self._compiling:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_THREADS, "outrider-grammar")
            self._compiling[spec] = self._threads.submit(self._compiler.compile, spec)
        self._waiting[request.request_id] = (request, self._clock() + self._patience_s)
        return False

    def drop(self, request_id: str) -> bool:
        """Whether the request was waiting here; it does not any more."""
        return self._waiting.pop(request_id, None) is not None

    def take_ready(self, timeout_s: float = 0.0) -> list[Ready]:
        """The requests that need not wait any longer; waits for one up to `timeout_s`."""
        if not self._waiting:
            return []
        wait(self._compiling.values(), timeout_s, FIRST_COMPLETED)
        ready: list[Ready] = []
        for spec, future in [item for item in self._compiling.items() if item[1].done()]:
            del self._compiling[spec]
            self._take(spec, future, ready)
        now = self._clock()
        for request, until in list(self._waiting.values()):
            if now > until:
                del self._waiting[request.request_id]
                reason = f"the grammar could not be compiled within {self._patience_s:g} s; make it simpler"
                ready.append(Ready(request, reason))
        return ready

    def stats(self) -> dict[str, int]:
        return {
            "kept": len(self._kept),
            "compiled": self.num_compiled,
            "hits": self.num_hits,
            "waiting": self.num_waiting,
        }

    def _take(self, spec: GrammarSpec, future: Future[Grammar], ready: list[Ready]) -> None:
        waiting = [request for request, _ in self._waiting.values() if request.params.grammar == spec]
        for request in waiting:
            del self._waiting[request.request_id]
        try:
            grammar = future.result()
        except Exception as error:
            if not isinstance(error, GrammarError):
                logger.exception("a grammar could not be compiled")
            ready += [Ready(request, str(error) or type(error).__name__) for request in waiting]
            return
        self.num_compiled += 1
        self._keep(spec, grammar)
        for request in waiting:
            self._start(request, grammar)
            ready.append(Ready(request, None))

    def _keep(self, spec: GrammarSpec, grammar: Grammar) -> None:
        self._kept[spec] = grammar
        num_bytes = sum(len(each.text) for each in self._kept)
        while len(self._kept) > self._most_kept or num_bytes > self._most_kept_bytes:
            oldest, _ = self._kept.popitem(last=False)
            num_bytes -= len(oldest.text)

    @staticmethod
    def _start(request: Request, grammar: Grammar) -> None:
        request.stream.grammar = grammar.matcher(ignore_eos=request.params.ignore_eos)
