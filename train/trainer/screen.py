"""What the screen shows of a run: lines at its start, before anything takes long, of its steps, and at its end."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning_fabric import Fabric
from torch import nn

from train.checkpoint.checkpointer import Checkpointer
from train.checkpoint.retention import newest
from train.checkpoint.state import Position
from train.config.run import FitConfig
from train.console.progress import TrainProgress, counted, duration, percent
from train.data.batching.loader import Trained
from train.distributed.sharding import ParallelDims
from train.objective.objective import Objective
from train.trainer.initial_model import ADAPTER
from train.trainer.logs import METRICS
from train.trainer.metrics import StepMetrics, base_rate
from train.trainer.parts import Figures, Observer, Outcome
from train.trainer.usage import FOLDER, NONE, named_steps
from train.trainer.validation import HeldOut

Say = Callable[[str], None]
PACED = (4, 12)
"""Steps of a start whose pace says when an open-ended run is expected to end."""
FIRST_STEPS, LINE_SECONDS = 3, 30.0
"""Steps of a start that the screen shows whatever `log.every` is, and the most seconds between two of its later lines."""


def start_lines(config: FitConfig, fabric: Fabric, profile: range = NONE) -> list[str]:
    """Lines with the model, folder, budget and devices of a run, and what is profiled, known before anything is loaded."""
    budget, cuda = config.budget, fabric.device.type == "cuda"
    limits = [counted(budget.steps, "step")] if budget.steps is not None else []
    limits += [f"{budget.minutes:g} minute{'s' * (budget.minutes != 1)}"] if budget.minutes is not None else []
    length = f"for {' or '.join(limits)}"
    if budget.until is not None:
        length = f"until {config.checkpoint.metric} {budget.until:g}, {length} at most"
    start = config.model.init_from or config.model.preset
    device = torch.cuda.get_device_name(fabric.device) if cuda else fabric.device.type
    strategy = f", {config.fabric.strategy}" if fabric.world_size > 1 and config.fabric.strategy != "auto" else ""
    dims = ParallelDims.of(config.fabric, fabric.world_size)
    strategy += f" in {dims.replicas} replicas" * (dims.replicas > 1 and config.fabric.strategy == "fsdp")
    strategy += f", tensor_parallel {dims.tensor}" * (dims.tensor > 1)
    lines = [
        f"training {start} in {config.run_folder} {length}",
        _line("devices", f"{fabric.world_size} x {device}{strategy}, {config.fabric.precision}"),
    ]
    if profile:
        traces = Path(config.run_folder) / FOLDER
        lines.append(_line("profile", f"{named_steps(profile)}: a trace for ui.perfetto.dev and a table, in {traces}"))
    return lines


def parameters_line(label: str, parameters: Iterable[nn.Parameter]) -> str:
    """A line with the number of values of some parameters, under a label."""
    return _line(label, f"{sum(p.numel() for p in parameters):,} parameters")


def data_lines(sources: Sequence[tuple[str, int | None]], draws: int | None, held: HeldOut) -> list[str]:
    """Lines with a run's sources and their numbers of rows (None for rows that are made), the most draws, and held-out rows."""
    sizes = [f"{name}: {'made while training' if size is None else f'{size:,} rows'}" for name, size in sources]
    sizes += [f"{draws:,} draws at most, by max_epochs and max_rows"] if draws is not None else []
    lines = [_line("" if i else "data", text) for i, text in enumerate(sizes)]
    if held.rows:
        lines.append(_line("held out", f"{held.rows:,} rows, {held.examples:,} examples"))
    for why in list(held.broken.values())[:1]:
        lines.append(_line("broken", f"{len(held.broken):,} of the held-out rows, which are left out (the first: {why})"))
    return lines


def ready_lines(config: FitConfig, objective: nn.Module, position: Position, saved: Path | None) -> list[str]:
    """Lines known once everything is built: trainable parameters, and the checkpoint that the run continues."""
    lines = [parameters_line("trainable", [p for p in objective.parameters() if p.requires_grad])]
    if saved is not None:
        lines.append(_line("resumed", f"from {saved}, after {position.step} steps and {duration(position.seconds)}"))
    if config.objective.align_first and isinstance(objective, Objective) and not objective.align_first:
        lines.append("objective.align_first is passed over: nothing that hears is trained (trainable)")
    if config.fabric.compile:
        lines.append("compiling the decoder's blocks: the first steps take longer")
    return lines


@dataclass
class StepLines(Observer):
    """Shows a run on the screen: rows of the log, and lines between them, of which the log knows nothing.

    Attributes:
        idle: makes the context in which the device has nothing queued.
        shown, paced: seconds of the run at the last line, and after the first of the `PACED` steps.
    """

    checkpointer: Checkpointer
    meter: StepMetrics
    idle: Callable[[], AbstractContextManager[None]]
    progress: TrainProgress

    def __post_init__(self) -> None:
        self.first_step = self.checkpointer.position.step + 1
        self.shown = self.paced = self.checkpointer.position.seconds

    def on_log(self, step: int, figures: Figures) -> None:
        self._say_expectation(step)
        self._show(step, figures)

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        if figures:
            return
        self._say_expectation(step)
        seconds = self.checkpointer.position.seconds
        is_due = step < self.first_step + FIRST_STEPS or seconds - self.shown >= LINE_SECONDS
        if is_due and self.checkpointer.config.log.progress != "off":  # in all processes alike
            with self.idle():
                self._show(step, {**self.meter.figures(shown=True), "lr": base_rate(self.checkpointer.training.optimizer)})
        else:
            self.progress.show(step, self.checkpointer.used, seconds)

    def _say_expectation(self, step: int) -> None:
        """Says after the first steps of an open-ended run, from their pace, when it should end."""
        config, seconds = self.checkpointer.config, self.checkpointer.position.seconds
        budget, metric = config.budget, config.checkpoint.metric
        first, last = (self.first_step + n - 1 for n in PACED)
        if step == first:
            self.paced = seconds
        elif step == last and budget.until is not None and budget.expected is not None and budget.steps is None:
            pace, most = (seconds - self.paced) / (last - first), budget.minutes or math.inf
            minutes, goal = (budget.expected - step) * pace / 60, f"{metric} {budget.until}"
            end = f"{goal} in about {minutes:.0f} min" if minutes <= most else f"{most:g} min, before {goal}"
            because = f"as a step takes {pace:.2g} s here and some {budget.expected} are needed"
            self.progress.say(f"expected: {end}, {because}")

    def _show(self, step: int, figures: Figures) -> None:
        self.shown = self.checkpointer.position.seconds
        self.progress.row(step, self.checkpointer.used, self.shown, figures)

    def close(self) -> None:
        self.progress.close()


def end_lines(position: Position, outcome: Outcome, folder: Path, adapted: bool, trained: Mapping[str, Trained]) -> list[str]:
    """Lines that say how a start of a run ended, where its files are, and what was trained of each source."""
    saved, name = outcome.checkpoint, signal.Signals(outcome.signal).name if outcome.signal else ""
    if name:
        return [f"stopped by {name} after step {outcome.step}; the state is in {saved}: run the same command to go on"]
    lines = [f"finished: {position.step} steps in {duration(position.seconds)}"]
    whole = sum(of.tokens for of in trained.values())
    for i, (source, of) in enumerate(trained.items()):
        amounts = f"{of.rows:,} rows, {duration(of.milliseconds / 1000)} of sound, {of.tokens:,} tokens"
        lines.append(_line("" if i else "trained", f"{source}: {amounts} ({percent(of.tokens / max(1, whole))})"))
    adapter = folder / ADAPTER if adapted else None
    files = {"model": outcome.model if outcome.model != adapter else None, "adapter": adapter}
    files |= {"logs": folder / METRICS, "checkpoint": saved, **{file.stem: file for file in sorted(folder.glob("*.png"))}}
    return lines + [_line(label, str(file)) for label, file in files.items() if file is not None and file.exists()]


def lost_line(step: int, parent: Path) -> str:
    """A line that says how many steps a run loses that ends after `step`, with its checkpoints in `parent`."""
    saved = newest(parent)
    lost = step - (int(saved.name[5:]) if saved is not None else 0)
    if not lost:
        return f"ended: nothing is lost of {counted(step, 'step')}" + (f", which {saved} has" if saved is not None else "")
    return f"ended without saving: {counted(lost, 'step')} since {saved or 'the start'} {'is' if lost == 1 else 'are'} lost"


def _line(label: str, text: str) -> str:
    return f"  {label:<12}{text}"
