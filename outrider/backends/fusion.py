"""Rewrites of a recorded graph that save memory traffic and barriers, and never change a bit.

Each fused kernel computes what its parts would have: the same operations in the same order. The passes
look at neighbouring nodes only and leave alone whatever does not fit.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.backends.ops import Weight
from outrider.backends.recording import Graph, Node, Value, View

GATED = {"silu_mul", "gelu_mul"}


def fuse(graph: Graph, is_pair: Callable[[Weight], bool]) -> None:
    """Apply all passes. `is_pair` says whether a weight is two of equal height that can be interleaved."""
    graph.remove_unused()
    _fuse_attention(graph)
    _fuse_activations(graph, is_pair)
    for fuse_pass in (_fuse_norms, _fuse_gathers, _fuse_residuals):
        graph.remove_unused()  # what was fused away must not count as a reader
        fuse_pass(graph)
    graph.remove_unused()


class _Peeler:
    """Finds the op behind a view, if the view is all that anyone reads of it."""

    def __init__(self, graph: Graph) -> None:
        self._producers = graph.producers()
        self._uses = graph.uses()

    def only_source(self, view: View, op: str) -> Node | None:
        node = self._producers.get(view.value)
        if node is None or node.op != op or not view.is_whole or self._uses[view.value] != 1:
            return None
        return node

    def forget(self, value: Value) -> None:
        """`value` has more than one producer from now on."""
        self._producers.pop(value, None)


def _fuse_attention(graph: Graph) -> None:
    """RMSNorm per head and RoPE of q and k go into attention."""
    peeler = _Peeler(graph)
    for node in graph.nodes:
        if node.op == "append_attention":
            _take_rope(node, peeler)
            _take_head_norms(node, peeler)


def _heads_of_q_and_k(node: Node) -> tuple[int, int]:
    return node.params["heads"], node.params["kv_heads"]


def _take_rope(node: Node, peeler: _Peeler) -> None:
    ropes = [peeler.only_source(view, "rope") for view in node.inputs[:2]]
    if ropes[0] is None or ropes[1] is None or ropes[0].params["table"] != ropes[1].params["table"]:
        return
    if tuple(rope.params["heads"] for rope in ropes if rope) != _heads_of_q_and_k(node):
        return
    node.inputs[:2] = [ropes[0].inputs[0], ropes[1].inputs[0]]
    node.params["rope"] = ropes[0].params["table"]


def _take_head_norms(node: Node, peeler: _Peeler) -> None:
    norms = [peeler.only_source(view, "rms_norm") for view in node.inputs[:2]]
    if norms[0] is None or norms[1] is None or norms[0].params["eps"] != norms[1].params["eps"]:
        return
    if tuple(norm.params["heads"] for norm in norms if norm) != _heads_of_q_and_k(node):
        return
    node.inputs[:2] = [norms[0].inputs[0], norms[1].inputs[0]]
    node.params.update(
        q_norm=norms[0].params["weight"], k_norm=norms[1].params["weight"], norm_eps=norms[0].params["eps"]
    )


def _fuse_activations(graph: Graph, is_pair: Callable[[Weight], bool]) -> None:
    """gate_up -> split -> silu_mul is one linear whose weight has gate and up interleaved."""
    producers, uses = graph.producers(), graph.uses()
    for node in graph.nodes:
        if node.op not in GATED:
            continue
        gate, up = node.inputs
        linear = producers.get(gate.value)
        if linear is None or linear.op != "linear" or up.value is not gate.value or uses[gate.value] != 2:
            continue
        halves = gate.column == 0 and up.column == gate.width and 2 * gate.width == gate.value.width
        if halves and is_pair(linear.params["weight"]):
            linear.params["epilogue"] = node.op
            linear.out = Value(gate.width, gate.value.gathered)
            graph.replace(node.out, linear.out)


def _fuse_norms(graph: Graph) -> None:
    """rms_norm -> linear: the linear norms its own input."""
    peeler = _Peeler(graph)
    for node in graph.nodes:
        if node.op != "linear":
            continue
        norm = peeler.only_source(node.inputs[0], "rms_norm")
        if norm is not None and norm.params["heads"] == 1:
            node.inputs = list(norm.inputs)
            node.params.update(norm_weight=norm.params["weight"], norm_eps=norm.params["eps"])


def _fuse_gathers(graph: Graph) -> None:
    """gather_rows -> linear: the linear picks its rows."""
    peeler = _Peeler(graph)
    for node in graph.nodes:
        if node.op == "linear":
            gather = peeler.only_source(node.inputs[0], "gather_rows")
            if gather is not None:
                node.inputs = list(gather.inputs)


def _fuse_residuals(graph: Graph) -> None:
    """add(residual, linear): the linear adds to the residual in place, if nobody needs that any more."""
    peeler = _Peeler(graph)
    index = {node: i for i, node in enumerate(graph.nodes)}
    written = {node.out: i for node, i in index.items()}
    for node in [node for node in graph.nodes if node.op == "add"]:
        for residual, view in (node.inputs, node.inputs[::-1]):
            linear = peeler.only_source(view, "linear")
            if linear is None or linear.params.get("epilogue", "store") != "store" or not residual.is_whole:
                continue
            readers = _readers(graph, residual.value, but=node)
            if written[residual.value] < index[linear] and all(index[r] < index[linear] for r in readers):
                linear.params["epilogue"] = "add"
                linear.out = residual.value
                graph.nodes.remove(node)
                graph.replace(node.out, residual.value)
                peeler.forget(residual.value)
                break


def _readers(graph: Graph, value: Value, but: Node) -> list[Node]:
    return [n for n in graph.nodes if n is not but and any(view.value is value for view in n.inputs)]
