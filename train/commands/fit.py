"""`omni-train fit` and `omni-train demo`: read the command line, with errors before anything heavy is imported, and train."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
from collections.abc import Sequence
from traceback import clear_frames

from omni.errors import UserError, in_one_line
from omni.utils.process import importing
from train.config.parse import in_folder, read_run, read_with_options
from train.config.run import FitConfig

PR_SET_PDEATHSIG = 1
"""Of Linux's `prctl`: the signal that a process gets when its parent has ended."""


def main(argv: Sequence[str]) -> int:
    """Runs the command, given a YAML file and dotted overrides; returns 0, or 128 + the signal that stopped the run."""
    _end_with_parent()
    read, name, options = read_with_options(argv, {"dry_run": bool, "profile": str})
    config = in_folder(read, name)
    with importing():
        from train.commands.dry_run import dry_run
        from train.distributed.fabric import leave
        from train.trainer.build import run_fit, with_alignment
        from train.trainer.usage import OutOfMemory

    dry, outcome = bool(options.get("dry_run")), None
    try:
        if dry:
            dry_run(config, options.get("profile"))
        else:
            outcome = run_fit(config, profile=options.get("profile"))
    except OutOfMemory as error:
        for raised in (error, error.__cause__):
            clear_frames(raised.__traceback__ if raised is not None else None)  # which hold all that the run held
        lines = saving_lines(with_alignment(config), error.in_step, error.limit)
        raise OutOfMemory("\n  ".join([str(error), *lines])) from error
    finally:
        leave()
    return 128 + outcome.signal if outcome is not None and outcome.signal else 0


def saving_lines(config: FitConfig, in_step: bool, limit: float = math.inf) -> list[str]:
    """Lines with the three keys that save most memory, in a step or in all, by the plan's arithmetic; one line where none saves
    enough.

    Args:
        limit: bytes that the run may fill.
    """
    from train.checkpoint.retention import differences
    from train.config.run import plain_config
    from train.plan.plan import GIB, savings_here

    try:
        savings = savings_here(config, in_step, limit)
    except Exception as error:  # arithmetic is not worth an error in place of the one that it is for
        return [f"`omni-train plan` counts what saves memory, but failed here ({in_one_line(error)})"]
    if savings and all(saving.total > limit for saving in savings):
        best = min(savings, key=lambda saving: saving.total)
        needs = f"{(best.total + best.saved) / GIB:.2f} GiB are needed, and {best.total / GIB:.2f} GiB with {best.keys}"
        return [f"no key alone saves enough, by the plan's arithmetic: {needs}; set some together, and ask `omni-train plan`"]
    lines = []
    for saving in savings[:3]:
        new = differences(plain_config(config), plain_config(saving.config))
        price = saving.price + ("; a resume refuses the change" if new else "")
        lines.append(f"{saving.keys}  saves {saving.saved / GIB:.2f} GiB ({price})")
    return ["what saves memory, by the plan's arithmetic:", *(f"  {line}" for line in lines)] if lines else []


def _end_with_parent() -> None:
    """Makes a process that Fabric has started end when the first one has, for any reason; torchrun and srun end theirs."""
    started = {"TORCHELASTIC_RUN_ID", "SLURM_NTASKS"}.isdisjoint(os.environ) and int(os.environ.get("LOCAL_RANK") or 0) > 0
    if started and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


DEMO_HELP = """usage: omni-train demo [CONFIG.yaml] [--any.key value ...]

Train the small model of the recipe nano on two CPU cores until it answers 95 % of held-out questions, for 25 minutes at most,
examine it in voices that it has never heard, and talk to it. The model, a question, its answer, pictures and report.md are in
runs/nano afterwards. Keys of the configuration are overridden as for `fit` (`omni-train fit --help` lists them).

  --budget.minutes M    train for M minutes at most, as does DEMO_MINUTES=M in the environment"""


def run_demo(argv: Sequence[str]) -> int:
    """Runs the command; arguments are those of `fit`, with the recipe `nano` as the default."""
    if any(argument in ("-h", "--help") for argument in argv):
        print(DEMO_HELP)
        return 0
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # two threads wait for each other idly where other programs are busy too
    words = list(argv)
    most = os.environ.get("DEMO_MINUTES")
    own = words if words and not words[0].startswith("-") else ["nano", *words]
    config = read_run([own[0], *([f"--budget.minutes={most}"] if most else []), *own[1:]])
    demonstrate = next((s.made.demonstrate for s in config.data.sources if hasattr(s.made, "demonstrate")), None)
    if demonstrate is None:
        raise UserError("the demonstration asks about spoken digits, but no source of the configuration is of that kind")
    with importing():
        import train.trainer.build  # noqa: F401

    return int(demonstrate(config))
