"""Counts what makes the host wait for a GPU, over tensors of a GPU that is not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

READS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"}
"""Operators whose result the host needs."""

FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "device"}
"""Operators that are no views, and launch nothing."""


class FakeGPU(TorchDispatchMode):
    """While entered, tensors of device cuda are without values, and those of the host are as ever.

    `found` names the operators that wait for the device: copies between host and device that do not say otherwise, reads of a
    value, and indices of truth values. `copies` names the copies that do not wait. `launched` counts the operators that
    compute on the device, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.found: list[str] = []
        self.copies: list[str] = []
        self.launched: Counter[str] = Counter()

    def __enter__(self) -> FakeGPU:
        self.fake.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.fake.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        leaves = tree_leaves((args, given))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        devices = {x.type for x in leaves if isinstance(x, torch.device)} | {x.device.type for x in tensors}
        if "cuda" not in devices and not any(isinstance(x, FakeTensor) for x in tensors):
            with unset_fake_temporarily():
                return func(*args, **given)
        args = tree_map_only(torch.Tensor, self._without_values, args)
        out = func(*args, **given)
        self._note(func, args, given, {x.device.type for x in (*tensors, *tree_leaves(out)) if isinstance(x, torch.Tensor)})
        return out

    def _without_values(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, FakeTensor):
            return x
        with self.fake, torch.inference_mode(x.is_inference()):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")

    def _note(self, func: Any, args: Any, given: Any, devices: set[str]) -> None:
        name = func.__name__.partition(".")[0]
        if len(devices) > 1 and name in ("copy_", "_to_copy", "to"):
            later = given.get("non_blocking", name == "copy_" and len(args) > 2 and args[2])
            (self.copies if later else self.found).append(str(func))
        elif "cuda" in devices and (name in READS or (name.startswith("index") and _has_truths(args[1:2]))):
            self.found.append(str(func))
        if "cuda" in devices and not (func.is_view or name in FREE):
            self.launched[name] += 1

    @contextmanager
    def counting(self) -> Iterator[tuple[list[str], list[str]]]:
        """Count within a block only: what waited, and the copies that did not."""
        self.found, self.copies, self.launched = [], [], Counter()
        yield self.found, self.copies


def _has_truths(args: Any) -> bool:
    return any(isinstance(x, torch.Tensor) and x.dtype == torch.bool and x.ndim > 0 for x in tree_leaves(args))


def backward(loss: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """`loss.backward()` by the same formulas in the engine's order, which without a driver has no threads for a GPU."""
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 1)  # so that checkpointed blocks are computed again once
    assert loss.grad_fn is not None
    waiting: Counter[Any] = Counter()
    stack, seen = [loss.grad_fn], {loss.grad_fn}
    while stack:
        for after, _ in stack.pop().next_functions:
            if after is not None:
                waiting[after] += 1
                if after not in seen:
                    seen.add(after)
                    stack.append(after)
    given: dict[Any, dict[int, torch.Tensor]] = {loss.grad_fn: {0: torch.ones_like(loss)}}
    ready = [loss.grad_fn]
    with torch.no_grad():
        while ready:
            node = max(ready, key=lambda node: node._sequence_nr())
            ready.remove(node)
            own = given.pop(node, {})
            found: Any = ()
            if own:
                apply = node.apply if hasattr(node, "apply") else node
                found = apply(*(own.get(i) for i in range(len(node._input_metadata))))
            found = found if isinstance(found, tuple) else (found,)
            if hasattr(node, "needs_input_grad"):  # a function of Python: gradients also of what is no tensor
                wanted = iter([x for x, needed in zip(found, node.needs_input_grad, strict=False) if needed])
                found = [None if after is None else next(wanted, None) for after, _ in node.next_functions]
            for i, (after, place) in enumerate(node.next_functions):
                if after is None:
                    continue
                gradient = found[i] if i < len(found) else None
                if gradient is not None:
                    like, there = after._input_metadata[place], given.setdefault(after, {})
                    gradient = gradient.sum_to_size(like.shape).to(like.dtype)
                    there[place] = gradient if place not in there else there[place] + gradient
                waiting[after] -= 1
                if not waiting[after]:
                    ready.append(after)
