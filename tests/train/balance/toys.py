"""A tiny run of our own model whose tasks are balanced, and the same written slowly: all logits, one graph.

`python -m tests.train.balance.toys '{"runs": [...]}'` makes runs as a program, for tests with several processes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from omni.config import ModelConfig
from omni.layout import IGNORE
from omni.model.speech_model import SpeechModel
from omni.tasks import TASKS
from tests.guarded import child
from tests.train.data.toys import MODELS, pipeline_of
from tests.train.toys import toy_config, toy_fit
from train.balance.config import BalanceConfig, balanced_tasks
from train.config.run import FitConfig
from train.config.sections import (
    BudgetConfig,
    CheckpointConfig,
    FabricConfig,
    LogConfig,
    LoRASection,
    OptimizerConfig,
    ScheduleConfig,
)
from train.data.batching.batch import Batch
from train.data.batching.examples import Alignment
from train.data.batching.loader import Pipeline, StepLoader
from train.data.config import DataConfig, PackingConfig, SourceConfig
from train.data.sources.mixture import TaskMixture
from train.distributed.fabric import leave
from train.objective.config import ObjectiveConfig
from train.objective.objective import Objective, targets
from train.trainer.initial_model import apply_lora, teacher_of
from train.trainer.parts import Parts

MIX = {"A1T1": 1.0, "A1A2": 1.0, "T1A2": 1.0}
PACKING = PackingConfig(rows=2, length=110, buffer=4)


def tiny(ctc: bool = False, **projector: Any) -> ModelConfig:
    config = MODELS["codec2"]
    alignment = Alignment("letters" if ctc else "none")
    decoder, projector = replace(config.decoder, layers=1), replace(config.projector, **projector)
    return replace(config, ctc=alignment.size, decoder=decoder, projector=projector)


def tiny_pipeline(config: ModelConfig, tasks: Mapping[str, float] = MIX, seed: int = 3) -> Pipeline:
    alignment = Alignment("letters" if config.ctc else "none")
    pipeline = pipeline_of(config, alignment=alignment, packing=PACKING, seed=seed)
    pipeline.tasks = [TaskMixture(dict(tasks))] * len(pipeline.tasks)
    return pipeline


def balanced_config(folder: Path | str, section: BalanceConfig | None, ctc: bool = False, **changes: Any) -> FitConfig:
    """Three steps of AdamW at a constant rate, of two micro-batches; of one for methods of two levels."""
    count = 1 if section is not None and section.spec.bilevel else 2
    base: dict[str, Any] = {
        "balance": section,
        "budget": BudgetConfig(steps=3),
        "data": DataConfig(sources=(SourceConfig("spoken-digits", tasks=dict(MIX)),), micro_batches=count),
        "objective": ObjectiveConfig(ctc_weight=0.2 if ctc else 0.0),
        "optimizer": OptimizerConfig(lr=3e-3, weight_decay=0.0),
        "schedule": ScheduleConfig("constant"),
        "ema": None,
    }
    return toy_config(folder, **{**base, **changes})


def joined(batches: Sequence[Batch]) -> Batch:
    """Micro-batches as one."""
    first, offset, index = batches[0], 0, []
    for b in batches:
        index.append(torch.where(b.feature_index >= 0, b.feature_index + offset, -1))
        offset += int(b.feature_index.max()) + 1
    longest = max(b.inputs.shape[2] for b in batches)
    rows: dict[str, Any] = {
        name: torch.cat([getattr(b, name) for b in batches]) for name in ("tokens", "targets", "segments", "task")
    }
    whole = replace(
        first, **rows, feature_index=torch.cat(index),
        inputs=torch.cat([F.pad(b.inputs, (0, longest - b.inputs.shape[2])) for b in batches]),
        input_lengths=[n for b in batches for n in b.input_lengths], frames=[n for b in batches for n in b.frames],
        transcripts=[t for b in batches for t in b.transcripts],
        examples=sum(b.examples for b in batches), positions=sum(b.positions for b in batches),
    )  # fmt: skip
    whole.__dict__.pop("supervised", None)
    return whole


def balanced_parts(
    config: FitConfig,
    model: ModelConfig | None = None,
    tasks: Mapping[str, float] = MIX,
    join: int = 1,
    outers: int = 2,
    valued: bool = True,
) -> Parts:
    """Our model with random weights, and steps that follow from their number.

    Args:
        join: micro-batches that are made one: as many processes' first ones, their second ones, ...
        outers: held-out batches.
        valued: the model has values.
    """
    torch.manual_seed(0)
    model = model or tiny(config.objective.ctc_weight > 0)
    speech = SpeechModel(model) if valued else SpeechModel.unfilled(model)
    teacher = teacher_of(config, speech, padded=False)
    if config.lora is not None:
        apply_lora(speech, config.lora)
    speech.set_checkpointing(config.fabric.checkpointing)
    objective = Objective(speech, config.objective, teacher)
    pipeline, count = tiny_pipeline(model, tasks), config.data.micro_batches

    def steps(shards: range, start: int, states: Mapping[str, Any]) -> Iterator[Sequence[Batch]]:
        whole = range(shards.start * join, shards.stop * join)
        for step in StepLoader(pipeline, count * join, whole, start_step=start, states=states):
            yield [joined(step[i :: len(shards)]) if join > 1 else step[i] for i in range(len(shards))]

    names = [] if config.balance is None else balanced_tasks(config.balance, config.data)
    return Parts(
        objective, steps, targets, objective.model.layout.names, tuple(TASKS), objective.idle, names,
        held_out(model, outers),
    )  # fmt: skip


@cache
def held_out(model: ModelConfig, count: int) -> list[Batch]:
    return [step[0] for step, _ in zip(StepLoader(tiny_pipeline(model, seed=8), 1), range(count), strict=False)]


def balanced_fit(config: FitConfig, parts: Parts | None = None) -> dict[str, Tensor]:
    """Run it in this process; the weights by name."""
    return toy_fit(config, parts or balanced_parts(config))[1]


def slow_losses(
    model: SpeechModel, batch: Batch, names: Sequence[str], denominators: Tensor, keep: list[Tensor] | None = None
) -> list[Tensor]:
    """Losses of the tasks (of the streams where none is named) by all logits and torch's cross-entropy.

    Args:
        keep: gets the features.
    """
    features = model.encode(batch.inputs, batch.input_lengths, batch.frames)
    if keep is not None:
        keep.append(features)
    hidden = model(batch.tokens, features, batch.feature_index, segments=batch.segments)
    tasks = list(TASKS)
    found = [torch.zeros(()) for _ in names] or [torch.zeros(()) for _ in model.layout.names]
    for k, logits in enumerate(model.decoder.logits(hidden)):
        each = F.cross_entropy(
            logits.flatten(0, 1), batch.targets[:, k].flatten(), ignore_index=IGNORE, reduction="none"
        ) / denominators[k].clamp_min(1)
        if not names:
            found[k] = found[k] + each.sum()
        for i, name in enumerate(names):
            found[i] = found[i] + each[batch.task.flatten() == tasks.index(name)].sum()
    return found


def slow_run(config: FitConfig, step: Callable[[SpeechModel, Sequence[Batch], Tensor, float], Any]) -> dict[str, Tensor]:
    """The same run without any of the machinery, where `step` fills `grad`; the weights by name.

    What comes after the optimizer's step is what `step` returns, if anything.
    """
    parts = balanced_parts(config)
    model = parts.objective.get_submodule("model")
    assert isinstance(model, SpeechModel)
    matrices = [p for p in model.parameters() if p.requires_grad]
    lr = config.optimizer.lr
    optimizer = torch.optim.AdamW(matrices, lr=lr, betas=config.optimizer.betas, weight_decay=0.0)
    batches = parts.steps(range(config.data.micro_batches), 0, {})
    for _ in range(config.budget.steps or 0):
        found = next(batches)
        optimizer.zero_grad()
        counts = torch.stack([targets(b) for b in found]).sum(0)
        after = step(model, found, counts, lr)
        torch.nn.utils.clip_grad_norm_(matrices, config.clip or float("inf"))
        optimizer.step()
        if after is not None:
            after()
    return {f"model.model.{name}": t for name, t in model.state_dict().items()}


def main(options: dict[str, Any]) -> None:
    """Runs one after another in the same processes: folder, balance (its fields), fabric, ctc, lora, micro, steps, every,
    resume, ema, decoder (fields that change), align_first, distill. The first process alone has the values at the start."""
    for run in options["runs"]:
        lora = (
            LoRASection(targets=("decoder.blocks.*", "encoder.*"), rank=2, trainable=("projector.*",))
            if run.get("lora")
            else None
        )
        data = DataConfig(sources=(SourceConfig("spoken-digits", tasks=dict(MIX)),), micro_batches=run.get("micro", 2))
        config = balanced_config(
            run["folder"], BalanceConfig(**run["balance"]) if run["balance"] else None, run.get("ctc", False), data=data,
            fabric=FabricConfig(**{"accelerator": "cpu", **run.get("fabric", {})}), lora=lora,
            log=LogConfig(every=1, progress="off"), budget=BudgetConfig(steps=run.get("steps", 3)),
            checkpoint=CheckpointConfig(every_steps=run.get("every"), every_minutes=None), resume=run.get("resume", "auto"),
            ema=run.get("ema"),
            objective=ObjectiveConfig(
                ctc_weight=0.2 if run.get("ctc") else 0.0, align_first=run.get("align_first", 0.0),
                distill_weight=run.get("distill", 0.0),
            ),
        )  # fmt: skip
        model = tiny(run.get("ctc", False))
        if run.get("distill"):
            model = replace(model, encoder=replace(model.encoder, mode="chunked", chunk_ms=40, train_chunk_ms=(40, 320)))
        model = replace(model, decoder=replace(model.decoder, **run.get("decoder", {})))
        toy_fit(config, balanced_parts(config, model, outers=run.get("outers", 2), valued=os.environ.get("RANK", "0") == "0"))


if __name__ == "__main__":
    try:
        with child():
            main(json.loads(sys.argv[1]))
    finally:
        leave()
