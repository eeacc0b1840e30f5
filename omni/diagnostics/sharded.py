"""Support for FSDP2 and DDP: finds gathered parameters, and cleans up after a failed step.

Nothing here adds communication between processes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_WHOLE = ("_unsharded_param", "_sharded_post_forward_param")
"""FSDP2's attributes for the tensor that replaces a parameter while it is gathered, wholly or within a node."""


def _sharded_modules(model: nn.Module | None) -> list[Any]:
    """Modules that FSDP2 wraps, the root before its parts; none where FSDP2 was never imported."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None or model is None else [module for module in model.modules() if isinstance(module, kind)]


def is_sharded(model: nn.Module | None) -> bool:
    """Whether parameters are gathered for a forward and resharded after it."""
    return bool(_sharded_modules(model))


def gathered(model: nn.Module | None) -> dict[int, nn.Parameter]:
    """The sharded parameter, which an optimizer owns, by id of the gathered tensor that replaces it.

    A root stays gathered after a forward without gradients, and after a backward that failed.
    """
    found: dict[int, nn.Parameter] = {}
    for module in _sharded_modules(model):
        for group in _groups(module):
            for one in getattr(group, "fsdp_params", ()):
                for whole in (getattr(one, name, None) for name in _WHOLE):
                    if whole is not None:
                        found[id(whole)] = one.sharded_param
    return found


def _groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)  # torch before 2.13 has one at most
    return list(several) if several is not None else [g for g in [state._fsdp_param_group] if g is not None]


def end_step(model: nn.Module | None) -> None:
    """Reset FSDP2 after a step that failed half-way: parameters are sharded again, and no hook waits for its backward."""
    modules = _sharded_modules(model)
    for module in modules:
        with suppress(RuntimeError, AttributeError):  # not of the root; nothing is there yet before the first forward
            if hasattr(module, "reset_iter_state"):  # torch 2.14
                module.reset_iter_state()
    for module in modules:
        module.reshard()


@contextmanager
def alone() -> Iterator[None]:
    """Run DDP's forwards locally while a block runs: gradients and buffers are not exchanged, and an exchange that a failed
    backward had started is dropped."""
    plain = DistributedDataParallel.forward
    ready = set[DistributedDataParallel]()

    def forward(module: Any, *inputs: Any, **kwargs: Any) -> Any:
        if module not in ready:
            ready.add(module)
            if hasattr(module.reducer, "_reset_state"):
                module.reducer._reset_state()
        module.require_forward_param_sync = False  # stays False after forwards without an exchange
        with module.no_sync():
            return plain(module, *inputs, **kwargs)

    DistributedDataParallel.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DistributedDataParallel.forward = plain  # type: ignore[method-assign]
        for module in ready:
            module.require_forward_param_sync = True
