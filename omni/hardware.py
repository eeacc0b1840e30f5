"""Which device and number format are meant, what a device could do at best (the other side of MFU, model FLOPs utilisation),
and waiting for it."""

from __future__ import annotations

import torch

from omni.errors import UserError

DTYPES = {
    "float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "fp16": torch.float16,
}  # fmt: skip
"""Number formats of weights by the names that people use."""

PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "A10G": 70e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "T4": 65e12,
}
"""Dense half-precision tensor-core FLOP/s by a part of the device's name (the makers' data sheets)."""


def find_device(name: str | int | torch.device) -> torch.device:
    """The device called `name` (a number counts CUDA devices); `auto` is a GPU where there is one. UserError where this machine
    does not have it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(f"cuda:{name}" if isinstance(name, int) else name)
    except (RuntimeError, TypeError) as error:
        raise UserError(f"device {str(name)!r} is unknown; use auto, cpu, cuda, cuda:1 or mps") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {str(name)!r}: there are {torch.cuda.device_count()} CUDA devices here; use 'cpu'")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("device 'mps': there is no such device here; use 'cpu'")
    if device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"device {str(name)!r} is not supported; use auto, cpu, cuda, cuda:1 or mps")
    return device


def find_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """The number format called `name`; None for None and `auto`, as the weights are stored. UserError where it is unknown."""
    if name is None or name == "auto":
        return None
    found = name if isinstance(name, torch.dtype) else DTYPES.get(str(name).removeprefix("torch."))
    if found not in DTYPES.values():
        raise UserError(f"dtype {str(name)!r} is unknown; use auto, float32, bfloat16 or float16")
    return found


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it, so that a clock read now is right; nothing but on CUDA."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def multiplies_bf16(kind: str = "auto") -> bool:
    """Whether a kind of device (`cpu`, `cuda`, `gpu`, `auto`; else no) multiplies bf16 by itself, hence faster than fp32.

    Of processors those with AMX, and AMD's with AVX512-BF16. Intel's AVX512-BF16 does as many products a cycle as its fp32: a
    product of 2048 x 1024 x 1024 took 26 ms in bf16 and 14 in fp32 on a Xeon without AMX.
    """
    if kind in ("cuda", "gpu") or (kind == "auto" and torch.cuda.is_available()):
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities() if kind in ("auto", "cpu") and hasattr(torch.cpu, "get_capabilities") else {}
    fast = capabilities.get("avx512_bf16", False) and "Intel" not in capabilities.get("cpu_name", "")
    return bool(fast or capabilities.get("amx_bf16", False))


def peak_flops(device: torch.device) -> float | None:
    """Peak FLOP/s of a device in half precision; None where it is not known (every CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
