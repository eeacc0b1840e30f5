"""Walks over the autograd graph: its nodes, their age, and the tensors from which a failing backward started."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

Node = Any  # torch.autograd.graph.Node, whose C++ attributes have no types


def next_number() -> int:
    """The number that autograd will give to the next node of this thread; nodes with a smaller one are older."""
    with torch.enable_grad(), torch.inference_mode(False):
        node: Node = torch.zeros((), requires_grad=True).clone().grad_fn
    return node._sequence_nr()


def is_older(node: Node, first: int) -> bool:
    return is_inner(node) and node._sequence_nr() < first


def is_inner(node: Node) -> bool:
    """Whether a node computes something (one that hands a gradient to a parameter is shared by all graphs)."""
    return not hasattr(node, "variable")


def nodes_of(tensors: Iterable[Any], since: int | None = None) -> set[Node]:
    """Every node of the graphs that tensors (others are passed over) are the result of.

    Args:
        since: do not go beyond nodes that are older than this number; tensors whose own node is older are passed over.
    """
    todo = [t.grad_fn for t in tensors if isinstance(t, Tensor) and t.grad_fn is not None]
    if since is not None:
        todo = [node for node in todo if not is_older(node, since)]
    seen: set[Node] = set(todo)
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                if since is None or not is_older(node, since):
                    todo.append(node)
    return seen


def leaves_of(nodes: Iterable[Node]) -> list[Tensor]:
    """Leaf tensors that receive a gradient from these nodes."""
    return [node.variable for node in nodes if hasattr(node, "variable")]


def backward_roots(error: BaseException) -> list[Tensor]:
    """Tensors on which `backward` or `grad` was called when this error was raised; empty where it was not raised there."""
    found: list[Tensor] = []
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename.replace("\\", "/").endswith("torch/autograd/__init__.py") and code.co_name in ("backward", "grad"):
            value = trace.tb_frame.f_locals.get("tensors" if code.co_name == "backward" else "outputs", ())
            found = [value] if isinstance(value, Tensor) else [t for t in value if isinstance(t, Tensor)]
        trace = trace.tb_next
    return found
