"""`omni-train fit`: read the command line, with errors before anything heavy is imported, and train."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
from collections.abc import Sequence
from traceback import clear_frames

from omni.errors import in_one_line
from omni.process import importing, say
from train.config.parse import in_folder, read_with_options
from train.config.run import FitConfig

DESCRIBED = {
    "dry_run": "check everything, build the model and one batch, and describe them",
    "profile": "trace these steps, such as 10:15",
}

PR_SET_PDEATHSIG = 1
"""Of Linux's `prctl`: the signal that a process gets when its parent has ended."""


def main(argv: Sequence[str]) -> int:
    """Runs the command, given a YAML file and dotted overrides; returns 0, or 128 + the signal that stopped the run."""
    _end_with_parent()
    read, name, options = read_with_options(argv, {"dry_run": bool, "profile": str}, described=DESCRIBED)
    config = in_folder(read, name)
    with importing():
        from train.distributed.fabric import leave
        from train.trainer.build import run_fit, with_alignment
        from train.trainer.dry_run import dry_run
        from train.trainer.usage import OutOfMemory

    if options.get("dry_run"):
        print(dry_run(config, options.get("profile")))
        return 0
    try:
        outcome = run_fit(config, profile=options.get("profile"))
    except OutOfMemory as error:
        for one in (error, error.__cause__):
            clear_frames(one.__traceback__ if one is not None else None)  # which hold all that the run held
        say("estimating which keys save how much memory; Ctrl-C leaves that out")
        lines = saving_lines(with_alignment(config), error.in_step, error.limit)
        raise OutOfMemory("\n  ".join([str(error), *lines])) from error
    finally:
        leave()
    return 128 + outcome.signal if outcome is not None and outcome.signal else 0


def saving_lines(config: FitConfig, in_step: bool, limit: float = math.inf) -> list[str]:
    """Lines with the keys that save memory, in a step or in all, the most first, by the plan's estimate; one line where none
    saves enough.

    Args:
        limit: bytes that the run may fill.
    """
    from train.checkpoint.config_diff import differences
    from train.config.run import plain_config
    from train.plan.plan import GIB, savings_here

    try:
        found = savings_here(config, in_step)
    except KeyboardInterrupt:
        return ["`omni-train plan` estimates what saves memory"]
    except Exception as error:  # an estimate is not worth an error in place of the one that it is for
        return [f"`omni-train plan` estimates what saves memory, but failed here ({in_one_line(error)})"]
    if found and all(one.total > limit for one in found):
        best = min(found, key=lambda one: one.total)
        needs = f"{(best.total + best.saved) / GIB:.2f} GiB are needed, and {best.total / GIB:.2f} GiB with {best.knob.keys}"
        return [f"no key alone saves enough, by the plan's estimate: {needs}; `omni-train plan` tries several together"]
    lines = []
    for one in found:
        keys = one.knob.keys.replace("--devices", "--fabric.devices")
        new = differences(plain_config(config), plain_config(one.knob.config))
        price = one.knob.price + ("; a resume refuses the change" if new else "")
        lines.append(f"{keys}  saves {one.saved / GIB:.2f} GiB ({price})")
    return ["what saves memory, by the plan's estimate:", *(f"  {line}" for line in lines)] if lines else []


def _end_with_parent() -> None:
    """Makes a process that Fabric has started end when the first one has, for any reason; torchrun and srun end theirs."""
    started = {"TORCHELASTIC_RUN_ID", "SLURM_NTASKS"}.isdisjoint(os.environ) and int(os.environ.get("LOCAL_RANK") or 0) > 0
    if started and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
