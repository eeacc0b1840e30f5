"""Makes the micro-batch that needs most memory of all that a run's packing allows.

Dimensions: R rows, K streams, T columns, N clips, M values of a feature frame.
"""

from __future__ import annotations

import math

import torch

from omni.config import ModelConfig
from omni.layout import IGNORE
from omni.tasks import TASKS
from train.data.batching.batch import Batch
from train.data.config import DataConfig, tasks_of

PROMPT = 4
"""Columns of a spoken question's example beside the question itself: input, end, the marker, and one of the answer."""

PADDED_COLUMNS = 256
"""Columns of an example where every clip costs the encoder its whole window, however short (`EncoderConfig.fixed_length`)."""


def worst_batch(data: DataConfig, shape: ModelConfig) -> Batch:
    """A batch that no batch of the run exceeds: all rows full, every stream that any task of the mixture trains supervised in
    every column, and, where any task asks by speech, clips as long as the window and the rows have room for.

    Columns of data belong to a sound or to an answer, these to both: answers cost little beside the decoder's columns, since
    logits are made in chunks. Where clips have a fixed length there is one to `PADDED_COLUMNS` columns.
    """
    rows, length, layout = data.packing.rows, data.packing.length, shape.layout
    tasks = tasks_of(data)
    trained = torch.tensor([any(t.trained(layout)[k] for t in tasks) for k in range(len(layout))])
    tokens = layout.ids("pad")[None, :, None].repeat(rows, 1, length)
    targets = torch.where(trained[None, :, None], torch.zeros_like(tokens), torch.full_like(tokens, IGNORE))
    index = torch.full((rows, length), -1)
    segments = torch.zeros(rows, length, dtype=torch.long)
    frames: list[int] = []
    heard = clips_of(length, shape) if any(task.question == "audio" for task in tasks) else []
    features = 0
    for row in range(rows):
        start = 0
        for number, count in enumerate(heard):
            index[row, start + 1 : start + 1 + count] = torch.arange(features, features + count)
            segments[row, start:] = number
            frames.append(min(count * shape.projector.stack, shape.encoder.positions))
            features += count
            start += count + PROMPT
    lengths = [shape.encoder.feature_frames(n) for n in frames]
    spelt = shape.ctc > 1 and data.alignment != "none"
    return Batch(
        tokens=tokens,
        targets=targets,
        feature_index=index,
        segments=segments,
        task=torch.full((rows, length), list(TASKS).index(tasks[-1].name)),
        inputs=torch.zeros(len(frames), shape.encoder.bands, max(lengths, default=0)),
        input_lengths=lengths,
        frames=frames,
        transcripts=[_transcript(max(1, n // 4), shape) if spelt else [] for n in frames],
        examples=rows * max(1, len(heard)),
        positions=rows * length,
        state={},
    )


def _transcript(count: int, shape: ModelConfig) -> list[int]:
    """`count` ids of each spelling."""
    sounds = shape.ctc_sounds - 1
    return [1 + i % (shape.ctc - 1) for i in range(count)] + [shape.ctc + 1 + i % sounds for i in range(count) if sounds > 0]


def clips_of(length: int, shape: ModelConfig) -> list[int]:
    """Number of features of each clip of a full row."""
    longest = math.ceil(shape.encoder.positions / shape.projector.stack)
    each = min(longest + PROMPT, PADDED_COLUMNS if shape.encoder.fixed_length else length, length)
    whole, rest = divmod(length, each)
    columns = [each] * whole + ([rest] if rest > PROMPT else [])
    return [max(1, n - PROMPT) for n in columns if n > PROMPT]
