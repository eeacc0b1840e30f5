"""Counts the FLOPs of a training step, the numerator of MFU (`omni.utils.hardware` has the denominator)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from omni.model.quantize import numels
from omni.model.speech_model import SpeechModel

if TYPE_CHECKING:
    from train.data.batching.batch import Batch
    from train.objective.config import ObjectiveConfig


class StepFlops:
    """FLOPs of a forward and backward pass of a packed batch, counted as Kaplan et al. 2020 do: 2 a weight and position
    forward, twice that backward; attention by the pairs that see each other; heads only where a target is. A frozen
    encoder costs its forward pass only, and a teacher too. Recomputation by checkpointing is not counted as work."""

    def __init__(self, model: SpeechModel, objective: ObjectiveConfig | None = None) -> None:
        decoder, encoder, sizes = model.decoder, model.encoder, numels(model)
        self.widths = [s.vocabulary * decoder.config.width for s in model.layout.streams]
        self.per_position = sum(sizes[f"decoder.{n}"] for n, p in decoder.named_parameters() if "blocks." in n and p.ndim == 2)
        c = decoder.config
        self.per_pair = (c.layers + c.post_layers) * c.heads * c.head_size
        matrices = sum(sizes[f"encoder.{n}"] for n, p in encoder.named_parameters() if p.ndim >= 2)
        self.per_frame = matrices + sum(sizes[f"projector.{n}"] for n, p in model.projector.named_parameters() if p.ndim >= 2)
        self.passes = 6 if any(p.requires_grad for p in encoder.parameters()) else 2
        self.alone = objective is not None and objective.encoder_alone
        if objective is not None and objective.distill_weight > 0:
            self.passes += 2
        self.encoder_pair = model.config.encoder.attention_size

    def __call__(self, batch: Batch, targets: Tensor) -> float:
        """FLOPs of a batch; targets: supervised positions of each stream, [K] and more (which are not used)."""
        frames = float(sum(batch.frames))
        frame_pairs = float(sum(n * n for n in batch.frames))
        hearing = self.passes * (self.per_frame * frames + 2.0 * self.encoder_pair * frame_pairs)
        if self.alone:
            return hearing
        heads = sum(6.0 * w * n for w, n in zip(self.widths, targets.tolist(), strict=False))
        pairs = float((batch.lengths.double() ** 2).sum()) / 2
        decoder = 6.0 * self.per_position * batch.positions + 12.0 * self.per_pair * pairs
        return heads + decoder + hearing
