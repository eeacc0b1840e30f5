"""`python -m train doctor CONFIG`: a few steps of a run under the graph guard's full trace.

Says what is wrong with graphs and gradients, with line, cause and remedy (docs/gradients.md), and which streams got no target
although a task of the mixture has them.
Nothing of the run itself is written.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from omni.diagnostics import Finding, check_targets, report
from omni.errors import UserError
from train.config import FitConfig
from train.fit import prepare
from train.parallel import build_fabric
from train.parse import read_fit_config
from train.plan.worst import tasks_of
from train.stop import Stop

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
        loop = prepare(alone, build_fabric(alone.fabric), Path(folder))
        assert loop.watch is not None
        seen = torch.zeros(len(loop.parts.streams) + 1)
        try:
            with Stop() as stop:
                feed = loop.feed(stop)
                for number in range(1, steps + 1):
                    loop.meter.start()
                    step = feed.next()
                    seen += step.denominators
                    loop.watch.step(number, step, 1.0, loop.train, trace=True)
                    loop.meter.pause()
        finally:
            if loop.logs is not None:
                loop.logs.close()
    model: Any = loop.objective.get_submodule("model")
    layout, tasks = model.layout, tasks_of(config.data)
    wanted = [k for k in range(len(layout)) if any(task.learnt(layout)[k] for task in tasks)]
    return [*loop.watch.guard.findings, *check_targets(seen[wanted].int(), [layout.names[k] for k in wanted])]
