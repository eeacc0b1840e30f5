"""Joins the parts of a preparation to its output.

Shards of segments that lie in one part are linked, or copied where they cannot be; shards of the others are written again from
their blocks. The parts stay as they are: a run may read them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omni.errors import UserError
from omni.files import locked, read_json
from train.console.progress import Display, Kind, counted
from train.data.prepare.config import DataPart
from train.data.prepare.parts import (
    SHARD,
    command_for,
    items_of,
    parts_folder,
    parts_in,
    settings_in,
    working,
)
from train.data.prepare.prepare import complete, occupied, place_for, whole_already
from train.data.prepare.report import REPORT, read_report
from train.data.prepare.rows import PrepareTally
from train.data.prepare.settings import NAME, check_settings, refuse_other
from train.data.prepare.shards import AGAIN, SEGMENT, ShardWriter, blocks_of, finished, in_part

_SHOWN = 8


def join(
    out: str | os.PathLike[str], folders: Sequence[str | os.PathLike[str]] = (), progress: Kind = "off"
) -> PrepareTally:  # fmt: skip
    """Join the parts of a preparation to the folder `out`, which appears when it is complete: the bytes as without `shard`.

    The same call goes on after an interruption, and leaves a finished output as it is.

    Args:
        folders: the parts, from anywhere; by default those beside `out`.

    Returns:
        Counts of all rows.

    Raises:
        UserError: a part that is missing, cut short or being made (with the command that makes it), twice there, damaged, of
            other settings or data than the first; another process at work in `out`; no space left; no row in any part.
    """
    out = place_for(Path(out))
    if not folders and not parts_folder(out).exists() and (out / REPORT).is_file():
        return read_report(out)
    parts, settings = find_parts(out, [Path(folder) for folder in folders])
    if occupied(out):
        return whole_already(out, settings)
    work = working(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with locked(work):
        if occupied(out):  # another process has finished it meanwhile
            shutil.rmtree(work)
            return whole_already(out, settings)
        check_settings(work, settings, finished=False)
        _fill(work, parts, settings, progress)
        return complete(work, out, settings, read_json(parts[0][1] / REPORT, AGAIN)["note"])


def _fill(work: Path, parts: Sequence[tuple[DataPart, Path]], settings: dict[str, Any], progress: Kind) -> None:
    """Write all shards that are not there yet."""
    total = _total(settings)
    writer = ShardWriter(work, settings["shard_mb"] << 20)
    display = Display(total, writer.next_item, progress)
    try:
        for part, place in parts:
            items = items_of(part, total)
            end = items.start
            for note in finished(place, items.start):
                start, end = note["items"]
                if end <= writer.last:  # by an earlier start
                    continue
                if in_part(note, items if items.stop < total else range(items.start, total + SEGMENT)):
                    writer.take(place, note)
                else:
                    for block, table, size in blocks_of(place, note):
                        if block.start >= writer.last:
                            writer.add_rows(block, table, size)
                display.tick(end - start, 0.0)
            if end != items.stop:
                raise UserError(f"{place} lacks items {end} to {items.stop - 1}, or their notes: remove it and make it again")
        writer.finish()
    finally:
        writer.abandon()
        display.close()
    if not writer.done.rows:
        raise UserError(f"the source has {counted(total, 'item')} and none makes a row: there is nothing to store")


def _total(settings: dict[str, Any]) -> int:
    return min(settings["source_items"], settings["limit"] or settings["source_items"])


def find_parts(out: Path, folders: Sequence[Path] = ()) -> tuple[list[tuple[DataPart, Path]], dict[str, Any]]:
    """All parts in their order, and their settings; UserError where they are not whole, or do not fit together."""
    found: dict[int, Path] = {}
    places = list(folders) or [place for _, place in parts_in(parts_folder(out)) if (place / NAME).is_file()]
    if not places:
        raise UserError(
            f"{parts_folder(out)} holds no part: make them by `omni-train data prepare SOURCE {out} --shard 0/2`, ..."
        )
    settings, count = settings_in(places[0]), 0
    for place in places:
        refuse_other(
            place, settings_in(place), settings, "was prepared", f"in {places[0]} is", "or remove one of both and make it again"
        )
        part = DataPart.read(read_json(place / NAME, AGAIN)[SHARD])
        count = count or part.count
        if part.count != count:
            raise UserError(
                f"{place} is part {part}, and {places[0]} one of {count}: remove what is of another number of parts"
            )
        if part.number in found:
            raise UserError(f"{place} and {found[part.number]} are both part {part}: name one of them")
        found[part.number] = place
    parts = [DataPart(number, count) for number in range(count)]
    missing = {part: _state(found.get(part.number)) for part in parts if not _is_whole(found.get(part.number))}
    if missing:
        first, more = next(iter(missing)), len(missing) - _SHOWN
        listed = ", ".join(f"{part} ({state})" for part, state in list(missing.items())[:_SHOWN])
        raise UserError(
            f"{counted(len(missing), 'part')} of {count} not whole: {listed}{f' and {more} more' if more > 0 else ''}. "
            f"This makes {first}: {command_for(settings, _out_of(found.get(first.number), out), first)}"
        )
    return [(part, found[part.number]) for part in parts], settings


def _is_whole(place: Path | None) -> bool:
    return place is not None and (place / REPORT).is_file() and not place.name.endswith(".preparing")


def _state(place: Path | None) -> str:
    """Why a part is not whole."""
    if place is None:
        return "not begun"
    try:
        with locked(place):
            return "cut short"
    except UserError as error:
        return str(error).partition(";")[0]


def _out_of(place: Path | None, out: Path) -> Path:
    """The output that a part in `place` was made for."""
    if place is None or not place.parent.name.endswith(".parts"):
        return out
    return place.parent.with_name(place.parent.name.removesuffix(".parts"))
