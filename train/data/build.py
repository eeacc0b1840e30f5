"""Builds the data pipeline of a run from its configuration, its held-out rows, and the speaking time of its answers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from omni.codec.base import AudioCodec
from omni.config import ModelConfig
from omni.errors import UserError
from omni.generate.speech_time import SpeechTime, estimate
from omni.text import Tokenizer
from train.data.batching.examples import Alignment, ExampleMaker
from train.data.batching.loader import Pipeline
from train.data.config import DataConfig, SourceConfig
from train.data.rows.files import evenly
from train.data.rows.parquet import Needed, StoredRows
from train.data.rows.row import Row
from train.data.seeding import key
from train.data.sources import Source
from train.data.sources.mixture import Mixture, TaskMixture
from train.data.sources.streams import StreamSource


def build_alignment(config: DataConfig, tokenizer: Tokenizer) -> Alignment:
    """Build the spelling of transcripts for the alignment loss; its `size` must be `model.ctc`."""
    words = {*config.words, *(word for source in config.sources for word in source.made.vocabulary)}
    return Alignment(config.alignment, words, tokenizer, config.sounds)


def build_source(config: SourceConfig, codec: AudioCodec | None, seed: int, needed: Needed | None = None) -> Source:
    """Build one source; UserError where its files are wrong, or it needs a codec and there is none. `needed`: parts of stored
    rows that are read; None for all."""
    if config.kind == "stream":
        return StreamSource(config.folders[0], config.read, codec.name if codec is not None else "", config.window, seed)
    if config.path is not None:
        held_out = config.held_out if isinstance(config.held_out, int) else 0
        return StoredRows(config.path, None, needed, held_out, config.window if config.order == "sequential" else None)
    return config.made.build(codec, seed)


def build_pipeline(
    config: DataConfig, model: ModelConfig, tokenizer: Tokenizer, codec: AudioCodec | None, heard_only: bool = False
) -> Pipeline:
    """Build sources, mixture and example maker into a pipeline, under the configuration's seed. `heard_only`: see
    `ExampleMaker`. UserError: files, voices, weights or settings that do not fit each other or the model."""
    sources = []
    for i, source in enumerate(config.sources):
        needed = Needed(frozenset(source.drawn), config.cut > 0, heard_only)
        sources.append(build_source(source, codec, key(config.seed, "source", i), needed))
    mixture, tasks = build_mixture(config, sources, config.seed), [TaskMixture(s.tasks, s.stages) for s in config.sources]
    options = (config.augment, config.seed, config.system, config.cut, heard_only)
    maker = ExampleMaker(model, tokenizer, codec, build_alignment(config, tokenizer), *options)
    return Pipeline(mixture, tasks, maker, config.packing, config.seed, broken=config.broken)


def take_frames(pipeline: Pipeline, encoder: Callable[[], int], held_out: Sequence[Row], obstacle: str) -> str:
    """Has examples take the frames that rows keep of this encoder in place of the questions' sound, where the first row of each
    source and all held-out ones have them; returns what is to be said, "" where none keeps any.

    Args:
        encoder: computes its fingerprint.
        obstacle: why the run needs the sound; "" where it does not.
    """
    stored, rows = [source for source in pipeline.mixture.sources if isinstance(source, StoredRows)], [*held_out]
    for source in stored:
        with suppress(UserError):  # training reports it
            rows.append(source.whole()[0])
    kept = [turn.question_frames for row in rows for turn in row.turns if turn.question_audio is not None]
    if not any(kept):
        return ""
    fingerprint = encoder()
    lacking = sum(frames is None or frames.encoder != fingerprint for frames in kept)
    if lacking or len(stored) < len(pipeline.mixture.sources):
        obstacle = obstacle or "some rows have none of this encoder, prepare all with --frames MODEL"
    if obstacle:
        return f"the frames kept with the rows are not taken: {obstacle}"
    pipeline.maker.frames = fingerprint
    for source in stored:
        source.needed = None if source.needed is None else replace(source.needed, frames=True)
    return "the frames kept with the rows are taken: no sound is decoded or encoded"


def build_mixture(config: DataConfig, sources: Sequence[Source], seed: int) -> Mixture:
    """Mix built sources as configured; UserError where a limit does not fit its source."""
    limits = []
    for i, (source, source_config) in enumerate(zip(sources, config.sources, strict=True)):
        try:
            limits.append(source_config.limit(source.size))
        except UserError as error:
            raise UserError(f"data.sources.{i}.{error}") from error
    windows = {i: source.windows for i, source in enumerate(sources) if isinstance(source, StoredRows) and source.windows}
    return Mixture(sources, config.weights, seed, limits, windows)


def held_out_rows(config: DataConfig, codec: AudioCodec | None, count: int) -> list[Row]:
    """Read `count` rows for validation, shared evenly over all sources that have some; the same ones every time. System
    messages are left out where the training leaves them out, and so are rows that cannot be read. UserError: no source has any,
    or one cannot be read and `data.broken` is not `skip`."""
    held_out = held_out_by_source(config, codec, count, {} if config.broken == "skip" else None)
    return [row for _, rows in held_out for row in rows]


def held_out_by_source(
    config: DataConfig, codec: AudioCodec | None, count: int, broken: dict[str, str] | None = None
) -> list[tuple[SourceConfig, list[Row]]]:
    """The rows of `held_out_rows`, with their sources; `broken` as in `held_out_of`. UserError: no source has any, or one
    cannot be read and `broken` is None."""
    sources, held_out = sources_held_out(config), []
    for i, source in enumerate(sources):
        share = count * (i + 1) // len(sources) - count * i // len(sources)
        rows = held_out_of(source, codec, share, broken=broken)
        held_out.append((source, rows if config.system else [replace(row, system="") for row in rows]))
    return held_out


def sources_held_out(config: DataConfig) -> list[SourceConfig]:
    """The sources with rows for validation; UserError where none has any."""
    sources = [source for source in config.sources if source.has_held_out]
    if not sources:
        raise UserError(
            "no source has held-out rows; name a file or a number of them as data.sources[...].held_out, or ask no questions"
        )
    return sources


def held_out_of(
    source: SourceConfig, codec: AudioCodec | None, count: int, seed: int = 1, broken: dict[str, str] | None = None
) -> list[Row]:
    """Read `count` held-out rows of a source that has some (`has_held_out`), or all of fewer; `seed` draws synthetic ones.
    `broken`: collects why rows cannot be read, by file and row number, and such rows are left out; None makes it an error.
    UserError: see `build_source`; or a row that cannot be read."""
    if isinstance(source.held_out, str):
        stored = StoredRows(source.held_out)
        indices = evenly(len(stored), count)
    elif source.held_out is None:
        return source.made.build(codec, 0).held_out(count, seed)
    else:
        stored = StoredRows(source.folders, held_out=source.held_out)
        indices = stored.held_out_indices(count)
    rows = []
    for number in indices:
        try:
            rows.append(stored[number])
        except UserError as error:
            if broken is None:
                raise
            broken[stored.where(number)] = str(error)
    return rows


DRAWS = 128
"""Number of a run's first draws that are measured: the same ones at every start, and with any number of processes."""


def estimate_speech_time(mixture: Mixture, codec: AudioCodec) -> SpeechTime | None:
    """Estimate the speaking time of a run's answers by their texts and the lengths of their sound; None where none has both.
    Unreadable rows are skipped: training reports them."""
    seen, spoken, mixture = set(), list[tuple[str, float]](), copy.copy(mixture)
    mixture.sources = [source.whole() if isinstance(source, StoredRows) else source for source in mixture.sources]
    for number in range(DRAWS if mixture.total is None else min(DRAWS, mixture.total)):
        draw = mixture.draw(number)
        where = (draw.source, mixture.sources[draw.source].identity(draw.index))
        if where in seen:
            continue
        seen.add(where)
        with suppress(UserError):
            for turn in mixture.row(draw).turns:
                if turn.answer_codes is not None and turn.answer_codes.codec == codec.name:
                    spoken.append((turn.answer_text, turn.answer_codes.frames.shape[-1] / codec.frame_rate))
                elif turn.answer_audio is not None and turn.answer_text.strip():
                    spoken.append((turn.answer_text, len(turn.answer_audio.load(codec.sample_rate)) / codec.sample_rate))
    return estimate(spoken)
