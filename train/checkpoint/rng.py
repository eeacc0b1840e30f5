"""The random states of a process, as tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def seed_random(seed: int) -> None:
    """Seeds this process's random generators: PyTorch's, Python's and NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """States of this process's random generators, as tensors; that of a GPU where the run is on one."""
    _, words, _ = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words),
        "numpy": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy_position": torch.tensor(numpy_state["state"]["pos"]),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Sets the generators to what `random_state` gave, that of a GPU where the run is on one."""
    torch.set_rng_state(state["torch"])
    random.setstate((3, tuple(state["python"].tolist()), None))
    words = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, int(state["numpy_position"]), 0, 0.0))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
