"""Traces some steps of a run with `torch.profiler` (`omni-train fit FILE --profile 10:15`)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

from omni.errors import UserError, in_one_line
from omni.files import replacing
from omni.utils.hardware import synchronize
from train.config.sections import BudgetConfig
from train.trainer.parts import Observer

FOLDER = "profile"
TOP = 25
"""Rows of the table."""
NONE = range(0)


def step_range(text: str, budget: BudgetConfig) -> range:
    """The steps of a run that `FIRST:LAST` names; UserError for anything else, or where they lie beyond the budget."""
    named = re.fullmatch(r"([0-9]+):([0-9]+)", text) if isinstance(text, str) else None
    way = "give the first and the last step, such as 10:15"
    if named is None:
        raise UserError(f"profile is {text!r}; {way}")
    first, last = int(named[1]), int(named[2])
    if not 1 <= first <= last:
        why = "steps are counted from 1" if first < 1 else "the first comes after the last"
        raise UserError(f"profile is {text}, but {why}; {way}")
    if budget.steps is not None and last > budget.steps:
        raise UserError(f"profile is {text}, but budget.steps is {budget.steps}; name steps of the run")
    return range(first, last + 1)


class StepProfiler(Observer):
    """Profiles the steps of a range (counted from 1), in the first process, and leaves a trace and a table of them, named after
    the steps.

    Args:
        first: this start's first step.
        folder: of the run.
    """

    def __init__(self, steps: range, first: int, folder: Path, device: torch.device, say: Callable[[str], None]) -> None:
        left = range(max(first, steps.start), steps.stop)
        if len(left) < len(steps):
            message = f"only {named_steps(left)} can be profiled" if left else f"{named_steps(steps)} cannot be profiled"
            say(f"this start begins at step {first}: {message}")
        self.steps, self.folder, self.device, self.say = left, folder / FOLDER, device, say
        self.taken: list[int] = []
        self.profile: Any = None
        self.label: Any = None
        self.since = self.seconds = 0.0

    def on_step_begin(self, step: int) -> None:
        """Starts the profile where this is the first of its steps."""
        if step not in self.steps:
            return
        if self.profile is None:
            cuda = self.device.type == "cuda"
            os.environ.setdefault("KINETO_LOG_LEVEL", "4" if cuda else "6")  # else the library prints what it does
            activities = [torch.profiler.ProfilerActivity.CPU, *[torch.profiler.ProfilerActivity.CUDA] * cuda]
            self.profile = torch.profiler.profile(activities=activities)
            self.profile.start()
            self.since = time.perf_counter()
        self.label = torch.profiler.record_function(f"ProfilerStep#{step}")
        self.label.__enter__()

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        if self.profile is not None:
            self._unlabel()
            self.taken.append(step)
            if step == self.steps[-1]:
                self.on_steps_end()

    def on_steps_end(self) -> None:
        """Writes what there is; says where there is nothing, or no room for it, and the run goes on."""
        profile = self.profile
        self.close()
        if self.steps and not self.taken:
            self.say(f"nothing is profiled: the run ended before step {self.steps[0]}")
        if profile is None or not self.taken:
            return
        try:
            self._write(profile)
        except (OSError, RuntimeError, UserError) as error:
            self.say(f"the profile cannot be written to {self.folder}: {in_one_line(error)}")

    def close(self) -> None:
        """Stops the profile, where one has started."""
        profile, self.profile = self.profile, None
        if profile is not None:
            self._unlabel()
            synchronize(self.device)
            self.seconds = time.perf_counter() - self.since
            profile.stop()

    def _unlabel(self) -> None:
        label, self.label = self.label, None
        if label is not None:
            label.__exit__(None, None, None)

    def _write(self, profile: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"steps-{self.taken[0]}-{self.taken[-1]}"
        trace, table = self.folder / f"{name}.json.gz", self.folder / f"{name}.txt"
        with replacing(trace) as part:
            whole = part.with_name(f"{part.name}.json.gz")  # by which ending it is packed
            try:
                profile.export_chrome_trace(str(whole))
                whole.replace(part)
            finally:
                whole.unlink(missing_ok=True)
        events = profile.key_averages()
        own = [e.self_device_time_total for e in events if e.device_type != DeviceType.CPU and not e.is_user_annotation]
        title = f"{named_steps(self.taken)} took {self.seconds:.2f} s"
        if own:
            title += f", in which kernels ran for {sum(own) / 1e6:.2f} s"
        elif self.device.type == "cuda":
            title += "; the driver let no kernels be seen"
        by = "self_device_time_total" if own else "self_cpu_time_total"
        table.write_text(f"{title}\n\n{events.table(sort_by=by, row_limit=TOP)}\n", encoding="utf-8")
        self.say(f"profile: {title}; what took it is in {table}, the trace in {trace}")


def named_steps(steps: Sequence[int]) -> str:
    """`step 3`, or `steps 10 to 15`."""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
