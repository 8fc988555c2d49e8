"""What became of drafts, counted per source and position; cheap to add to, worked out when asked."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.request import SpeculationStats
from outrider.spec_decode.proposer import Drafts

_MOST_WINDOWS = 512  # different ones that are kept before they are worked out


class DraftCounts:
    """Counts of verified windows. Equal windows (same sources, shape and outcome) are counted together."""

    __slots__ = ("_by_node", "_drafts_by_source", "_windows")

    def __init__(self) -> None:
        self._windows: dict[tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]], int] = {}
        self._by_node: dict[tuple[str, int], list[int]] = {}  # (source, depth) -> [drafted, accepted]
        self._drafts_by_source: dict[str, int] = {}  # windows that held drafts of the source

    def add(self, drafts: Drafts, path: Sequence[int]) -> None:
        """Count one window and the nodes of it that were accepted."""
        key = (drafts.source, drafts.parents, tuple(path))
        self._windows[key] = self._windows.get(key, 0) + 1
        if len(self._windows) > _MOST_WINDOWS:
            self._work_out()

    def windows(self) -> dict[str, int]:
        """Source -> windows that held drafts of it."""
        self._work_out()
        return dict(self._drafts_by_source)

    def totals(self, accepted: bool) -> dict[str, int]:
        """Source -> tokens drafted, or those accepted."""
        return {source: sum(counts) for source, counts in self.per_position(accepted).items()}

    def per_position(self, accepted: bool) -> dict[str, list[int]]:
        """Source -> tokens drafted (or accepted) at each place in the draft."""
        self._work_out()
        result: dict[str, list[int]] = {}
        for (source, depth), counts in sorted(self._by_node.items()):
            places = result.setdefault(source, [])
            places += [0] * (depth + 1 - len(places))
            places[depth] = counts[accepted]
        return result

    def to_stats(self, steps: int) -> SpeculationStats:
        """The same for one request."""
        drafted, taken = self.totals(accepted=False), self.totals(accepted=True)
        depths = max((depth for _, depth in self._by_node), default=-1) + 1
        per_position = [[0, 0] for _ in range(depths)]
        for (_, depth), counts in self._by_node.items():
            per_position[depth][0] += counts[0]
            per_position[depth][1] += counts[1]
        return SpeculationStats(
            steps=steps,
            draft_tokens=sum(drafted.values()),
            accepted_tokens=sum(taken.values()),
            by_source={source: [drafted[source], taken[source]] for source in drafted},
            per_position=per_position,
        )

    def _work_out(self) -> None:
        for (sources, parents, path), times in self._windows.items():
            accepted = set(path)
            for source in set(sources):
                self._drafts_by_source[source] = self._drafts_by_source.get(source, 0) + times
            depths: list[int] = []
            for node, parent in enumerate(parents):
                depths.append(depths[parent] + 1 if parent >= 0 else 0)
                counts = self._by_node.setdefault((sources[node], depths[node]), [0, 0])
                counts[0] += times
                counts[1] += times * (node in accepted)
        self._windows.clear()
