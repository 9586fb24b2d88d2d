"""Splits a backward in two: gradients that other ranks wait for first, those of weights when there is time for them.

Backward of a layer gives the gradient of what came in (B), for which an earlier stage waits, and that of its weights
(W), for which nobody does before the step ends (Qi et al., *Zero Bubble Pipeline Parallelism*, ICLR'24, section 2).
autograd computes both at once. Here it is asked for B alone, and what W needs is kept:

                     ┌─▶ x ─▶ ...  ─▶ what came from another rank
    ... ─▶ product ──┤
                     └─▶ t() ─▶ weight            not asked for; later: x.t() @ gradient goes in here

What is put off are weights of matrix products and convolutions that are read once: the same kernels get the same
tensors, and add to `.grad` in the same order, so that the numbers are those of one backward. Hooks run once. Everything
else is computed with B: what is no such weight, what autograd keeps by hooks (recomputation, offload), functions of the
user's own, and whole phases in which nothing came from another rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from tulle.errors import GradientError

_LEAF = "AccumulateGrad"
_PASSED_ON = {"TBackward0", "TransposeBackward0", "ToCopyBackward0", "ViewBackward0", "AliasBackward0"}
"""What may lie between a weight and the product that reads it."""
_Graph = dict[Node, list[Node]]
Work = Callable[[], None]
"""Computes the gradients of one product's weight and bias, and adds them to `.grad`."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of node whose weight's gradient can be computed later.

    Args:
        saved: Names of what is needed of what it saved.
        weight: Number of its edge to the weight.
        bias: Of that to the bias, if it can have one.
        gradients: Gives those of weight and bias, as autograd computes them, of the node, its gradient, what it saved,
            and the bias' shape, if it is wanted.
    """

    saved: tuple[str, ...]
    weight: int
    bias: int | None
    gradients: Callable[[Any, Tensor, Sequence[Tensor], Sequence[int] | None], Sequence[Tensor]]


def splits_of(phases: Sequence[tuple[Sequence[GradientEdge], Collection[Tensor]]]) -> list[Split | None]:
    """How the backward of each phase of a program is split; None where it is not.

    Args:
        phases: Where gradients may go in, and the leaves behind which other ranks wait, of each.
    """
    if not any(anchors for _, anchors in phases):
        return [None] * len(phases)
    graphs = [_graph(edge.node for edge in edges) for edges, _ in phases]
    readers = _readers(graphs, (edge.node for edges, _ in phases for edge in edges))
    return [_split(graph, anchors, readers) for graph, (_, anchors) in zip(graphs, phases, strict=True)]


def products_of(loss: Tensor) -> list[Product]:
    """All products whose weights' gradients could be computed later, if somebody waited for what they read."""
    root = get_gradient_edge(loss).node
    graph = _graph([root])
    readers = _readers([graph], [root])
    return [product for node in graph if (product := _product(node, readers)) is not None]


class Split:
    """The two halves of the backward of one phase.

    Args:
        leaves: Whose gradients are computed at once.
        later: The others.
    """

    def __init__(self, leaves: Sequence[Tensor], later: Sequence[Product]) -> None:
        self._leaves, self._later = leaves, later

    def backward(self, edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> list[Work]:
        """Run the first half, as `torch.autograd.backward`.

        Returns:
            The second half.
        """
        trained = [leaf for leaf in self._leaves if leaf.requires_grad]  # some may have been frozen since forward
        hooks = [product.node.register_prehook(product.note) for product in self._later]
        try:
            torch.autograd.backward(edges, gradients, inputs=trained)
        finally:
            for hook in hooks:
                hook.remove()
        return [product.add for product in self._later if product.gradient is not None]


class Product:
    """One whose weight's gradient is put off.

    Args:
        node: Of the graph.
        kind: Of the node.
        weight: The leaf that it leads to.
        bias: The same, if the gradient of its bias is put off, too.
    """

    def __init__(self, node: Node, kind: _Kind, weight: Node, bias: Node | None) -> None:
        self.node: Any = node
        self.weight, self.bias = weight, bias
        self._kind = kind
        ends = (kind.weight, weight), (kind.bias, bias)
        self._edges = [
            GradientEdge(*self.node.next_functions[at]) for at, leaf in ends if at is not None and leaf is not None
        ]
        self._saved: Sequence[Tensor] = ()
        self._versions: Sequence[int] = ()
        self.gradient: Tensor | None = None

    def note(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep what is needed; called when autograd comes to the node, behind the user's hooks."""
        self.gradient = gradients[0]
        if self.gradient is not None:
            self._saved = [getattr(self.node, f"_saved_{name}").detach() for name in self._kind.saved]
            self._versions = [tensor._version for tensor in (self.gradient, *self._saved)]

    def compute(self) -> Sequence[Tensor]:
        """The gradients of what its edges to weight and bias lead to, once.

        Raises:
            GradientError: If something has been written in what they are computed of.
        """
        gradient, saved = self.gradient, self._saved
        assert gradient is not None, "only what autograd came to is put off"
        self.gradient, self._saved = None, ()
        if [tensor._version for tensor in (gradient, *saved)] != self._versions:
            raise GradientError(
                f"a tensor of shape {list(saved[0].shape)}, or its gradient, was written in behind its backward, but "
                'before the gradient of the weight that reads it, which schedule="zb-h1" puts off: write '
                'in a copy (.clone()), or take "1f1b"'
            )
        shape = None
        if self.bias is not None:
            bias: Any = self._edges[1]
            shape = bias.node._input_metadata[bias.output_nr].shape
        return self._kind.gradients(self.node, gradient, saved, shape)

    def add(self) -> None:
        """Compute them, and let autograd bring them to the leaves."""
        torch.autograd.backward(self._edges, self.compute())
        self.node = None


def _graph(roots: Iterable[Node]) -> _Graph:
    """All nodes that are reached from some, with those that they lead to, each behind these."""
    found: _Graph = {}
    seen = set[Node]()
    path, ahead = list[tuple[Node, list[Node]]](), [iter(tuple(roots))]
    while ahead:
        following = next((node for node in ahead[-1] if node not in seen), None)
        if following is not None:
            seen.add(following)
            path.append((following, [node for node, _ in following.next_functions if node is not None]))
            ahead.append(iter(path[-1][1]))
            continue
        ahead.pop()
        if path:
            node, others = path.pop()
            found[node] = others
    return found


def _readers(graphs: Iterable[_Graph], roots: Iterable[Node]) -> Counter[Node]:
    """How many edges lead to each node, and from outside."""
    return Counter(chain(roots, *(others for graph in graphs for others in graph.values())))


def _split(graph: _Graph, anchors: Collection[Tensor], readers: Counter[Node]) -> Split | None:
    leaves: dict[Node, Any] = {node: node.variable for node in graph if node.name().endswith(_LEAF)}  # type: ignore[attr-defined]
    awaited = {id(anchor) for anchor in anchors}
    goes_back = {node for node, leaf in leaves.items() if id(leaf) in awaited}
    """What leads to what other ranks wait for."""
    for node, others in graph.items():
        if not goes_back.isdisjoint(others):
            goes_back.add(node)
    later = [
        product for node in reversed(graph) if node in goes_back and (product := _product(node, readers)) is not None
    ]
    for product in later:
        del leaves[product.weight]
        if product.bias is not None:
            del leaves[product.bias]
    return Split([*leaves.values()], later) if later else None


def _product(node: Node, readers: Counter[Node]) -> Product | None:
    """What a node is, if it is a product whose weight's gradient can be computed later."""
    kind = _KINDS.get(node.name())
    if kind is None:
        return None
    weight, bias = (_leaf_of(node, number, readers) for number in (kind.weight, kind.bias))
    return Product(node, kind, weight, bias) if weight is not None and _can_wait(node, kind) else None


def _can_wait(node: Any, kind: _Kind) -> bool:
    """Whether what autograd kept of a product is there at any time, and the product is a plain one."""
    if getattr(node, "_saved_alpha", 1) != 1 or getattr(node, "_saved_beta", 1) != 1:
        return False
    saved = [getattr(node, f"_raw_saved_{name}") for name in kind.saved]
    return all(getattr(one, "unpack_hook", one) is None and one.data.layout is torch.strided for one in saved)


def _leaf_of(node: Node, number: int | None, readers: Counter[Node]) -> Node | None:
    """The leaf behind an edge of a node, if nothing else leads there."""
    following = None if number is None else node.next_functions[number][0]
    while following is not None and readers[following] == 1:
        if following.name().endswith(_LEAF):
            return following
        following = following.next_functions[0][0] if following.name() in _PASSED_ON else None
    return None


def _of_factor(
    node: Any, gradient: Tensor, saved: Sequence[Tensor], bias_shape: Sequence[int] | None
) -> Sequence[Tensor]:
    """Of a product's second factor, in the order of memory that torch's own has, and of what is added."""
    [first] = saved
    down, across = node._saved_mat2_sym_strides
    if down == 1 and across == node._saved_mat2_sym_sizes[0]:
        of_weight = gradient.t().mm(first.conj()).t()
    else:
        of_weight = first.t().conj().mm(gradient)
    return [of_weight] if bias_shape is None else [of_weight, gradient.sum_to_size(bias_shape)]


def _of_convolution(
    node: Any, gradient: Tensor, saved: Sequence[Tensor], bias_shape: Sequence[int] | None
) -> Sequence[Tensor]:
    _, *found = torch.ops.aten.convolution_backward(
        gradient,
        *saved,
        bias_shape,
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups,
        (False, True, bias_shape is not None),
    )
    return found[: 1 + (bias_shape is not None)]


_KINDS = {
    "AddmmBackward0": _Kind(("mat1",), 2, 0, _of_factor),
    "MmBackward0": _Kind(("self",), 1, None, _of_factor),
    "ConvolutionBackward0": _Kind(("input", "weight"), 1, 2, _of_convolution),
}
