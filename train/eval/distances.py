"""Measures how far the frames of an encoder that hears in chunks are from those of another one, which hears recordings whole.

No text and no answer is needed, so that recordings alone will do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from omni.audio.io import SAMPLE_RATE
from omni.checkpoint.folder import load_folder, read_config
from omni.encoder.base import build_encoder, collate, frame_distances
from omni.encoder.config import EncoderConfig
from omni.errors import UserError
from omni.stores.tries import StoreError
from train.console.progress import Display
from train.data.readers import Broken
from train.eval.config import EvalConfig, Progress
from train.eval.delays import write_delays
from train.eval.measures import figure
from train.eval.questions import Questions, open_data

if TYPE_CHECKING:
    from train.eval.measures import Figure

MEASURE = "distance"


@dataclass(frozen=True)
class Distances:
    """Figures by length of a chunk in milliseconds, 0 for whole recordings; and why recordings were left out."""

    figures: dict[int, dict[str, Figure]]
    left_out: list[str]


def evaluate_distances(
    model: Path,
    teacher: Path,
    data: Path,
    out: Path,
    config: EvalConfig,
    chunks: Sequence[int],
    progress: Progress = "auto",
) -> Distances:
    """Measures the mean `frame_distances` of a model's frames from the teacher's, and writes table, JSON and picture.

    Args:
        teacher: a model folder, whose encoder hears each recording whole, and in its window where its mode is "padded".
        chunks: lengths in milliseconds, 0 for whole recordings; none for the model's own.

    Raises:
        UserError: a model or data that cannot be read, an encoder that hears whole clips only or of another shape than the
            teacher's, a length that is given twice or is none of the encoder's, or no recording that can be heard.
    """
    if len(set(chunks)) < len(chunks):
        raise UserError(f"--chunks {','.join(map(str, chunks))} names a length twice; name each once")
    stored = read_config(model).encoder
    own = stored.chunk_samples or 0
    chosen = {chunk: stored.with_chunk(chunk) for chunk in chunks or [own * 1000 // SAMPLE_RATE]}
    recordings = Questions.spread(open_data(data, config.read), config.limit)
    student = load_folder(model, config.device, torch.float32).model.eval().encoder
    other = load_folder(teacher, config.device, torch.float32).model.encoder
    whole = build_encoder(stored).to(config.device).eval()
    try:
        whole.load_state_dict(other.state_dict())
    except RuntimeError as error:
        raise UserError(
            f"--teacher {teacher}: its encoder is of another shape than that of {model}; name its origin"
        ) from error
    found: dict[int, list[tuple[float, int]]] = {chunk: [] for chunk in chosen}
    left_out: list[str] = []
    display = Display(len(recordings), 0, progress)
    with torch.no_grad():
        for sound in _sounds(recordings, stored, left_out):
            prepared = stored.prepare(sound)
            features, lengths = collate(prepared.features)
            given = features.to(config.device), lengths, prepared.clip_frames
            taught = whole.hear_whole(*given, other.config.fixed_length)
            for chunk, student.config in chosen.items():
                distances = frame_distances(student.run(*given), taught)
                found[chunk].append((float(distances.sum()), len(distances)))
            display.tick(1, len(sound) / SAMPLE_RATE)
    display.close()
    if not any(found.values()):
        raise UserError(f"none of the {len(recordings)} recordings can be heard; the first: {left_out[0]}")
    figures = {chunk: {MEASURE: figure(MEASURE, np.asarray(pairs, dtype=np.float64))} for chunk, pairs in found.items()}
    out.mkdir(parents=True, exist_ok=True)
    write_delays(figures, out)
    return Distances(figures, left_out)


def _sounds(recordings: Questions, encoder: EncoderConfig, left_out: list[str]) -> Iterator[Tensor]:
    """Samples [S] of each row's first question; `left_out` receives why there are none."""
    for _, row in recordings.iterate():
        if isinstance(row, Broken):
            left_out.append(f"{row.where}: {row.why}")
        elif row.turns[0].question_audio is None:
            left_out.append(f"{row.where}: there is no question_audio")
        else:
            try:
                sound = row.turns[0].question_audio.load(SAMPLE_RATE)
                encoder.clips(len(sound))
            except StoreError:
                raise
            except UserError as error:
                left_out.append(f"{row.where}: {error}")
                continue
            yield sound
