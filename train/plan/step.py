"""Takes training steps as the loop does, without Fabric."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from omni.config import ModelConfig
from omni.lora.attach import add_adapter
from omni.model.quantize import quantize
from omni.model.speech_model import SpeechModel
from train.config.run import FitConfig
from train.data.batching.batch import Batch
from train.distributed.precision import AdapterPrecision, product_type, quantized_type
from train.objective.objective import Objective
from train.optim.ema import Average
from train.optim.optimizer import Optimizers, build_optimizer, set_trainable
from train.trainer.initial_model import stored_padded
from train.trainer.teacher import teacher_of


@dataclass
class Workbench:
    """The objective, optimizer and running average of a step; `named`: the trainable parameters, by the model's names."""

    objective: Objective
    optimizer: Optimizers
    average: Average | None
    config: FitConfig
    named: list[tuple[str, nn.Parameter]]

    @property
    def learning(self) -> list[nn.Parameter]:
        return [p for _, p in self.named]


def build_workbench(config: FitConfig, shape: ModelConfig, device: torch.device | str = "cpu") -> Workbench:
    """Builds objective (with the model), optimizer and running average of a run, in its precision, with random weights.

    Raises:
        UserError: patterns that name nothing, or settings that do not fit each other.
    """
    model, lora, precision = SpeechModel(shape), config.lora, config.fabric.precision
    teacher = teacher_of(config, model, config.objective.distill_weight > 0 and stored_padded(config.model))
    if lora is not None:
        if lora.quantize is not None:
            quantize(model, lora.quantize, lora.quantize_targets, quantized_type(precision))
        add_adapter(model, lora)
    model.set_checkpointing(config.fabric.checkpointing)
    objective = Objective(model, config.objective, teacher)
    also = set_trainable(model, config.trainable_patterns)
    if precision == "bf16-true":
        AdapterPrecision().convert_module(objective)
    objective.to(device)
    learning = [(name, p) for name, p in objective.named_parameters() if p.requires_grad]
    named = [(name.removeprefix("model."), p) for name, p in learning]
    optimizer = build_optimizer(named, config.optimizer, precision, also)
    return Workbench(objective, optimizer, Average(learning, config.ema) if config.ema is not None else None, config, named)


def take_step(bench: Workbench, batches: Sequence[Batch], wanted: Tensor, number: int) -> None:
    """Runs forward and backward of every micro-batch, clipping, the optimizer and the running average.

    Args:
        wanted: targets of the step by stream, and of heads on the encoder, [K + HEADS] float on the batches' device.
        number: of the step, from 1.
    """
    config = bench.config
    half = product_type(config.fabric.precision, config.lora is not None)
    for batch in batches:
        with torch.autocast(wanted.device.type, half) if half is not None else nullcontext():
            total: Tensor = bench.objective(batch, wanted, 1.0).total
        total.backward()
    norm = nn.utils.clip_grad_norm_(bench.learning, config.clip if config.clip is not None else float("inf"))
    bench.optimizer.skip = (~norm.isfinite()).float()
    bench.optimizer.step()
    bench.optimizer.zero_grad()
    if bench.average is not None:
        bench.average.update(number)
