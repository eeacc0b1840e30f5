"""Settings of the objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omni.errors import UserError


def check_stream_weights(weights: Sequence[float], streams: int) -> None:
    """Refuses another number of `objective.stream_weights` than the layout's streams (UserError)."""
    if len(weights) != streams:
        raise UserError(
            f"objective.stream_weights has {len(weights)} entries; the layout has {streams} streams: give a weight for each, "
            "those of audio first"
        )


def no_alignment_head(weight: float) -> str:
    """Error text for an alignment loss on a model without a head for it."""
    return (
        f"objective.ctc_weight is {weight}, but the model has no alignment head: set data.alignment to words or letters (and "
        "leave model.ctc out), or objective.ctc_weight to 0"
    )


@dataclass(frozen=True)
class ObjectiveConfig:
    """Weights of the losses and their schedule.

    Attributes:
        stream_weights: weight of each stream's mean loss, in the layout's order; None for 1 each.
        ctc_weight: weight of the alignment loss on the encoder; needs `model.ctc`.
        ctc_final: its weight at the end of the budget, reached linearly; None for the same all along.
        ctc_words: what a word or letter counts beside a sound, where questions are spelt by both (`data.sounds`).
        align_first: share of the budget in which only the encoder is trained, by the alignment loss alone: recognising speech
            takes longest to train, and a step is cheapest while nothing else runs.
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
            raise UserError("objective.align_first trains by the alignment loss alone, but objective.ctc_weight is 0")
        if self.chunk < 1:
            raise UserError(f"objective.chunk is {self.chunk}; it must be at least 1")
