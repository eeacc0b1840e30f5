"""`omni-train plan`: read the command line, with errors before anything heavy is imported, and print the plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omni.checkpoint.places import check_folder
from omni.process import importing
from train.config.parse import read_with_options
from train.plan.options import check_options

HELP = """usage: omni-train plan CONFIG.yaml [--any.key value ...] [options]

Parameters, memory on each device, pace, and the knob to turn when the run does not fit. Nothing of the model is read or built;
keys of the configuration are overridden as for `fit`.

  --devices N     plan for N devices (default: as configured, or this machine's)
  --gpu_gib G     plan for GPUs of G GiB: does it fit? (with --fabric.accelerator mps a Mac's)
  --gpu NAME      plan for this GPU's speed, such as H100, to estimate hours
  --mfu SHARE     of the GPU's peak that the run reaches (default 0.35)
  --try           take two steps of the worst batch here, and show what was measured beside the estimate
  --json          one JSON object instead of tables"""
_OPTIONS: dict[str, type] = {"devices": int, "gpu_gib": float, "gpu": str, "mfu": float, "try": bool, "json": bool}


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, or 1 where the run does not fit."""
    if any(argument in ("-h", "--help") for argument in argv):
        print(HELP)
        return 0
    config, name, options = read_with_options(argv, _OPTIONS, _check)
    options["attempted"] = options.pop("try", False)
    if config.model.init_from is not None:
        check_folder(Path(config.model.init_from))
    with importing():
        from train.plan.plan import make_plan, plain
        from train.plan.report import show

    plan = make_plan(config, **{key: value for key, value in options.items() if key != "json"})
    if options.get("json"):
        print(json.dumps(plain(plan)))
    else:
        show(plan, name)
    return 1 if plan.fits is False else 0


def _check(given: dict[str, Any]) -> None:
    check_options(**{key: given[key] for key in ("devices", "gpu_gib", "mfu") if key in given})
