"""Settings of the objective."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from omni.errors import UserError
from omni.utils.configuration import Share, configuration

NO_ALIGNMENT_HEAD = "the model has no alignment head: set data.alignment to words, letters or tokens (and leave model.ctc out)"
NO_TURN_HEAD = "the model has no turn head: set model.turn to true, with encoder.mode chunked"


def check_stream_weights(weights: Sequence[float], streams: int, key: str = "objective.stream_weights") -> None:
    """Refuses weights of another number than the layout's streams, below 0, or all 0 (UserError)."""
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise UserError(f"{key} is {list(weights)}; give numbers of at least 0, not all of them 0, or null for 1 each")
    if len(weights) != streams:
        raise UserError(
            f"{key} has {len(weights)} entries; the layout has {streams} streams: give a weight for each, those of audio first"
        )


def untrained(loss: str, weight: float, why: str) -> UserError:
    """The error of a loss on the encoder that cannot be trained: `why` says what is lacking, and how to get it."""
    return UserError(f"objective.{loss}_weight is {weight}, but {why}, or set objective.{loss}_weight to 0")


@configuration
class ObjectiveConfig:
    """Weights of the losses and their schedule.

    Attributes:
        stream_weights: weight of each stream's mean loss, in the layout's order; None for 1 each.
        ctc_weight: weight of the alignment loss on the encoder, or, of tokens, on the projector; needs `model.ctc`. Over
            more than 12,288 tokens, steps estimate it by a sample of them; validation does not.
        ctc_final: its weight at the end of the budget, reached linearly; None for the same all along.
        ctc_words: what a word or letter counts beside a sound, where questions are spelt by both (`data.sounds`).
        turn_weight: weight of the loss of the turn head on the encoder; needs `model.turn`.
        distill_weight: weight of the distance of an encoder that hears in chunks from what it started as and hears whole clips:
            the squared distance of a frame over the teacher's square, mean of all frames (`encoder.mode: chunked`,
            `model.init_from`).
        align_first: share of the budget in which only the encoder (with `data.alignment: tokens` the projector, too) is
            trained, by the losses of its heads and of its distillation alone: recognising speech takes longest to train, and a
            step is cheapest while nothing else runs. At 1 nothing else is trained, and rows need only the sound of their
            questions.
        chunk: largest number of logits held at once; None for 2^28 on a GPU (1.5 GB in half precision) and 2^25 on a CPU.
    """

    stream_weights: tuple[float, ...] | None = None
    ctc_weight: NonNegativeFloat = 0.0
    ctc_final: NonNegativeFloat | None = None
    ctc_words: PositiveFloat = 1.0
    turn_weight: NonNegativeFloat = 0.0
    distill_weight: NonNegativeFloat = 0.0
    align_first: Share = 0.0
    chunk: PositiveInt | None = None

    def __post_init__(self) -> None:
        if self.align_first > 0 and self.ctc_weight == self.distill_weight == 0:
            raise UserError(
                "objective.align_first trains by the losses on the encoder alone, but objective.ctc_weight is 0, and so is "
                "distill_weight"
            )

    @property
    def by_heads(self) -> bool:
        """True where losses on the encoder are trained, which belong to no task."""
        return max(self.ctc_weight, self.ctc_final or 0, self.turn_weight, self.distill_weight) > 0

    @property
    def encoder_alone(self) -> bool:
        """True where nothing but the encoder ever runs in training, so that rows need only the sound of their questions."""
        return self.align_first == 1

    def chunk_on(self, cuda: bool) -> int:
        """The largest number of logits held at once on a GPU, or on a CPU."""
        return self.chunk if self.chunk is not None else 1 << (28 if cuda else 25)
