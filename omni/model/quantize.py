"""Holds weights of linears in 4 or 8 bits, by bitsandbytes (Dettmers et al. 2022 and 2023).

Only frozen weights are quantised: adapters beside them are trained (QLoRA).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from omni.errors import UserError
from omni.model.linears import checksum_of, text_rows_of
from omni.utils.patterns import match_names
from omni.utils.quiet import silence_bitsandbytes

Kind = Literal["nf4", "int8"]


def is_quantized(linear: nn.Module) -> bool:
    """Whether a linear's weight is not a plain matrix: bitsandbytes' linears, and others that have `dequantize()`."""
    return type(linear).__name__ in ("Linear4bit", "Linear8bitLt") or callable(getattr(linear, "dequantize", None))


def numels(model: nn.Module) -> dict[str, int]:
    """Number of elements of each parameter by name; of a quantised weight the number of elements that are packed into it."""
    found = {name: p.numel() for name, p in model.named_parameters()}
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear) and is_quantized(part) and f"{name}.weight" in found:
            found[f"{name}.weight"] = part.in_features * part.out_features
    return found


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


def plain_checksum(linear: nn.Module) -> int | None:
    """`checksum_of` the weight before `quantize`; None where the weight is plain, or was quantised by another library."""
    return getattr(linear, "plain_checksum", None)


Packed = tuple[int, dict[str, Tensor]]
"""Checksum of a weight before it was quantised, and bitsandbytes' parts of it by name: plain data."""


def quantize(
    model: nn.Module,
    kind: Kind,
    patterns: Sequence[str],
    dtype: torch.dtype = torch.float32,
    share: Callable[[Packed | None], Packed | None] | None = None,
) -> list[str]:
    """Quantise the weights of linears to 4 bits (nf4 with double quantisation) or 8, in place; outputs have the inputs' type.

    Args:
        patterns: names of the linears (`omni.utils.patterns`).
        dtype: type of the products of nf4, and of its dequantised weights; those of int8 follow the inputs.
        share: sends a value of the first of several processes to all of them: others need no weights to quantise, which may
            lie on the meta device.

    Returns:
        names of the linears that were quantised.

    Raises:
        UserError: an unknown kind, bitsandbytes is not there, a pattern matches no linear, or a linear is quantised already or
            has adapters or edits beside it (they are loaded afterwards).
    """
    if kind not in get_args(Kind):
        raise UserError(f"a weight is held as {' or '.join(get_args(Kind))}, not as {kind!r}")
    silence_bitsandbytes()
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
        if kind == "nf4":
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
        if kind == "nf4" and new.weight.quant_state is not None:
            new.weight.quant_state.dtype = dtype
        place, _, last = name.rpartition(".")
        setattr(model.get_submodule(place), last, new)
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
    linears = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    chosen = match_names(patterns, list(linears), "lora.quantize_targets", what="linear")
    for name in chosen:
        if is_quantized(linears[name]):
            raise UserError(f"{name} is quantised already")
    return [name for name in linears if name in chosen]
