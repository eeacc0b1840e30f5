"""A process that makes two collectives with itself, and prints the name of the last one."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from train.distributed.process_group import last_collective

os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
dist.init_process_group("gloo", rank=0, world_size=1)
dist.broadcast(torch.ones(3), 0)
dist.all_reduce(torch.ones(77))
print(last_collective())
