"""Model code runs once and leaves a graph: the ops that it called, on symbolic values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.backends.ops import RopeSpec, Weight


@dataclass(eq=False)
class Value:
    """What one op computes: a row a token, or a row for each needed row of logits (`gathered`)."""

    width: int
    gathered: bool = False


@dataclass(frozen=True)
class View:
    """Columns of a value: the `Array` that a model function handles."""

    value: Value
    column: int
    width: int

    @property
    def is_whole(self) -> bool:
        return self.width == self.value.width


@dataclass(eq=False)
class Node:
    """One op. `op` and the names in `params` are those of `_native.Program`'s methods."""

    op: str
    out: Value
    inputs: list[View]
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Graph:
    """Nodes in the order in which they run. `outputs` are read after the last of them."""

    nodes: list[Node]
    outputs: list[View]

    def producers(self) -> dict[Value, Node]:
        return {node.out: node for node in self.nodes}

    def uses(self) -> Mapping[Value, int]:
        """How often a value is read, the reading of outputs included."""
        counts: dict[Value, int] = defaultdict(int)
        for view in [*self.outputs, *(view for node in self.nodes for view in node.inputs)]:
            counts[view.value] += 1
        return counts

    def replace(self, old: Value, new: Value) -> None:
        """Let whoever reads `old` read `new`."""

        def moved(view: View) -> View:
            return View(new, view.column, view.width) if view.value is old else view

        for node in self.nodes:
            node.inputs = [moved(view) for view in node.inputs]
        self.outputs = [moved(view) for view in self.outputs]

    def remove_unused(self) -> None:
        """Drop nodes that nothing depends on. Attention stays: it also writes the cache."""
        needed = {view.value for view in self.outputs}
        kept = []
        for node in reversed(self.nodes):
            if node.out in needed or node.op in ("append_attention", "append_cache"):
                kept.append(node)
                needed.update(view.value for view in node.inputs)
        self.nodes = kept[::-1]


class RecordingOps:
    """`Ops` that record. `weight_shape` says (n, k) of a weight handle."""

    def __init__(self, weight_shape: Callable[[Weight], tuple[int, int]]) -> None:
        self.nodes: list[Node] = []
        self._weight_shape = weight_shape

    def _record(self, op: str, width: int, inputs: list[View], **params: Any) -> View:
        gathered = op == "gather_rows" or any(view.value.gathered for view in inputs)
        node = Node(op, Value(width, gathered), inputs, params)
        self.nodes.append(node)
        return View(node.out, 0, width)

    def hidden_rows(self, width: int) -> View:
        return self._record("hidden_rows", width, [])

    def embedding(self, weight: Weight) -> View:
        return self._record("embedding", self._weight_shape(weight)[1], [], table=weight)

    def linear(self, x: View, weight: Weight, bias: Weight | None = None) -> View:
        n, k = self._weight_shape(weight)
        if x.width != k:
            raise ValueError(f"linear: weight [{n}, {k}] cannot be applied to rows of width {x.width}")
        return self._record("linear", n, [x], weight=weight, bias=bias)

    def rms_norm(self, x: View, weight: Weight, eps: float, num_heads: int = 1) -> View:
        return self._record("rms_norm", x.width, [x], weight=weight, eps=eps, heads=num_heads)

    def layer_norm(self, x: View, weight: Weight, bias: Weight | None, eps: float) -> View:
        return self._record("layer_norm", x.width, [x], weight=weight, bias=bias, eps=eps)

    def rope(self, x: View, spec: RopeSpec, num_heads: int) -> View:
        return self._record("rope", x.width, [x], table=spec, heads=num_heads)

    def append_attention(
        self,
        q: View,
        k: View,
        v: View,
        *,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None = None,
    ) -> View:
        return self._record(
            "append_attention", q.width, [q, k, v], layer=layer, heads=num_heads, kv_heads=num_kv_heads,
            head_dim=head_dim, scale=scale, window=window or 0,
        )  # fmt: skip

    def append_cache(self, k: View, v: View, *, layer: int, num_kv_heads: int, head_dim: int) -> View:
        if k.width != num_kv_heads * head_dim or v.width != k.width:
            raise ValueError(f"append_cache: k and v of {k.width} and {v.width} do not fit the heads")
        return self._record("append_cache", 1, [k, v], layer=layer)

    def silu_mul(self, gate: View, up: View) -> View:
        return self._record("silu_mul", gate.width, [gate, up])

    def gelu_mul(self, gate: View, up: View) -> View:
        return self._record("gelu_mul", gate.width, [gate, up])

    def add(self, a: View, b: View) -> View:
        return self._record("add", a.width, [a, b])

    def split(self, x: View, widths: Sequence[int]) -> list[View]:
        if sum(widths) != x.width:
            raise ValueError(f"split: widths {list(widths)} do not add up to {x.width}")
        views, column = [], x.column
        for width in widths:
            views.append(View(x.value, column, width))
            column += width
        return views

    def gather_rows(self, x: View) -> View:
        return self._record("gather_rows", x.width, [x])


def hidden_view(graph: Graph, logits: View, hidden: str) -> View:
    """The hidden states of all rows of the step: after the norm before the head ("post_norm"), or before it
    ("pre_norm"), which costs nothing."""
    producers = graph.producers()
    head = producers[logits.value]
    if head.op != "linear":
        raise ValueError(f"hidden={hidden!r} needs a model that ends in a linear, not in {head.op}")
    if hidden not in ("pre_norm", "post_norm"):
        raise ValueError(f"hidden must be pre_norm or post_norm, got {hidden!r}")
    norm = producers[_ungathered(producers, head.inputs[0]).value]
    if norm.op not in ("rms_norm", "layer_norm"):
        raise ValueError(f"hidden={hidden!r} needs a norm before the head, not {norm.op}")
    rows = _ungathered(producers, norm.inputs[0])
    if hidden == "pre_norm":
        return rows
    if not norm.out.gathered:
        return View(norm.out, 0, norm.out.width)
    node = Node(norm.op, Value(norm.out.width), [rows], dict(norm.params))
    graph.nodes.append(node)
    return View(node.out, 0, node.out.width)


def _ungathered(producers: Mapping[Value, Node], view: View) -> View:
    """`view`, or what it was gathered from."""
    node = producers[view.value]
    return node.inputs[0] if node.op == "gather_rows" else view
