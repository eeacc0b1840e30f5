"""Settings under which a GPU adds in the same order every time (`fabric.deterministic`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """A context in which PyTorch takes deterministic kernels only, where `on`; what was set before is restored.

    An operation without such a kernel is an error: flash and memory-efficient attention take their deterministic backward
    pass only if it is (`warn_only` off; aten/src/ATen/native/transformers/cuda/attention_backward.cu). To be entered before
    CUDA starts, since cuBLAS reads its workspace's size once.
    """
    if not on:
        yield
        return
    cudnn: Any = torch.backends.cudnn
    memory: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode()
    kept = cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory, os.environ.get(WORKSPACE)
    os.environ[WORKSPACE] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    memory.fill_uninitialized_memory = False  # nothing reads it, and filling costs a pass over every buffer
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory, workspace = kept
        os.environ.pop(WORKSPACE, None)
        if workspace is not None:
            os.environ[WORKSPACE] = workspace
