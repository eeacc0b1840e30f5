"""Reads the questions of an evaluation, in a fixed order, from rows in any known format.

Besides those of `train.data.readers` there is one format:

    voicebench   Parquet or JSON lines with `audio`, `prompt` and the references of its judges. The reference is the column
                 that `columns` names as answer_text, else the first of `REFERENCES` that is there; many sets have none.

Only the first turn of a conversation is asked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni.errors import UserError
from omni.stores.cache import stored_size
from omni.stores.reading import naming
from omni.tasks import TASKS, Task, find_task
from omni.utils.remote import check_there, find_address
from train.data.readers import READERS, Broken, OpenedSource, ReaderOptions, data_path, open_source
from train.data.readers.containers import TAR
from train.data.readers.files import Files
from train.data.readers.source import RecordReader, text
from train.data.rows.files import evenly
from train.data.rows.row import Row, RowTurn

if TYPE_CHECKING:
    from omni.generate.speech_lm import SpeechLM

REFERENCES = ("reference", "output", "answer", "target")
_PIECE = 1 << 20


@dataclass(frozen=True)
class RecordRow(Row):
    """A row that keeps the fields of the record it was made of, without the sound."""

    fields: Mapping[str, Any] = field(default_factory=dict)


def voicebench_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> RecordRow:
    """The row of one record; UserError where it has no recording."""
    named = options.columns.get("answer_text")
    if named is not None and named not in data:
        raise UserError(f"has no column {named!r} for answer_text: its columns are {', '.join(data)}")
    names = [named] if named is not None else [name for name in REFERENCES if isinstance(data.get(name), str | int | float)]
    turn = RowTurn(text(data, "prompt"), files.sound(data.get("audio")), text(data, *names))
    if turn.question_audio is None:
        raise UserError("has no recording in its column 'audio': drop the row")
    name = next((str(data[n]) for n in ("id", "key", "index") if isinstance(data.get(n), str | int)), "")
    fields = {name: value for name, value in data.items() if name != "audio"}
    return RecordRow((turn,), id=name, source=VOICEBENCH.name, language=options.language, where=where, fields=fields)


def readable(item: Row | Broken) -> Row | Broken:
    """Makes an item broken where its question or answer holds half of a surrogate pair, which no tokenizer takes."""
    if isinstance(item, Broken):
        return item
    for name in ("question_text", "answer_text"):
        half = next((c for c in getattr(item.turns[0], name) if 0xD800 <= ord(c) <= 0xDFFF), None)
        if half is not None:
            return Broken(item.where, f"its {name} holds U+{ord(half):04X}, half of a surrogate pair: fix or drop the row")
    return item


VOICEBENCH = RecordReader(
    name="voicebench",
    summary="VoiceBench: Parquet or JSON lines with audio, prompt and reference columns",
    row=voicebench_row,
    endings=(".parquet", ".jsonl", ".jsonl.gz", ".json", TAR),
    fields=(frozenset({"audio", "prompt"}),),
)
OWN = {VOICEBENCH.name: VOICEBENCH}


def open_data(path: Path, options: ReaderOptions) -> OpenedSource:
    """Opens the data as a source of rows; UserError where there are none, or of no known format."""
    address, path = find_address(path), data_path(path)
    known = ", ".join([*OWN, *READERS])
    with naming(address or path, path):
        check_there(path, "data", f"data {path} does not exist: name a file or folder of one of {known}")
        if options.format and options.format not in (*OWN, *READERS):
            raise UserError(f"--read.format {options.format!r} is unknown: there are {known}")
        own = next((r for r in OWN.values() if r.name == options.format or (not options.format and r.recognise(path))), None)
        source = open_source(path, options) if own is None else own(path, options)
    if address is not None:
        source.brought = path, address
    return source


@dataclass(frozen=True)
class Questions:
    """Some or all items of a source, by their indices, ascending."""

    source: OpenedSource
    chosen: range | list[int]

    @classmethod
    def spread(cls, source: OpenedSource, count: int | None) -> Questions:
        """Chooses `count` items, evenly over the source (all of them by default); UserError for data without any."""
        size = len(source)
        if size == 0:
            raise UserError("the data hold no rows; name others")
        return cls(source, range(size) if count is None else evenly(size, count))

    def sample(self, places: Sequence[int], count: int) -> Questions:
        """Chooses at most `count` of the items at these places, evenly."""
        return Questions(self.source, [places[i] for i in evenly(len(places), count)])

    def __len__(self) -> int:
        return len(self.chosen)

    def iterate(self, start: int = 0) -> Iterator[tuple[int, Row | Broken]]:
        """Yields index and item, from the `start`th chosen one on; an item whose texts cannot be read is broken."""
        for _, group in groupby(enumerate(self.chosen[start:]), lambda pair: pair[1] - pair[0]):  # indices without a gap
            indices = [index for _, index in group]
            items = self.source.iterate(indices[0], indices[-1] + 1)
            for index, item in zip(indices, map(readable, items), strict=True):
                where = self.source.named(item.where)
                if isinstance(item, Broken):
                    yield index, Broken(where, self.source.named(item.why))
                else:
                    yield index, replace(item, where=where)


def choose_task(questions: Questions, lm: SpeechLM, heard: bool) -> Task:
    """The task of the questions where none is configured; `heard`: there is an ASR. UserError where no row can be asked."""
    spoken = TASKS["A1A2" if lm.codec is not None else "A1T2"]
    if questions.source.format in ("librispeech", "common-voice"):
        return TASKS["A1T1"]
    if questions.source.format == VOICEBENCH.name:
        return spoken if heard else TASKS["A1T2"]
    why = ""
    for _, item in questions.iterate():
        if isinstance(item, Broken):
            why = why or f"{item.where}: {item.why}"
            continue
        turn = item.turns[0]
        if item.task:
            return find_task(item.task)
        if turn.question_audio is None:
            return TASKS["T1A2" if lm.codec is not None and not turn.answer_text else "T1T2"]
        answered = turn.answer_text or turn.answer_codes or turn.answer_audio
        return TASKS["A1T1"] if turn.question_text and not answered else spoken
    raise UserError(f"no row of the data can be read, so nothing can be asked; the first: {why}")


def fingerprint(path: Path) -> str:
    """A hash that identifies data: of the files' names and sizes, and of a single file also of its two ends (1 MiB each)."""
    digest, folder = hashlib.sha256(), path if path.is_dir() else path.parent
    for file in sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]:
        digest.update(f"{file.relative_to(folder)}\0{stored_size(file)}\0".encode())
    if path.is_file():
        with path.open("rb") as handle:
            for start in (0, max(0, path.stat().st_size - _PIECE)):
                handle.seek(start)
                digest.update(handle.read(_PIECE))
    return digest.hexdigest()[:16]
