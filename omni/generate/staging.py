"""Writes the numbers of new rows into tensors on a device, in one copy that the host does not wait for.

`x[row] = number` on a tensor of a GPU waits until all queued work is done, and so does `torch.tensor(list, device="cuda")`; a
start of 64 rows made 325 such waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from omni.utils.hardware import to_device


class Staging:
    """Writes rows of several tensors together.

    Args:
        targets: tensors [rows, ...] on one device, of whole numbers, truth values or fp32 numbers.
    """

    def __init__(self, targets: Sequence[Tensor]) -> None:
        self.targets = tuple(targets)

    @torch.inference_mode()
    def write(self, rows: Sequence[int], values: Sequence[Tensor]) -> None:
        """Write the rows `rows`, in any order, of every target.

        Args:
            values: for each target the numbers of its rows, [len(rows), ...], on the host.
        """
        if self.targets[0].device.type == "cpu":
            for target, value in zip(self.targets, values, strict=True):
                target.numpy()[list(rows)] = value.numpy().reshape(len(value), *target.shape[1:])
            return
        parts = [torch.tensor(list(rows))[:, None], *(_bits(value) for value in values)]
        staged = to_device(torch.cat(parts, dim=1), self.targets[0].device)
        index, *columns = staged.split([part.shape[1] for part in parts], dim=1)
        index = index.flatten()
        for target, column in zip(self.targets, columns, strict=True):
            number = column.to(torch.int32).view(torch.float32) if target.is_floating_point() else column.to(target.dtype)
            target.index_copy_(0, index, number.view(-1, *target.shape[1:]))


def _bits(value: Tensor) -> Tensor:
    """Numbers [B, ...] as whole numbers [B, n]; of fp32 numbers their bits."""
    whole = value.view(torch.int32) if value.is_floating_point() else value
    return whole.reshape(len(value), -1).long()
