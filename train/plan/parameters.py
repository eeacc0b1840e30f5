"""How many parameters a model has, by part, and how many of them learn."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omni.config import ModelConfig
from omni.model.quantize import numels
from omni.model.speech_model import SpeechModel
from train.config.run import FitConfig
from train.optim.optimizer import set_trainable
from train.plan.quantized import adapt

PARTS = ("encoder", "projector", "decoder blocks", "tables", "heads", "alignment head", "norms", "LoRA")


@dataclass(frozen=True)
class Count:
    """Parameters of a part: all of them, and those that learn."""

    part: str
    total: int
    trainable: int


def paper_model(config: FitConfig, shape: ModelConfig) -> SpeechModel:
    """The model without values, on the meta device; the trainable parameters are marked."""
    with torch.device("meta"):
        model = SpeechModel(shape)
    adapt(model, config.lora, paper=True)
    set_trainable(model, config.learns)
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
    """Every part that there is, in the order of `PARTS`."""
    found: dict[str, list[int]] = {}
    sizes = numels(model)
    for name, p in model.named_parameters():
        count = found.setdefault(part_of(name), [0, 0])
        count[0] += sizes[name]
        count[1] += sizes[name] * p.requires_grad
    return [Count(part, *found[part]) for part in PARTS if part in found]
