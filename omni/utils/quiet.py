"""Silences single lines of libraries that are of no use to whoever runs this package; all else that they say is kept."""

from __future__ import annotations

import logging

LINES = {
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community",
    "torch.utils.cpp_extension": "No CUDA runtime is found, using CUDA_HOME",
}
"""How the line begins, by the name of its logger."""


def _is_kept(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(LINES[record.name])


def silence(logger: str) -> None:
    """Drops the line of this logger; to be called before the library is imported."""
    logging.getLogger(logger).addFilter(_is_kept)


def silence_bitsandbytes() -> None:
    """Drops bitsandbytes' line about a kernel for CPUs that no run uses; to be called before it is imported."""
    silence("bitsandbytes.backends.cpu.ops")
