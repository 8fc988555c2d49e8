"""A smaller model for tests: the built-in one without some layers. It agrees on most tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from outrider.models.loader import Checkpoint
from outrider.models.tensors import RawTensor

DROPPED = (14, 15, 16)


class PrunedTensors(Mapping[str, RawTensor]):
    """The tensors of the layers that are left, under their new numbers."""

    def __init__(self, tensors: Mapping[str, RawTensor], num_layers: int, dropped: tuple[int, ...]) -> None:
        kept = [layer for layer in range(num_layers) if layer not in dropped]
        numbers = {old: new for new, old in enumerate(kept)}
        self._tensors = tensors
        self._names: dict[str, str] = {}
        for name in tensors:
            layer = re.match(r"layers\.(\d+)\.", name)
            if layer is None:
                self._names[name] = name
            elif (old := int(layer[1])) in numbers:
                self._names[f"layers.{numbers[old]}.{name[layer.end() :]}"] = name

    def __getitem__(self, name: str) -> RawTensor:
        return self._tensors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def prune(checkpoint: Checkpoint, dropped: tuple[int, ...] = DROPPED) -> Checkpoint:
    """The checkpoint without these layers."""
    num_layers = checkpoint.config.num_layers
    return replace(
        checkpoint,
        config=replace(checkpoint.config, num_layers=num_layers - len(dropped)),
        tensors=PrunedTensors(checkpoint.tensors, num_layers, dropped),
        name="pruned",
    )
