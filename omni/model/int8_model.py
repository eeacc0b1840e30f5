"""A speech model in int8: all its linears, and the decoder's tables, whose rows are its vocabularies.

A table has a scale per row, as a head has, so a text head that is tied to its table stays one tensor with it. Convolutions,
norms and biases keep their precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from omni.errors import UserError
from omni.model.int8 import MOST, Int8Linear, largest_of, whole_numbers
from omni.model.linears import TEXT_TABLE, checksum_of, linears_of, text_rows_of
from omni.model.quantize import is_quantized

TABLES = (TEXT_TABLE, "decoder.audio_embedding")
"""Names of the tables that are held in int8."""


class Int8Embedding(nn.Embedding):
    """A table with int8 rows [V, W] and a scale [V]; gives rows in the model's precision."""

    scale: Tensor

    def __init__(self, rows: int, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(rows, width, _weight=torch.empty(rows, width, dtype=torch.int8), _freeze=True)
        self.register_buffer("scale", torch.empty(rows))
        self.dtype = dtype
        self._heads: list[Int8Linear] = []

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor) -> Int8Embedding:
        """The int8 form of a table [V, W]."""
        new, largest = cls(weight.shape[0], weight.shape[1], weight.dtype), largest_of(weight)
        new.weight.copy_(whole_numbers(weight, largest))
        new.scale.copy_(largest / MOST)
        return new

    def dense(self) -> Tensor:
        """The table [V, W] in float32."""
        return self.weight * self.scale[:, None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Embedding:
        """Keeps the scales in float32; the rows are given in the precision that the model is turned to."""
        before = self.scale
        super()._apply(fn, recurse)
        self.scale, self.dtype = before.to(self.weight.device), fn(torch.empty(0, dtype=self.dtype)).dtype
        return self

    def forward(self, ids: Tensor) -> Tensor:
        rows = F.embedding(ids, self.weight) * F.embedding(ids, self.scale[:, None])
        return rows.to(self.dtype)

    def head(self) -> Int8Linear:
        """The same rows as a linear [W] to [V], for a head that is tied to the table; nothing is copied."""
        if not self._heads or self._heads[0].weight is not self.weight or self._heads[0].scale is not self.scale:
            with torch.device("meta"):
                head = Int8Linear(self.embedding_dim, self.num_embeddings)
            head.weight, head.scale = self.weight, self.scale
            self._heads = [head]
        return self._heads[0]


@torch.no_grad()
def to_int8(model: nn.Module) -> nn.Module:
    """Turns every linear of a speech model, and its decoder's tables, to int8, in place, one at a time.

    Raises:
        UserError: a linear is quantised already, has adapters or edits beside it or is of a kind that int8 cannot replace, or
            the model is not on a CPU.
    """
    text_rows = text_rows_of(model)
    linears = check_linears(model)
    for part in linears.values():
        if part.weight.device.type != "cpu":
            raise UserError(f"int8 is for device cpu, and the model is on {part.weight.device}; leave quantize out")
    for name, part in linears.items():
        new = Int8Linear.of(part.weight, part.bias)
        new.plain_checksum = checksum_of(name, part.weight, text_rows)  # type: ignore[assignment]
        _put(model, name, new.train(model.training))
    for name, table in _tables(model).items():
        _put(model, name, Int8Embedding.of(table.weight))
    return model


def is_int8(model: nn.Module) -> bool:
    """Whether linears of a model are held in int8."""
    return any(isinstance(part, Int8Linear) for part in model.modules())


def check_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linears of a model that is to be turned to int8, by name; UserError as `to_int8` raises it."""
    linears = linears_of(model)
    for name, part in linears.items():
        if is_quantized(part):
            raise UserError(f"{name} is quantised already; start from the model in full precision")
        if hasattr(part, "lora"):
            raise UserError(f"{name} has adapters or edits beside it, which would be lost; quantise first, then load them")
        if isinstance(part, NonDynamicallyQuantizableLinear):  # whose weight is read past its `forward`
            raise UserError(f"{name} belongs to PyTorch's MultiheadAttention, which int8 cannot replace; leave quantize out")
    return linears


def empty_int8(
    model: nn.Module, checksums: Mapping[str, int] | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, str]:
    """Replaces the linears and tables of a model that has no values yet (on the meta device) by empty ones in int8.

    Args:
        dtype: that the tables' rows are given in.
        checksums: `omni.model.linears.checksum_of` the weights in full precision, by the linear's name, where known.

    Returns:
        the names of the tensors that are held in int8, with the names of their scales.
    """
    known = checksums or {}
    tables = _tables(model)
    with torch.device("meta"):
        for name, part in check_linears(model).items():
            new = Int8Linear(part.in_features, part.out_features)
            new.bias = part.bias
            new.plain_checksum = known.get(name)  # type: ignore[assignment]
            _put(model, name, new)
        for name, table in tables.items():
            _put(model, name, Int8Embedding(table.num_embeddings, table.embedding_dim, dtype))
    return {
        f"{name}.weight": f"{name}.scale"
        for name, part in model.named_modules()
        if isinstance(part, (Int8Linear, Int8Embedding))
    }


def _tables(model: nn.Module) -> dict[str, nn.Embedding]:
    """The decoder's tables by name; none of a model without such a decoder."""
    known = {name: part for name, part in model.named_modules() if name in TABLES}
    return {name: part for name, part in known.items() if isinstance(part, nn.Embedding)}


def _put(model: nn.Module, name: str, part: Any) -> None:
    place, _, last = name.rpartition(".")
    setattr(model.get_submodule(place), last, part)
