"""A model's linears: by name, with checksums that are the same in every precision; those of one input as one product; weights
in 4 or 8 bits by bitsandbytes (Dettmers et al. 2022 and 2023).

The weights of linears of one input become views of one tensor, so that names and checkpoints stay as they are, and what changes
a weight in place changes the product. Where a weight is replaced, or something acts beside a linear (an adapter, an edit, a
hook), each is multiplied alone again. Only frozen weights are quantised: adapters beside them are trained (QLoRA).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni.errors import UserError
from omni.utils.arguments import match_names
from omni.utils.private import has_forward_hooks
from omni.utils.process import silence


def linears_of(model: nn.Module) -> dict[str, nn.Linear]:
    """Every linear by name, quantised ones included."""
    return {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}


TEXT_HEAD, TEXT_TABLE = "decoder.text_head", "decoder.text_embedding"


def tied_names(model: nn.Module) -> dict[str, str]:
    """Maps second names of parameters to the first: in a tied model the text head is the text embedding."""
    parameters = dict(model.named_parameters())
    head, table = f"{TEXT_HEAD}.weight", f"{TEXT_TABLE}.weight"
    return {head: table} if table in parameters and not any(name.startswith(f"{TEXT_HEAD}.") for name in parameters) else {}


def checksum_of(name: str, weight: Tensor, text_rows: int | None = None) -> int:
    """CRC-32 of a linear's weight in bfloat16: the same for a model in fp32 and in bfloat16.

    Args:
        text_rows: number of rows of the text head that are counted: those of a language model of the same tokenizer, where
            known (`text_rows_of`). The checksum is then the same before and after it is grown into a speech model.
    """
    if text_rows is not None and name == TEXT_HEAD:
        weight = weight[:text_rows]
    return crc_of(weight.to(torch.bfloat16), zlib.crc32(name.encode()))


def checksum(names: Iterable[str], read: Callable[[str], Tensor | int], text_rows: int | None = None) -> int:
    """One checksum for the weights of several linears.

    Args:
        names: of the linears; their order does not matter.
        read: the weight of a linear, or its `checksum_of` where that is known.
        text_rows: see `checksum_of`.
    """
    value = 0
    for name in sorted(names):
        weight = read(name)
        crc = weight if isinstance(weight, int) else checksum_of(name, weight, text_rows)
        value = zlib.crc32(f"{name} {crc};".encode(), value)
    return value


def text_rows_of(model: nn.Module) -> int | None:
    """Rows of a speech model's text head without those of our special ids; None for a model without a layout."""
    layout = getattr(getattr(model, "config", None), "layout", None)
    return None if layout is None else int(layout.text.size)


def crc_of(tensor: Tensor, value: int = 0) -> int:
    """CRC-32 of a tensor's bytes, continued from `value`."""
    data = tensor.detach().cpu().contiguous()
    return zlib.crc32(data.flatten().view(torch.uint8).numpy().data, value)


class FusedWeight(NamedTuple):
    """Weights [sum of N, K] of linears, one after another, with their biases, and where each was."""

    weight: Tensor
    bias: Tensor | None
    addresses: tuple[tuple[int, int], ...]


def fuse(model: nn.Module) -> int:
    """Fuse the linears that modules name in `TOGETHER`; returns how many groups. Others, and sharded ones, stay as they are."""
    count = 0
    for part in model.modules():
        linears = [getattr(part, name) for name in getattr(type(part), "TOGETHER", ())]
        plain = all(type(part) is nn.Linear and all(type(p.data) is Tensor for p in part.parameters()) for part in linears)
        if linears and plain and len({linear.bias is None for linear in linears}) == 1:
            with torch.inference_mode(False), torch.no_grad():
                weight = fuse_weights([linear.weight for linear in linears])
                bias = None if linears[0].bias is None else fuse_weights([linear.bias for linear in linears])
            linears[0].__dict__["fused"] = FusedWeight(weight, bias, tuple(map(_addresses, linears)))
            count += 1
    return count


def _addresses(linear: nn.Linear) -> tuple[int, int]:
    """Addresses of its weight and bias, 0 for none."""
    return linear.weight.data_ptr(), 0 if linear.bias is None else linear.bias.data_ptr()


def fuse_weights(weights: Sequence[Tensor]) -> Tensor:
    """Weights one after another, of which they become views."""
    if len(weights) == 1 and weights[0].is_contiguous():
        return weights[0].detach()
    whole = torch.cat([weight.detach() for weight in weights])
    for weight, view in zip(weights, whole.split([len(weight) for weight in weights]), strict=True):
        weight.data = view
    return whole


def fused_product(x: Tensor, *linears: nn.Linear) -> Tensor | None:
    """Outputs of linears of one input x [..., K], side by side; None where they are not fused."""
    fused: FusedWeight | None = linears[0].__dict__.get("fused")
    if fused is None or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling():
        return None
    for linear, address in zip(linears, fused.addresses, strict=True):
        if _addresses(linear) != address or has_forward_hooks(linear):
            return None
    return F.linear(x, fused.weight, fused.bias)


Form = Literal["nf4", "int8"]


def is_quantized(linear: nn.Module) -> bool:
    """Whether a linear's weight is not a plain matrix: bitsandbytes' linears, and others that have `dequantize()`."""
    return type(linear).__name__ in ("Linear4bit", "Linear8bitLt") or callable(getattr(linear, "dequantize", None))


def numels(model: nn.Module) -> dict[str, int]:
    """Number of elements of each parameter by name; of a quantised weight the number of elements that are packed into it."""
    counts = {name: p.numel() for name, p in model.named_parameters()}
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear) and is_quantized(part) and f"{name}.weight" in counts:
            counts[f"{name}.weight"] = part.in_features * part.out_features
    return counts


@torch.no_grad()
def dense_weight(linear: nn.Module) -> Tensor:
    """The weight [out, in] of a linear, dequantised where it is held in fewer bits."""
    if hasattr(linear, "dequantize"):
        return linear.dequantize().detach()  # type: ignore[operator]
    weight: Any = linear.weight
    if not is_quantized(linear):
        return weight.detach()
    import bitsandbytes.functional as bits

    if type(linear).__name__ == "Linear4bit":
        return bits.dequantize_4bit(weight.data, weight.quant_state).to(weight.quant_state.dtype)
    state: Any = weight if weight.CB is not None else linear.state  # the first pass moves it
    return bits.int8_vectorwise_dequant(state.CB, state.SCB).to(torch.float32)


Packed = tuple[int, dict[str, Tensor]]
"""Checksum of a weight before it was quantised, and bitsandbytes' parts of it by name: plain data."""


def quantize(
    model: nn.Module,
    form: Form,
    patterns: Sequence[str],
    dtype: torch.dtype = torch.float32,
    share: Callable[[Packed | None], Packed | None] | None = None,
) -> list[str]:
    """Quantise the weights of linears to 4 bits (nf4 with double quantisation) or 8, in place; outputs have the inputs' type.

    Args:
        patterns: names of the linears (`omni.utils.arguments`).
        dtype: type of the products of nf4, and of its dequantised weights; those of int8 follow the inputs.
        share: sends a value of the first of several processes to all of them: others need no weights to quantise, which may
            lie on the meta device.

    Returns:
        names of the linears that were quantised.

    Raises:
        UserError: bitsandbytes is not there, a pattern matches no linear, or a linear is quantised already or
            has adapters or edits beside it (they are loaded afterwards).
    """
    silence("bitsandbytes.backends.cpu.ops")
    try:
        import bitsandbytes as bnb
    except ImportError as error:
        raise UserError("a quantised base needs the package bitsandbytes: pip install bitsandbytes") from error
    names = chosen_linears(model, patterns)
    for name in names:
        if hasattr(model.get_submodule(name), "lora"):
            raise UserError(f"{name} has adapters or edits beside it, which would be lost; quantise first, then load them")
    text_rows = text_rows_of(model)
    for name in names:  # one at a time: each weight is freed before the next is quantised
        linear: Any = model.get_submodule(name)
        new: Any
        shape, bias, valued = (linear.in_features, linear.out_features), linear.bias is not None, not linear.weight.is_meta
        if form == "nf4":
            options: Any = {"quant_type": "nf4", "compress_statistics": True}
            new = bnb.nn.Linear4bit(*shape, bias, compute_dtype=dtype, **options, device="meta")
            # In eval mode bitsandbytes would repack the weight for a faster, rounded product, which has no backward pass.
            new.support_avx512bf16_for_cpu = False
            if valued:
                new.weight = bnb.nn.Params4bit(linear.weight.detach(), requires_grad=False, **options)
        else:
            new = bnb.nn.Linear8bitLt(*shape, bias, has_fp16_weights=False, threshold=0.0, device="meta")
            if valued:
                half = linear.weight.detach().to(torch.float16)
                new.weight = bnb.nn.Int8Params(half, requires_grad=False, has_fp16_weights=False)
        new.bias = linear.bias
        if valued:
            new.plain_checksum = checksum_of(name, linear.weight, text_rows)
            new = new.to(linear.weight.device)
        if share is not None:
            packed = share(_packed(new) if valued else None)
            if not valued and packed is not None:
                _unpack(new, packed)
        if form == "nf4" and new.weight.quant_state is not None:
            new.weight.quant_state.dtype = dtype
        model.set_submodule(name, new)
    return names


def _packed(linear: Any) -> Packed:
    weight = linear.weight
    more = {"SCB": weight.SCB} if hasattr(weight, "SCB") else weight.quant_state.as_dict(packed=True)
    return linear.plain_checksum, {"weight": weight.detach().cpu().as_subclass(Tensor), **{k: t.cpu() for k, t in more.items()}}


def _unpack(linear: Any, packed: Packed) -> None:
    """Gives a linear of the meta device a weight that another process has packed."""
    import bitsandbytes as bnb

    linear.plain_checksum, parts = packed
    weight = parts.pop("weight")
    if "SCB" in parts:
        linear.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False, CB=weight, SCB=parts["SCB"])
    else:
        linear.weight = bnb.nn.Params4bit.from_prequantized(weight, parts, device=weight.device, module=linear)


def chosen_linears(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The linears that are to be quantised, in the model's order; UserError as `quantize` raises it."""
    linears = linears_of(model)
    chosen = match_names(patterns, list(linears), "lora.quantize_targets", noun="linear")
    for name in chosen:
        if is_quantized(linears[name]):
            raise UserError(f"{name} is quantised already")
    return [name for name in linears if name in chosen]


def base_checksum(model: nn.Module, names: Iterable[str]) -> int:
    """Checksum of the weights that adapters of these linears belong to (`omni.lora.peft.AdapterWeights.base`)."""
    linears = linears_of(model)
    return checksum(names, lambda name: base_weight(linears[name]), text_rows_of(model))


def base_weight(linear: nn.Module) -> Tensor | int:
    """The weight that adapters of a linear belong to; of a quantised one `checksum_of` the weight before, which is known
    unless another library quantised it."""
    known: int | None = getattr(linear, "plain_checksum", None)
    return known if known is not None else dense_weight(linear)


def has_weight(model: nn.Module, name: str, value: Tensor) -> bool:
    """Whether a linear's weight (by the weight's name) equals `value`, or starts with it (text rows may have been added)."""
    target = name.removesuffix(".weight")
    linear = linears_of(model).get(target)
    if linear is None:
        return False
    own = base_weight(linear)
    if isinstance(own, int):
        return value.shape[1:] == (linear.in_features,) and checksum_of(target, value, text_rows_of(model)) == own
    return own.shape[1:] == value.shape[1:] and torch.equal(own[: len(value)].cpu().to(value.dtype), value)
