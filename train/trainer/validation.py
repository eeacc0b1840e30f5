"""Validates a run when that is due, keeps its best state and exports its model. Held-out rows give answers to their questions,
and a loss, teacher-forced, over all processes, in nats per target. Balance methods of two levels judge a step by batches of
such rows, too.

The rows of the loss are those that are asked, each once for every task that its source trains (or its own), without
augmentation, packed into micro-batches as training packs them. Batch i belongs to process i mod world, so that a batch is the
same on any number of processes; all run equally many forwards, some over an empty batch, because FSDP2 gathers weights in each.

Dimensions: T tasks, K streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from omni.audio.io import SAMPLE_RATE
from omni.checkpoint.tensors import NotFinite
from omni.errors import UserError
from omni.generate.speech_lm import SpeechLM, checked
from omni.lora.peft import merged_state
from omni.model.speech_model import SpeechModel
from omni.tasks import find_task
from train.checkpoint.checkpointer import Checkpointer
from train.config.run import FitConfig
from train.config.sections import ValidationConfig
from train.data.batching.batch import Batch, assemble
from train.data.batching.examples import Example, ExampleMaker, Prepared, TooLong
from train.data.batching.loader import choose
from train.data.build import held_out_rows
from train.data.config import PackingConfig, SourceConfig
from train.data.rows.row import Row
from train.distributed.fabric import reshard, with_whole_state
from train.distributed.process_group import ProcessGroup
from train.eval.held_out import Item, evaluate, spoken, write_answers
from train.objective.objective import HEADS, Losses, Objective
from train.optim.optimizer import Average, due
from train.trainer.initial_model import Initial
from train.trainer.metrics import FIXED, LAST, loss_sums, mean_losses
from train.trainer.parts import Figures, Parts
from train.trainer.plots import SPECTROGRAMS, spectrograms
from train.trainer.signals import BrokenOff, Stop, break_off

ANSWERS = "validation"
OUTER_ROWS = 64
"""Held-out rows by which the balance methods of two levels judge a step."""


@dataclass
class Validator:
    """Evaluates a second model over the given weights, so that generation does not affect the model in training, whose adapters
    are merged. Weights that have its device and dtype are not copied; answers and a spectrogram go to the run's folder."""

    initial: Initial
    items: Sequence[Item]
    config: ValidationConfig
    device: torch.device
    dtype: torch.dtype
    folder: Path

    def __call__(self, weights: dict[str, Tensor], step: int) -> dict[str, float]:
        """Evaluates weights after `step` steps; returns the figures. `BrokenOff` where the run is asked to stop."""
        trained, codec = self.initial.model, self.initial.codec
        model = SpeechModel.from_state(trained.config, merged_state(trained, weights)).to(self.device, self.dtype).eval()
        lm = SpeechLM(model, self.initial.tokenizer, codec, graph=False)  # a graph of each shape would serve once
        with torch.no_grad(), checked(break_off):
            report = evaluate(lm, self.items, **self.config.answering)
        write_answers(report, self.folder / ANSWERS / f"step-{step:08d}.jsonl")
        if codec is not None and (chosen := spoken(report, codec)) is not None:
            judged, sound = chosen
            question = (judged.item.question, SAMPLE_RATE) if isinstance(judged.item.question, Tensor) else None
            answer, texts = (sound, codec.sample_rate), (judged.item.question_text, judged.answer.text)
            spectrograms(self.folder / SPECTROGRAMS, question, answer, *texts)
        return report.figures


def answering_type(device: str, precision: str) -> torch.dtype:
    """The precision in which a run's model answers on a kind of device."""
    half = precision == "bf16-true" or (precision == "bf16-mixed" and device != "cpu")
    return torch.bfloat16 if half else torch.float32


@dataclass(frozen=True)
class HeldOut:
    """The batches that a held-out loss is measured on.

    Attributes:
        batches: of this process; equally many in every process.
        rows, examples: over all processes.
        broken: why rows were left out, by their names.
    """

    batches: Sequence[Batch] = ()
    rows: int = 0
    examples: int = 0
    broken: Mapping[str, str] = field(default_factory=dict)


def build_held_out(
    rows_by_source: Sequence[tuple[SourceConfig, Sequence[Row]]],
    packing: PackingConfig,
    maker: ExampleMaker,
    rank: int,
    world: int,
    broken: dict[str, str] | None = None,
) -> HeldOut:
    """Makes the held-out batches of process `rank` of `world`, of the rows of each source, as `held_out_by_source` gives
    them; none where no example can be made. Examples that no packed row can hold are left out. `broken` receives why rows
    are; where it is None a broken row is a UserError."""
    plain_maker = ExampleMaker(maker.model, maker.tokenizer, maker.codec, maker.alignment, heard_only=maker.heard_only)
    plain_maker.frames = maker.frames
    layout, bands, encoded = maker.model.layout, maker.input_size, maker.frames is not None
    own: list[Batch] = []
    made, examples = 0, 0
    packed = _packed(_examples(rows_by_source, packing, plain_maker, broken), packing)
    while rows := list(islice(packed, packing.rows)):
        examples += sum(map(len, rows))
        if made % world == rank:
            own.append(assemble([*rows, *[[]] * (packing.rows - len(rows))], packing.length, layout, bands, {}, encoded))
        made += 1
    if len(own) < -(-made // world):
        own.append(assemble([[]] * packing.rows, packing.length, layout, bands, {}, encoded))
    return HeldOut(own, sum(len(rows) for _, rows in rows_by_source), examples, broken or {})


def _examples(
    rows_by_source: Sequence[tuple[SourceConfig, Sequence[Row]]],
    packing: PackingConfig,
    maker: ExampleMaker,
    broken: dict[str, str] | None,
) -> Iterator[Example]:
    """Each row once for every task that its source trains, or for its own."""
    for number, (source, row) in enumerate((source, row) for source, rows in rows_by_source for row in rows):
        prepared = Prepared(row, (0, number))  # its sound is read once for all tasks
        for name in [row.task] if row.task else [name for name, weight in source.tasks.items() if weight > 0]:
            if any(turn.lacks(find_task(name), maker.heard_only) for turn in row.turns):
                continue
            try:
                example = maker.make(number, prepared, [name] * len(row.turns))
            except TooLong:
                continue
            except UserError as error:
                if broken is None:
                    raise
                broken.setdefault(row.where, str(error))
                continue
            if len(example.columns) <= packing.length:
                yield example


def _packed(examples: Iterator[Example], packing: PackingConfig) -> Iterator[list[Example]]:
    """Examples packed into rows."""
    waiting = list[Example]()
    for example in chain(examples, [None]):
        if example is not None:
            waiting.append(example)
        while waiting and (example is None or len(waiting) >= packing.buffer):
            chosen = set(choose([len(example.columns) for example in waiting], packing.length))
            yield [example for i, example in enumerate(waiting) if i in chosen]
            waiting = [example for i, example in enumerate(waiting) if i not in chosen]


@torch.no_grad()
def held_out_loss(
    module: Callable[..., Losses],
    objective: nn.Module,
    batches: Sequence[Any],
    tasks: Sequence[str],
    streams: Sequence[str],
    device: torch.device,
    average: Average | None,
    group: ProcessGroup,
) -> dict[str, float]:
    """Mean losses of held-out batches: `loss` over all targets, `loss/text`, `loss/audio`, and by stream and task, of the
    average where there is one; `loss/shuffled` of written answers to spoken questions, each heard as another's. All processes
    must call it, with equally many batches. `BrokenOff`: a signal has come, to a run of one process; others would have to
    agree to that."""
    totals, shuffled = torch.zeros(2, FIXED + 2 * len(tasks) * len(streams) + LAST, dtype=torch.float64)
    ones = torch.ones(len(streams) + HEADS, dtype=torch.long, device=device)
    real = objective if isinstance(objective, Objective) and not objective.config.encoder_alone else None
    known = [] if real is None else [find_task(name) for name in tasks]
    heard = [i for i, task in enumerate(known) if task.question == "audio" and not task.audio]
    asked = sum(bool(torch.isin(batch.task, torch.tensor(heard)).any()) for batch in batches) if heard else 0
    shuffles = float(group.sum(torch.tensor([float(asked)]))) > 0  # in all processes alike
    with evaluated(objective, average):
        for batch in batches:
            if group.world == 1:
                break_off()
            totals += loss_sums(module(batch.to(device), ones, 1.0)).to("cpu", torch.float64)
            if real is not None and shuffles:
                other = exchanged(batch, real.model.config.projector.stack)
                shuffled += loss_sums(module(other.to(device), ones, 1.0)).to("cpu", torch.float64) * (len(batch.frames) > 1)
    totals, shuffled = group.sum(totals), group.sum(shuffled)
    sums, counts = totals[FIXED:-LAST].view(2, -1).sum(1).tolist()
    figures = {**({"loss": sums / counts} if counts > 0 else {}), **mean_losses(totals, tasks, streams)}
    sums, counts = shuffled[FIXED:-LAST].view(2, len(tasks), -1)[:, heard].sum((1, 2)).tolist()
    return figures | ({"loss/shuffled": sums / counts} if counts > 0 else {})


def exchanged(batch: Batch, stack: int) -> Batch:
    """A batch in which each clip's features are those of the clip next in length: repeated, or the last, to as many."""
    counts = [-(-n // stack) for n in batch.frames]
    starts, order = [0, *accumulate(counts)], sorted(range(len(counts)), key=counts.__getitem__)
    moved = [torch.zeros(0)] * len(counts)
    for i, other in zip(order, [*order[1:], *order[:1]], strict=True):
        moved[i] = torch.arange(starts[other], starts[other + 1])[-counts[i] :].repeat(counts[i])[: counts[i]]
    index = torch.cat([*moved, torch.tensor([-1])]).long()  # a column without a feature has the index -1
    return replace(batch, feature_index=index[batch.feature_index])


@contextmanager
def evaluated(objective: nn.Module, average: Average | None) -> Iterator[None]:
    """A context in which the objective is in eval mode with the running average as weights; restores all after, to the bit."""
    modes = [(part, part.training) for part in objective.modules()]
    kept: dict[str, Tensor] = {}
    _exchange(average, kept)
    objective.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        _exchange(average, kept)
        reshard(objective)


def _exchange(average: Average | None, kept: dict[str, Tensor]) -> None:
    """Swaps weights and average in place, which takes one parameter's memory; a second call swaps them back.

    Where their types differ, the average is left alone, and the weights are kept beside.
    """
    if average is None:
        return
    for name, p in average.params.items():
        value, before = average.values[name], p.detach().clone()
        p.copy_(kept.get(name, value))
        if p.dtype == value.dtype:
            value.copy_(before)
        else:
            kept[name] = before


def check_metric(config: FitConfig, held_out: HeldOut) -> None:
    """Refuses (UserError) to keep the checkpoints of the lowest loss where no held-out example measures it."""
    keep = config.checkpoint
    measured = held_out.examples or not config.validation.questions
    if keep.keep_best > 0 and keep.metric.partition("/")[0] == "loss" and not measured:
        raise UserError(
            f"checkpoint.metric is {keep.metric}, but none of the {held_out.rows} held-out rows makes an example: they lack "
            "what the tasks of their sources need, are broken, or do not fit into packing.length; complete them, name another "
            "metric, or set checkpoint.keep_best to 0"
        )


def outer_batches(config: FitConfig, names: Sequence[str], maker: ExampleMaker) -> Sequence[Batch]:
    """Makes batches of held-out rows in all balanced tasks, without augmentation; the same ones every time. Where streams
    are balanced there are no `names`: tasks are those of the first source. UserError where the data have no held-out rows."""
    assert config.balance is not None
    data, first = config.data, config.data.sources[0]
    try:
        rows = held_out_rows(data, maker.codec, OUTER_ROWS)
    except UserError as error:
        raise UserError(f"balance.method {config.balance.method} judges by held-out rows: {error}") from error
    source = replace(first, tasks=dict.fromkeys(names, 1.0) or first.tasks)
    return build_held_out([(source, rows)], data.packing, maker, 0, 1, {}).batches


@dataclass(eq=False)
class RunValidation:
    """Measures the model of a run, or its running average: the loss of held-out rows in all processes, and answers in the
    first one, for which the others wait. Keeps the best, and exports the last.

    Attributes:
        module: the objective as Fabric wraps it.
    """

    parts: Parts
    checkpointer: Checkpointer
    module: Any

    def if_due(self, stop: Stop) -> int:
        """Runs a validation where that is due; the signal that has broken it off, or 0."""
        plan, position = self.checkpointer.config.validation, self.checkpointer.position
        if due(position.step, position.seconds, *position.validated, plan.every_steps, plan.every_minutes):
            return self.run(stop)
        return 0

    def run(self, stop: Stop) -> int:
        """Runs a validation; one that a signal breaks off is not made. Returns that signal's number, or 0."""
        position, stop.phase = self.checkpointer.position, "validation"
        try:
            figures = self._measure(position.step)
            if figures is None:
                return self.checkpointer.group.broadcast(stop.number)
            position.validated = (position.step, position.seconds)
            if figures:
                position.figures = figures
                for observer in reversed(self.checkpointer.observers):
                    observer.on_validation(position.step, figures)
                self._keep_best(figures.get(self.checkpointer.config.checkpoint.metric))
        finally:
            stop.phase = "step"
        return 0

    def _keep_best(self, value: float | None) -> None:
        """Saves a state that is among the best; UserError, after that, where the metric that says so is not measured."""
        saver, keep = self.checkpointer, self.checkpointer.config.checkpoint
        useless = value is None and keep.keep_best > 0 and saver.used < 1
        if saver.is_best(value) or useless:
            saver.save(beside=not useless and saver.used < 1)
        saver.add_figures()
        if useless:
            raise UserError(
                f"checkpoint.metric {keep.metric!r} is not measured here; the validation's figures are "
                f"{', '.join(saver.position.figures)}: name one of them, or set checkpoint.keep_best to 0; the state is in "
                f"{saver.saved}"
            )

    def export(self) -> Path | None:
        """Writes the finished model; says where it is."""
        parts, average = self.parts, self.checkpointer.training.average

        def work(weights: Mapping[str, Tensor]) -> Path | None:
            try:
                return parts.export(weights) if parts.export is not None else None
            except NotFinite as error:
                raise self.checkpointer.refused(error) from error

        exported = with_whole_state(
            parts.objective, average.values if average is not None else None, self.checkpointer.group, work, "model."
        )
        if self.checkpointer.uploads is not None and exported is not None:
            self.checkpointer.uploads.add(exported)
        return exported

    def _measure(self, step: int) -> dict[str, float] | None:
        """The figures after so many steps, none where nothing is measured; None where a signal has broken it off, which of
        several processes only the answers heed."""
        parts, saver, group = self.parts, self.checkpointer, self.checkpointer.group
        average, device = saver.training.average, saver.fabric.device
        asked = group.broadcast(parts.validate is not None)
        if not asked and not parts.held_out:
            return {}
        group.phase = "held-out loss"
        try:
            tools = parts.tasks, parts.streams, device, average, group
            losses = held_out_loss(self.module, parts.objective, parts.held_out, *tools)
        except BrokenOff:
            return None
        group.phase = "validation answers"
        answering = device if saver.config.lora is None else "cpu"  # adapters are merged into copies
        figures: Figures | None = {}

        def answers(weights: Mapping[str, Tensor]) -> Figures | None:
            with suppress(BrokenOff):
                return parts.validate(dict(weights), step) if parts.validate is not None else {}
            return None

        if asked:
            values = average.values if average is not None else None
            figures = group.broadcast(with_whole_state(parts.objective, values, group, answers, "model.", answering))
        return None if figures is None else group.broadcast({**figures, **losses})
