"""Reads folders of recordings: with their texts those of Common Voice and LibriSpeech, and any without.

Common Voice: a table such as `train.tsv` with `client_id, path, sentence` (and `locale`, ...), recordings in `clips/` beside
it. LibriSpeech: folders `<speaker>/<chapter>/` with a `<speaker>-<chapter>.trans.txt`, a line `<id> <TEXT>` for each
`<id>.flac` beside it. Both give questions with recording and text, and no answers. Recordings alone give questions that
have nothing else: an encoder is distilled on them (`objective.distill_weight`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from omni.audio.decode import SUFFIXES
from omni.errors import UserError
from train.data.readers.contract import OpenedSource, ReaderOptions
from train.data.readers.files import Files, list_files
from train.data.readers.records import JsonLines, Record, Records, TableRecords
from train.data.readers.source import RecordSource, RowMapper, make_row, text
from train.data.rows.row import Row, RowTurn


class CommonVoice:
    """Reads one table of Common Voice, given as the file or as a folder with one table."""

    name = "common-voice"
    summary = "Common Voice: a .tsv with client_id, path, sentence and the folder clips/ beside it"

    def recognise(self, path: Path) -> bool:
        return bool(self._tables(path))

    def __call__(self, path: Path, options: ReaderOptions) -> OpenedSource:
        tables = self._tables(path)
        if not tables:
            raise UserError(f"{path} is no .tsv with the columns client_id, path, sentence, and holds none")
        if len(tables) > 1:
            names = ", ".join(table.name for table in tables)
            raise UserError(f"{path} holds several tables, which share rows: name one of {names} in it")
        files = Files.of(tables[0], options)
        make = RowMapper(common_voice_row, files, options)
        return RecordSource(self.name, [TableRecords(tables[0])], make)

    def _tables(self, path: Path) -> list[Path]:
        files = map(Path, list_files(path, (".tsv",), 0)) if path.is_dir() else [path] if path.suffix == ".tsv" else []
        return [file for file in files if {"client_id", "path", "sentence"} <= set(TableRecords(file).header)]


def common_voice_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> Row:
    """Make the row of one line; UserError where its recording is missing or broken."""
    name, said = text(data, "path", needed=True), text(data, "sentence", needed=True)
    if not name or not said:
        raise UserError(f"has no {'path' if not name else 'sentence'}: drop the row")
    clip = name if "/" in name else f"clips/{name}"
    turn = RowTurn(question_text=said, question_audio=files.sound(clip))
    speaker, language = text(data, "client_id"), text(data, "locale")
    return make_row([turn], options, "common-voice", where, id=Path(name).stem, speaker=speaker, language=language)


TRANSCRIPT = ".trans.txt"


class LibriSpeech:
    """Reads a folder with transcripts anywhere below it."""

    name = "librispeech"
    summary = "LibriSpeech: folders with *.trans.txt and a .flac for each of their lines"

    def recognise(self, path: Path) -> bool:
        return any(list_files(path, (TRANSCRIPT,)))

    def __call__(self, path: Path, options: ReaderOptions) -> OpenedSource:
        transcripts = list(map(Path, list_files(path, (TRANSCRIPT,)))) if path.is_dir() else [path]
        if not transcripts:
            raise UserError(f"data folder {path} holds no {TRANSCRIPT}")
        files = Files.of(path, options)
        make = partial(librispeech_row, files=files, options=options)
        return RecordSource(self.name, [Transcript(file) for file in transcripts], make)


class Transcript(JsonLines):
    """Reads the lines of a `.trans.txt` as records of `id`, `text`, and `folder`, the file's own."""

    def _fields(self, part: bytes) -> dict[str, str]:
        try:
            name, _, said = part.decode().strip().partition(" ")
        except UnicodeDecodeError as error:
            raise UserError("is not UTF-8: convert the file") from error
        return {"id": name, "text": said.strip(), "folder": str(self.path.parent.resolve())}


def librispeech_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> Row:
    """Make the row of one line; UserError where its recording is missing or broken."""
    name, said = data["id"], data["text"]
    if not said or Path(name).name != name:
        raise UserError(f"{name!r} is not followed by a text: a line is <id> <TEXT>")
    folder = files.relative(data["folder"])
    endings = [ending for ending in SUFFIXES if (Path(data["folder"]) / f"{name}{ending}").is_file()]
    sound = files.sound(str(Path(folder) / f"{name}{endings[0] if endings else SUFFIXES[0]}"))
    return make_row([RowTurn(said, sound)], options, "librispeech", where, id=name, speaker=name.split("-")[0])


class Recordings:
    """Reads a folder that holds recordings and nothing else, in folders of any depth; a row for each."""

    name = "recordings"
    summary = "recordings without texts: a folder of .flac, .wav, .mp3, .m4a or the like and nothing else"

    def recognise(self, path: Path) -> bool:
        names = (name.lower() for name in list_files(path))
        return next(names, "").endswith(SUFFIXES) and all(name.endswith(SUFFIXES) for name in names)

    def __call__(self, path: Path, options: ReaderOptions) -> OpenedSource:
        records = SoundFiles(path)
        if not len(records):
            raise UserError(f"data folder {path} holds no recording ({', '.join(SUFFIXES[:4])})")
        make = partial(recording_row, files=Files.of(path, options), options=options)
        return RecordSource(self.name, [records], make)


class SoundFiles(Records):
    """The recordings in a folder, or one recording, as records of `path`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._files = list(list_files(path, SUFFIXES)) if path.is_dir() else [str(path)]

    def __len__(self) -> int:
        return len(self._files)

    def _raw(self, start: int) -> tuple[int, Iterator[Path]]:
        return start, map(Path, self._files[start:])

    def _record(self, raw: Path) -> Record:
        return Record(str(raw), {"path": str(raw.absolute())})


def recording_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> Row:
    """Make the row of one recording; UserError where it is broken."""
    name = files.relative(data["path"])
    return make_row([RowTurn(question_audio=files.sound(name))], options, "recordings", where, id=name)
