"""Checks a run and describes its model and first batch, without training (`omni-train fit FILE --dry_run`)."""

from __future__ import annotations

import time
from contextlib import suppress

from omni.errors import UserError
from train.config.run import FitConfig
from train.console.progress import counted
from train.data.batching.batch import describe as draw
from train.data.batching.loader import StepLoader
from train.data.build import build_pipeline
from train.data.sources.mixture import UsedUp
from train.optim.optimizer import describe, parameter_groups, set_trainable
from train.trainer import lora as adapters
from train.trainer.build import with_alignment
from train.trainer.initial_model import build_initial
from train.trainer.preflight import check_devices, check_packages, check_start
from train.trainer.profiler import step_range


def dry_run(config: FitConfig, profile: str | None = None) -> str:
    """Builds the model and one batch, and describes both. Devices and packages that this machine lacks are notes, not errors:
    the run may be for another machine.

    Args:
        profile: as of `fit`; only checked.
    """
    if profile is not None:
        step_range(profile, config.budget)
    config, notes = with_alignment(config), list[str]()
    check_start(config)
    for check in (lambda: check_devices(config.fabric), lambda: check_packages(config)):
        try:
            check()
        except UserError as error:
            notes.append(f"note: {error}")
    initial = build_initial(config.model, config.seed)
    model = initial.model
    if config.lora is not None:
        adapters.apply(model, config.lora)
    also = set_trainable(model, config.trainable_patterns)
    learning = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    pipeline = build_pipeline(config.data, model.config, initial.tokenizer, initial.codec, config.objective.encoder_alone)
    steps = iter(StepLoader(pipeline, config.data.micro_batches))
    batch, start = next(steps)[0], time.perf_counter()
    with suppress(UsedUp):
        next(steps)
    made = time.perf_counter() - start
    whole, data = sum(p.numel() for p in model.parameters()), config.data
    return "\n".join(
        [
            f"model: {whole / 1e6:.2f} M parameters, {sum(p.numel() for _, p in learning) / 1e6:.2f} M trainable",
            f"optimizer: {describe(parameter_groups(learning, config.optimizer, also))}",
            f"step: {counted(data.micro_batches, 'micro-batch')} of {data.packing.rows} x {data.packing.length} time steps",
            draw(batch, model.layout, initial.tokenizer),
            f"data: one process makes the rows of a step in {made:.3g} s, and data.workers is {data.workers}",
            *notes,
        ]
    )
