"""Estimates the contents and work of a step, and the time of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omni.checkpoint.folder import CODEC, TOKENIZER
from omni.codec.base import AudioCodec
from omni.codec.registry import load_if_given
from omni.config import ModelConfig
from omni.errors import UserError
from omni.hardware import PEAK_FLOPS
from omni.model.speech_model import SpeechModel
from omni.stores.reading import local_path
from omni.text import Tokenizer
from train.config.run import FitConfig
from train.config.sections import ModelSection
from train.data.batching.batch import Batch
from train.data.batching.packer import PackerShard
from train.data.build import build_pipeline
from train.objective.flops import StepFlops
from train.objective.objective import targets
from train.plan.balanced import passes_of
from train.trainer.initial_model import choose_tokenizer


@dataclass(frozen=True)
class Pace:
    """Contents, work and time of one optimizer step over all devices, and of the run.

    Attributes:
        columns: columns of a step that hold examples; one is a token of the log's tokens/s, whatever its number of streams.
        targets: ids of a step that the losses of the streams are over.
        examples: of a step; None where the data could not be read.
        flops: of a step, with all passes of its balance.
        forwards, backwards: passes of a step, in those of one that is not balanced.
        seconds: of a step; None where they are neither measured nor can be estimated.
        steps, hours: until the budget is spent; None where that follows from `seconds`, which are not known.
        source: where columns and examples come from; `clock`: where seconds come from.
    """

    columns: float
    targets: float
    examples: float | None
    flops: float
    seconds: float | None
    steps: float | None
    hours: float | None
    source: str
    clock: str
    forwards: float = 1.0
    backwards: float = 1.0

    def to_budget(self, a_step: float) -> float | None:
        """Sum over the run of a quantity that is `a_step` in each step; None where the number of steps is not known."""
        return None if self.steps is None else self.steps * a_step


def sample(config: FitConfig, shape: ModelConfig, count: int = 2) -> tuple[list[Batch], str]:
    """Makes the run's first micro-batches, and says where they are from; UserError or OSError where data cannot be read."""
    tokenizer, codec = tools(config.model, shape)
    shard = PackerShard(build_pipeline(config.data, shape, tokenizer, codec, config.objective.encoder_alone), 0, 1)
    return [shard.batch() for _ in range(count)], f"{count} micro-batch{'' if count == 1 else 'es'} of the data"


def tools(section: ModelSection, shape: ModelConfig) -> tuple[Tokenizer, AudioCodec | None]:
    """Load the tokenizer and the codec of a run; None for one without weights here."""
    start = local_path(section.start) if section.start else None
    if start is not None and section.tokenizer is None:
        tokenizer = Tokenizer.from_file(start / TOKENIZER)
    else:
        tokenizer = choose_tokenizer(section, shape)
    folder = Path(section.codec_folder) if section.codec_folder else None
    if folder is None and start is not None and (start / CODEC).is_dir():
        folder = start / CODEC
    return tokenizer, load_if_given(shape.codec, folder)


def flops_of(name: str) -> float:
    """Peak FLOP/s of a GPU by a part of its name; UserError where it is not known."""
    for part, peak in PEAK_FLOPS.items():
        if part.lower() == name.lower():
            return peak
    raise UserError(f"--gpu {name!r} is unknown; known: {', '.join(PEAK_FLOPS)}")


def pace(
    config: FitConfig,
    model: SpeechModel,
    found: tuple[list[Batch], str],
    worst: Batch,
    world: int,
    measured: float | None = None,
    speed: float | None = None,
    mfu: float = 0.35,
) -> Pace:
    """Estimates the pace of a run.

    Args:
        found: result of `sample`; no batches, and the reason, where there is none.
        measured: seconds of a step of worst batches on one device; those of the sample's are fewer in proportion to its work.
        speed: peak FLOP/s of a device, of which the run reaches the share `mfu`.
    """
    count, flops = StepFlops(model, config.objective), float(config.data.micro_batches)
    batches, source = found
    forwards, backwards = passes_of(config, len(model.layout), world)
    flops *= (forwards + 2 * backwards) / 3  # as `StepFlops` counts them
    full = count(worst, targets(worst)) * flops
    if batches:
        scale = config.data.micro_batches / len(batches)
        columns = scale * sum(b.positions for b in batches)
        trained = scale * sum(_targets_in(b) for b in batches)
        examples: float | None = scale * sum(b.examples for b in batches)
        work = flops / len(batches) * sum(count(b, targets(b)) for b in batches)
    else:
        columns, examples, work = float(config.data.micro_batches * worst.positions), None, full
        trained = float(config.data.micro_batches * _targets_in(worst))
    if measured is not None:
        seconds: float | None = measured * work / full
        clock = "the step tried here, by the sample's share of its work"
    elif speed:
        left_out = "without launches, which are most of a small model's step, and what is sent"
        seconds, clock = work / (speed * mfu * world), f"FLOPs at an MFU of {mfu:.0%} of {speed / 1e12:.0f} TFLOP/s, {left_out}"
    else:
        seconds, clock = None, "unknown: give --try, or --gpu NAME"
    budget = config.budget
    limits = [float(budget.steps)] if budget.steps is not None else []
    if budget.minutes is not None and seconds:
        limits.append(60 * budget.minutes / seconds)
    steps = min(limits) if limits else None
    hours = steps * seconds / 3600 if steps and seconds else budget.minutes / 60 if budget.minutes is not None else None
    return Pace(columns, trained, examples, work, seconds, steps, hours, source, clock, forwards, backwards)


def _targets_in(batch: Batch) -> int:
    """Number of ids that the losses of the streams are over."""
    return sum(len(at) for at in batch.supervised)
