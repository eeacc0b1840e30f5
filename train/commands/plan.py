"""`omni-train plan`: read the command line, with errors before anything heavy is imported, and print the plan."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omni.checkpoint.places import check_folder
from omni.errors import UserError
from omni.utils.process import importing, say
from train.config.parse import in_folder, read_with_options

HELP = """usage: omni-train plan CONFIG.yaml [--any.key value ...] [options]

Parameters, memory on each device, pace, and the keys to turn when the run does not fit, by arithmetic: nothing of the model is
read or built. Keys of the configuration are overridden as for `fit`, whose --dry_run measures two steps.

  --devices N     plan for N devices (default: as configured, or this machine's)
  --gpu_gib G     plan for GPUs of G GiB: does it fit? (with --fabric.accelerator mps a Mac's)
  --gpu NAME      plan for this GPU's speed, such as H100, to estimate hours
  --mfu SHARE     of the GPU's peak that the run reaches (default 0.35)
  --json          one JSON object instead of tables

Exit code 1, with a line that says why: the run does not fit, or `fit` would refuse it. What this machine lacks for a run of
another one (--devices, --gpu_gib, --gpu, an accelerator that is not here) is a note."""


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, or 1 (with a line that says why) where `fit` would refuse the run, or it does not fit."""
    if any(argument in ("-h", "--help") for argument in argv):
        print(HELP)
        return 0
    kinds: dict[str, type] = {"devices": int, "gpu_gib": float, "gpu": str, "mfu": float, "json": bool}
    config, name, options = read_with_options(argv, kinds, check_options, "plan")
    config, as_json = in_folder(config, name), options.pop("json", False)
    with importing():
        from omni.utils.hardware import PEAK_FLOPS
        from train.plan.plan import make_plan, show

    if options.get("gpu", "H100") not in PEAK_FLOPS:
        raise UserError(f"--gpu {options['gpu']!r} is unknown; known: {', '.join(PEAK_FLOPS)}")
    try:
        if config.model.start is not None:
            check_folder(Path(config.model.start))
        plan = make_plan(config, **options)
    except UserError as error:
        error.code = 1
        raise
    print(json.dumps(plan.plain())) if as_json else show(plan, name)
    for problem in plan.problems:
        say(f"error: {problem}")
    return 1 if plan.problems else 0


def check_options(options: dict[str, Any]) -> None:
    """Refuses (UserError) numbers that no machine has."""
    for name, most in (("devices", math.inf), ("gpu_gib", math.inf), ("mfu", 1)):
        if not 0 < options.get(name, 1) <= most:
            raise UserError(f"--{name} is {options[name]:g}; it must be above 0{', and at most 1' * (most == 1)}")
