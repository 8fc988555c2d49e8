"""Where the values of a program live: values whose lives do not overlap share memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.backends.recording import Graph, Value


@dataclass
class Storage:
    """Sizes of the areas in floats, and the area of each value."""

    sizes: list[int] = field(default_factory=list)
    places: dict[Value, int] = field(default_factory=dict)


def assign_storage(graph: Graph, max_rows: int, max_logits_rows: int) -> Storage:
    """Give every value an area from its first writing to its last reading.

    A node's result never shares memory with its inputs, except where the node writes to a value that it
    also reads (residuals). Outputs keep theirs to the end.
    """
    last_use: dict[Value, int] = {}
    for index, node in enumerate(graph.nodes):
        last_use[node.out] = index
        for view in node.inputs:
            last_use[view.value] = index
    for view in graph.outputs:
        last_use[view.value] = len(graph.nodes)

    storage = Storage()
    free: list[int] = []
    for index, node in enumerate(graph.nodes):
        if node.out not in storage.places:
            need = node.out.width * (max_logits_rows if node.out.gathered else max_rows)
            storage.places[node.out] = _take(storage.sizes, free, need)
        for value in dict.fromkeys([node.out, *(view.value for view in node.inputs)]):
            if last_use[value] == index:
                free.append(storage.places[value])
    return storage


def _take(sizes: list[int], free: list[int], need: int) -> int:
    """The smallest free area that is large enough, else the largest, grown; else a new one."""
    if not free:
        sizes.append(need)
        return len(sizes) - 1
    fitting = [place for place in free if sizes[place] >= need]
    place = min(fitting, key=sizes.__getitem__) if fitting else max(free, key=sizes.__getitem__)
    free.remove(place)
    sizes[place] = max(sizes[place], need)
    return place
