"""Watched runs that fail, on two processes: `python -m tests.diagnostics.failing FOLDER`, as torchrun would start it.

The first process prints a JSON object: of each strategy and model what the run ended with.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from omni.errors import UserError
from tests.train.toys import ToyObjective, toy_config, toy_fit, toy_parts
from tests.train.trainer.test_guard import Keeping, Written
from train.config.sections import FabricConfig
from train.distributed.fabric import leave


def failure(folder: Path, strategy: str, kind: type[Written] | type[Keeping]) -> str:
    """The error that a run ends with."""
    torch.manual_seed(0)
    fabric = FabricConfig(accelerator="cpu", devices=2, strategy=strategy)  # type: ignore[arg-type]
    try:
        toy_fit(toy_config(folder, guard=True, fabric=fabric), toy_parts(objective=ToyObjective(kind())))
    except UserError as error:
        return str(error)
    return ""


def main() -> None:
    torch.set_num_threads(1)
    said = {
        f"{strategy} {kind.__name__}": failure(Path(sys.argv[1]) / f"{strategy}-{kind.__name__}", strategy, kind)
        for strategy in ("ddp", "fsdp")
        for kind in (Written, Keeping)
    }
    if os.environ["RANK"] == "0":
        print(json.dumps(said))
    leave()


if __name__ == "__main__":
    main()
