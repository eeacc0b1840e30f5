"""Linears in int8 for inference on a CPU: weights of 8 bits, activations of 16, a scale per row of both, sums exact.

    n = max |x| of a row        u = x * 127 / n in steps of 1/256        y = (u @ W^T) * scale * n / 127 + bias        W: int8

The two bytes of u, its whole part and the rest, are multiplied as two rows, for which a step's weights are read once. Real
models have columns that are a hundred times the others, to which whole steps alone would leave nothing.
A norm's factor of a row cancels in u, so it is put into the row's scale instead of the row (`Normed`).
Sums of products of two int8 are exact in int32, so a row's product is bitwise the same in any batch of rows. The product is
oneDNN's, through PyTorch's `onednn.qlinear_prepack` and `onednn.qlinear_pointwise` (their use:
`torch/_inductor/quantized_lowerings.py`); where these are missing or not exact (a processor without VNNI), a compiled one
takes their place, with the same sums.

M rows, K inputs, N outputs.

Of a model, all linears are held in int8, and the decoder's tables, whose rows are its vocabularies. A table has a scale per
row, as a head has, so a text head that is tied to its table stays one tensor with it. Convolutions, norms and biases keep
their precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from omni.cpu import compiled_int8
from omni.errors import UserError
from omni.model.linears import TEXT_TABLE, checksum_of, is_quantized, linears_of, text_rows_of

MOST = 127
"""Largest number of either sign."""

ZERO = 0x8080
"""0 of activations: both bytes are 128, of which 128 is 0 (of the high one in whole steps, of the low one in 1/256)."""

FEWEST = 4
"""Rows that oneDNN multiplies at least: on an AMD EPYC all weights of 0.5B take 26.6 ms for two rows, and 21.5 for four."""


class Packed(NamedTuple):
    """Weights [N, K] as they are multiplied: packed (or as they are, for the compiled product), scales [N] over 127, biases."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None


class Normed(NamedTuple):
    """The RMSNorm of x [..., K], which is computed only for what cannot take its rounded rows."""

    x: Tensor
    norm: nn.RMSNorm

    def rounded(self) -> tuple[Tensor, Tensor]:
        """Its rows as `rounded` gives them, rounded before they are divided by their length."""
        count = self.x.shape[-1]
        rows = self.x.float().reshape(-1, count)
        held, most = rounded(rows * self.norm.weight.float())
        root = torch.linalg.vector_norm(rows, 2, -1, True)
        length = torch.hypot(root, constant(((self.norm.eps or 0.0) * count) ** 0.5))
        return held, torch.addcdiv(constant(0.0), most, length, value=count**0.5)


M = TypeVar("M", bound="Int8Rows")


class Int8Rows(nn.Module):
    """A module whose weight [N, K] is held in int8, with a scale [N] of each row."""

    weight: Tensor
    scale: Tensor

    @torch.no_grad()
    def filled(self: M, weight: Tensor) -> M:
        """The module itself, with the int8 form of a weight [N, K]."""
        largest = largest_of(weight)
        self.weight.copy_(whole_numbers(weight, largest))
        self.scale.copy_(largest / MOST)
        return self

    def dense(self) -> Tensor:
        """The weight [N, K] in float32."""
        return self.weight * self.scale[:, None]

    def _apply(self: M, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> M:
        """Keeps the scales in float32 in a model of another precision."""
        before = self.scale
        super()._apply(fn, recurse)
        self.scale = before.to(self.weight.device)
        return self


class Int8Linear(Int8Rows, nn.Linear):
    """A linear with an int8 weight [N, K] and a scale [N]; takes and gives float32 or bfloat16."""

    dequantize = Int8Rows.dense

    def __init__(self, in_features: int, out_features: int, bias: Tensor | None = None) -> None:
        super().__init__(in_features, out_features, bias=False, device="meta")
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=torch.int8), requires_grad=False)
        self.register_buffer("scale", torch.empty(out_features))
        if bias is not None:
            self.bias = nn.Parameter(bias.detach(), requires_grad=False)
        self._packed: dict[tuple[int, ...], Packed] = {}  # by the linears that are multiplied together

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Int8Linear:
        """The int8 form of a weight [N, K]."""
        return cls(weight.shape[1], weight.shape[0], bias).filled(weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        self._packed = {}
        return super()._apply(fn, recurse)

    def forward(self, x: Tensor, product: Tensor | None = None) -> Tensor:
        """x [..., K] to [..., N]; `product` is the output where it is known."""
        return product_of(x, self) if product is None else product


def largest_of(weight: Tensor) -> Tensor:
    """The largest |w| of each row of a weight [N, K], [N] float32."""
    return weight.float().abs().amax(1)


def whole_numbers(weight: Tensor, largest: Tensor) -> Tensor:
    """The rows of a weight [N, K] as whole numbers of -127 to 127, int8; a row of zeros (or below float32's range) is zeros.

    One operation at a time, none of which depends on the number of rows: a weight in pieces gives the same as a whole one.
    """
    factor = MOST / largest
    factor = torch.where(factor.isfinite(), factor, 0)
    return (weight.float() * factor[:, None]).add_(128.5).floor_().sub_(128).to(torch.int8)


def packed_of(linears: tuple[Int8Linear, ...]) -> Packed:
    """The weights of linears of one input, side by side; made once."""
    first, key = linears[0], tuple(map(id, linears))
    packed = first._packed.get(key)
    if packed is None:
        weight, scale = (torch.cat([getattr(part, name).detach() for part in linears]) for name in ("weight", "scale"))
        bias = None
        if any(part.bias is not None for part in linears):
            bias = torch.cat([scale.new_zeros(len(p.weight)) if p.bias is None else p.bias.detach().float() for p in linears])
        if exact():
            weight = torch.ops.onednn.qlinear_prepack(weight, [2, weight.shape[1]])
        packed = first._packed[key] = Packed(weight, scale / MOST, bias)
    return packed


def product_of(x: Tensor | Normed, *linears: Int8Linear) -> Tensor:
    """Outputs of linears of one input [..., K], side by side."""
    packed = packed_of(linears)
    if isinstance(x, Normed):
        source, (held, factor) = x.x, x.rounded()
    else:
        source, (held, factor) = x, rounded(x.float().reshape(-1, linears[0].in_features))
    out = raw_product(held, packed)
    out = out.mul_(factor) if packed.bias is None else torch.addcmul(packed.bias, out, factor)
    return out.view(*source.shape[:-1], packed.scale.shape[0]).to(source.dtype)


def raw_product(held: Tensor, packed: Packed) -> Tensor:
    """Products [M, N] float32 of rounded rows [2, M, K], without the rows' factors and the biases."""
    rows, count = held.flatten(0, 1), held.shape[1]
    if exact():
        rows = F.pad(rows, (0, 0, 0, FEWEST - len(rows))) if len(rows) < FEWEST else rows
        out = _exact_product(rows, packed.weight, packed.scale)
    else:
        out = torch.empty(len(rows), len(packed.weight))
        compiled_int8.multiply(rows, packed.weight, packed.scale, out, torch.get_num_threads())
    return out[:count].add_(out[count : 2 * count], alpha=1 / 256)  # of a power of two: the sum alone is rounded


@cache
def constant(value: float, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of a value throughout, made once."""
    with torch.inference_mode(False):
        return torch.full(shape, value, dtype=dtype, device="cpu")


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [M, K] float32 as the high and low bytes of 16 bits, [2, M, K] uint8, of which 128 and 128 are 0, and the largest
    |x| of each row, the products' factor, [M, 1].

    A row of zeros is of any values; one that is not finite has no finite largest.
    """
    largest = rows.abs().amax(1, keepdim=True)
    scaled = torch.addcdiv(constant(ZERO + 0.5, (rows.shape[1],)), rows, largest, value=256 * MOST).to(torch.int32)
    return torch.stack([scaled >> 8, scaled]).to(torch.uint8), largest


def _exact_product(rows: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """Products [M, N] float32 of rows [M, K] uint8, whose 0 is 128, and a packed weight, times the scale [N]."""
    zeros = constant(0, (scale.shape[0],), torch.int64)
    out: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        rows, 1.0, 128, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return out


@cache
def exact() -> bool:
    """Whether oneDNN's product is there and gives the exact sums."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randint(-MOST, MOST + 1, (n, 96), generator=generator) for n in (3, 40))
    try:
        packed = torch.ops.onednn.qlinear_prepack(weight.to(torch.int8), [2, 96])
        product = _exact_product((rows + 128).to(torch.uint8), packed, torch.ones(40))
    except (AttributeError, RuntimeError, TypeError):
        return False
    return bool(product.equal((rows @ weight.T).float()))


TABLES = (TEXT_TABLE, "decoder.audio_embedding")
"""Names of the tables that are held in int8."""


class Int8Embedding(Int8Rows, nn.Embedding):
    """A table with int8 rows [V, W] and a scale [V]; gives rows in the model's precision."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(rows, width, _weight=torch.empty(rows, width, dtype=torch.int8), _freeze=True)
        self.register_buffer("scale", torch.empty(rows))
        self.dtype = dtype
        self._heads: list[Int8Linear] = []

    @classmethod
    def of(cls, weight: Tensor) -> Int8Embedding:
        """The int8 form of a table [V, W]."""
        return cls(weight.shape[0], weight.shape[1], weight.dtype).filled(weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Embedding:
        """The rows are given in the precision that the model is turned to."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return super()._apply(fn, recurse)

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
        model.set_submodule(name, new.train(model.training))
    for name, table in _tables(model).items():
        model.set_submodule(name, Int8Embedding.of(table.weight))
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
    tables = _tables(model)
    with torch.device("meta"):
        for name, part in check_linears(model).items():
            new = Int8Linear(part.in_features, part.out_features, part.bias)
            new.plain_checksum = (checksums or {}).get(name)  # type: ignore[assignment]
            model.set_submodule(name, new)
        for name, table in tables.items():
            model.set_submodule(name, Int8Embedding(table.num_embeddings, table.embedding_dim, dtype))
    return {
        f"{name}.weight": f"{name}.scale"
        for name, part in model.named_modules()
        if isinstance(part, (Int8Linear, Int8Embedding))
    }


def _tables(model: nn.Module) -> dict[str, nn.Embedding]:
    """The decoder's tables by name; none of a model without such a decoder."""
    return {name: part for name, part in model.named_modules() if name in TABLES and isinstance(part, nn.Embedding)}
