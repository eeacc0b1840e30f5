"""Builds a run from its configuration and trains it (`omni-train fit`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from omni.checkpoint.folder import save_folder
from omni.convert.lazy import LazyTensors, cast, lazies_of
from omni.errors import UserError
from omni.files import locked, write_whole
from omni.generate.speech_time import EXTRA as SPEECH_TIME
from omni.lora.weights import merged_lazies, merged_state
from omni.remote import refuse_remote
from omni.tasks import TASKS
from train.balance.section import BalanceSection, balanced_tasks
from train.checkpoint import retention
from train.checkpoint.checkpointer import Checkpointer
from train.config.run import FitConfig, plain_config
from train.console.progress import TrainProgress, counted
from train.data.batching.batch import Batch
from train.data.batching.loader import StepLoader, process_shards
from train.data.batching.pipeline import Pipeline
from train.data.build import build_alignment, build_pipeline, held_out_by_source
from train.data.sources.recorded_digits import speak_ahead
from train.data.speech_time import estimate_speech_time
from train.distributed.fabric import ProcessGroup, build_fabric, compile_blocks, launch, leave
from train.distributed.precision import quantized_type
from train.objective.flops import StepFlops
from train.objective.objective import Objective, cells, targets
from train.optim.ema import Average
from train.optim.optimizer import build_optimizer, describe, parameter_groups, set_trainable
from train.optim.schedule import used
from train.trainer import announce, plots
from train.trainer import lora as adapters
from train.trainer.balanced_step import Balanced, Balancing
from train.trainer.callbacks import CALLBACKS, Callback, Callbacks, build_callbacks
from train.trainer.feed import CountingFeed, Feed
from train.trainer.guard import StepGuard
from train.trainer.held_out_batches import outer_batches
from train.trainer.held_out_loss import HeldOut, build_held_out
from train.trainer.initial_model import Initial, build_initial
from train.trainer.logs import LeftOut, Logs
from train.trainer.loop import Loop
from train.trainer.metrics import StepMetrics
from train.trainer.parts import Outcome, Parts
from train.trainer.preflight import check_devices, check_packages, check_resume, check_start
from train.trainer.signals import Stop
from train.trainer.step import BalancedStep, GuardedStep, PlainStep, Step
from train.trainer.validation import build_validator

MODEL = "model"


def fit(config: FitConfig, callbacks: Sequence[Callback] = ()) -> Outcome | None:
    """Trains as configured, in all processes of the run; returns None in all but the first.

    A folder that has an earlier start of the run is gone on with; see `resume`.

    Args:
        callbacks: called as the run goes on, beside those that the configuration names, in the first process only; an
            exception in one ends the run.

    Raises:
        UserError: whatever is wrong with configuration, data or disk; in all processes alike.
    """
    if not isinstance(config, FitConfig):
        raise UserError(f"fit was given {config!r:.80}; give it a FitConfig, such as recipe('nano') from train")
    if not config.run_folder:
        raise UserError("run_folder is missing: name a folder for the run")
    refuse_remote(config.run_folder, "run_folder", write=True)
    folder = Path(config.run_folder)
    check_resume(config)
    notes = check_start(with_alignment(config))
    check_devices(config.fabric)
    check_packages(config)
    own = build_callbacks([CALLBACKS[name] for name in config.callbacks], folder)
    fabric = build_fabric(config.fabric)
    launch(fabric)
    try:
        group = ProcessGroup(fabric)
        with ExitStack() as stack:
            group.run_on_first(lambda: stack.enter_context(locked(folder)))
            say = announce.speaker(config, group.first)
            for note in notes:
                say(note)
            loop = prepare(config, fabric, folder, group, [*callbacks, *own])
            group.run_on_first(lambda: _synthesise_ahead(config))
            outcome = loop.run()
        return outcome if group.first else None
    finally:
        leave()


def prepare(
    config: FitConfig, fabric: Fabric, folder: Path, group: ProcessGroup | None = None, callbacks: Sequence[Callback] = ()
) -> Loop:
    """Build everything a run needs, in every process alike."""
    say = announce.speaker(config, fabric.global_rank == 0)
    for line in announce.start_lines(config, fabric):
        say(line)
    initial = build_initial(with_alignment(config).model, config.seed)
    say(announce.parameters_line("model", initial.model.parameters()))
    plain = plain_config(config)
    loop = build_loop(config, plain, build_parts(config, initial, fabric, folder), fabric, folder, group, callbacks)
    loop.group.run_on_first(lambda: write_whole(folder / retention.CONFIG, _yaml(plain)))
    for line in announce.ready_lines(config, loop.parts, [p for _, p in loop.trainable], loop.position, loop.saved):
        say(line)
    return loop


def build_loop(
    config: FitConfig,
    plain: Mapping[str, Any],
    parts: Parts,
    fabric: Fabric,
    folder: Path,
    group: ProcessGroup | None = None,
    callbacks: Sequence[Callback] = (),
) -> Loop:
    """Builds optimizer, step, checkpoints and logs of a run over its parts, and resumes it where it has a checkpoint.

    Args:
        plain: the configuration as plain data, to be stored and compared.
        folder: where everything of the run is written.
        callbacks: see `fit`.
    """
    group, objective = group or ProcessGroup(fabric), parts.objective
    shards = process_shards(parts.micro_batches, group.rank, group.world)
    also = set_trainable(objective.get_submodule("model"), config.trainable_patterns)
    if config.fabric.compile:
        compile_blocks(objective)
    module = fabric.setup_module(objective)
    learning = [(name, p) for name, p in objective.named_parameters() if p.requires_grad]
    trainable = [(name.removeprefix("model."), p) for name, p in learning]
    optimizer = build_optimizer(trainable, config.optimizer, config.fabric.precision, also)
    stepper: Any = fabric.setup_optimizers(optimizer)
    guard = StepGuard(objective, optimizer, parts.idle, config.data) if config.guard else None
    average = Average(learning, config.ema) if config.ema is not None else None
    balance = None
    if config.balance is not None:
        balance = build_balance(config.balance, config, parts, fabric, group, module, trainable, len(shards))
    meter = StepMetrics(parts.tasks, parts.streams, fabric.device, group)
    built = (fabric, module, optimizer, stepper, group, meter, parts.idle, config.clip)
    step: Step = PlainStep(*built) if balance is None else BalancedStep(*built, balance, config.objective.align_first)
    torch.manual_seed(config.seed + 1 + group.rank)
    checkpointer = Checkpointer(
        config, plain, folder, fabric, group, objective=objective, optimizer=optimizer, average=average, balance=balance,
        meter=meter, packer_shards=shards, rows=parts.rows,
    )  # fmt: skip
    resumed = checkpointer.resume()
    position = checkpointer.position
    logs = group.run_on_first(lambda: Logs(folder, position.step, config.log.wandb, plain))
    share = used(config.budget, position.step, position.seconds)
    progress = TrainProgress(config.log.progress if group.first else "off", (share, position.seconds))
    checkpointer.say = progress.say
    if resumed is not None:
        progress.say(resumed)
    if guard is not None:
        step = GuardedStep(step, guard, position.step, progress.say)

    calls = Callbacks(callbacks, group)

    def open_feed(stop: Stop, clock: Callable[[], float]) -> Feed:
        left = used(config.budget, position.step, position.seconds) < 1
        batches = parts.steps(shards, position.step, position.packer_shards) if left else iter(())
        batches = calls.checked(checkpointer.checked(batches))
        if balance is None:
            return Feed(batches, parts.targets, parts.flops, clock, len(parts.streams), group, stop)
        shape = len(parts.tasks), len(parts.streams)
        return CountingFeed(batches, parts.targets, parts.flops, clock, shape, balance.given.cells, group, stop)

    left_out = LeftOut(folder, group, progress.say, parts.broken_limit)
    return Loop(
        config, parts, folder, fabric, group, module, trainable, optimizer, step, open_feed, average, balance, meter,
        checkpointer, logs, progress, left_out, calls,
    )  # fmt: skip


def build_balance(
    section: BalanceSection,
    config: FitConfig,
    parts: Parts,
    fabric: Fabric,
    group: ProcessGroup,
    module: Any,
    trainable: Sequence[tuple[str, nn.Parameter]],
    micro_batches: int,
) -> Balancing:
    """Builds the balance of a run's tasks from a section.

    Args:
        module: the objective as Fabric wraps it.
        micro_batches: of this process in a step.
    """
    if parts.balanced is None:
        raise UserError("balance is given, but this run's objective does not give its losses by task; leave it out")
    aligned = max(config.objective.ctc_weight, config.objective.ctc_final or 0) > 0
    return Balancing(
        section, parts.balanced, fabric, module, trainable, parts.tasks, parts.streams, parts.targets, group, micro_batches,
        aligned,
    )  # fmt: skip


def build_parts(config: FitConfig, initial: Initial, fabric: Fabric, folder: Path) -> Parts:
    """Builds the parts of a run: model, objective, data, validation and export."""
    model, lora = initial.model, config.lora
    base = adapters.apply(model, lora, quantized_type(config.fabric.precision)) if lora is not None else None
    model.set_checkpointing(config.fabric.checkpointing)
    pipeline = build_pipeline(config.data, model.config, initial.tokenizer, initial.codec)
    questions, broken = config.validation.questions, dict[str, str]() if config.data.broken == "skip" else None
    found = held_out_by_source(config.data, initial.codec, questions, broken) if questions else []
    validator = build_validator(
        config.validation,
        [row for _, rows in found for row in rows],
        model.config,
        initial.tokenizer,
        initial.codec,
        fabric.device,
        config.fabric.precision,
        folder,
        broken,
    )

    def export(weights: Mapping[str, Tensor]) -> Path:
        if lora is not None and base is not None:
            adapter = adapters.save(folder, model, weights, base, config.model.init_from)
            if not lora.merged:
                return adapter
        codec, extra = initial.codec_folder, dict(initial.extra)
        time = estimate_speech_time(pipeline.mixture, initial.codec) if initial.codec is not None else None
        if time is not None:
            extra[SPEECH_TIME] = time.plain()
        kind = (
            torch.bfloat16 if config.fabric.precision == "bf16-true" else torch.float32
        )  # types of base and adapters may differ
        plain = LazyTensors(cast(merged_lazies(model, lazies_of(weights)), kind))
        save_folder(folder / MODEL, model.config, plain, initial.tokenizer, codec_folder=codec, extra=extra)
        return folder / MODEL

    def validate(weights: dict[str, Tensor], step: int) -> dict[str, float]:
        assert validator is not None
        return validator(merged_state(model, weights), step)

    rank, world = fabric.global_rank, fabric.world_size
    held_out = build_held_out(found, config.data.packing, pipeline.maker, rank, world, broken)
    _check_metric(config, held_out)
    objective = Objective(model, config.objective)
    objective.compiled = config.fabric.compile
    sizes = enumerate(source.size for source in pipeline.mixture.sources)
    fixed = {f"the number of rows of data.sources[{i}]": size for i, size in sizes if size is not None}
    if base is not None:
        fixed["the checksum of the weights below the adapters"] = base
    balanced = None
    if config.balance is not None:
        names = balanced_tasks(config.balance, config.data)
        outer = outer_batches(config, names, pipeline.maker) if config.balance.kind.bilevel else ()
        balanced = Balanced(names, cells, objective.encoder_parameters, outer)
    return Parts(
        objective=objective,
        micro_batches=config.data.micro_batches,
        steps=lambda shards, start, states: _steps(pipeline, config, shards, start, states),
        targets=targets,
        streams=model.layout.names,
        tasks=tuple(TASKS),
        idle=objective.idle,
        balanced=balanced,
        flops=StepFlops(model),
        rows=fixed,
        held_out=held_out,
        validate=validate if validator is not None else None,
        export=export,
        draw=lambda: pictures(folder),
        broken_limit=config.data.broken_limit,
        sources=[(source.name, source.size) for source in pipeline.mixture.sources],
    )


def _synthesise_ahead(config: FitConfig) -> None:
    """Synthesises now the questions that training would otherwise wait for."""
    for source in config.data.sources:
        if source.kind == "recorded-digits":
            speak_ahead(source.recorded, source.digits.question_rate, config.log.progress)


def _check_metric(config: FitConfig, held_out: HeldOut) -> None:
    """Refuses (UserError) to keep the checkpoints of the lowest loss where no held-out example measures it."""
    keep = config.checkpoint
    measured = held_out.examples or not config.validation.questions
    if keep.keep_best > 0 and keep.metric.partition("/")[0] == "loss" and not measured:
        raise UserError(
            f"checkpoint.metric is {keep.metric}, but none of the {held_out.rows} held-out rows makes an example: they lack "
            "what the tasks of their sources need, are broken, or do not fit into packing.length; complete them, name another "
            "metric, or set checkpoint.keep_best to 0"
        )


def _steps(
    pipeline: Pipeline, config: FitConfig, shards: range, start: int, states: Mapping[str, Any]
) -> Iterator[list[Batch]]:
    data = config.data
    return iter(StepLoader(pipeline, data.micro_batches, shards, data.workers, start, states, prefetch=data.prefetch))


def with_alignment(config: FitConfig) -> FitConfig:
    """Sets `model.ctc` and `ctc_sounds` to what the data's alignment needs, where they are left open."""
    ctc, sounds = config.model.ctc, config.model.ctc_sounds
    if (ctc is not None and sounds is not None) or config.data.alignment == "none":
        return config
    if ctc is None and config.data.alignment == "tokens":
        raise UserError("data.alignment tokens needs model.ctc: the number of the tokenizer's ids and one more")
    from omni.text import Tokenizer

    alignment = build_alignment(config.data, Tokenizer.bytes())
    ctc = alignment.size if ctc is None else ctc
    sounds = alignment.sound_size if sounds is None else sounds
    return replace(config, model=replace(config.model, ctc=ctc, ctc_sounds=sounds))


def pictures(folder: Path) -> dict[str, Path]:
    """Redraws the curves; returns the pictures that exist, by name."""
    plots.curves(folder)
    plots.balance(folder)
    files = {"curves": plots.CURVES, "spectrogram": plots.SPECTROGRAMS, "balance": plots.PICTURE}
    found = {name: folder / file for name, file in files.items()}
    return {name: file for name, file in found.items() if file.exists()}


def _yaml(plain: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(dict(plain), sort_keys=False, allow_unicode=True)


def dry_run(config: FitConfig) -> str:
    """Builds the model and one batch, and describes both. Devices that this machine lacks are a note, not an error: the run may
    be for another machine."""
    from train.data.batching.draw import describe as draw

    config = with_alignment(config)
    check_start(config)
    try:
        check_devices(config.fabric)
        notes = []
    except UserError as error:
        notes = [f"note: {error}"]
    initial = build_initial(config.model, config.seed)
    model = initial.model
    if config.lora is not None:
        adapters.apply(model, config.lora)
    also = set_trainable(model, config.trainable_patterns)
    learning = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    pipeline = build_pipeline(config.data, model.config, initial.tokenizer, initial.codec)
    batch = next(StepLoader(pipeline, config.data.micro_batches))[0]
    whole, data = sum(p.numel() for p in model.parameters()), config.data
    return "\n".join(
        [
            f"model: {whole / 1e6:.2f} M parameters, {sum(p.numel() for _, p in learning) / 1e6:.2f} M trainable",
            f"optimizer: {describe(parameter_groups(learning, config.optimizer, also))}",
            f"step: {counted(data.micro_batches, 'micro-batch')} of {data.packing.rows} x {data.packing.length} time steps",
            draw(batch, model.layout, initial.tokenizer),
            *notes,
        ]
    )
