"""Linears in int8 for inference on a CPU: a scale per row of the weight and per row of the activations, sums exact.

    n = max |x| of a row        u = floor(x * 127 / n + 1/2)        y = (u @ W^T) * scale * n / 127 + bias        u, W: int8

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
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from omni.cpu import compiled_int8
from omni.errors import UserError
from omni.model.linears import TEXT_TABLE, checksum_of, is_quantized, linears_of, text_rows_of
from omni.utils.private import has_forward_hooks

MOST = 127
"""Largest number of either sign."""

FEWEST = 4
"""Rows that oneDNN multiplies at least: on an AMD EPYC all weights of 0.5B take 26.6 ms for two rows, and 21.5 for four."""


class Packed(NamedTuple):
    """Weights [N, K] as they are multiplied: packed (or as they are, for the compiled product), scales [N] over 127, biases."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None


class Normed:
    """The output of an RMSNorm of x [..., K], which is computed only for what cannot take its rounded rows."""

    def __init__(self, x: Tensor, norm: nn.RMSNorm) -> None:
        self.x, self.norm = x, norm
        self._whole: Tensor | None = None

    def whole(self) -> Tensor:
        """The output of the norm, [..., K]."""
        if self._whole is None:
            self._whole = self.norm(self.x)
        return self._whole

    def rounded(self) -> tuple[Tensor, Tensor]:
        """Its rows as `rounded` gives them, rounded before they are divided by their length."""
        count = self.x.shape[-1]
        rows = _float(self.x).reshape(-1, count)
        held, most = rounded(rows * _float(self.norm.weight))
        root = torch.linalg.vector_norm(rows, 2, -1, True)
        length = torch.hypot(root, _full((), ((self.norm.eps or 0.0) * count) ** 0.5))
        return held, torch.addcdiv(_full((), 0.0), most, length, value=count**0.5)


class Int8Linear(nn.Linear):
    """A linear with an int8 weight [N, K] and a scale [N]; takes and gives float32 or bfloat16."""

    scale: Tensor

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False, device="meta")
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=torch.int8), requires_grad=False)
        self.register_buffer("scale", torch.empty(out_features))
        self._packed: dict[tuple[int, ...], Packed] = {}  # by the linears that are multiplied together

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Int8Linear:
        """The int8 form of a weight [N, K]."""
        new, largest = cls(weight.shape[1], weight.shape[0]), largest_of(weight)
        new.weight.copy_(whole_numbers(weight, largest))
        new.scale.copy_(largest / MOST)
        if bias is not None:
            new.bias = nn.Parameter(bias.detach(), requires_grad=False)
        return new

    def dequantize(self) -> Tensor:
        """The weight [N, K] in float32."""
        return self.weight * self.scale[:, None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        """Keeps the scales in float32 in a model of another precision."""
        before = self.scale
        super()._apply(fn, recurse)
        self.scale, self._packed = before.to(self.weight.device), {}
        return self

    def forward(self, x: Tensor, product: Tensor | None = None) -> Tensor:
        """x [..., K] to [..., N]; `product` is the output where it is known."""
        return _product(x, (self,)) if product is None else product


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


def normed(x: Tensor, norm: nn.RMSNorm, *linears: nn.Module) -> Tensor | Normed:
    """The output of a norm for linears that are in int8 all, and for others."""
    if any(type(part) is not Int8Linear for part in linears) or has_forward_hooks(norm):
        out: Tensor = norm(x)
        return out
    return Normed(x, norm)


def together(x: Tensor | Normed, *linears: nn.Module) -> Tensor | None:
    """Outputs of several int8 linears of one input [..., K], side by side, of one product; None where one is of another kind.

    What acts beside a linear (hooks) is given its own output, so that the product of a row does not depend on it.
    """
    hooks = False
    for part in linears:
        if type(part) is not Int8Linear:
            return None
        hooks = hooks or has_forward_hooks(part)
    parts = cast("tuple[Int8Linear, ...]", linears)
    out = _product(x, parts)
    if hooks:
        whole = x.whole() if isinstance(x, Normed) else x
        each = out.split([part.out_features for part in parts], -1)
        out = torch.cat([part(whole, product=own) for part, own in zip(parts, each, strict=True)], -1)
    return out


def packed_of(linears: tuple[Int8Linear, ...]) -> Packed:
    """The weights of linears of one input, side by side; made once."""
    first, key = linears[0], tuple(map(id, linears))
    packed = first._packed.get(key)
    if packed is None:
        weight, scale = (torch.cat([getattr(part, name).detach() for part in linears]) for name in ("weight", "scale"))
        bias = None
        if any(part.bias is not None for part in linears):
            bias = torch.cat([scale.new_zeros(len(p.weight)) if p.bias is None else p.bias.detach().float() for p in linears])
        packed = first._packed[key] = Packed(_prepack(weight) if exact() else weight, scale / MOST, bias)
    return packed


def _product(x: Tensor | Normed, linears: tuple[Int8Linear, ...]) -> Tensor:
    packed = packed_of(linears)
    if isinstance(x, Normed):
        source, (held, factor) = x.x, x.rounded()
    else:
        source, (held, factor) = x, rounded(_float(x).reshape(-1, linears[0].in_features))
    out = raw_product(held, packed)
    out = out.mul_(factor) if packed.bias is None else torch.addcmul(packed.bias, out, factor)
    out = out.view(*source.shape[:-1], packed.scale.shape[0])
    return out if out.dtype == source.dtype else out.to(source.dtype)


def raw_product(held: Tensor, packed: Packed) -> Tensor:
    """Products [M, N] float32 of rounded rows, without the rows' factors and the biases."""
    if exact():
        count = len(held)
        rows = F.pad(held, (0, 0, 0, FEWEST - count)) if count < FEWEST else held
        return _exact_product(rows, packed.weight, packed.scale)[:count]
    out = torch.empty(len(held), len(packed.weight))
    compiled_int8.multiply(held, packed.weight, packed.scale, out, torch.get_num_threads())
    return out


def _float(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float32 else x.float()


@cache
def _full(shape: tuple[int, ...], value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    with torch.inference_mode(False):
        return torch.full(shape, value, dtype=dtype)


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [M, K] float32 as uint8 of 1 to 255, of which 128 is 0, and the largest |x| of each, the products' factor, [M, 1].

    A row of zeros is of any values; one that is not finite has no finite largest.
    """
    largest = rows.abs().amax(1, keepdim=True)
    scaled = torch.addcdiv(_full((rows.shape[1],), 128.5), rows, largest, value=MOST)
    return scaled.to(torch.int32).to(torch.uint8), largest  # by way of int32, which takes a third of the time


def _prepack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.onednn.qlinear_prepack(weight, [2, weight.shape[1]])
    return packed


def _exact_product(rows: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """Products [M, N] float32 of rows [M, K] uint8, whose 0 is 128, and a packed weight, times the scale [N]."""
    zeros = _full((scale.shape[0],), 0, torch.int64)
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
        product = _exact_product((rows + 128).to(torch.uint8), _prepack(weight.to(torch.int8)), torch.ones(40))
    except (AttributeError, RuntimeError, TypeError):
        return False
    return bool(product.equal((rows @ weight.T).float()))


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
            new = Int8Linear(part.in_features, part.out_features)
            new.bias = part.bias
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
