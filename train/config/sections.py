"""Sections of a run's configuration whose own modules need PyTorch, which reading a configuration does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from omni.errors import UserError
from omni.lora.config import LoRAConfig

LORA = "*.lora.*"
"""Names of adapters' parameters."""


@dataclass(frozen=True)
class LoRASection(LoRAConfig):
    """Low-rank adapters instead of the weights themselves; see `omni.lora.attach`.

    Attributes:
        targets: names of the linears that get an adapter: shell patterns, or regular expressions after `re:`.
        rank, alpha, dropout: of each pair; its product counts alpha / rank.
        rank_stabilized: it counts alpha / sqrt(rank) instead.
        trainable: names of parameters that learn besides, whole.
        init_from: a PEFT folder to start from instead of new adapters; targets, rank and alpha are then its own.
        quantize: hold the base's weights as `nf4` (4 bits, double quantisation) or `int8`; needs bitsandbytes.
        quantize_targets: names of the linears that are held so.
        merged: also write the model with the adapter in its weights at the end, as a run without lora does.
    """

    trainable: tuple[str, ...] = ()
    init_from: str | None = None
    quantize: Literal["nf4", "int8"] | None = None
    quantize_targets: tuple[str, ...] = ("decoder.blocks.*",)
    merged: bool = True


def learning(trainable: tuple[str, ...], section: LoRASection | None) -> tuple[str, ...]:
    """Names of the parameters that learn, as patterns."""
    return trainable if section is None else (LORA, *section.trainable)


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is trained, and how much each part counts.

    Attributes:
        stream_weights: weight of each stream's mean loss, in the layout's order; None for 1 each.
        ctc_weight: weight of the alignment loss on the encoder; needs `model.ctc`.
        ctc_final: its weight at the end of the budget, reached linearly; None for the same all along.
        ctc_words: what a word or letter counts beside a sound, where questions are spelt by both (`data.sounds`).
        align_first: share of the budget in which only the encoder learns, by the alignment loss alone: listening takes
            longest, and it is cheapest while nothing else runs.
        chunk: largest number of logits held at once.
    """

    stream_weights: tuple[float, ...] | None = None
    ctc_weight: float = 0.0
    ctc_final: float | None = None
    ctc_words: float = 1.0
    align_first: float = 0.0
    chunk: int = 1 << 25

    def __post_init__(self) -> None:
        if not 0 <= self.align_first < 1:
            raise UserError(f"objective.align_first is {self.align_first}; it is a share of the budget, from 0 to below 1")
        if self.ctc_weight < 0 or (self.ctc_final or 0) < 0:
            raise UserError(f"objective.ctc_weight {self.ctc_weight} and ctc_final {self.ctc_final} must not be negative")
        if not 0 < self.ctc_words < float("inf"):
            raise UserError(f"objective.ctc_words is {self.ctc_words}; it must be above 0")
        if self.align_first > 0 and self.ctc_weight == 0:
            raise UserError("objective.align_first learns by the alignment loss alone, but objective.ctc_weight is 0")
        if self.chunk < 1:
            raise UserError(f"objective.chunk is {self.chunk}; it must be at least 1")
