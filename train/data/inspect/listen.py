"""Writes one row as sound files, and draws it as the columns that a model would get."""

from __future__ import annotations

import filecmp
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from omni.audio.wav import write_wav
from omni.codec.registry import CODECS
from omni.errors import UserError
from omni.tasks import TASKS, find_task
from train.data.inspect.checks import BadSound, Codecs, load, measure
from train.data.inspect.scan import Scan, Target
from train.data.rows.row import Row, Sound

if TYPE_CHECKING:
    from torch import Tensor

    from omni.codec.base import AudioCodec

USUAL = ("A1A2", "T1A2", "A1T2", "T1T2", "A1T1", "T1A1")
"""Tasks that are tried, in this order, where none is named: the first that the row has all parts for is used."""


def own_folder(data: str, row: str) -> Path:
    """Default output folder of a row, such as `listen-mine-17`."""
    path = Path(data).resolve()
    words = (path.name if path.is_dir() else path.stem, row.replace(".parquet", ""))
    return Path("-".join(["listen", *(re.sub(r"[^\w.]+", "-", word).strip("-.")[:80] for word in words)]))


def find_row(scan: Scan, name: str) -> Row:
    """Find a row by number, place (`rows-00000.parquet:7`) or id. UserError where there is none, or it cannot be read."""
    file, colon, number = name.rpartition(":")
    if name.isdigit():
        index = int(name)
    elif colon and number.isdigit() and Path(file).name in [known.name for known in scan.files]:
        index = scan.index(Path(file).name, int(number))
    else:
        for item in scan:
            if item.row is not None and item.row.id == name:
                return item.row
        raise UserError(f"data {scan.path} has no row with the id {name!r}; a number from 0 to {len(scan) - 1} names one too")
    row = scan.at(index)
    if row.row is None:
        raise UserError(f"{row.where}: {row.why}")
    return row.row


def sounds(row: Row, folder: Path, codecs: Codecs, overwrite: bool = False) -> list[str]:
    """Write the sounds of every turn as `question-0.wav`, `answer-0.wav` and, decoded, `answer-0-codes.wav`. Returns a line for
    each text, and for each sound that the row has, written or not. UserError: a file of another sound is there, and it is not
    to be replaced."""
    lines = []
    for number, turn in enumerate(row.turns):
        for side in ("question", "answer"):
            text, sound = getattr(turn, f"{side}_text"), getattr(turn, f"{side}_audio")
            if text:
                lines.append(f"{side} {number}: {text!r}")
            if sound is not None:
                lines.append(f"{side} {number}: {_recording(sound, folder / f'{side}-{number}.wav', overwrite)}")
        if (codes := turn.answer_codes) is not None:
            shape = f"answer {number}: {codes.codec} codes {list(codes.frames.shape)}, order {codes.order!r}"
            try:
                codec = codecs.load(codes.codec)
                audio = codec.decode(codecs.streams(codes)).cpu()
            except UserError as error:
                lines.append(f"{shape}, not decoded: {error}")
                continue
            file = _written(folder / f"answer-{number}-codes.wav", audio, codec.sample_rate, overwrite)
            lines.append(f"{shape}, {len(audio) / codec.sample_rate:.2f} s: {file}")
    return lines


def _written(file: Path, samples: Tensor, rate: int, overwrite: bool) -> Path:
    """Write samples [S] to a WAV file; one with the same samples is left as it is."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and not overwrite:
        with tempfile.TemporaryDirectory() as folder:
            if not filecmp.cmp(write_wav(Path(folder) / file.name, samples, rate), file, shallow=False):
                raise UserError(f"{file} is another sound: name another folder with --out, or replace it with --overwrite")
        return file
    return write_wav(file, samples, rate)


def _recording(sound: Sound, file: Path, overwrite: bool) -> str:
    try:
        samples, rate = load(sound)
        measured = measure(sound)
    except BadSound as error:
        return f"no sound: {error}"
    _written(file, samples, rate, overwrite)
    return (
        f"{measured.seconds:.2f} s at {rate} Hz, {100 * measured.silence:.0f} % silent, "
        f"{100 * measured.clipping:.2f} % clipped: {file}"
    )


def draw(row: Row, target: Target, codecs: Codecs, task: str | None = None, columns: int = 24) -> str:
    """Draw the row's prompt and targets as text; UserError where it lacks a part that the task needs, or needs a codec that
    is not available."""
    from train.data.batching.batch import draw_columns
    from train.data.batching.examples import ExampleMaker, Prepared

    usual = (TASKS[name] for name in USUAL if not any(turn.lacks(TASKS[name]) for turn in row.turns))
    chosen = find_task(task, "--task") if task else find_task(row.task, row.where) if row.task else next(usual, None)
    if chosen is None:
        raise UserError(f"{row.where} has the parts of no task: see omni-train data validate")
    codec = _codec(row, target, codecs) if chosen.audio else None
    maker = ExampleMaker(target.config, target.tokenizer, codec)
    example = maker.make(0, Prepared(row), [chosen.name] * len(row.turns))
    heard = sum(-(-clip.frames // target.config.projector.stack) for clip in example.clips)
    title = f"as {chosen.name}: {len(example.columns)} time steps, {heard} of them with features"
    context = target.config.decoder.context
    if len(example.columns) > context:
        title += f", more than the decoder's context of {context}"
    return "\n".join([title, *draw_columns(example.columns, target.config.layout, target.tokenizer, columns)])


def _codec(row: Row, target: Target, codecs: Codecs) -> AudioCodec:
    """The model's codec; where its weights are not available, one of which only name and codebook sizes are known."""
    from omni.codec.base import AudioCodec, CodecStream

    name = target.config.codec
    if codecs.folder is not None or not CODECS.find(name).weights or any(turn.answer_codes is None for turn in row.turns):
        return codecs.load(name)

    class CodeChecks(AudioCodec):
        sample_rate = frame_samples = 1
        codebook_sizes = target.config.layout.codebook_sizes

        def stream(self, seed: int = 0) -> CodecStream:
            raise NotImplementedError

        def _encode(self, audio: Tensor) -> Tensor:
            raise NotImplementedError

    checks = CodeChecks()
    checks.name = name
    return checks
