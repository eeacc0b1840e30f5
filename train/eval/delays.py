"""Evaluates a model that listens at several lengths of its encoder's chunks, and sets figures beside the delay; of an encoder
alone, by recordings without texts, how far its frames are from those of another one, which hears recordings whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from omni.audio.io import SAMPLE_RATE
from omni.checkpoint.folder import load_folder, read_config
from omni.encoder.base import build_encoder, collate, frame_distances
from omni.encoder.config import EncoderConfig
from omni.errors import UserError
from omni.files import write_json, write_whole
from omni.stores.tries import StoreError
from omni.utils.charts import drawn, markdown_table
from train.console.progress import Display, Progress
from train.data.readers import Broken
from train.eval.config import EvalConfig
from train.eval.measures import MEASURES, Figure, figure, plain, shown
from train.eval.questions import Questions, open_data
from train.eval.run import evaluate

Figures = Mapping[str, Figure]

JSON, TABLE, PICTURE = "delays.json", "delays.md", "delays.png"


def evaluate_delays(
    model: Path, data: Path, out: Path, config: EvalConfig, chunks: Sequence[int], progress: Progress = "auto"
) -> dict[int, Figures]:
    """Evaluates once for each length of a chunk, into `out/chunk-320` and the like; figures by milliseconds, 0 for whole
    clips. UserError for a length that is none of the encoder's."""
    for chunk in chunks:  # before anything is asked
        read_config(model).encoder.with_chunk(chunk)
    by_chunk: dict[int, Figures] = {}
    for chunk in chunks:
        _, by_chunk[chunk] = evaluate(model, data, out / f"chunk-{chunk}", replace(config, chunk_ms=chunk), progress)
    write_delays(by_chunk, out)
    return by_chunk


def write_delays(by_chunk: Mapping[int, Figures], out: Path) -> None:
    """Writes the figures of several lengths as a table, as JSON and as a picture."""
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / TABLE, markdown_table(*delay_table(by_chunk)) + "\n")
    write_json(out / JSON, {chunk: {name: plain(v) for name, v in figures.items()} for chunk, figures in by_chunk.items()})
    draw_delays(by_chunk, out / PICTURE)


def delay_table(by_chunk: Mapping[int, Figures]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table: a row for each length, a column for each figure. Before the end of its chunk nobody hears a
    word: half of the chunk on the average."""
    names = list(next(iter(by_chunk.values())))
    head = ["chunk", "mean wait", *(MEASURES[name].title for name in names)]
    rows = []
    for chunk, figures in by_chunk.items():
        waits = [f"{chunk} ms", f"{chunk / 2:g} ms"] if chunk else ["whole", "-"]
        rows.append([*waits, *(shown(name, figures[name].value) if name in figures else "-" for name in names)])
    return head, rows


def draw_delays(by_chunk: Mapping[int, Figures], file: Path) -> Path:
    """Draws the shares and error rates, or all figures where there are none, over the length of a chunk, with 95 % intervals;
    whole clips at the right."""
    from train.eval.report import SHARES, bars_of

    chunks = sorted(by_chunk, key=lambda chunk: chunk or float("inf"))
    names = [name for name in SHARES if all(name in by_chunk[chunk] for chunk in chunks)]
    scale, unit = (100.0, "per cent, with 95 % intervals") if names else (1.0, "with 95 % intervals")
    names = names or list(by_chunk[chunks[0]])
    with drawn(file) as axes:
        axis = axes[0, 0]
        for name in names:
            lengths, errors = bars_of([by_chunk[chunk][name] for chunk in chunks], scale)
            axis.errorbar(range(len(chunks)), lengths, yerr=errors, marker="o", label=MEASURES[name].title)
        axis.set_xticks(range(len(chunks)), [f"{chunk} ms" if chunk else "whole" for chunk in chunks])
        axis.set(xlabel="chunk of the encoder", ylabel=unit)
        axis.set_ylim(bottom=0)
    return file


def evaluate_distances(
    model: Path, teacher: Path, data: Path, out: Path, config: EvalConfig, chunks: Sequence[int], progress: Progress = "auto"
) -> tuple[dict[int, Figures], list[str]]:
    """Measures the mean `frame_distances` of a model's frames from the teacher's, and writes table, JSON and picture; figures
    by milliseconds, and why recordings were left out.

    The teacher's encoder hears each recording whole, and in its window where its mode is "padded". Without `chunks`
    (milliseconds, 0 for whole recordings) the model has its own. UserError for an encoder that hears whole clips only, or of
    another shape than the teacher's, and where no recording can be heard.
    """
    stored = read_config(model).encoder
    chunks = chunks or [(stored.chunk_samples or 0) * 1000 // SAMPLE_RATE]
    chosen = {chunk: stored.with_chunk(chunk) for chunk in chunks}
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
    pairs: dict[int, list[tuple[float, int]]] = {chunk: [] for chunk in chosen}
    left_out: list[str] = []
    with torch.no_grad(), closing(Display(len(recordings), 0, progress)) as display:
        for sound in _sounds(recordings, stored, left_out):
            prepared = stored.prepare(sound)
            features, lengths = collate(prepared.features)
            clips = features.to(config.device), lengths, prepared.clip_frames
            taught = whole.hear_whole(*clips, other.config.fixed_length)
            for chunk, student.config in chosen.items():
                distances = frame_distances(student.run(*clips), taught)
                pairs[chunk].append((float(distances.sum()), len(distances)))
            display.tick(1, len(sound) / SAMPLE_RATE)
    if not any(pairs.values()):
        raise UserError(f"none of the {len(recordings)} recordings can be heard; the first: {left_out[0]}")
    figures: dict[int, Figures] = {chunk: {"distance": figure("distance", np.array(of))} for chunk, of in pairs.items()}
    write_delays(figures, out)
    return figures, left_out


def _sounds(recordings: Questions, encoder: EncoderConfig, left_out: list[str]) -> Iterator[Tensor]:
    """Samples [S] of each row's first question; `left_out` receives why there are none."""
    for _, row in recordings.iterate():
        try:
            if isinstance(row, Broken):
                raise UserError(row.why)
            if row.turns[0].question_audio is None:
                raise UserError("there is no question_audio")
            sound = row.turns[0].question_audio.load(SAMPLE_RATE)
            encoder.clips(len(sound))
        except StoreError:
            raise
        except UserError as error:
            left_out.append(f"{row.where}: {error}")
            continue
        yield sound
