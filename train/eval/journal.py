"""Files in the output folder of an evaluation: what was started there, and records that a later start continues.

    run.json       what was started: model, data, task and the settings that answers depend on
    NAME.jsonl     one record per item, in order, appended batch by batch

A start of something else in the same folder is refused. A start that goes on drops a half-written record at the end of a file,
and those of an unfinished batch, so that batches and answers are the same as without the interruption.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import islice, takewhile
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
        old = before.get(name)
        if name in LATER and None in (wanted, old):
            before[name] = wanted or old
        elif old != wanted:
            if isinstance(old, dict) and isinstance(wanted, dict):
                inner = next(key for key in (*wanted, *old) if old.get(key) != wanted.get(key))
                name, old, wanted = f"{name} {inner}", old.get(inner), wanted.get(inner)
            was, now = (json.dumps(value, ensure_ascii=False) for value in (old, wanted))
            raise UserError(
                f"{folder} was started with {name} {was:.80}, this start has {now:.80}: go on with the former, or "
                "name another folder with --out"
            )
    write_json(file, before)


def resume(file: Path, group: int, total: int) -> int:
    """Cuts off what is not whole of a file of `total` records in batches of `group`; returns the number of those kept."""
    if not file.is_file():
        return 0
    with file.open("rb") as handle:
        sizes = [len(line) for line in takewhile(_record, handle)][:total]
    done = total if len(sizes) == total else len(sizes) - len(sizes) % group
    os.truncate(file, sum(sizes[:done]))
    return done


def append(file: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Add records to a file; they are on the disk when this returns."""
    lines = "".join(json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records)
    with file.open("a", encoding="utf-8", errors="backslashreplace") as handle:  # a path may hold half of a surrogate pair
        handle.write(lines)
        handle.flush()
        os.fsync(handle.fileno())


def record_all(
    file: Path,
    questions: Questions,
    config: EvalConfig,
    progress: Progress,
    prepare: Callable[[int, Row], Q],
    score: Callable[[list[Q]], Iterable[Mapping[str, Any]]],
) -> None:
    """Appends records of the questions that have none yet, `config.batch` at a time: `index` and `where`, and `broken`, the
    reason, of one that cannot be asked. `prepare` makes of an index and a row what is asked, ValueError or OSError where it
    cannot; `score` asks a batch of these, and gives the rest of each record."""
    done = resume(file, config.batch, len(questions))
    if done == len(questions):
        return
    items = questions.iterate(done)
    with closing(Display(len(questions), done, progress, label=file.stem)) as display:
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
            append(file, records)
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


def read_records(file: Path) -> list[dict[str, Any]]:
    """The records of a file up to the first that is not whole; none where there is no file."""
    if not file.is_file():
        return []
    with file.open("rb") as handle:
        return list(takewhile(lambda record: record is not None, map(_record, handle)))  # type: ignore[arg-type]


def _record(line: bytes) -> dict[str, Any] | None:
    """The record of a line, None where it is not whole."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
