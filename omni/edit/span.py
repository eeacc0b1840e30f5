"""The life of one block of `edited`: its forward hooks, and what tells a backward pass that it has come too late.

A block that is recomputed in backward calls its linears again. Where the hooks are gone by then, gradients would be those of
another function. So every change is added in a node of the graph that knows its block, and a hook stays on, doing nothing but
look, until the graph has run or is dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

OUTSIDE = (
    "backward runs after the block of `edited(...)` has ended: what is recomputed there would lack the edits; "
    "call backward inside the block"
)


class Span:
    """Hooks of one block, and the nodes it has left in graphs that have not run yet."""

    def __init__(self) -> None:
        self.open = True
        self.handles: list[Any] = []
        self.nodes: dict[int, weakref.ref[Any]] = {}

    def hook(self, part: nn.Module, add: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Add to what a linear puts out: `add(input, output)`."""

        def act(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
            if not self.open:
                self.refuse_recomputing()
                return out
            change = add(args[0] if args else next(iter(kwargs.values())), out)
            if not torch.is_grad_enabled():
                return out + change
            anchor = None
            if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # in a block that may be recomputed
                anchor = torch.zeros((), device=out.device, requires_grad=True)
            return _Added.apply(out, change, anchor, self)

        self.handles.append(part.register_forward_hook(act, with_kwargs=True))

    def watch(self, node: Any) -> None:
        """Remember a node as long as it lives."""
        key = id(node)
        self.nodes[key] = weakref.ref(node, lambda _: self.forget(key))

    def forget(self, key: int) -> None:
        """A node has run, or its graph is gone."""
        self.nodes.pop(key, None)
        self._tidy()

    def close(self) -> None:
        """The block ends."""
        self.open = False
        self._tidy()

    def _tidy(self) -> None:
        if not self.open and not self.nodes:
            for handle in self.handles:
                handle.remove()
            self.handles.clear()

    def refuse_recomputing(self) -> None:
        """Called in a forward: ValueError where it belongs to a backward pass through this block's graph."""
        if torch._C._current_graph_task_id() == -1:
            return
        nodes = [ref() for ref in list(self.nodes.values())]
        if any(node is not None and torch._C._will_engine_execute_node(node) for node in nodes):
            raise ValueError(OUTSIDE)


class _Added(torch.autograd.Function):
    """out + change, in a node that knows its block.

    With an anchor the node is part of the graph even where neither needs a gradient, and it saves a tensor: recomputing without
    the hook then saves fewer, which torch refuses whatever gradients are asked for.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, change: Tensor, anchor: Tensor | None, span: Span) -> Tensor:
        ctx.span = span
        span.watch(ctx)
        if anchor is not None:
            ctx.save_for_backward(anchor)
        return out + change

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        if not ctx.span.open:
            raise ValueError(OUTSIDE)
        ctx.span.forget(id(ctx))
        return grad, grad, None, None
