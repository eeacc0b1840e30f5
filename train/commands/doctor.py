"""`omni-train doctor CONFIG`: runs a few steps of a run under the graph guard's full trace (docs/gradients.md)."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omni.utils.process import end_by_signal, importing
from train.config.parse import read_with_options
from train.config.run import FitConfig
from train.console.command import check_least

if TYPE_CHECKING:
    from omni.diagnostics import Finding

HELP = """usage: omni-train doctor CONFIG.yaml [--steps N] [--any.key value ...]

Take a few steps of a run in one process, trace every operation, and name what is wrong with graphs, gradients and targets, with
line, cause and remedy (docs/gradients.md). Where the recipe aligns first (objective.align_first), steps of both phases are
taken. Nothing of the run itself is written. Keys of the configuration are overridden as for `fit`. The exit code is 1 where
something was found.

  --steps N       steps to trace, of each phase (default 2)"""
STEPS = 2


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 1 where something was found."""
    if any(argument in ("-h", "--help") for argument in argv):
        print(HELP)
        return 0
    config, name, options = read_with_options(argv, {"steps": int}, partial(check_least, steps=1), "doctor")
    steps = options.get("steps", STEPS)
    findings = examine(config, steps)
    if not findings:
        phases = " of each phase" if config.objective.align_first else ""
        print(f"{name}: {steps} {'step' if steps == 1 else 'steps'}{phases}, every operation traced: nothing found")
        return 0
    print("\n".join(map(str, findings)))
    return 1


def examine(config: FitConfig, steps: int = STEPS) -> list[Finding]:
    """Runs a few steps of each phase of a run under the guard, in one process; returns the findings.

    A step that fails ends in a UserError with the diagnosis, a signal in SystemExit after the step in hand.
    """
    with importing():
        from train.distributed.fabric import build_fabric
        from train.trainer.build import prepare, with_alignment
        from train.trainer.preflight import check_start
        from train.trainer.signals import Stop
        from train.trainer.step import GuardedStep

    with tempfile.TemporaryDirectory() as folder:
        alone = replace(
            config,
            run_folder=folder,
            guard=False,
            resume="restart",
            fabric=replace(config.fabric, devices=1, num_nodes=1, strategy="auto"),
            data=replace(config.data, workers=0),
            validation=replace(config.validation, questions=0),
            log=replace(config.log, progress="off", wandb=None),
        )
        check_start(with_alignment(alone))
        loop = prepare(alone, build_fabric(alone.fabric), Path(folder))
        take = GuardedStep(loop.step, loop.objective, loop.optimizer, loop.parts.idle, seen=1, trace=True)
        try:
            with Stop() as stop:
                feed = loop.feed(stop)
                phases = (0.0, 1.0) if config.objective.align_first else (1.0,)
                planned = [progress for progress in phases for _ in range(steps)]
                for progress in planned:
                    take(feed.next(), progress)
                    if stop.number:
                        break
        finally:
            for observer in loop.observers:
                observer.close()
    if stop.number:
        name = signal.Signals(stop.number).name
        end_by_signal(stop.number, f"stopped by {name} after step {take.number} of {len(planned)}; nothing is reported")
    return take.guard.findings
