"""Interface of readers: a data set is a sequence of items in a fixed order, each a row or the reason why it is broken.

    source = open_source("VoiceAssistant-400K", ReaderOptions())  # recognised, or named by `ReaderOptions.format`
    len(source)                                                # items, broken ones included
    for item in source.iterate(1000, 2000):                    # exactly 1000 items; the same ones every time
        if isinstance(item, Broken): ...

Item i is always the same: `list(s.iterate(a, b)) == list(s)[a:b]`. Workers thus share a source by ranges of items, and an
interrupted preparation goes on at the item it had reached. An `OpenedSource` is small, holds no open file and can be pickled;
opening one reads no more than the start of the data. Ranges that follow each other cost no more than one that covers them: a
process keeps the place where the last one ended (`records`).

Sound stays as it is stored where possible: `Sound(data=...)` or `Sound(path=..., folder=...)` with its header checked. A path
is relative to `folder`, the source's own, so rows must embed the bytes before they are stored somewhere else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from pydantic import PositiveFloat, PositiveInt

from omni.utils.configuration import configuration
from omni.utils.remote import shown
from train.data.rows.row import Row


@dataclass(frozen=True)
class Broken:
    """An item that could not be read: `where` names the file and the row in it, `why` is one line."""

    where: str
    why: str


@configuration
class RecordOptions:
    """Options of reading records. Empty values mean: as the format documents it.

    Commands that read data take each as `--read.NAME`, and messages name it so.

    Attributes:
        format: name of the reader, one of `READERS`; "" recognises it.
        folder: the folder that paths in the data are relative to and must lie in; "" for the one that the format documents
            (in general that of the file which names them).
        prefix: the beginning that is cut off paths, such as "/home/somebody/data/": data sets often carry the absolute paths
            of the machine that made them.
        audio: "required": a row whose recording is missing or damaged is broken; "optional": it comes without that
            recording (what is missing can be spoken again); "none": recordings are not looked at.
        codec: the codec of stored codes, where the format leaves it open: one of `train.data.readers.codes.codes_kinds`.
        order: the order of SNAC's codes in a frame, "streams" (c0 c1 c2 c2 c1 c2 c2) or "levels" (c0 | c1 c1 | c2 c2 c2 c2).
        packing: what was added to the codes (`train.data.readers.codes.PACKINGS`), "plain" for nothing.
        columns: for tables and JSON lines of one's own: from a field of the row (`question_text`, `question_audio`,
            `answer_text`, `answer_audio`, `id`, `speaker`, `language`) to the column that holds it.
        language: of rows whose data do not say (BCP 47).
        name: what the rows' `source` says; "" for the reader's name.
        task: written into the rows' `task`.
        pause: for conversations on two channels: silence in seconds that ends an utterance.
    """

    format: str = ""
    folder: str = ""
    prefix: str = ""
    audio: Literal["required", "optional", "none"] = "required"
    codec: str = ""
    order: Literal["", "streams", "levels"] = ""
    packing: Literal["plain", "layers", "mini-omni", "mini-omni-joint", "orpheus"] = "plain"
    columns: Mapping[str, str] = field(default_factory=dict)
    language: str = "en"
    name: str = ""
    task: str = ""
    pause: PositiveFloat = 1.0


@configuration
class ReaderOptions(RecordOptions):
    """Options of reading a data set.

    Attributes:
        rows: for dialogues with slots: number of rows to make.
        seed: for the same: of the order of rows and wordings.
        part: for the same: combinations of slots to `train` on, those `held_out` for evaluation, or `all`.
    """

    rows: PositiveInt = 10_000
    seed: int = 0
    part: Literal["train", "held_out", "all"] = "train"


class OpenedSource(ABC):
    """An opened data set.

    Attributes:
        format: name of its reader.
        note: what the reader assumes about codes and their order, shown to the user; "" where it assumes nothing.
        brought: where the data are in the cache, and the address they are from; None for data of this machine.
    """

    format: str
    note: str = ""
    brought: tuple[Path, str] | None = None

    @property
    def origin(self) -> tuple[Path, str] | None:
        """`brought`, where that is a folder."""
        return self.brought if self.brought is not None and self.brought[0].is_dir() else None

    def named(self, text: str) -> str:
        """A text in which the address stands for the data's place in the cache of this machine."""
        return text if self.brought is None else text.replace(str(self.brought[0]), shown(self.brought[1]))

    @abstractmethod
    def __len__(self) -> int:
        """Number of items: rows and broken ones."""

    @abstractmethod
    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Row | Broken]:
        """Iterate over items `start` to `stop` (the end where None), exactly one for each index."""

    def __iter__(self) -> Iterator[Row | Broken]:
        return self.iterate()


class Reader(Protocol):
    """A reader of one format: recognises and opens data sets.

    Attributes:
        name: in `READERS`.
        summary: one line for the list of formats.
    """

    name: str
    summary: str

    def recognise(self, path: Path) -> bool:
        """True where the file or folder is of this format, by names and the first record."""

    def __call__(self, path: Path, options: ReaderOptions) -> OpenedSource:
        """Open a data set; UserError for errors of the whole, such as a missing path or an option that does not fit."""
