"""The row of stored data, version 2: one conversation, independent of the task it will be used for.

    version    int32     2
    id         string    any name, for people
    source     string    data set that it is from
    language   string    BCP 47, such as "en"
    speaker    string    speaker of the questions
    task       string    a task that all turns are meant for, "" to leave it to the mixture
    system     string    text of the conversation's system message, "" for none; files without the column have none
    question_frames      of each turn, what an encoder made of question_audio: {encoder, counts, data}; null for none
        encoder    int64     `omni.encoder.base.Encoder.fingerprint`
        counts     list of int32: frames of each clip
        data       binary    frames of all clips, bfloat16 [sum of counts, width]
    turns      list of
        question_text   string
        question_audio  {bytes, path}
                            bytes   FLAC, or any other file that soundfile reads
                            path    instead of bytes: relative to the folder of the Parquet file, or a `reference.Reference`
        answer_text     string
        answer_audio    {bytes, path}
        answer_codes    {codec, order, frames}
                            codec   name of an audio codec: codec2, snac, ...
                            order   `streams`: that of the codec's streams in the model (SNAC: c0 c1 c2 c2 c1 c2 c2);
                                    `levels`: SNAC's levels one after another (c0 | c1 c1 | c2 c2 c2 c2)
                            frames  [streams][frames] int32
        words           list of {text, start, end, who}: times of each word, in seconds from the start of its sound: `who` is
                            "user" (question_audio) or "model" (answer_audio)
        question_start, answer_start
                            times of the two sounds in a longer recording, in seconds

Parts that a turn lacks are empty ("" or null). Which parts a task needs is checked when the row is used.
Version 1 had no `words` and no starts.
Dimensions: S samples, A audio streams, F frames.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from omni.audio.io import AudioInfo, audio_info, read_audio
from omni.audio.resample import resample
from omni.codec.registry import code_orders
from omni.errors import UserError
from omni.stores.cache import has_pointers, pointed_at
from omni.tasks import Task
from omni.utils.remote import refuse_remote
from train.data.rows.reference import PointedRecording, Reference, SoundPart, UnfitReference

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa
    from torch import Tensor

    from omni.codec.base import AudioCodec

ROW_VERSION = 2

OPTIONAL = ("system", "question_frames")
"""Columns that files of this version may lack: they were added later."""


@dataclass(frozen=True)
class Sound:
    """A recording: `samples` [S] at `sample_rate` in memory, encoded `data` (FLAC, WAV, ...), or a `path` below `folder`. A
    `path` may be a `Reference` too. Samples that were cut from a file have its absolute `path`, and which `part` they are."""

    samples: Tensor | None = None
    sample_rate: int = 0
    data: bytes | None = None
    path: str | None = None
    folder: Path | None = None
    part: SoundPart | None = None

    @property
    def reference(self) -> Reference | None:
        """The recording elsewhere that the row names, or a pointer file in its folder; None where it holds the sound, or
        names a file in its folder."""
        if self.data or self.samples is not None:
            return None
        named = Reference.read(self.path)
        if named is None and self.path and self.folder is not None and has_pointers(self.folder):
            stored = pointed_at(inside(self.folder, self.path))
            return None if stored is None else PointedRecording(stored.address, stored.size, stored.version)
        return named

    def info(self) -> AudioInfo:
        """Read the header, without decoding the sound; UserError as of `load`."""
        if self.samples is not None:
            return AudioInfo(self.sample_rate, len(self.samples), 1, "samples")
        if (named := self.reference) is not None:
            return named.info()
        return audio_info(self.data or self.file())

    def load(self, sample_rate: int) -> Tensor:
        """Load mono samples [S] (float32) at `sample_rate`; UserError where the file is no sound, or is outside its folder."""
        if self.samples is not None:
            return resample(self.samples, self.sample_rate, sample_rate)
        if (named := self.reference) is not None:
            return named.load(sample_rate)
        return read_audio(self.data or self.file(), sample_rate)

    def file(self) -> Path:
        """The file of a path below the folder; UnfitReference where there is none."""
        path = inside(self.folder, self.path or "")
        if not os.path.isfile(path):
            where = f"the data's folder {self.folder}"
            raise UnfitReference("missing_reference", f"audio {self.path!r:.200} is not in {where}: copy it there")
        return path

    def plain(self) -> dict[str, Any]:
        """Convert to the stored form `{bytes, path}`: samples become FLAC of 16 bits."""
        import soundfile

        if self.samples is not None:
            buffer = io.BytesIO()
            samples = self.samples.clamp(-1, 1).numpy()
            soundfile.write(buffer, samples, self.sample_rate, format="FLAC", subtype="PCM_16")
            return {"bytes": buffer.getvalue(), "path": None}
        return {"bytes": self.data, "path": self.path}


def checked(samples: Tensor) -> Tensor:
    """Return the samples [S]; UserError where there are none, or one is not finite."""
    import torch

    if len(samples) == 0:
        raise UserError("its sound holds no samples: record or convert it again")
    finite = torch.isfinite(samples)
    if not bool(finite.all()):
        raise UserError(f"its sound holds NaN or infinity from sample {int((~finite).nonzero()[0])}: fix or drop it")
    return samples


def inside(folder: Path | None, path: str) -> Path:
    """The file at a relative `path`, which must lie in `folder` (UnfitReference otherwise). So must the target of a link; but
    files of a snapshot in a Hugging Face cache are links to the `blobs` of their repository."""
    if folder is None or "\0" in path:
        why = "no path, it holds NUL" if folder else "a reference, but there is no folder here that it belongs to"
        raise UnfitReference("missing_reference", f"audio {path!r:.200} is {why}: name a file in the data's folder")
    try:
        refuse_remote(path, "audio", folder)
    except UserError as error:
        raise UnfitReference("missing_reference", str(error)) from error
    real, advice = os.path.realpath(folder), "name a file inside it, by its relative path"
    full = os.path.realpath(os.path.join(real, path))
    if not os.path.isabs(path):
        if full == real or full.startswith(os.path.join(real, "")):
            return Path(full)
        root, parts = Path(real), Path(path).parts
        if ".." not in parts and Path(full).parent == _blobs(root):
            return root / path  # the name before links are resolved
        for count in range(1, len(parts) + 1):
            prefix = root.joinpath(*parts[:count])
            if not prefix.resolve().is_relative_to(root) and prefix.is_symlink():
                advice = f"{'/'.join(parts[:count])!r} in it is a link to {prefix.resolve()}; put its files there (cp -rL)"
                break
    raise UnfitReference("escaping_reference", f"audio {path!r} leaves the data's folder {folder}: {advice}")


def _blobs(folder: Path) -> Path | None:
    """Folder that holds the files of a Hugging Face cache's snapshot (`datasets--x--y/snapshots/REVISION`); None for others."""
    for ancestor in (folder, *folder.parents):
        repository = ancestor.parent.parent
        if ancestor.parent.name == "snapshots" and repository.name.startswith(("datasets--", "models--", "spaces--")):
            return repository / "blobs"
    return None


@dataclass(frozen=True)
class Codes:
    """Frames [A, F] of a codec, and the stored order of their streams."""

    codec: str
    frames: Tensor
    order: str = "streams"

    def for_codec(self, codec: AudioCodec) -> Tensor:
        """Frames [A, F] (int64) in the model's order; UserError for another codec or an unknown order."""
        import torch

        if self.codec != codec.name:
            raise UserError(
                f"its answer_codes are of the codec {self.codec!r}, the model's is {codec.name!r}: prepare the data again "
                f"with --codec {codec.name}, and --speak answer where there is no sound of the answers"
            )
        frames = self.frames.to(torch.long)
        if self.order != "streams":
            orders = code_orders(codec.name)
            if self.order not in orders:
                known = ", ".join(["streams", *orders])
                raise UserError(f"order {self.order!r} of its answer_codes is unknown for {codec.name}; known: {known}")
            if frames.ndim == 2 and frames.shape[0] == len(orders[self.order]):
                frames = frames[list(orders[self.order])]
        return codec.check(frames)


class Frames(NamedTuple):
    """What an encoder made of a question: its fingerprint, the frames of each clip, and all of them as bytes of bfloat16."""

    encoder: int
    counts: Sequence[int]
    data: bytes

    @classmethod
    def of(cls, encoder: int, clips: Sequence[Tensor]) -> Frames:
        """Keep the frames [T, D] of clips."""
        import torch

        data = torch.cat(list(clips)).to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes()
        return cls(encoder, [len(clip) for clip in clips], data)

    @property
    def clips(self) -> Sequence[Tensor]:
        """Frames [T, D] of each clip."""
        import torch

        frames = torch.frombuffer(bytearray(self.data), dtype=torch.bfloat16)
        return frames.view(sum(self.counts), -1).split(list(self.counts))


class Word(NamedTuple):
    """A word and its times, in seconds from the start of its sound; `who` is "user" or "model"."""

    text: str
    start: float
    end: float
    who: str


@dataclass(frozen=True)
class RowTurn:
    """One question and its answer, in every form there is.

    Attributes:
        words: words with their times, where these are known.
        question_start, answer_start: seconds at which the two sounds start in the recording that they are cut from, so that
            pauses and overlaps can be restored.
        question_frames: what an encoder made of the question's sound.
    """

    question_text: str = ""
    question_audio: Sound | None = None
    answer_text: str = ""
    answer_audio: Sound | None = None
    answer_codes: Codes | None = None
    words: tuple[Word, ...] = ()
    question_start: float = 0.0
    answer_start: float = 0.0
    question_frames: Frames | None = None

    def written(self, task: Task) -> str:
        """The text that `task` writes of this turn."""
        return self.question_text if task.writes == "question" else self.answer_text

    def lacks(self, task: Task, heard_only: bool = False) -> str | None:
        """Name of a field that `task` needs and the turn lacks; None where it lacks nothing. `heard_only`: nothing but the
        encoder is trained, on the sound of the question."""
        if task.question == "audio" and self.question_audio is None and self.question_frames is None:
            return "question_audio"
        if heard_only:
            return None if task.question == "audio" else "spoken question"
        if (task.question == "text" or task.writes == "question") and not self.question_text.strip():
            return "question_text"
        if task.text and task.writes == "answer" and not self.answer_text.strip():
            return "answer_text"
        if task.audio and self.answer_codes is None and self.answer_audio is None:
            return "answer_codes (or answer_audio)"
        return None


@dataclass(frozen=True)
class Row:
    """A conversation, and the system message before it. `where` names its file and place, for errors; it is not stored."""

    turns: tuple[RowTurn, ...]
    id: str = ""
    source: str = ""
    language: str = "en"
    speaker: str = ""
    task: str = ""
    version: int = ROW_VERSION
    where: str = "row"
    system: str = ""


def features() -> datasets.Features:
    """The columns as `datasets` features. Audio is kept as stored: it is decoded when used."""
    from datasets import Audio, Features, List, Value

    text, audio = Value("string"), Audio(decode=False)
    codes = {"codec": text, "order": text, "frames": List(List(Value("int32")))}
    turn = {
        "question_text": text,
        "question_audio": audio,
        "answer_text": text,
        "answer_audio": audio,
        "answer_codes": codes,
        "words": List({"text": text, "start": Value("float32"), "end": Value("float32"), "who": text}),
        "question_start": Value("float32"),
        "answer_start": Value("float32"),
    }
    frames = List({"encoder": Value("int64"), "counts": List(Value("int32")), "data": Value("binary")})
    texts = dict.fromkeys(_TEXTS, text)
    return Features({"version": Value("int32"), **texts, "turns": List(turn), "system": text, "question_frames": frames})


@cache
def row_schema() -> pa.Schema:
    """The columns as Parquet files have them."""
    return features().arrow_schema


_TEXTS = ("id", "source", "language", "speaker", "task")
"""Columns of texts."""


def to_plain(row: Row) -> dict[str, Any]:
    """Convert a row to the plain data that is stored. UserError for a row without turns or of another version."""
    check(row)
    turns = []
    for turn in row.turns:
        codes = turn.answer_codes
        plain = None if codes is None else {"codec": codes.codec, "order": codes.order, "frames": codes.frames.tolist()}
        turns.append(
            {
                **vars(turn),
                "question_audio": turn.question_audio.plain() if turn.question_audio else None,
                "answer_audio": turn.answer_audio.plain() if turn.answer_audio else None,
                "answer_codes": plain,
                "words": [word._asdict() for word in turn.words],
            }
        )
    frames = [turn.pop("question_frames") for turn in turns]
    kept = [None if each is None else each._asdict() for each in frames] if any(frames) else None
    texts = {name: getattr(row, name) for name in (*_TEXTS, "system")}
    return {"version": row.version, **texts, "turns": turns, "question_frames": kept}


def from_plain(data: Mapping[str, Any], folder: Path | None, where: str) -> Row:
    """Make a row of stored data; its references are relative to `folder`, which is None for rows in a store. UserError for
    another version or no turns."""
    frames = data.get("question_frames") or [None] * len(data["turns"] or ())
    turns = tuple(
        RowTurn(
            turn["question_text"] or "",
            _sound(turn["question_audio"], folder),
            turn["answer_text"] or "",
            _sound(turn["answer_audio"], folder),
            _codes(turn["answer_codes"]),
            tuple(Word(**word) for word in turn["words"] or ()),
            turn["question_start"] or 0.0,
            turn["answer_start"] or 0.0,
            Frames(**kept) if kept and kept["data"] else None,
        )
        for turn, kept in zip(data["turns"] or (), frames, strict=True)
    )
    texts = {name: data[name] or "" for name in _TEXTS}
    row = Row(turns, version=data["version"], where=where, system=data.get("system") or "", **texts)
    check(row)
    return row


def check(row: Row) -> None:
    """Refuse a row of another version, or one without turns."""
    if row.version != ROW_VERSION:
        raise UserError(f"{row.where} is of version {row.version}; this is version {ROW_VERSION}: prepare the data again")
    if not row.turns:
        raise UserError(f"{row.where} has no turns: a row needs at least one question and answer; drop it")


def _sound(stored: Mapping[str, Any] | None, folder: Path | None) -> Sound | None:
    if not stored or not (stored["bytes"] or stored["path"]):
        return None
    return Sound(data=stored["bytes"], path=stored["path"], folder=folder)


def has_codes(stored: Mapping[str, Any] | None) -> bool:
    """True where a turn's stored `answer_codes` are there."""
    return stored is not None and stored["frames"] is not None and bool(stored["codec"])


def _codes(stored: Mapping[str, Any] | None) -> Codes | None:
    import torch

    if stored is None or not has_codes(stored):
        return None
    return Codes(stored["codec"], torch.tensor(stored["frames"]), stored["order"] or "streams")
