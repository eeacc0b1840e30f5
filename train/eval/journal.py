"""Files in the output folder of an evaluation: what was started there, and records that a later start continues.

    run.json       what was started: model, data, task and the settings that answers depend on
    NAME.jsonl     one record per item, in order, appended batch by batch

A start of something else in the same folder is refused. A half-written record at the end of a file is dropped when it is read;
a start that goes on also drops the records of an unfinished batch, so that batches are the same as without the interruption,
and so are the answers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from omni.errors import UserError
from omni.files import read_json, write_json
from omni.stores.tries import StoreError
from train.console.progress import Display, Progress
from train.data.readers import Broken
from train.data.rows.row import Row
from train.eval.config import EvalConfig
from train.eval.questions import Questions

Q = TypeVar("Q")

RUN = "run.json"
LATER = ("text_before", "text_before_hash", "against", "against_hash")
"""Entries that a later start may add, or leave out."""
AGAIN = "remove its folder and evaluate again"
"""Advice in the error for a damaged file of an evaluation."""
_HALVES = "backslashreplace"
"""Error handler that writes half of a surrogate pair, as a path may hold, as JSON's own escape."""


def claim(folder: Path, started: Mapping[str, Any]) -> None:
    """Writes into a folder what is started there; UserError where something else was (the first difference is named), or the
    folder holds other files."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / RUN
    if not file.is_file():
        others = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
        if others:
            raise UserError(f"output folder {folder} holds {others[0]!r}, but no {RUN}: name a new or empty folder with --out")
        write_json(file, started)
        return
    before = read_json(file, AGAIN)
    for name, wanted in json.loads(json.dumps(started)).items():
        if name in LATER and None in (wanted, before.get(name)):
            before[name] = wanted or before.get(name)
        elif before.get(name) != wanted:
            setting, old, new = _difference(name, before.get(name), wanted)
            raise UserError(
                f"{folder} was started with {setting} {_short(old)}, this start has {_short(new)}: go on with the former, or "
                "name another folder with --out"
            )
    write_json(file, before)


class Journal:
    """Records in a file of JSON lines, one per item: `total` in all, in batches of `group`, of which `done` are there."""

    def __init__(self, file: Path, group: int, total: int) -> None:
        self.file = file
        ends = list(_ends(file))[:total]
        self.done = len(ends) if len(ends) == total else len(ends) - len(ends) % group
        if file.is_file():
            os.truncate(file, ends[self.done - 1] if self.done else 0)

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add records; they are on the disk when this returns."""
        lines = "".join(json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records)
        with self.file.open("a", encoding="utf-8", errors=_HALVES) as handle:
            handle.write(lines)
            handle.flush()
            os.fsync(handle.fileno())
        self.done += len(records)


def record_all(
    file: Path,
    questions: Questions,
    config: EvalConfig,
    progress: Progress,
    prepare: Callable[[int, Row], Q],
    score: Callable[[list[Q]], Iterable[Mapping[str, Any]]],
) -> None:
    """Appends records of the questions that have none yet, `config.batch` at a time: `index` and `where`, and `broken`, the
    reason, of one that cannot be asked.

    Args:
        prepare: makes of a row what is asked, by its place in the data; ValueError or OSError where it cannot.
        score: asks a batch of these, and gives the rest of each record.
    """
    journal = Journal(file, config.batch, len(questions))
    if journal.done == len(questions):
        return
    items = questions.iterate(journal.done)
    with closing(Display(len(questions), journal.done, progress, label=file.stem)) as display:
        while batch := list(islice(items, config.batch)):
            records: list[dict[str, Any]] = [{"index": index, "where": row.where} for index, row in batch]
            asked: list[Q] = []
            for record, (index, row) in zip(records, batch, strict=True):
                with noting_broken(record):
                    if isinstance(row, Broken):
                        raise UserError(row.why)
                    asked.append(prepare(index, row))
            whole = [record for record in records if "broken" not in record]
            for record, scored in zip(whole, score(asked) if asked else (), strict=True):
                record.update(scored)
            journal.append(records)
            display.tick(len(records), sum(record.get("seconds", 0.0) for record in whole))


@contextmanager
def noting_broken(record: dict[str, Any]) -> Iterator[None]:
    """Puts into a record why its question cannot be asked; errors of a store are let through."""
    try:
        yield
    except StoreError:
        raise
    except (ValueError, OSError) as error:  # a path that is none, such as one with NUL, is a plain ValueError
        record["broken"] = " ".join(str(error).split())


def read_records(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a file, without a half-written one at its end; none where there is no file.

    UserError where records follow a broken one.
    """
    if not file.is_file():
        return
    with file.open("rb") as handle:
        for number, line in enumerate(handle, 1):
            record = _record(line)
            if record is not None:
                yield record
            elif handle.read(1):
                raise UserError(
                    f"{file} line {number} is damaged: start the same evaluation again, which asks again from there, or name "
                    "another folder"
                )


def _ends(file: Path) -> Iterator[int]:
    """Offsets in bytes at which whole records end, up to the first that is not whole."""
    if not file.is_file():
        return
    end = 0
    with file.open("rb") as handle:
        for line in handle:
            end += len(line)
            if _record(line) is None:
                return
            yield end


def _record(line: bytes) -> dict[str, Any] | None:
    """The record of a line, None where it is not whole."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _difference(name: str, before: Any, wanted: Any) -> tuple[str, Any, Any]:
    """Name and both values of an entry that differs; of settings, the first one that does."""
    if not isinstance(before, dict) or not isinstance(wanted, dict):
        return name, before, wanted
    inner = next(key for key in (*wanted, *before) if before.get(key) != wanted.get(key))
    return f"{name} {inner}", before.get(inner), wanted.get(inner)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
