"""Settings that an output's rows depend on, stored in it, so that it cannot be continued under other settings."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omni.errors import UserError
from omni.files import LOCK, read_json, write_json
from omni.stores.pointers import stored_size
from omni.stores.reading import content_key
from train.data.prepare.config import BLOCK, PrepareConfig
from train.data.prepare.shards import AGAIN, checksum, stored
from train.data.readers import OpenedSource
from train.data.readers.listing import sorted_walk
from train.data.rows.row import ROW_VERSION

NAME = "settings.json"
FORMAT = 1
_DATA = ("source_bytes", "source_files", "source_checksum", "source_versions")
_SMALL = 1 << 20
"""Largest file, in bytes, that is compared by its checksum: such as one that people edit."""
_WITHOUT_EFFECT = ("workers", "ray")
_OF_SPEECH = ("voice", "answer_voice", "seed", "speaking")


def settings_of(path: Path, source: OpenedSource, config: PrepareConfig, address: str | None = None) -> dict[str, Any]:
    """Collect everything that rows and shards depend on: the configuration, the source's files, and the codec's weights.

    `address` is where the source was brought from."""
    unused = _WITHOUT_EFFECT if config.sides else _WITHOUT_EFFECT + _OF_SPEECH
    plain = json.loads(json.dumps({name: value for name, value in asdict(config).items() if name not in unused}))  # lists
    codec = Path(config.codec_folder) if config.codec_folder else None
    return {
        "format": FORMAT,
        "row_version": ROW_VERSION,
        "block": BLOCK,
        "source": str(path.resolve()) if address is None else address,
        "source_format": source.format,
        "source_items": len(source),
        "source_bytes": path.stat().st_size if path.is_file() else None,
        "source_files": _files(path) if path.is_dir() else None,
        "source_checksum": checksum(path) if path.is_file() and path.stat().st_size <= _SMALL else None,
        **({} if address is None else {"source_versions": content_key(path)}),
        "codec_weights": {file.name: checksum(file) for file in sorted(codec.iterdir()) if file.is_file()} if codec else None,
        **plain,
    }


def _files(folder: Path) -> str:
    """Fingerprint of a folder without reading its files: their number, their bytes, and a digest of their names and sizes.

    Hidden files do not count: no reader reads them.
    """
    digest, count, total = hashlib.sha256(), 0, 0
    for name, _ in sorted_walk(folder):
        if not name.rpartition("/")[2].startswith("."):
            size = _size(os.path.join(folder, name))
            digest.update(b"/" + os.fsencode(name) + f"\0{size}\0".encode())
            count, total = count + 1, total + size
    return f"{count} files, {total} bytes ({digest.hexdigest()[:16]})"


def _size(file: str) -> int:
    """Size of a file, or of a link's target, in bytes; 0 where that does not exist."""
    try:
        return stored_size(file)
    except OSError:
        return 0


def check_settings(folder: Path, settings: dict[str, Any], finished: bool) -> None:
    """Write the settings into a folder without stored rows; compare them with those of a folder that has some.

    UserError where rows are stored under other settings, or of data that have changed since.
    """
    path = folder / NAME
    if not path.is_file():
        if (folder / "notes").is_dir() or finished:
            raise UserError(f"{folder} has shards but no {NAME}: it is not of this command; choose another output")
        write_json(path, settings)
        return
    if not finished and not stored(folder):
        write_json(path, settings)
        return
    held, state = read_json(path, AGAIN), "was prepared" if finished else "was started"
    way = "choose another output, or remove the folder"
    differing, elsewhere = [], held.get("source") != settings.get("source")
    for name, one, other in _differing(held, settings):
        if name in _DATA and elsewhere:
            continue
        if name in _DATA:
            what = f"{name} was {one} and is now {other}"
            raise UserError(f"{folder} {state} before {settings['source']} changed: {what}; {way}")
        differing.append(f"{name} was {one!r} and is now {other!r}")
    if differing:
        raise UserError(f"{folder} {state} with other settings: {', '.join(differing)}; give the same ones, {way}")


def _differing(was: dict[str, Any], now: dict[str, Any], within: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Iterate over settings that differ, with dotted names for nested ones, and both their values."""
    for name in dict.fromkeys((*now, *was)):
        one, other = was.get(name), now.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _differing(one, other, f"{within}{name}.")
        elif one != other:
            yield f"{within}{name}", one, other


def discard(folder: Path) -> None:
    """Remove a folder without stored rows; it stays where it holds files of others."""
    for name in (NAME, LOCK):
        (folder / name).unlink(missing_ok=True)
    for place in (folder / "notes", folder):
        with suppress(OSError):  # it holds something, or is not there
            place.rmdir()
