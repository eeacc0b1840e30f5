"""Readers of existing data set formats: `open_source(path, options)` gives rows and broken items in a fixed order.

`contract` defines what a source guarantees. Formats are recognised by file names and the first record; `ReaderOptions.format`
overrides that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni.errors import UserError
from omni.plugins import Registry
from omni.stores.reading import local_path
from omni.utils.remote import check_there
from train.data.readers.codes import codes_kinds
from train.data.readers.containers import TAR
from train.data.readers.contract import Broken as Broken
from train.data.readers.contract import OpenedSource as OpenedSource
from train.data.readers.contract import Reader as Reader
from train.data.readers.contract import ReaderOptions as ReaderOptions
from train.data.readers.conversations import ALPACA, CHAT, LLAMA_OMNI, LUCY, SLAM_OMNI, VOICE_ASSISTANT
from train.data.readers.segments import CUTS, MOSHI
from train.data.readers.source import RecordReader
from train.data.readers.table import COMMON_VOICE, LIBRISPEECH, RECORDINGS, ROWS, TABLE, unknown
from train.data.readers.templates.dialogues import DialoguesReader

_ALL: tuple[Reader, ...] = (
    VOICE_ASSISTANT,
    SLAM_OMNI,
    LUCY,
    LLAMA_OMNI,
    MOSHI,
    CUTS,
    CHAT,
    ALPACA,
    ROWS,
    DialoguesReader(),
    COMMON_VOICE,
    LIBRISPEECH,
    TABLE,
    RECORDINGS,
)

READERS: Registry[Reader] = Registry("format")
"""Readers by name, from the most specific format to the most general: the first that recognises a path reads it, those of
plug-ins before all others."""

for _reader in _ALL:
    READERS.add(_reader.name, _reader)


def register_reader(reader_class: type[Reader]) -> type[Reader]:
    """A decorator for a reader's class, which has no arguments; the name is its attribute `name`."""
    reader = reader_class()
    READERS.add(reader.name, reader)
    return reader_class


def data_path(path: str | os.PathLike[str], again: bool = False) -> Path:
    """The path of a data set here, as `local_path`: recordings and Parquet files of a store's folder stay there and are read
    from pointer files. With readers of plug-ins, which know none, they come too."""
    return local_path(path, again, pointers=len(READERS) == len(_ALL))


def recognise(path: str | os.PathLike[str]) -> Reader:
    """Find the reader for a file or folder; UserError where it does not exist or no reader recognises it."""
    source = data_path(path)
    check_there(source, "data", f"data {source} does not exist: name a file or folder of one of {', '.join(READERS)}")
    reader = next((reader for reader in _in_order() if reader.recognise(source)), None)
    if reader is None:
        raise UserError(unknown(source, tuple(READERS)))
    return reader


def _in_order() -> list[Reader]:
    """All readers, those of plug-ins first."""
    return [*list(READERS.values())[len(_ALL) :], *_ALL]


def recognise_record(record: Mapping[str, Any], options: ReaderOptions, where: str) -> RecordReader:
    """Find the reader of records such as this one, or that of `options.format`. UserError where no reader knows them, or its
    rows are not of the records of shards. `where` names the data."""
    known = {reader.name: reader for reader in _in_order() if isinstance(reader, RecordReader) and TAR in reader.endings}
    if options.format:
        if options.format not in known:
            reason = "is unknown" if options.format not in READERS else "makes no rows of single records, and is not streamed"
            raise UserError(f"read.format {options.format!r} {reason}: there are {', '.join(known)}")
        return known[options.format]
    return TABLE if options.columns else next((reader for reader in known.values() if reader.fits(record)), TABLE)


def open_source(path: str | os.PathLike[str], options: ReaderOptions | None = None) -> OpenedSource:
    """Open a data set; UserError for one that does not exist or is of no known format, or for options that do not fit."""
    options, source = options or ReaderOptions(), data_path(path)
    check_options(options)
    check_there(source, "data", f"data {source} does not exist: name a file or folder")
    # Mapped columns mean that the data are a table, even where the columns would fit another format.
    reader = READERS[options.format or "table"] if options.format or options.columns else recognise(path)
    return reader(source, options)


def check_options(options: ReaderOptions, prefix: str = "--read") -> None:
    """UserError for a format or codec that is not registered; `prefix` comes before names in messages."""
    for option, value, known in (("format", options.format, READERS), ("codec", options.codec, codes_kinds())):
        if value and value not in known:
            raise UserError(f"{prefix}.{option} {value!r} is unknown: there are {', '.join(known)}")
