"""Counts a model's parameters by part, and how many of them are trainable."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omni.config import ModelConfig
from omni.model.quantize import numels
from omni.model.speech_model import SpeechModel
from train.config.run import FitConfig
from train.optim.optimizer import set_trainable
from train.plan.quantized import adapt

PARTS = ("encoder", "projector", "decoder blocks", "tables", "heads", "alignment head", "turn head", "norms", "LoRA")


@dataclass(frozen=True)
class Count:
    """Number of parameters of a part: all of them, and the trainable ones."""

    part: str
    total: int
    trainable: int


def meta_model(config: FitConfig, shape: ModelConfig) -> SpeechModel:
    """Builds the model without values, on the meta device; the trainable parameters are marked."""
    with torch.device("meta"):
        model = SpeechModel(shape)
    adapt(model, config.lora, fake=True)
    set_trainable(model, config.trainable_patterns)
    return model


def part_of(name: str) -> str:
    """The part of `PARTS` that a parameter belongs to; a text head that is the text table counts as a table."""
    top, _, rest = name.partition(".")
    if ".lora." in name:
        return "LoRA"
    if top != "decoder":
        return top.replace("_", " ")
    if "blocks." in rest:
        return "decoder blocks"
    if "embedding" in rest:
        return "tables"
    return "heads" if "head" in rest else "norms"


def count_parameters(model: SpeechModel) -> list[Count]:
    """Counts the parameters of every part that the model has, in the order of `PARTS`."""
    found: dict[str, list[int]] = {}
    sizes = numels(model)
    for name, p in model.named_parameters():
        count = found.setdefault(part_of(name), [0, 0])
        count[0] += sizes[name]
        count[1] += sizes[name] * p.requires_grad
    return [Count(part, *found[part]) for part in PARTS if part in found]
