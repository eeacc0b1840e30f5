"""What serving takes on a CPU, asked here: a product, and the rule for it, by the processor's features, number format and rows.

All products of a step of 0.5B in ms, for one row, two and eight, two threads (EPYC: of AMD's third and fifth generation):

| processor | number format | `F.linear`, oneDNN | the weight first | compiled |
|---|---|---|---|---|
| EPYC with AVX512-VNNI, no AMX | float32 (whole step) | 147, 245 | 85, 83 | |
| | int8 | 17, 24, 27 | | |
| Xeon with AMX | float32 | 96, 95, 207 | 95, 200, 188 | 146, 154, 212 |
| | bfloat16 | 79, 70, 88 | 76, 52, 83 | 127, 118, 379 |
| | int8 | 72, 72, 32 | | 58, 59, 69 |

So few float32 rows have the weight first where the processor is not Intel's, for which MKL is slow; int8 is oneDNN's where that
is exact (VNNI), and else compiled (`omni.cpu.int8`); all else is `F.linear`'s. With AMX bfloat16 has 0.5B's first sound after
2.9 s, and float32 after 6.2 (one thread).

A step of one column is compiled (`omni.cpu.step`) in int8 and, of a small model, in float32. Steps of 1, 4, 8 and 64 rows on
that Xeon: `nano` in float32, one thread, takes 0.6, 0.8, 1.2 and 9.3 ms instead of 2.0, 2.3, 2.8 and 9.3; 0.5B in int8, two
threads, 56, 48, 59 and 167 instead of 78, 59, 76 and 168. Prompts and encoders are the modules' alone.

For inference only: where autograd records, and without `use_fast`, `F.linear` is called. Results agree to rounding (1e-5
relative in float32).
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni.cpu.int8 import Int8Embedding, Int8Linear, Normed, product_of
from omni.cpu.int8 import constant as constant
from omni.cpu.int8 import is_int8 as is_int8
from omni.model.linears import fused_product
from omni.utils.hardware import cpu_features
from omni.utils.private import has_forward_hooks

ROWS = 8
"""Most rows of a product that has the weight first."""

SMALL = 1 << 20
"""Numbers in the weights of a block up to which a model is small."""


def takes_bf16(model: nn.Module) -> bool:
    """Whether a model that is stored in float32 is faster in bfloat16: of a processor with AMX (all products of 0.5B 0.6 to 0.8
    of the time, prompts far less), unless it is small."""
    linears = [part for part in model.modules() if type(part) is nn.Linear and part.weight.dtype == torch.float32]
    return bool(cpu_features().get("amx_bf16")) and max((part.weight.numel() for part in linears), default=0) > SMALL


def use_fast(model: nn.Module, fast: bool = True) -> None:
    """Let the decoder of a model that serves take the forms of this rule; else `F.linear` and modules alone."""
    for part in model.modules():
        if hasattr(type(part), "fast"):
            part.fast = fast  # type: ignore[assignment]


@cache
def weight_first() -> bool:
    """Whether few float32 rows are multiplied with the weight first: MKL's other way is slow on processors not of Intel."""
    features = cpu_features()
    return features.get("architecture") == "x86_64" and "Intel" not in str(features.get("cpu_name", "Intel"))


def product(fast: bool, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear(x, weight, bias)` of x [..., K], in the form that is fastest by the rule where `fast`."""
    count = x.numel() // x.shape[-1] if fast else 0
    if not 0 < count <= ROWS or not weight_first() or not x.dtype == weight.dtype == torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    rows = F.pad(x.reshape(count, -1), (0, 0, 0, max(2 - count, 0)))
    out = torch.mm(weight, rows.t())[:, :count].t().contiguous()  # in another order the next product takes a slow way
    return (out if bias is None else out + bias).view(*x.shape[:-1], -1)


def linear(fast: bool, part: nn.Module, x: Any) -> Tensor:
    """`part(x)`, or the products of x and a table's rows; by `product` where a linear is plain and nothing acts beside it."""
    if isinstance(part, nn.Embedding):
        return part.head()(x) if isinstance(part, Int8Embedding) else product(fast, x, part.weight)
    if not fast or type(part) is not nn.Linear or has_forward_hooks(part):
        return part(x)  # type: ignore[no-any-return]
    return product(fast, x, part.weight, part.bias)


def normed(x: Tensor, norm: nn.RMSNorm, *linears: nn.Module) -> Tensor | Normed:
    """The output of a norm for linears that are in int8 all, and for others."""
    if any(type(part) is not Int8Linear for part in linears) or has_forward_hooks(norm):
        out: Tensor = norm(x)
        return out
    return Normed(x, norm)


def together(x: Tensor | Normed, *linears: nn.Linear) -> Tensor | None:
    """Outputs of linears of one input [..., K], side by side, of one product, in int8 or fused; None where there is none.

    What acts beside a linear in int8 (hooks) is given its own output, so that the product of a row does not depend on it.
    """
    parts = [part for part in linears if type(part) is Int8Linear]
    if len(parts) < len(linears):
        return fused_product(cast(Tensor, x), *linears)
    out = product_of(x, *parts)
    if any(map(has_forward_hooks, parts)):
        whole = x.norm(x.x) if isinstance(x, Normed) else x
        each = out.split([part.out_features for part in parts], -1)
        out = torch.cat([part(whole, product=own) for part, own in zip(parts, each, strict=True)], -1)
    return out
