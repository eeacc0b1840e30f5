"""Builds a run from its configuration and trains it (`omni-train fit`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from omni.checkpoint.folder import save_folder
from omni.convert.lazy import LazyTensors, cast, lazies_of
from omni.errors import UserError
from omni.files import locked
from omni.generate.speech_time import EXTRA as SPEECH_TIME
from omni.lora.peft import merged_lazies
from omni.model.speech_model import SpeechModel
from omni.tasks import TASKS
from omni.text import Tokenizer
from omni.utils.hardware import peak_flops
from omni.utils.remote import refuse_remote
from train.balance.config import balanced_tasks
from train.checkpoint import retention
from train.checkpoint.checkpointer import Checkpointer
from train.checkpoint.state import Training, seed_random
from train.config.run import FitConfig, plain_config
from train.console.progress import Screen, TrainProgress
from train.data.batching.batch import Batch
from train.data.batching.loader import StepLoader, process_shards
from train.data.build import build_alignment, build_pipeline, estimate_speech_time, held_out_by_source, take_frames
from train.distributed.fabric import (
    build_fabric,
    compile_blocks,
    count_processes,
    deterministic,
    leave,
    quantized_type,
    restarted,
)
from train.distributed.process_group import ProcessGroup, check_shared, launch, lost_named
from train.distributed.sharding import ParallelDims, fill, to_meta
from train.eval.held_out import items_of
from train.objective.objective import Objective, targets
from train.optim.optimizer import Average, build_optimizer, set_trainable
from train.trainer import screen
from train.trainer.balanced_step import Balancing
from train.trainer.initial_model import (
    Initial,
    apply_lora,
    build_initial,
    encoder_checksum,
    save_lora,
    teacher_of,
    trains_encoder,
)
from train.trainer.logs import COUNT, DataCounts, HighestLosses, Logs, LogWriter
from train.trainer.loop import Loop
from train.trainer.metrics import StepFlops, StepHealth, StepMetrics
from train.trainer.parts import CALLBACKS, Callback, Callbacks, Outcome, Parts
from train.trainer.plots import pictures
from train.trainer.preflight import check_machine, check_resume, check_start
from train.trainer.signals import Stop
from train.trainer.step import Feed, GuardedStep, PlainStep, Step, TimedStep
from train.trainer.usage import NONE, StepProfiler, Usage, is_out_of_memory, out_of_memory, step_range, worker_lost
from train.trainer.validation import RunValidation, Validator, answering_type, build_held_out, check_metric, outer_batches

MODEL = "model"
LEFT_SECONDS = 120.0
"""Longest time in which the lock of a process that was lost is taken from it; NFS waits for a node that is gone."""


def fit(config: FitConfig, callbacks: Sequence[Callback] = (), profile: str | None = None) -> Outcome | None:
    """Trains as configured, in all processes of the run, or goes on with the folder's run; returns None in all but the
    first.

    Args:
        callbacks: called as the run goes on, beside those that the configuration names, in the first process only; an exception
            in one ends the run.
        profile: steps of the run to trace, such as "10:15"; see `train.trainer.usage`.

    Raises:
        UserError: whatever is wrong with configuration, data or disk, in all processes alike; OutOfMemory in this one.
    """
    try:
        return run_fit(config, callbacks, profile)
    finally:
        leave()


def run_fit(config: FitConfig, callbacks: Sequence[Callback] = (), profile: str | None = None) -> Outcome | None:
    """Trains as `fit`, but does not `leave` the other processes, which until then wait for one that has failed."""
    if not config.run_folder:
        raise UserError("run_folder is missing: name a folder for the run")
    steps = NONE if profile is None else step_range(profile, config.budget)
    refuse_remote(config.run_folder, "run_folder", write=True)
    folder = Path(config.run_folder)
    configured, processes = config, ParallelDims.of(config.fabric, count_processes(config.fabric, os.environ)).data
    config, larger = config.shared_by(processes)  # as many micro-batches as they can share
    check_resume(config, configured)
    notes = [*([] if larger is None else [larger]), *check_start(with_alignment(config))]
    check_machine(config)
    callbacks = list(callbacks)
    for name in config.callbacks:
        try:
            callbacks.append(CALLBACKS[name](folder))
        except (Exception, SystemExit) as error:
            raise UserError(f"callback {name} cannot be made: {type(error).__name__}: {error}") from error
    with deterministic(config.fabric.deterministic):
        return _fit(config, folder, notes, callbacks, steps)


def _fit(config: FitConfig, folder: Path, notes: Sequence[str], callbacks: Sequence[Callback], steps: range) -> Outcome | None:
    """Trains after the checks; see `fit`."""
    fabric = build_fabric(config.fabric)
    launch(fabric, plain_config(config))
    loop: Loop | None = None
    try:
        group = process_group(config, fabric)
        with lost_named(group), ExitStack() as stack:
            wait = LEFT_SECONDS if restarted(os.environ) else 0.0
            group.run_on_first(lambda: stack.enter_context(locked(folder, wait)))
            check_shared(folder, group)
            loop = prepare(config, fabric, folder, group, callbacks, steps, notes)
            for source in config.data.sources:
                group.run_on_first(partial(source.made.prepare, config.log.progress))
            outcome = loop.run()
        return outcome if group.first else None
    except (RuntimeError, MemoryError) as error:
        if (lost := worker_lost(error, 0 if loop is None else loop.position.step + 1, fabric.global_rank)) is not None:
            raise lost from error
        if not is_out_of_memory(error):
            raise
        if loop is None:
            raise out_of_memory(error, fabric.device) from error
        step = loop.position.step + 1 if loop.usage.meter.since is not None else None
        raise out_of_memory(error, fabric.device, loop.usage, loop.checkpointer.saved, step) from error


def prepare(
    config: FitConfig, fabric: Fabric, folder: Path, group: ProcessGroup | None = None, callbacks: Sequence[Callback] = (),
    profile: range = NONE, notes: Sequence[str] = (),
) -> Loop:  # fmt: skip
    """Build everything a run needs, in every process alike."""
    say = Screen("off" if fabric.global_rank > 0 or config.log.progress == "off" else "lines").say
    for line in (*notes, *screen.start_lines(config, fabric, profile)):
        say(line)
    run_group = group or process_group(config, fabric)
    initial = run_group.together(lambda: build_initial(with_alignment(config).model, config.seed, run_group.first))
    say(screen.parameters_line("model", initial.model.parameters()))
    parts = run_group.together(lambda: build_parts(config, initial, fabric, folder, run_group, say))
    loop = build_loop(config, parts, fabric, folder, run_group, callbacks, profile, lambda: pictures(folder))
    for line in screen.ready_lines(config, parts.objective, loop.position, loop.checkpointer.saved):
        say(line)
    return loop


def process_group(config: FitConfig, fabric: Fabric) -> ProcessGroup:
    """The process group of a run that was launched."""
    tensor = ParallelDims.of(config.fabric, fabric.world_size).tensor
    return ProcessGroup(fabric, tensor, config.fabric.timeout_seconds)


def build_loop(
    config: FitConfig,
    parts: Parts,
    fabric: Fabric,
    folder: Path,
    group: ProcessGroup,
    callbacks: Sequence[Callback] = (),
    profile: range = NONE,
    draw: Callable[[], dict[str, Path]] | None = None,
) -> Loop:
    """Builds optimizer, step, checkpoints and logs of a run over its parts, and resumes it where it has a checkpoint; `draw`
    refreshes the pictures in the run folder."""
    objective = parts.objective
    real = objective if isinstance(objective, Objective) else None
    shards = process_shards(config.data.micro_batches, group.data_rank, group.data_world)
    also = set_trainable(objective.get_submodule("model"), config.trainable_patterns)
    if config.fabric.compile:
        compile_blocks(objective)
    if config.fabric.strategy != "fsdp" and group.world > 1:  # the first process's values for all
        fill(objective, to_meta(objective), fabric.device)
    module: Any = fabric.setup_module(objective)
    learning = [(name, p) for name, p in objective.named_parameters() if p.requires_grad]
    trainable = [(name.removeprefix("model."), p) for name, p in learning]
    optimizer = build_optimizer(trainable, config.optimizer, config.fabric.precision, also)
    stepper: Any = fabric.setup_optimizers(optimizer)
    balance = None
    if config.balance is not None:
        balance = Balancing(config.balance, parts, fabric, module, trainable, group, len(shards), config.seed)
    peak = (peak_flops(fabric.device) or 0.0) * group.world
    meter = StepMetrics(parts.tasks, parts.streams, fabric.device, group, peak or None)
    highest = HighestLosses(COUNT if real is not None else 0, folder, group)
    seed_random((config.seed + 1 + group.data_rank) % 2**63)
    training = Training(objective, optimizer, Average(learning, config.ema) if config.ema is not None else None)
    checkpointer = Checkpointer(config, folder, fabric, group, training, balance, meter, shards, parts.rows)
    resumed = checkpointer.resume()
    position = checkpointer.position
    logs = group.run_on_first(lambda: Logs(folder, position.step, config.log.wandb, checkpointer.plain))
    share = checkpointer.used
    most = None if config.budget.expected is None or config.budget.minutes is None else 60 * config.budget.minutes
    progress = TrainProgress(config.log.progress if group.first else "off", (share, position.seconds), most)
    say = checkpointer.say = progress.say
    if checkpointer.saved is None and restarted(os.environ):
        say("started again before there was a checkpoint: the run starts over")
    for line in resumed:
        say(line)
    calls = Callbacks(callbacks, group)
    checkpointer.asynchronous &= not any(type(callback).on_save is not Callback.on_save for callback in callbacks)

    first = real.align_first if real is not None else 0.0
    step: Step = PlainStep(fabric, module, optimizer, stepper, group, meter, parts.idle, config, highest, balance, first)
    if config.guard:
        step = GuardedStep(step, objective, optimizer, parts.idle, number=position.step, say=say)
    timed = TimedStep(step, parts.idle, say)
    usage = Usage(*training, meter, fabric.device, group)
    scaled = bool(fabric.strategy.precision.state_dict())
    health = StepHealth(checkpointer, meter, scaled, position.step + 1)
    counts = DataCounts(checkpointer)
    writer = LogWriter(logs, checkpointer, balance.figures if balance is not None else dict, draw)
    if not group.broadcast((folder / retention.CONFIG).exists()):
        writer.on_steps_end()
    observers = [
        timed,
        calls,
        StepProfiler(profile if group.first else NONE, position.step + 1, folder, fabric.device, say),
        meter,
        highest,
        health,
        counts,
        usage,
        screen.StepLines(checkpointer, meter, usage.idle, progress),
        writer,
    ]
    flops_of = StepFlops(real.model, config.objective) if real is not None else None
    flops = None if flops_of is None else lambda batch, targets: flops_of(batch, targets, checkpointer.used)

    def feed(stop: Stop) -> Feed:
        batches = parts.steps(shards, position.step, position.packer_shards) if share < 1 else iter(())
        batches = calls.checked(checkpointer.checked(batches))
        return Feed(batches, parts, flops, checkpointer.clock, group, stop, balance is not None)

    validation = RunValidation(parts, checkpointer, module)
    checkpointer.observers = observers
    checkpointer.start_clock()
    return Loop(config, group, optimizer, feed, timed, validation, checkpointer, observers, usage, health, counts, progress)


def build_parts(
    config: FitConfig, initial: Initial, fabric: Fabric, folder: Path, group: ProcessGroup | None = None,
    say: screen.Say = lambda line: None,
) -> Parts:  # fmt: skip
    """Builds the parts of a run: model, objective, data, validation and export; says what its data are."""
    model, lora, group = initial.model, config.lora, group or process_group(config, fabric)
    teacher = teacher_of(config, model, initial.padded)
    taught = encoder_checksum(model.encoder, group) if teacher is not None else None
    base = apply_lora(model, lora, quantized_type(config.fabric.precision), group) if lora is not None else None
    model.set_checkpointing(config.fabric.checkpointing)
    pipeline = build_pipeline(config.data, model.config, initial.tokenizer, initial.codec, config.objective.encoder_alone)
    questions, broken = config.validation.questions, dict[str, str]() if config.data.broken == "skip" else None
    held_out_rows = held_out_by_source(config.data, initial.codec, questions, broken) if questions else []
    rows = [row for _, rows in held_out_rows for row in rows]
    if line := take_frames(pipeline, partial(encoder_checksum, model.encoder, group), rows, needs_sound(config, model)):
        say(line)
    validate: Validator | None = None
    if config.validation.asks:
        items = items_of(rows, config.validation.tasks, initial.codec, model.config.encoder, broken)
        dtype = answering_type(fabric.device.type, config.fabric.precision)
        validate = Validator(initial, items, config.validation, fabric.device, dtype, folder)

    def steps(shards: range, start: int, states: Mapping[str, Any]) -> Iterator[list[Batch]]:
        data, pin = config.data, fabric.device.type == "cuda"
        loader = StepLoader(pipeline, data.micro_batches, shards, data.workers, start, states, prefetch=data.prefetch, pin=pin)
        return iter(loader)

    def export(weights: Mapping[str, Tensor]) -> Path:
        if lora is not None and base is not None:
            adapter = save_lora(folder, model, weights, base, config.model.start)
            if not lora.merged:
                return adapter
        codec, extra = initial.codec_folder, dict(initial.extra)
        time = estimate_speech_time(pipeline.mixture, initial.codec) if initial.codec is not None else None
        if time is not None:
            extra[SPEECH_TIME] = time.plain()
        # The types of base and adapters may differ.
        dtype = torch.bfloat16 if config.fabric.precision == "bf16-true" else torch.float32
        plain = LazyTensors(cast(merged_lazies(model, lazies_of(weights)), dtype))
        save_folder(folder / MODEL, model.config, plain, initial.tokenizer, codec_folder=codec, extra=extra, only_finite=True)
        return folder / MODEL

    held_out = build_held_out(held_out_rows, config.data.packing, pipeline.maker, group.data_rank, group.data_world, broken)
    check_metric(config, held_out)
    mixture = pipeline.mixture
    for line in screen.data_lines([(source.name, source.size) for source in mixture.sources], mixture.total, held_out):
        say(line)
    objective = Objective(model, config.objective, teacher)
    objective.compiled = config.fabric.compile
    fixed = {f"the number of rows of data.sources[{i}]": source.size for i, source in enumerate(mixture.sources)}
    for i, windows in mixture.windows.items():
        fixed[f"the number of pieces that data.sources[{i}] is read in"] = windows.pieces
    for i, stream in pipeline.mixture.streams.items():
        fixed[f"the number of shards of data.sources[{i}]"] = len(stream.shards)
    fixed["the checksum of the weights below the adapters"] = base
    fixed["the checksum of the encoder that is the teacher"] = taught
    names: Sequence[str] | None = None
    outer: Sequence[Batch] = ()
    if config.balance is not None:
        names = balanced_tasks(config.balance, config.data)
        outer = outer_batches(config, names, pipeline.maker) if config.balance.spec.bilevel else ()
    return Parts(
        objective=objective,
        steps=steps,
        targets=targets,
        streams=model.layout.names,
        tasks=tuple(TASKS),
        idle=objective.idle,
        balanced=names,
        outer=outer,
        rows={name: number for name, number in fixed.items() if number is not None},
        held_out=held_out.batches,
        validate=validate,
        export=export,
    )


def needs_sound(config: FitConfig, model: SpeechModel) -> str:
    """Why a run cannot take the encoder's frames as they are kept with the rows; "" where it can."""
    reasons = {
        "the encoder is trained": trains_encoder(config, model),
        "data.augment changes the sound": config.data.augment is not None,
        "the turn head is trained on the sound": model.turn_head is not None,
        "the encoder is distilled": config.objective.distill_weight > 0,
        "chunks are drawn in training": model.config.encoder.streams,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def with_alignment(config: FitConfig) -> FitConfig:
    """Sets `model.ctc` and `ctc_sounds` to what the data's alignment needs, where they are left open."""
    ctc, sounds = config.model.ctc, config.model.ctc_sounds
    if (ctc is not None and sounds is not None) or config.data.alignment == "none":
        return config
    alignment = build_alignment(config.data, Tokenizer.bytes())
    ctc = alignment.size if ctc is None else ctc
    sounds = alignment.sound_size if sounds is None else sounds
    return replace(config, model=replace(config.model, ctc=ctc, ctc_sounds=sounds))
