"""Parts of an inspection, which several machines make (`--shard 3/16`); `omni-train data join` makes the result of them all.

They lie beside the result, as those of a preparation do (`train.data.prepare.parts`). A part looks at the row groups that begin
within its share of the rows, and stores what it has found, with settings that must agree.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omni.errors import UserError
from omni.files import LOCK, flush, locked, write_json
from omni.remote import refuse_remote, spelled
from train.console.options import Parser
from train.data.inspect.scan import Scan
from train.data.prepare.config import DataPart
from train.data.prepare.parts import COMMAND, SHARD, part_folder, parts_folder, parts_in, refuse_counts, settings_in, working
from train.data.prepare.report import REPORT
from train.data.prepare.settings import NAME, refuse_other
from train.data.rows.places import size_of

DAMAGED = "remove its folder, and make this part again by the same command"
"""Advice in messages about a damaged file of a part."""


def settings_of_parts(
    words: Sequence[object], source: object, scans: Sequence[Scan], options: Mapping[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """What all parts must agree on: the command, the rows, and what depends on neither.

    Args:
        words: the command that makes a part, without `--shard`.
        source: path or address of the rows, as it was given.
    """
    settings = {
        COMMAND: [spelled(word) for word in words],
        "source": spelled(source),
        "source_files": [fingerprint(scan) for scan in scans],
        **options,
    }
    return dict(json.loads(json.dumps(settings)))  # as it will be read


def fingerprint(scan: Scan) -> str:
    """Tells the files of some rows from others, without reading them."""
    digest = hashlib.sha256()
    for file in scan.files:
        digest.update(os.fsencode(file.name) + f"\0{size_of(file)}\0".encode())
    return f"{len(scan.files)} files, {len(scan)} rows ({digest.hexdigest()[:16]})"


@contextmanager
def making(out: Path, part: DataPart, settings: Mapping[str, Any]) -> Iterator[Path | None]:
    """Yields a folder to fill, which becomes the part when the block ends well; None where it is whole already.

    UserError where `out` is there, another process makes this part, or parts have been made with other settings.
    """
    refuse_remote(out, "output", write=True)
    out = out.resolve()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"output {out} exists: choose another, or remove it")
    place = part_folder(out, part)
    refuse_counts(out, part)
    for _, other in parts_in(parts_folder(out)):
        if (other / NAME).is_file():
            way = f"choose another output, or remove {parts_folder(out)}"
            refuse_other(other, settings_in(other), dict(settings), "was started", way=way)
    if (place / REPORT).is_file():
        yield None
        return
    work = working(place)
    with locked(work):
        for left in work.iterdir():  # by a process that was killed
            if left.name != LOCK:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        write_json(work / NAME, {**settings, SHARD: str(part)})
        yield work
        write_json(work / REPORT, {SHARD: str(part)})
        (work / LOCK).unlink()
        os.rename(work, place)
        flush(place.parent)


def add_shard(parser: Parser) -> None:
    """Add the option that makes a part."""
    text = "do a part of the rows, such as 3/16: part 3 of 16, counted from 0; `omni-train data join` makes the whole of all"
    parser.add_argument("--shard", type=str, default="", help=text)


def given(chosen: Mapping[str, Any], *names: str) -> list[object]:
    """Options of a command that were given, as words."""
    return [word for name in names if chosen[name] not in (None, []) for word in (f"--{name}", *_listed(chosen[name]))]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def joining(out: Path) -> str:
    """The command that joins the parts."""
    return f"omni-train data join {shlex.quote(str(out))}"
