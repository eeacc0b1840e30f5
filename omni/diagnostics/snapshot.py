"""Saves the state at the start of a step, so that it can be repeated under the same conditions, and puts all back after it."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from omni.diagnostics.held import MODULE_FIELDS, held_by, held_in
from omni.diagnostics.trace import replaced

MOST_BYTES = 1 << 28
"""Most bytes of buffers and caches that are copied at the start of every step; further ones are not restored."""

MOST_ITEMS = 1000
"""Most values of a module's attributes that are searched for containers."""

_CONTAINERS = (list, dict, set, deque)


def _random_states() -> list[tuple[Callable[[Any], Any], Any]]:
    """States of all generators (torch's on the CPU and the GPUs, Python's and numpy's), with the function that sets each."""
    states: list[tuple[Callable[[Any], Any], Any]] = [(torch.set_rng_state, torch.get_rng_state())]
    states.append((random.setstate, random.getstate()))
    if torch.cuda.is_initialized():
        states.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    numpy = sys.modules.get("numpy")
    return states if numpy is None else [*states, (numpy.random.set_state, numpy.random.get_state())]


class Snapshot:
    """Random state, and contents and graphs of a model's buffers and attributes and of a batch's tensors."""

    def __init__(self, model: nn.Module | None, batch: Any = None) -> None:
        self.random = _random_states()
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
        """Releases all tensors; the random state remains."""
        self.modules.clear()
        self.values.clear()

    @torch.no_grad()
    def restore(self) -> None:
        for put, state in self.random:
            put(state)
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


def _restorer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Keeps settings and state of an optimizer, and returns what puts them back to the bit: its own `load_state_dict` rounds
    state to the parameters' type."""
    kept = [(p, name, value, _copy(value)) for p, of in optimizer.state.items() for name, value in of.items()]
    groups = [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]

    def restore() -> None:
        optimizer.state.clear()
        for p, name, value, content in kept:  # the same tensor is kept: others may hold it too
            optimizer.state[p][name] = value.copy_(content) if isinstance(value, Tensor) else content
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            params = group["params"]
            group.clear()
            group.update({"params": params, **settings})

    return restore


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


@contextmanager
def restored(model: nn.Module | None, batch: Any, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Restores weights, gradients, buffers, optimizer state and random state when the block ends."""
    owned = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    params = {id(p): p for p in [*owned, *(model.parameters() if model is not None else ())]}.values()
    weights = [(p, p.detach().clone(), p.grad, None if p.grad is None else p.grad.detach().clone()) for p in params]
    restorers = [_restorer(optimizer) for optimizer in optimizers]
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
            for restore in restorers:
                restore()
        now.restore()


# --- FSDP2 and DDP ----------------------------------------------------------------------------------------------------


def fsdp_modules(model: nn.Module | None) -> list[Any]:
    """Modules that FSDP2 wraps, the root before its parts; none where it was never imported."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return [] if model is None else [module for module in model.modules() if isinstance(module, kind)]


def reshard(model: nn.Module | None, failed: bool = False) -> None:
    """Has FSDP2 free what it has gathered (a root stays gathered after a forward without gradients), so that the model's
    parameters are those that an optimizer owns; after a step that failed half-way, no hook waits for its backward either."""
    modules = fsdp_modules(model)
    for module in modules if failed else ():
        with suppress(RuntimeError, AttributeError):  # not of the root; not there before the first forward
            module.reset_iter_state()
    for module in modules:
        module.reshard()


@contextmanager
def alone() -> Iterator[None]:
    """Runs DDP's forwards locally while a block runs: gradients and buffers are not exchanged, and an exchange that a failed
    backward had started is dropped."""
    plain = DistributedDataParallel.forward
    ready = set[DistributedDataParallel]()

    def forward(module: Any, *inputs: Any, **kwargs: Any) -> Any:
        if module not in ready:
            ready.add(module)
            module.reducer._reset_state()
        module.require_forward_param_sync = False  # stays False after forwards without an exchange
        with module.no_sync():
            return plain(module, *inputs, **kwargs)

    try:
        with replaced(DistributedDataParallel, "forward", forward):
            yield
    finally:
        for module in ready:
            module.require_forward_param_sync = True
