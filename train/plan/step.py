"""Takes one training step as the loop does, without Fabric; the same code runs on fake tensors (`trace`) and real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from omni.config import ModelConfig
from omni.model.speech_model import SpeechModel
from train.config.run import FitConfig
from train.data.batching.batch import Batch
from train.distributed.precision import product_type, quantized_type
from train.objective.objective import Objective
from train.optim.ema import Average
from train.optim.optimizer import RULES, Optimizers, build_optimizer, set_trainable
from train.plan.quantized import adapt, fake_adamw_8bit
from train.trainer.held_out_loss import evaluated
from train.trainer.initial_model import stored_padded
from train.trainer.teacher import teacher_of

Balance = Callable[[Sequence[Batch], Tensor, Callable[[Batch], Tensor], Callable[[Tensor], None]], None]
"""Runs all passes of a balanced step, given its batches, its counts of targets, a forward and a backward pass."""

LOSS = "held-out loss"
"""The phase of a validation's forward passes."""


@dataclass
class Workbench:
    """The objective, optimizer and running average of a step; `balance` where its tasks are balanced."""

    objective: Objective
    optimizer: Optimizers
    average: Average | None
    config: FitConfig
    balance: Balance | None = None

    @property
    def learning(self) -> list[nn.Parameter]:
        return [p for _, p in self.named]

    @property
    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The trainable parameters, by the model's names."""
        return [(n.removeprefix("model."), p) for n, p in self.objective.named_parameters() if p.requires_grad]


def build_workbench(config: FitConfig, shape: ModelConfig, device: torch.device | str = "cpu", fake: bool = False) -> Workbench:
    """Builds objective (with the model), optimizer and running average of a run, in its precision, with random weights.

    Args:
        fake: tensors are fake ones.

    Raises:
        UserError: patterns that name nothing, or settings that do not fit each other.
    """
    model = random_model(shape, torch.bfloat16 if config.fabric.precision == "bf16-true" else torch.float32)
    teacher = teacher_of(config, model, config.objective.distill_weight > 0 and stored_padded(config.model))
    adapt(model, config.lora, fake, quantized_type(config.fabric.precision))
    model.set_checkpointing(config.fabric.checkpointing)
    objective = Objective(model, config.objective, teacher)
    if torch.device(device).type != "cpu":
        objective.to(device)
    also = set_trainable(model, config.trainable_patterns)
    if config.lora is not None:
        _trainable_to_fp32(model)
    learning = [(name, p) for name, p in objective.named_parameters() if p.requires_grad]
    named = [(name.removeprefix("model."), p) for name, p in learning]
    rules = {**RULES, "paged_adamw_8bit": fake_adamw_8bit} if fake else RULES
    optimizer = build_optimizer(named, config.optimizer, config.fabric.precision, also, rules)
    return Workbench(objective, optimizer, Average(learning, config.ema) if config.ema is not None else None, config)


def random_model(shape: ModelConfig, dtype: torch.dtype) -> SpeechModel:
    """Builds a model in its type from the start: fake tensors cannot be converted in place."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return SpeechModel(shape)
    finally:
        torch.set_default_dtype(usual)


def _trainable_to_fp32(model: nn.Module) -> None:
    """Replaces the trainable parameters by copies in fp32."""
    learning = [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    full = {p: nn.Parameter(p.detach().float()) for _, p in learning}
    for name, p in learning:
        place, _, last = name.rpartition(".")
        setattr(model.get_submodule(place), last, full[p])


def take_step(
    bench: Workbench, batches: Sequence[Batch], wanted: Tensor, number: int, enter: Callable[[str], None] = lambda phase: None
) -> None:
    """Runs forward and backward of every micro-batch, clipping, the optimizer and the running average.

    Args:
        wanted: targets of the step by stream, and of heads on the encoder, [K + HEADS] float on the batches' device.
        number: of the step, from 1.
        enter: called with the name of each phase when it starts.
    """
    config, kind = bench.config, wanted.device.type
    half = product_type(config.fabric.precision, config.lora is not None)

    def forward(batch: Batch) -> Tensor:
        enter("forward")
        with torch.autocast(kind, half) if half is not None else nullcontext():
            total: Tensor = bench.objective(batch, wanted, 1.0).total
        return total

    def backward(loss: Tensor) -> None:
        enter("backward")
        loss.backward()
        if bench.balance is not None:
            enter("balance")

    if bench.balance is not None:
        bench.balance(batches, wanted, forward, backward)
    else:
        for batch in batches:
            backward(forward(batch))
    enter("optimizer")
    norm = nn.utils.clip_grad_norm_(bench.learning, config.clip if config.clip is not None else float("inf"))
    bench.optimizer.skip = (~norm.isfinite()).float()
    bench.optimizer.step()
    bench.optimizer.zero_grad()
    if bench.average is not None:
        enter("average")
        bench.average.update(number)


@torch.no_grad()
def measure_loss(bench: Workbench, batch: Batch, wanted: Tensor, enter: Callable[[str], None]) -> None:
    """Measures the loss of a held-out batch as `train.trainer.held_out_loss` does."""
    half = product_type(bench.config.fabric.precision, bench.config.lora is not None)
    enter(LOSS)
    with evaluated(bench.objective, bench.average), torch.autocast(wanted.device.type, half, enabled=half is not None):
        bench.objective(batch, wanted, 1.0)
