"""Counts what makes the host wait for a GPU, over tensors of a GPU that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

READS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"}
"""Operators whose result the host needs."""


class FakeGPU(TorchDispatchMode):
    """While entered, tensors of device cuda are without values, and those of the host are as ever.

    `found` names the operators that wait for the device: copies between host and device that do not say otherwise, reads of a
    value, and indices of truth values. `copies` names the copies that do not wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.found: list[str] = []
        self.copies: list[str] = []

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

    @contextmanager
    def counting(self) -> Iterator[tuple[list[str], list[str]]]:
        """Count within a block only: what waited, and the copies that did not."""
        self.found, self.copies = [], []
        yield self.found, self.copies


def _has_truths(args: Any) -> bool:
    return any(isinstance(x, torch.Tensor) and x.dtype == torch.bool and x.ndim > 0 for x in tree_leaves(args))
