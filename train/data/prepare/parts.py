"""Parts of a preparation, which several machines make: `--shard 3/16` makes part 3 of 16, and `join` the output of them all.

    OUT.parts/00003-of-00016.preparing     a part that is being made, or was cut short
    OUT.parts/00003-of-00016               a whole part: rows, index and report as of any output, and its notes

A part is a range of the source's items. It is made as a preparation of these alone is, with a lock of its own.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omni.errors import UserError
from omni.files import locked, read_json
from train.data.prepare import shards
from train.data.prepare.config import DataPart, PrepareConfig
from train.data.prepare.settings import NAME, discard, refuse_other
from train.data.prepare.shards import AGAIN, stored
from train.data.prepare.worker import BLOCK

SHARD = "shard"
"""Setting of a part alone: which it is."""
COMMAND = "command"
"""Setting of parts that are none of a preparation: the command that makes them."""
_SEGMENTS = 8
"""Least number of segments of a part: where a source has fewer, parts end within segments, which `join` then writes again."""


def working(place: Path) -> Path:
    """The folder in which an output, or a part, is made."""
    return place.with_name(f"{place.name}.preparing")


def parts_folder(out: Path) -> Path:
    """The folder of an output's parts."""
    return out.with_name(f"{out.name}.parts")


def part_folder(out: Path, part: DataPart) -> Path:
    """The folder of a part, once it is whole."""
    return parts_folder(out) / f"{part.number:05d}-of-{part.count:05d}"


def made_at(out: Path, config: PrepareConfig) -> Path:
    """Where a preparation's rows are: its part, or the output where there is no part, or all are joined."""
    place = part_folder(Path(out).resolve(), config.part) if config.part else out
    return place if (place / NAME).is_file() and not (out / NAME).is_file() else out


def items_of(part: DataPart, total: int) -> range:
    """The items of a part, of `total`: whole blocks, about as many in each part."""
    unit = shards.SEGMENT if total >= _SEGMENTS * part.count * shards.SEGMENT else BLOCK
    units = -(-total // unit)
    first, stop = (min(total, units * number // part.count * unit) for number in (part.number, part.number + 1))
    return range(first, stop)


def parts_in(folder: Path) -> Iterator[tuple[DataPart, Path]]:
    """Iterate over the parts in a folder of parts, in their order: whole ones, and those that are being made."""
    for place in sorted(folder.iterdir()) if folder.is_dir() else ():
        found = re.fullmatch(r"(\d{5,})-of-(\d{5,})(\.preparing)?", place.name)
        if found is not None and place.is_dir():
            yield DataPart(int(found[1]), int(found[2])), place


def settings_in(place: Path) -> dict[str, Any]:
    """The settings of a part, without which it is; UserError where the folder is none of a part."""
    settings = read_json(place / NAME, AGAIN)
    if SHARD not in settings:
        raise UserError(f"{place} is no part of a preparation: name folders that `data prepare --shard` has made")
    return {name: value for name, value in settings.items() if name != SHARD}


def refuse_parts(out: Path) -> None:
    """UserError where an output is being made in parts already."""
    if next(parts_in(parts_folder(out)), None) is not None:
        raise UserError(
            f"{parts_folder(out)} holds parts of this output, made with --shard: finish them and join them by "
            f"`omni-train data join {shlex.quote(str(out))}`, or remove that folder"
        )


def refuse_others(out: Path, part: DataPart, settings: dict[str, Any]) -> None:
    """UserError where an output is being made as a whole already, or in another number of parts, or with other settings."""
    work = working(out)
    if work.exists():
        with locked(work):  # names who is at work there
            pass
        if stored(work):
            raise UserError(f"{work} holds what was prepared without --shard: go on without it, or remove that folder")
        discard(work)
    refuse_counts(out, part)
    for other, place in parts_in(parts_folder(out)):
        if other.number != part.number and (place / NAME).is_file() and stored(place):
            way = f"choose another output, or remove {parts_folder(out)}"
            return refuse_other(place, settings_in(place), settings, "was started", way=way)


def refuse_counts(out: Path, part: DataPart) -> None:
    """UserError where an output is being made in another number of parts."""
    for other, place in parts_in(parts_folder(out)):
        if other.count != part.count:
            raise UserError(
                f"{place} is of {other.count} parts, and --shard {part} of {part.count}: give --shard i/{other.count}, or "
                f"remove {parts_folder(out)}"
            )


def command_for(settings: Mapping[str, Any], out: Path, part: DataPart) -> str:
    """The command that makes a part under these settings."""
    if COMMAND in settings:
        return shlex.join(["omni-train", *settings[COMMAND], "--shard", str(part)])
    words = ["omni-train", "data", "prepare", settings["source"], str(out), "--shard", str(part)]
    plain = asdict(PrepareConfig())
    for name, usual in plain.items():
        value = settings.get(name, usual)
        if name in ("read", "speaking"):
            changed = {f"{name}.{inner}": one for inner, one in value.items() if _plain(usual[inner]) != _plain(one)}
        else:
            changed = {name: value} if (value or None) != (usual or None) else {}
        words += [f"--{key}={one if isinstance(one, str) else json.dumps(one)}" for key, one in changed.items()]
    return shlex.join(words)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
