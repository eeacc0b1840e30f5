"""`python -m train doctor CONFIG`: a few steps of a run under the graph guard's full trace.

Says what is wrong with graphs and gradients, with line, cause and remedy (docs/gradients.md), which streams and tasks got no
target although these steps had them or the mixture should have drawn them, and whose ends are masked (train/trainer/guard.py).
Nothing of the run itself is written.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from omni.errors import UserError
from omni.process import importing
from train.config.parse import read_fit_config
from train.config.run import FitConfig

if TYPE_CHECKING:
    from omni.diagnostics import Finding

STEPS = 2


def main(argv: Sequence[str]) -> int:
    """The command. Returns 1 where something was found."""
    rest, steps = list(argv), STEPS
    if "--steps" in rest:
        at = rest.index("--steps")
        given = rest[at + 1] if at + 1 < len(rest) else ""
        if not given.isdigit() or int(given) < 1:
            raise UserError(f"--steps is {given!r}; give a number of at least 1")
        steps = int(given)
        del rest[at : at + 2]
    config, name = read_fit_config(rest)
    with importing():
        from omni.diagnostics import report

    found = examine(config, steps)
    if not found:
        print(f"{name}: {steps} steps, every operation traced: nothing found")
        return 0
    print(report(found))
    return 1


def examine(config: FitConfig, steps: int = STEPS) -> list[Finding]:
    """What a few steps of a run show, in one process.

    Raises:
        UserError: a step failed; with the diagnosis.
    """
    with importing():
        from train.distributed.fabric import build_fabric
        from train.trainer.build import prepare, with_alignment
        from train.trainer.guard import targets_of
        from train.trainer.preflight import check_start
        from train.trainer.signals import Stop

    with tempfile.TemporaryDirectory() as folder:
        alone = replace(
            config,
            run_folder=folder,
            guard=True,
            resume="restart",
            fabric=replace(config.fabric, devices=1, num_nodes=1, strategy="auto"),
            data=replace(config.data, workers=0),
            validation=replace(config.validation, questions=0),
            log=replace(config.log, progress="off", wandb=None),
        )
        check_start(with_alignment(alone))
        loop = prepare(alone, build_fabric(alone.fabric), Path(folder))
        assert loop.guard is not None
        loop.guard.targets = targets_of(loop.objective, config.data, seen=1)
        try:
            with Stop() as stop:
                feed = loop.feed(stop)
                for number in range(1, steps + 1):
                    loop.meter.start()
                    step = feed.next()
                    loop.guard.step(number, step, 1.0, loop.train, trace=True)
                    loop.meter.pause()
        finally:
            if loop.logs is not None:
                loop.logs.close()
    return loop.guard.guard.findings
