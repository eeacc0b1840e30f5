"""Saves the state at the start of a step, so that a failing step can be repeated under the same conditions."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from omni.diagnostics.held import MODULE_FIELDS, held_by, held_in

MOST_BYTES = 1 << 28
"""Most bytes of buffers and caches that are copied at the start of every step; further ones are not restored."""

MOST_ITEMS = 1000
"""Most values of a module's attributes that are searched for containers."""

_CONTAINERS = (list, dict, set, deque)


class Random:
    """States of all generators: torch's on the CPU and the GPUs, Python's and numpy's."""

    def __init__(self) -> None:
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self.python = random.getstate()
        numpy = sys.modules.get("numpy")
        self.numpy = None if numpy is None else numpy.random.get_state()

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


class Snapshot:
    """Random state, and contents and graphs of a model's buffers and attributes and of a batch's tensors."""

    def __init__(self, model: nn.Module | None, batch: Any = None) -> None:
        self.random = Random()
        self.modules: list[tuple[nn.Module, dict[str, Any], dict[str, Any], list[tuple[Any, Any]]]] = []
        self.values: list[tuple[Tensor, Tensor, Any]] = []
        for module in model.modules() if model is not None else ():
            own = {k: v for k, v in vars(module).items() if k not in MODULE_FIELDS}
            self.modules.append((module, own, dict(module._buffers), _containers(own)))
        room = MOST_BYTES
        for held in (*held_by(model), *held_in(batch, "batch")):
            tensor = held.tensor
            room -= tensor.nbytes
            if room >= 0 and not tensor.is_inference():
                self.values.append((tensor, tensor.detach().clone(), tensor.grad_fn))

    def forget(self) -> None:
        """Release all tensors; the random state remains."""
        self.modules.clear()
        self.values.clear()

    @torch.no_grad()
    def restore(self) -> None:
        self.random.restore()
        for module, own, buffers, inside in self.modules:
            for name in [k for k in vars(module) if k not in MODULE_FIELDS and k not in own]:
                del vars(module)[name]
            vars(module).update(own)
            if not isinstance(module, torch.jit.ScriptModule):
                module._buffers.clear()
                module._buffers.update(buffers)
            for container, content in inside:
                container.clear()
                container.extend(content) if isinstance(container, (list, deque)) else container.update(content)
        for tensor, value, node in self.values:
            if node is None and tensor.grad_fn is not None and not tensor._is_view():
                tensor.detach_()
            tensor.data.copy_(value)


class _State:
    """Settings and state of an optimizer, to the bit: its own `load_state_dict` rounds state to the parameters' type."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.state = {p: {name: (value, _copy(value)) for name, value in of.items()} for p, of in optimizer.state.items()}
        self.groups = [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]

    @torch.no_grad()
    def restore(self) -> None:
        kept = self.optimizer.state
        kept.clear()
        for p, of in self.state.items():
            kept[p] = {}
            for name, (value, content) in of.items():
                if isinstance(value, Tensor) and value.shape == content.shape and value.dtype == content.dtype:
                    kept[p][name] = value.copy_(content)  # the same tensor: others may hold it too
                else:
                    kept[p][name] = content
        for group, settings in zip(self.optimizer.param_groups, self.groups, strict=True):
            for name in group.keys() - settings.keys() - {"params"}:
                del group[name]
            group.update(settings)


def _containers(own: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The containers in attributes, at any depth, with a copy of their contents; the first `MOST_ITEMS` values are searched."""
    found: dict[int, tuple[Any, Any]] = {}
    left: deque[Any] = deque(own.values())
    for _ in range(MOST_ITEMS):
        if not left:
            break
        value = left.popleft()
        if type(value) in _CONTAINERS and id(value) not in found:
            found[id(value)] = value, copy.copy(value)
            left.extend(value.values() if isinstance(value, dict) else value)
        elif type(value) is tuple:
            left.extend(value)
    return list(found.values())


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


@contextmanager
def restored(model: nn.Module | None, batch: Any, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Restore weights, gradients, buffers, optimizer state and random state when the block ends."""
    owned = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    params = {id(p): p for p in [*owned, *(model.parameters() if model is not None else ())]}.values()
    weights = [(p, p.detach().clone(), p.grad, None if p.grad is None else p.grad.detach().clone()) for p in params]
    states = [_State(optimizer) for optimizer in optimizers]
    now = Snapshot(model, batch)
    try:
        for p in params:
            p.grad = None
        yield
    finally:
        with torch.no_grad():
            for p, value, grad, content in weights:
                p.data.copy_(value)
                p.grad = grad
                if grad is not None and content is not None:
                    grad.data.copy_(content)
        for state in states:
            state.restore()
        now.restore()
