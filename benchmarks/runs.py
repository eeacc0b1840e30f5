"""Measures data that are made while training, and builds runs with their first batches made beforehand."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import TimingRow
from omni.hardware import synchronize
from train.config.parse import read_fit_config
from train.config.run import FitConfig
from train.config.sections import BudgetConfig
from train.data.batching.loader import StepLoader
from train.data.build import build_pipeline
from train.distributed.fabric import build_fabric
from train.distributed.precision import product_type
from train.objective.objective import Objective, targets
from train.optim.optimizer import build_optimizer
from train.trainer.build import prepare, with_alignment
from train.trainer.feed import StepBatches
from train.trainer.initial_model import build_initial
from train.trainer.loop import Loop
from train.trainer.signals import Stop

WARM_UP = 6
"""Steps that are not measured at the start of a round with data made while it trains."""


def data(file: str, device: torch.device, steps: int = 26, rounds: int = 4) -> list[TimingRow]:
    """Times a recipe's training steps with data made while it trains, and the same steps with their batches made beforehand.

    The two alternate, so that changes of a machine's speed affect both; during the second, the loader's workers fill their
    queue and then wait. Where utterances are reused (`digits.reuse`), only some steps make new ones: 16 of 124 with the recipe
    of `make demo`; the measured steps have that share.
    """
    config = with_alignment(read_fit_config([file])[0])
    half = product_type(config.fabric.precision, config.lora is not None)
    initial = build_initial(config.model, config.seed)
    module = Objective(initial.model, replace(config.objective, align_first=0.0)).to(device)
    optimizer = build_optimizer(
        [(n.removeprefix("model."), p) for n, p in module.named_parameters()], config.optimizer, config.fabric.precision
    )
    pipeline = build_pipeline(config.data, initial.config, initial.tokenizer, initial.codec)

    def run(batches: Iterator[Any], count: int) -> tuple[list[Any], float]:
        seen, start = [], time.perf_counter()
        for _ in range(count):
            step = next(batches)
            wanted = torch.stack([targets(batch) for batch in step]).sum(0).to(device)
            for batch in step:
                with torch.autocast(device.type, half, enabled=half is not None):
                    total = module(batch.to(device), wanted).total
                total.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(step)
        synchronize(device)
        return seen, time.perf_counter() - start

    live, at_hand, examples, positions, used = [], [], 0, 0, 0
    data, pin = config.data, device.type == "cuda"
    loader = StepLoader(pipeline, data.micro_batches, workers=data.workers, prefetch=data.prefetch, pin=pin)
    for _ in range(rounds):
        run(loader, WARM_UP)  # also empties the queue that filled meanwhile
        seen, seconds = run(loader, steps)
        live.append(seconds / steps)
        at_hand.append(run(iter(seen), steps)[1] / steps)
        flat = [batch for step in seen for batch in step]
        examples += sum(b.examples for b in flat)
        positions += sum(b.segments.numel() for b in flat)
        used += sum(b.positions for b in flat)
    loader.close()
    made, given = statistics.fmean(live), statistics.fmean(at_hand)
    return [
        TimingRow("step, batches at hand", given * 1e3, "ms"),
        TimingRow("step, data made while training", made * 1e3, "ms"),
        TimingRow("examples, data made while training", examples / rounds / steps / made, "/s"),
        TimingRow("throughput, made / at hand", given / made, "x"),
        TimingRow("padding", (1 - used / positions) * 100, "%"),
    ]


@contextmanager
def run_with_batches(config: FitConfig, device: torch.device, count: int) -> Iterator[tuple[Loop, list[StepBatches]]]:
    """Builds a run in one process, in a folder that is removed at the end, and makes the batches of its first steps."""
    with tempfile.TemporaryDirectory() as folder:
        config = replace(
            config,
            run_folder=folder,
            resume="restart",
            fabric=replace(config.fabric, accelerator="gpu" if device.type == "cuda" else "cpu", devices=1, strategy="auto"),
            data=replace(config.data, workers=0),
            validation=replace(config.validation, questions=0),
            log=replace(config.log, progress="off", wandb=None),
        )
        loop = prepare(config, build_fabric(config.fabric), Path(folder))
        with Stop() as stop:
            feed = loop.feed(stop)
            given = [feed.next() for _ in range(count)]
        yield loop, given
        if loop.logs is not None:
            loop.logs.close()


PHASES = {"aligning": 0.0, "all of the model": 0.5}
"""Used shares of the budget: at the first, where the recipe has `objective.align_first`, the decoder does not run."""


def two_steps(file: str) -> tuple[FitConfig, dict[str, float]]:
    """A recipe with a budget of two steps and no guard, and those of `PHASES` that it has."""
    config = replace(read_fit_config([file])[0], budget=BudgetConfig(steps=2), guard=False)
    return config, {phase: share for phase, share in PHASES.items() if share or config.objective.align_first}
