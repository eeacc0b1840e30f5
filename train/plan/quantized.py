"""Attaches a run's adapters for a plan; imitates the memory of bitsandbytes' linears and optimizer without bitsandbytes.

A quantised linear of n = in * out weights holds (read off bitsandbytes 0.50; Dettmers et al. 2023, section 3):

    nf4     n / 2 bytes; for every 64 weights a scale in 8 bits; for every 256 scales one in fp32, and the scales' mean;
            tables of the 16 values of a weight and the 256 of a scale
    int8    n bytes, and for every row [in] a scale in fp32

Its AdamW in 8 bits holds two bytes for every value of a parameter, and for every 256 values two scales in fp32; parameters of
fewer than 4,096 values have their state in fp32.

Besides, the whole matrix exists in the product's type during each forward and backward product. int8 keeps its inputs where
checkpointing does not drop them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni.lora.attach import add_adapter
from omni.model.quantize import Kind, chosen_linears, quantize
from train.config.sections import LoRASection, OptimizerConfig

BLOCK, BLOCKS = 64, 256
"""Weights to a scale, and scales to one of the second level."""

_SMALL = 4096
"""Parameters with fewer values have their optimizer state in fp32."""

QUANTISING_BYTES = {"nf4": 8, "int8": 11}
"""Bytes for each weight of a matrix while it is quantised on a CPU: its scaled copy and the codes, or rows in fp32 and fp16."""


def adapt(model: nn.Module, section: LoRASection | None, fake: bool, dtype: torch.dtype = torch.float32) -> None:
    """Attaches adapters as a run does, and quantises the base where asked.

    Args:
        fake: the model has no values: linears are replaced by `FakeLinear`, without bitsandbytes.
        dtype: type in which weights of 4 bits are multiplied.

    Raises:
        UserError: a pattern that matches no linear, or no bitsandbytes where it is needed.
    """
    if section is None:
        return
    if section.quantize is not None:
        (_replace_by_fake if fake else quantize)(model, section.quantize, section.quantize_targets, dtype)
    add_adapter(model, section)


def _replace_by_fake(model: nn.Module, kind: Kind, patterns: tuple[str, ...], dtype: torch.dtype) -> None:
    names = chosen_linears(model, patterns)
    for name in names:
        linear: Any = model.get_submodule(name)
        place, _, last = name.rpartition(".")
        setattr(model.get_submodule(place), last, FakeLinear(linear, kind, dtype))


def packed_bytes(model: nn.Module) -> int:
    """Bytes of the quantised weights of a model without values, scales and tables included."""
    held = {t for part in model.modules() if isinstance(part, FakeLinear) for t in (part.weight, *part.buffers(recurse=False))}
    return sum(t.numel() * t.element_size() for t in held)


def dense_bytes(model: nn.Module) -> int:
    """Bytes of a model without values, before its weights were quantised and adapters attached."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    own = {f"{name}." for name, part in model.named_modules() if isinstance(part, FakeLinear)}
    plain = [t for name, t in tensors if ".lora." not in name and f"{name.rpartition('.')[0]}." not in own]
    whole = sum(part.in_features * part.out_features for part in model.modules() if isinstance(part, FakeLinear))
    biases = sum(part.bias.numel() for part in model.modules() if isinstance(part, FakeLinear) and part.bias is not None)
    return sum(t.numel() * t.element_size() for t in plain) + 4 * (whole + biases)


class _FakeAdamW8bit(torch.optim.Optimizer):
    """Makes the state of bitsandbytes' AdamW in 8 bits, and updates nothing."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or self.state[p]:
                    continue
                small = p.numel() < _SMALL
                kind = torch.float32 if small else torch.uint8
                self.state[p] = {name: torch.empty_like(p, dtype=kind) for name in ("state1", "state2")}
                if not small:
                    blocks = -(-p.numel() // BLOCKS)
                    self.state[p] |= {name: p.new_empty(blocks, dtype=torch.float32) for name in ("absmax1", "absmax2")}


def fake_adamw_8bit(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Makes an optimizer with the state of bitsandbytes' AdamW in 8 bits, for tensors without values."""
    return _FakeAdamW8bit(groups, {"lr": config.lr})


class FakeLinear(nn.Linear):
    """A quantised linear of fake or meta tensors that replaces `linear`."""

    def __init__(self, linear: nn.Linear, kind: Kind, dtype: torch.dtype) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.kind, self.dtype, self.on_cuda, device = kind, dtype, False, linear.weight.device
        count = self.in_features * self.out_features

        def hold(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> None:
            self.register_buffer(name, torch.empty(shape, device=device, dtype=dtype))

        if kind == "nf4":
            blocks = -(-count // BLOCK)
            packed = torch.empty(-(-count // 2), 1, device=device, dtype=torch.uint8)
            hold("scales", blocks, dtype=torch.uint8)
            hold("scales_of_scales", -(-blocks // BLOCKS))
            hold("mean")
            hold("values", 16)
            hold("values_of_scales", 256)
        else:
            packed = torch.empty(self.out_features, self.in_features, device=device, dtype=torch.int8)
            hold("scales", self.out_features)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Makes the dense matrix [out, in] and, beside it for a moment, the first scales in fp32."""
        scales = torch.empty(self.scales.numel(), device=self.weight.device) if self.kind == "nf4" else None  # type: ignore[operator]
        dense = torch.empty(self.out_features, self.in_features, device=self.weight.device, dtype=dtype)
        del scales
        return dense

    def forward(self, x: Tensor) -> Tensor:
        given = x.to(self.dtype) if self.kind == "nf4" else x
        bias = None if self.bias is None else self.bias.to(given.dtype)
        return _Product.apply(given, self, bias).to(x.dtype)


class _Product(torch.autograd.Function):
    """Multiplies x W'; only int8 keeps x for the backward pass (`MatMul8bitFp`, `MatMul8bitLt`: in plain attributes)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: FakeLinear, bias: Tensor | None) -> Tensor:
        ctx.linear, ctx.dtype = linear, x.dtype
        ctx.x = x if linear.kind == "int8" else None
        if linear.kind == "int8" and linear.on_cuda:  # a product of integers
            codes = torch.empty_like(x.to(torch.float16), dtype=torch.int8)
            product = codes.new_empty(*x.shape[:-1], linear.out_features, dtype=torch.int32)
            return torch.empty_like(product, dtype=x.dtype)
        return F.linear(x, linear.dequantize(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None]:  # type: ignore[override]
        linear: FakeLinear = ctx.linear
        dense = linear.dequantize(ctx.dtype if linear.kind == "int8" else linear.dtype).to(grad.dtype)
        bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return grad @ dense, None, bias
