"""Commands on a run's configuration: `omni-train fit`, `demo`, `plan` and `doctor`, read before anything heavy is imported."""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

from omni.checkpoint.places import check_folder
from omni.errors import UserError, in_one_line
from omni.utils.process import end_by_signal, importing, say
from train.config.parse import in_folder, read_run, read_with_options
from train.config.run import FitConfig
from train.console.command import asks_for_help, check_least
from train.console.progress import counted

if TYPE_CHECKING:
    from omni.diagnostics import Finding

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
    if asks_for_help(argv, DEMO_HELP):
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


PLAN_HELP = """usage: omni-train plan CONFIG.yaml [--any.key value ...] [options]

Parameters, memory on each device, pace, and the keys to turn when the run does not fit, by arithmetic: nothing of the model is
read or built. Keys of the configuration are overridden as for `fit`, whose --dry_run measures two steps.

  --devices N     plan for N devices (default: as configured, or this machine's)
  --gpu_gib G     plan for GPUs of G GiB: does it fit? (with --fabric.accelerator mps a Mac's)
  --gpu NAME      plan for this GPU's speed, such as H100, to estimate hours
  --mfu SHARE     of the GPU's peak that the run reaches (default 0.35)
  --json          one JSON object instead of tables

Exit code 1, with a line that says why: the run does not fit, or `fit` would refuse it. What this machine lacks for a run of
another one (--devices, --gpu_gib, --gpu, an accelerator that is not here) is a note."""


def run_plan(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, or 1 (with a line that says why) where `fit` would refuse the run, or it does not fit."""
    if asks_for_help(argv, PLAN_HELP):
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


DOCTOR_HELP = """usage: omni-train doctor CONFIG.yaml [--steps N] [--any.key value ...]

Take a few steps of a run in one process, trace every operation, and name what is wrong with graphs, gradients and targets, with
line, cause and remedy (docs/gradients.md). Where the recipe aligns first (objective.align_first), steps of both phases are
taken. Nothing of the run itself is written. Keys of the configuration are overridden as for `fit`. The exit code is 1 where
something was found.

  --steps N       steps to trace, of each phase (default 2)"""


def run_doctor(argv: Sequence[str]) -> int:
    """Runs the command; returns 1 where something was found."""
    if asks_for_help(argv, DOCTOR_HELP):
        return 0
    config, name, options = read_with_options(argv, {"steps": int}, partial(check_least, steps=1), "doctor")
    steps, phases = options.get("steps", 2), " of each phase" if config.objective.align_first else ""
    findings = examine(config, steps)
    nothing = f"{name}: {counted(steps, 'step')}{phases}, every operation traced: nothing found"
    print("\n".join(map(str, findings)) or nothing)
    return 1 if findings else 0


def examine(config: FitConfig, steps: int) -> list[Finding]:
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
        parts = loop.validation.parts
        take = GuardedStep(loop.step, parts.objective, loop.optimizer, parts.idle, seen=1, trace=True)
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
