"""Dtypes in which a run stores its weights and computes its products, by `fabric.precision`."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from lightning_fabric.plugins import HalfPrecision
from torch import nn

from omni.lora.attach import adapted

MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def product_type(precision: str, adapters: bool) -> torch.dtype | None:
    """Dtype of products under autocast; None without autocast, where weights are multiplied in their own dtype.

    Args:
        adapters: LoRA adapters are trained beside a frozen base.
    """
    return torch.bfloat16 if adapters and precision == "bf16-true" else MIXED.get(precision)


def quantized_type(precision: str) -> torch.dtype:
    """Dtype in which weights of 4 bits are multiplied."""
    return torch.bfloat16 if precision.startswith("bf16") else torch.float32


class AdapterPrecision(HalfPrecision):
    """`bf16-true` that also suits runs with adapters: the base is stored in bf16, the trainable parameters in fp32.

    bf16 has 8 bits of precision: an update of 2.5e-5 is lost in every value from 2^-7 on. PEFT keeps adapters in fp32 likewise
    (`autocast_adapter_dtype`). Trainable parameters are cast for each product, by autocast.
    """

    device = "cpu"
    """Device type of autocast."""
    _adapters = False

    def __init__(self) -> None:
        super().__init__("bf16-true")

    def convert_module(self, module: nn.Module) -> nn.Module:
        self._adapters = bool(adapted(module))
        if not self._adapters:
            return super().convert_module(module)
        for part in module.modules():
            for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                if tensor.is_floating_point():
                    full = tensor.requires_grad or isinstance(part, nn.LayerNorm)  # in bf16, it refuses fp32 inputs on the CPU
                    tensor.data = tensor.data.to(torch.float32 if full else torch.bfloat16)
        return module

    def forward_context(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device, torch.bfloat16) if self._adapters else super().forward_context()
