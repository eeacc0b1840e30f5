"""One thread for every test: small tensors gain nothing from more, and sums are then the same in every process."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in what the tests start

import torch

torch.set_num_threads(1)
