"""`omni-train plan`: read the command line, with errors before anything heavy is imported, and print the plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omni.checkpoint.places import check_folder
from omni.config import PRESETS
from omni.errors import UserError
from omni.process import importing, say
from train.config.parse import in_folder, read_with_options
from train.plan.options import check_options

HELP = """usage: omni-train plan CONFIG.yaml [--any.key value ...] [options]

Parameters, memory on each device, pace, and the knob to turn when the run does not fit. Nothing of the model is read or built;
keys of the configuration are overridden as for `fit`.

  --devices N     plan for N devices (default: as configured, or this machine's)
  --gpu_gib G     plan for GPUs of G GiB: does it fit? (with --fabric.accelerator mps a Mac's)
  --gpu NAME      plan for this GPU's speed, such as H100, to estimate hours
  --mfu SHARE     of the GPU's peak that the run reaches (default 0.35)
  --try           take two steps of the worst batch here, and show what was measured beside the estimate
  --json          one JSON object instead of tables

Exit code 1, with a line that says why: the run does not fit, or `fit` would refuse it. What this machine lacks for a run of
another one (--devices, --gpu_gib, --gpu, an accelerator that is not here) is a note."""
_OPTIONS: dict[str, type] = {"devices": int, "gpu_gib": float, "gpu": str, "mfu": float, "try": bool, "json": bool}


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, or 1 (with a line that says why) where `fit` would refuse the run, or it does not fit."""
    if any(argument in ("-h", "--help") for argument in argv):
        print(HELP)
        return 0
    config, name, options = read_with_options(argv, _OPTIONS, _check, "plan")
    options["attempted"] = options.pop("try", False)
    config = in_folder(config, name)
    with importing():
        from train.plan.pace import flops_of
        from train.plan.plan import make_plan, plain
        from train.plan.report import show

    flops_of(options.get("gpu", "H100"))  # refuses an unknown one
    try:
        if config.model.start is not None:
            _check_folder(Path(config.model.start))
        plan = make_plan(config, **{key: value for key, value in options.items() if key != "json"})
    except UserError as error:
        error.code = 1
        raise
    if options.get("json"):
        print(json.dumps(plain(plan)))
    else:
        show(plan, name)
    for problem in plan.problems:
        say(f"error: {problem}")
    return 1 if plan.problems else 0


def _check_folder(folder: Path) -> None:
    try:
        check_folder(folder)
    except UserError as error:
        raise UserError(
            f"{error}; to plan without it, give its shape: --model.init_from null --model.preset {' or '.join(PRESETS)}"
        ) from error


def _check(given: dict[str, Any]) -> None:
    check_options(**{key: given[key] for key in ("devices", "gpu_gib", "mfu") if key in given})
