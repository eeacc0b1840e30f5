"""Resolves names of devices and number formats; peak FLOP/s of devices (for model FLOPs utilisation, MFU); synchronising.

Names can be checked without importing torch.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import threading
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni.errors import UserError

if TYPE_CHECKING:
    import torch

DTYPES = {
    "float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "fp16": "float16",
}  # fmt: skip
"""Number formats of weights, by every name that is accepted."""

PEAK_FLOPS = {
    "H200": 989e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H800": 989e12,
    "H800 PCIe": 756e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "GB200": 2500e12,
    "A100": 312e12,
    "A800": 312e12,
    "A10G": 70e12,
    "A40": 149.7e12,
    "A6000": 154.8e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 6000 Ada": 364e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "V100-PCIE": 112e12,
    "V100S": 130e12,
    "T4": 65e12,
}
"""Dense half-precision tensor-core FLOP/s, summed in fp32, by words of the device's name (the makers' data sheets)."""

_OTHERS = r"Ti|SUPER|D|Laptop|Max-Q"  # words after a name that make it that of another device


def check_device(name: object) -> None:
    """UserError for a string that names a device on no machine."""
    if not re.fullmatch(r"auto|(cpu|cuda|mps)(:(0|[1-9]\d{0,2}))?", str(name)):
        raise UserError(f"device {str(name)!r} is unknown; use auto, cpu, cuda, cuda:1 or mps")


def check_dtype(name: object) -> None:
    """UserError for an unknown number format; None and `auto` mean the stored one."""
    if name not in (None, "auto") and str(name).removeprefix("torch.") not in DTYPES:
        raise UserError(f"dtype {str(name)!r} is unknown; use auto, float32, bfloat16 or float16")


QUANTIZED = ("int8",)  # formats of weights in fewer bits (`omni.cpu.int8`)


def check_quantize(name: object, device: str = "cpu") -> None:
    """UserError for an unknown format of weights in fewer bits, or one that a type of device does not take; None means none."""
    if name is not None and name not in QUANTIZED:
        raise UserError(f"quantize {name!r} is unknown; use {' or '.join(QUANTIZED)}, or leave it out")
    if name is not None and device.partition(":")[0] not in ("cpu", "auto"):
        raise UserError(f"quantize {name!r} is for device cpu, not for {device}; leave one of them out")


KERNELS = ("fast", "reference")
"""Forms of products and steps: the fastest by the rule of `omni.cpu`, or `F.linear` and modules alone."""


def check_kernels(name: object) -> None:
    """UserError for a value of `kernels` that is none of `KERNELS`."""
    if name not in KERNELS:
        raise UserError(f"kernels {name!r} is unknown; use {' or '.join(KERNELS)}")


def find_device(name: str | int | torch.device, quantize: str | None = None) -> torch.device:
    """The device called `name` (a number counts CUDA devices); `auto` is a GPU where there is one, and the CPU for weights in
    fewer bits (`quantize`). UserError where this machine does not have it."""
    import torch

    device_name = f"cuda:{name}" if isinstance(name, int) else str(name)
    check_device(device_name)
    if device_name == "auto":
        if quantize is not None:
            return torch.device("cpu")
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(device_name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {str(name)!r}: there are {torch.cuda.device_count()} CUDA devices here; use 'cpu'")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("device 'mps': there is no such device here; use 'cpu'")
    return device


def find_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """The number format called `name`; None for None and `auto` (keep the stored one). UserError where it is unknown."""
    import torch

    check_dtype(name)
    if name is None or name == "auto":
        return None
    dtype: torch.dtype = getattr(torch, DTYPES[str(name).removeprefix("torch.")])
    return dtype


def cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor from the host to a device, through pinned memory, so that the host does not wait for a CUDA device."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


_CAPTURES: defaultdict[int, threading.RLock] = defaultdict(threading.RLock)


def capture_lock(device: torch.device) -> threading.RLock:
    """Lock of a CUDA device, held while a graph is captured there and by who synchronizes the device: a capture in one thread
    fails if another one waits for the whole device."""
    import torch

    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    return _CAPTURES[index or 0]


def synchronize(device: torch.device) -> None:
    """Wait for all queued work of a CUDA device, so that times read afterwards are right; does nothing on other devices."""
    if device.type == "cuda":
        import torch

        with capture_lock(device):
            torch.cuda.synchronize(device)


def finish_queued(device: torch.device) -> None:
    """Wait for the work that this thread has queued on a CUDA device, and for nothing else; does nothing on other devices."""
    if device.type == "cuda":
        import torch

        with torch.cuda.device(device):
            event = torch.cuda.Event()
            event.record()
            event.synchronize()


@cache
def _libgomp() -> ctypes.CDLL | None:
    """The OpenMP runtime that comes with PyTorch, where it is GNU's."""
    import torch

    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    try:
        return ctypes.CDLL(str(libraries[0])) if libraries else None
    except OSError:
        return None


def release_threads() -> None:
    """End the threads with which this one has computed on the CPU; its next computation starts new ones. Once a process has
    more threads of libgomp than there are cores, each of them sleeps where it would wait a moment for the others: a step of a
    0.5B model in int8 then takes 46 ms instead of 36 on two cores of an AMD EPYC. So whoever leaves the computing to another
    thread ends its own (`omp_pause_resource_all`, OpenMP 5.0)."""
    pause = getattr(_libgomp(), "omp_pause_resource_all", None)
    if pause is not None:
        pause(1)  # omp_pause_soft


def in_threads(function: int, shared: ctypes.Structure, threads: int) -> None:
    """Call a C function in each of so many of the threads with which PyTorch computes, and wait for all; without the lock.

    Where their runtime is not GNU's, which has `GOMP_parallel`, the caller's thread alone calls it.

    Args:
        function: address of a `void (*)(void *)`.
        shared: argument of all of them.
    """
    address, parallel = ctypes.addressof(shared), getattr(_libgomp(), "GOMP_parallel", None) if threads > 1 else None
    if parallel is not None:
        parallel(ctypes.c_void_p(function), ctypes.c_void_p(address), ctypes.c_uint(threads), ctypes.c_uint(0))
    else:
        _c_function(function)(address)


_c_function = cache(ctypes.CFUNCTYPE(None, ctypes.c_void_p))


def multiplies_bf16(device: str = "auto") -> bool:
    """Whether a kind of device (`cpu`, `cuda`, `gpu`, `auto`; False for others) has native bf16 products, faster than fp32. Of
    CPUs, those with AMX have, and AMD's with AVX512-BF16. Intel's AVX512-BF16 does as many products a cycle as its fp32: a
    product of 2048 x 1024 x 1024 took 26 ms in bf16 and 14 ms in fp32 on a Xeon without AMX."""
    import torch

    if device in ("cuda", "gpu") or (device == "auto" and torch.cuda.is_available()):
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    features = cpu_features() if device in ("auto", "cpu") else {}
    fast = features.get("avx512_bf16", False) and "Intel" not in features.get("cpu_name", "")
    return bool(fast or features.get("amx_bf16", False))


def cpu_features() -> Mapping[str, Any]:
    """The processor's name and instructions (`avx2`, `avx512_vnni`, `amx_bf16` ...); empty where PyTorch does not say."""
    import torch

    return torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}


def machine() -> dict[str, str]:
    """The processor and PyTorch that measurements belong to."""
    import torch

    name = cpu_features().get("cpu_name") or platform.processor() or platform.machine()
    return {"processor": str(name), "torch": torch.__version__}


def peak_flops(device: torch.device) -> float | None:
    """Peak FLOP/s of a device in half precision, by the longest name in `PEAK_FLOPS` that its driver's has; None where it is
    not known (every CPU), and for a slice of a GPU (MIG)."""
    if device.type != "cuda":
        return None
    import torch

    name = torch.cuda.get_device_name(device)
    if re.search(r"\bMIG\b", name):
        return None
    parts = [part for part in PEAK_FLOPS if re.search(rf"\b{part}\b(?! (?:{_OTHERS})\b)", name)]
    return PEAK_FLOPS[max(parts, key=len)] if parts else None
