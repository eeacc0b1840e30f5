"""Names that other packages keep private where they have no public ones, with the version they were read from; no other file
uses any."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# PyTorch 2.14.1, and there in 2.11

foreach_zero_, foreach_mul_, foreach_lerp_ = torch._foreach_zero_, torch._foreach_mul_, torch._foreach_lerp_
"""In-place operations on lists of tensors: a few launches on a GPU, instead of one for each."""


children, own_parameters, own_buffers = attrgetter("_modules"), attrgetter("_parameters"), attrgetter("_buffers")
"""The dictionaries of a module's children, and of its own parameters and buffers."""
forward_hooks = attrgetter("_forward_hooks", "_forward_pre_hooks")
"""The dictionaries of what runs after and before a module's `forward`."""


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether something runs beside a module's `forward`."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module's `compile` was called."""
    return module._compiled_call_impl is not None


def remove_forward_hook(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Removes a forward hook whose handle nobody holds."""
    for key in [key for key, known in module._forward_hooks.items() if known is hook]:
        del module._forward_hooks[key]
        module._forward_hooks_with_kwargs.pop(key, None)


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""The innermost hooks of saved tensors, (pack, unpack), or None; its argument tells whether while tracing."""
pop_saved_tensor_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
push_saved_tensor_hooks = torch._C._autograd._push_saved_tensors_default_hooks


def flight_recorder(name: str) -> bytes:
    """JSON of the flight recorder by one of its functions; AttributeError where this build of PyTorch lacks it."""
    import torch._C._distributed_c10d as c10d

    return getattr(c10d, name)()  # type: ignore[no-any-return]


def reset_reducer(module: nn.parallel.DistributedDataParallel) -> None:
    """Drops the exchange of gradients that a failed backward had started."""
    module.reducer._reset_state()


def sequence_nr(node: Any) -> int:
    """Number of a node of the graph in the order in which this thread made them."""
    return int(node._sequence_nr())


def schema_of(operator: Any) -> Any:
    """The schema of an operator; None of one of higher order, which has none."""
    return getattr(operator, "_schema", None)


base_of = attrgetter("_base")
"""The tensor that a view was made of; None for what is no view."""


def storage_key(tensor: Tensor) -> int:
    """A number of a tensor's storage, the same for all its views."""
    return int(tensor.untyped_storage()._cdata)


# lightning-fabric 2.6.6


ddp_kwargs = attrgetter("_ddp_kwargs")
"""Keywords that a `DDPStrategy` will give to PyTorch's module."""


def group_timeout(strategy: Any) -> Any:
    """Timeout of a strategy's process group; None where it has none."""
    return getattr(strategy, "_timeout", None)


# aiortc 1.16.0, aioice 0.13.0


async def gather_from(gatherer: Any, addresses: list[str]) -> None:
    """Offers candidates of addresses that aioice leaves out of what it gathers."""
    connection = gatherer._connection
    connection._local_candidates += await connection.get_component_candidates(1, addresses)


# CPython 3.11


def disown(process: Any) -> None:
    """Has multiprocessing not end a child at exit, which fails in a process that was forked from this one."""
    import multiprocessing.process

    getattr(multiprocessing.process, "_children", set()).discard(process)
