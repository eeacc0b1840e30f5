"""`omni-train fit`: read the command line, with errors before anything heavy is imported, and train."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

from omni.process import importing
from train.config.parse import in_folder, read_with_options

PR_SET_PDEATHSIG = 1
"""Of Linux's `prctl`: the signal that a process gets when its parent has ended."""


def main(argv: Sequence[str]) -> int:
    """Runs the command, given a YAML file and dotted overrides; returns 0, or 128 + the signal that stopped the run."""
    _end_with_parent()
    read, name, options = read_with_options(argv, {"dry_run": bool})
    config = in_folder(read, name)
    with importing():
        from train.trainer.build import dry_run, fit

    if options:
        print(dry_run(config))
        return 0
    outcome = fit(config)
    return 128 + outcome.signal if outcome is not None and outcome.signal else 0


def _end_with_parent() -> None:
    """Makes a process that Fabric has started end when the first one has, for any reason; torchrun and srun end theirs."""
    started = {"TORCHELASTIC_RUN_ID", "SLURM_NTASKS"}.isdisjoint(os.environ) and int(os.environ.get("LOCAL_RANK") or 0) > 0
    if started and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
