"""Files that appear whole: written under another name in the same folder, forced to disk, renamed."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omni.errors import UserError
from omni.files import flush


def part_of(target: Path) -> Path:
    """The name under which a file grows."""
    return target.with_name(f".{target.name}.part")


def publish(target: Path) -> None:
    """Give a file that has grown whole its own name."""
    with open(part_of(target), "rb+") as file:
        os.fsync(file.fileno())
    os.replace(part_of(target), target)
    flush(target.parent)


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Around what writes `target`: a full disk becomes a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"no space left to write {target}: free some and run the same command again; what is finished stays"
        ) from error


def write_json(target: Path, data: Any) -> None:
    """Data as JSON, to be read by people too."""
    write_text(target, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def write_text(target: Path, text: str) -> None:
    """A text file, whole or not at all."""
    with writing(target):
        try:
            part_of(target).write_text(text, encoding="utf-8")
            publish(target)
        except OSError:
            part_of(target).unlink(missing_ok=True)
            raise


def read_json(path: Path) -> Any:
    """UserError for a file that is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): remove its folder and prepare the data again") from error
