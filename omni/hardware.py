"""What a device could do at best (the other side of MFU, model FLOPs utilisation), and waiting for it."""

from __future__ import annotations

import torch

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


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it, so that a clock read now is right; nothing but on CUDA."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def multiplies_bf16(kind: str = "auto") -> bool:
    """Whether a kind of device (`cpu`, `cuda`, `gpu`, `auto`; else no) multiplies bf16 by itself, hence faster than fp32.

    Of processors those with AVX512-BF16 or AMX; a product then takes about a quarter of the time.
    """
    if kind in ("cuda", "gpu") or (kind == "auto" and torch.cuda.is_available()):
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities() if kind in ("auto", "cpu") and hasattr(torch.cpu, "get_capabilities") else {}
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def peak_flops(device: torch.device) -> float | None:
    """Peak FLOP/s of a device in half precision; None where it is not known (every CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
