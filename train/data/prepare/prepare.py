"""Prepares data sets: converts any readable data set to documented rows in Parquet shards, with speech and codes added.

A preparation works in a folder beside its output, `OUT.preparing`, which becomes OUT by one rename once it is complete, so that
an OUT is always whole. Items of the source are processed in blocks of a fixed size (`rows`), in any number of processes of this
machine or a cluster (`train.data.executor`), and stored in their order: the result depends on source and settings alone.
Every finished shard has a note of the items it covers (`shards`), after which an interrupted preparation goes on; a lock on the
folder excludes a second process, and settings are stored in it, so that it is not continued under others.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from omni.errors import UserError
from omni.files import LOCK, flush, locked, read_json, write_json
from omni.stores.cache import stored_size
from omni.stores.reading import content_key, naming
from omni.utils.remote import find_address, refuse_remote
from train.console.progress import Display, Progress, counted
from train.data.executor import Processes, imap
from train.data.prepare.rows import BLOCK, BlockMaker, PrepareConfig, PrepareTally, codec_of, encoder_of, voice_of
from train.data.prepare.shards import AGAIN, REPORT, ShardWriter, checksum, read_report, stored, write_report
from train.data.readers import OpenedSource, data_path, open_source
from train.data.readers.files import list_files
from train.data.rows.row import ROW_VERSION, row_schema

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
    unused = _WITHOUT_EFFECT if config.sides or config.augment else _WITHOUT_EFFECT + _OF_SPEECH
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
        "frames_encoder": None if (encoder := encoder_of(config)) is None else encoder.fingerprint(),
        **plain,
    }


def _files(folder: Path) -> str:
    """Fingerprint of a folder without reading its files: their number, their bytes, and a digest of their names and sizes.
    Hidden files do not count: no reader reads them."""
    digest, count, total = hashlib.sha256(), 0, 0
    top = len(os.path.join(folder, ""))
    for file in list_files(folder):
        size = 0
        with suppress(OSError):  # a link that leads nowhere
            size = stored_size(file)
        digest.update(b"/" + os.fsencode(file[top:]) + f"\0{size}\0".encode())
        count, total = count + 1, total + size
    return f"{count} files, {total} bytes ({digest.hexdigest()[:16]})"


def check_settings(folder: Path, settings: dict[str, Any], finished: bool) -> None:
    """Write the settings into a folder without stored rows; compare them with those of a folder that has some. UserError where
    rows are stored under other settings, or of data that have changed since."""
    path = folder / NAME
    if not path.is_file() and (any((folder / "notes").glob("*")) or finished):
        raise UserError(f"{folder} has shards but no {NAME}: it is not of this command; choose another output")
    if not path.is_file() or not (finished or stored(folder)):
        write_json(path, settings)
        return
    held, state = read_json(path, AGAIN), "was prepared" if finished else "was started"
    way = "choose another output, or remove the folder"
    differing, elsewhere = [], held.get("source") != settings.get("source")
    for name, old, new in _differing(held, settings):
        change = f"{name} was {old!r} and is now {new!r}"
        if name not in _DATA:
            differing.append(change)
        elif not elsewhere:
            raise UserError(f"{folder} {state} before {settings['source']} changed: {change}; {way}")
    if differing:
        raise UserError(f"{folder} {state} with other settings: {', '.join(differing)}; give the same ones, {way}")


def _differing(was: dict[str, Any], now: dict[str, Any], within: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Iterate over settings that differ, with dotted names for nested ones, and both their values."""
    for name in dict.fromkeys((*now, *was)):
        old, new = was.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differing(old, new, f"{within}{name}.")
        elif old != new:
            yield f"{within}{name}", old, new


def discard(folder: Path) -> None:
    """Remove a folder without stored rows; it stays where it holds files of others."""
    for name in (NAME, LOCK):
        (folder / name).unlink(missing_ok=True)
    for path in (folder / "notes", folder):
        with suppress(OSError):  # it holds something, or is not there
            path.rmdir()


_MAX_WITHOUT_ROW = 1000
"""Number of items without a single row after which a preparation stops: the settings must be wrong."""


def prepare(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    config: PrepareConfig | None = None,
    progress: Progress = "off",
    opener: Callable[[Path], OpenedSource] | None = None,
    decided: Mapping[str, Any] | None = None,
) -> PrepareTally:
    """Convert a data set to Parquet shards of rows in the folder `out`, which appears when it is complete.

    The same call goes on after an interruption, at the last finished shard (a failure before the first leaves nothing), and
    leaves a finished output as it is. Items that make no row are counted and listed in `out`'s `report.json` and `broken.csv`.
    Returns counts of all rows, those of earlier starts included. UserError: settings, codec, voice or data set that do not fit;
    an `out` within the data, or that cannot be replaced; another process at work in `out`; a half-made or whole `out` of other
    settings, or of data that have changed since; no space left; a data set of which no item makes a row.

    Args:
        path: file or folder of the data set, or its address (`train.data.readers.data_path`).
        opener: opens the data set, instead of `train.data.readers.open_source`; its result must be picklable.
        decided: what else the rows depend on, by name: plain data, compared with those of an earlier start.
    """
    config, here, address = config or PrepareConfig(), data_path(path, again=True), find_address(path)
    with naming(path, here):
        target = place_for(Path(out), here)
        source = opener(here) if opener else open_source(here, config.read)
        if address is not None:
            source.brought = here, address
        settings = settings_of(here, source, config, address) | dict(decided or {})
        return whole_already(target, settings) if occupied(target) else _prepare(target, source, settings, config, progress)


def _prepare(
    out: Path, source: OpenedSource, settings: dict[str, Any], config: PrepareConfig, progress: Progress
) -> PrepareTally:
    """Make an output that is not there yet, or go on with what is half made."""
    work = out.with_name(f"{out.name}.preparing")
    if not (config.ray and config.device != "cpu"):  # this machine may have no such device
        codec_of(config)  # loaded before processes start and folders are made, so that errors come first
    for side in config.sides:
        voice_of(config, side)
    if config.augment is not None and config.augment.noise_folder is not None:
        from train.data.augment import noise_files

        noise_files(config.augment.noise_folder)  # without them half of the rows would be broken
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"output {out} lies in a file: name a folder") from error
    with locked(work):
        if occupied(out):  # another process has finished it meanwhile
            shutil.rmtree(work)
            return whole_already(out, settings)
        check_settings(work, settings, finished=False)
        try:
            _fill(work, source, config, progress)
        except BaseException:
            if not stored(work):
                discard(work)
            raise
        write_report(work, settings, source.note)
        os.rename(work, out)
        flush(out.parent)
    _tidy(out)
    return read_report(out)


def _fill(work: Path, source: OpenedSource, config: PrepareConfig, progress: Progress) -> None:
    """Write all shards that are not finished yet."""
    items = config.items(len(source))
    shards = ShardWriter(work, config.shard_mb << 20, items.start)
    done = shards.next_item - items.start
    display = Display(len(items), done, progress)
    if source.note:
        display.say(source.note)
    if done:
        display.say(f"going on after {counted(done, 'item')}, of which {counted(shards.done.rows, 'row')} came")
    rows, first_why = shards.done.rows, ""
    todo = [range(first, min(first + BLOCK, items.stop)) for first in range(shards.next_item, items.stop, BLOCK)]
    processes = Processes(config.workers, config.threads, config.device, config.ray)
    blocks = imap(partial(BlockMaker, source, config, row_schema()), todo, processes)
    try:
        for block in blocks:
            rows += block.tally.rows
            if not first_why and block.broken:
                first_why = f"{block.broken[0].where}: {block.broken[0].why}"
            if not (rows or items.start) and block.stop >= min(items.stop, _MAX_WITHOUT_ROW):
                beside = source.brought is not None and source.origin is None
                shutil.rmtree(work / "notes", ignore_errors=True)  # another start has other settings
                raise UserError(
                    f"none of the first {counted(block.stop, 'item')} makes a row; the first, {first_why}"
                    + "; what lies beside a file in a store is not brought with it: give the address of its folder" * beside
                )
            shards.add(block)
            display.tick(block.stop - block.start, block.tally.seconds)
        shards.finish()
    finally:
        shards.abandon()
        blocks.close()
        display.close()
    if not shards.done.rows:
        raise UserError(f"the source has {counted(len(items), 'item')} and none makes a row: there is nothing to store")


def place_for(out: Path, path: Path | None = None) -> Path:
    """Path of the output folder, links resolved; UserError where it cannot be made there, or lies in the data at `path`."""
    refuse_remote(out, "output", write=True)
    try:
        real = out.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # links in a circle, NUL
        raise UserError(f"output {out} is no name that leads to a folder ({error}): name another") from error
    if path is not None and path.is_dir() and real.is_relative_to(path.resolve()):
        raise UserError(f"output {out} lies in the data {path}, of which it would become a part: name a folder outside")
    if real.is_dir() and not occupied(real):  # an empty folder is replaced by the working folder at the end
        subject = "a mount point" if os.path.ismount(real) else "the folder that this runs in"
        if os.path.ismount(real) or os.path.samefile(real, os.curdir):
            raise UserError(f"output {out} is {subject}, which cannot be replaced: name a folder in it, such as {out / 'rows'}")
    return real


def occupied(out: Path) -> bool:
    """True where the output's path is taken; an empty folder does not count."""
    return out.exists() and not (out.is_dir() and not any(out.iterdir()))


def whole_already(out: Path, settings: dict[str, Any]) -> PrepareTally:
    """Check the settings of an output that is complete already, and return its counts."""
    if not (out / REPORT).is_file():
        raise UserError(f"output {out} exists and is none of this command's: choose another, or remove it")
    check_settings(out, settings, finished=True)
    _tidy(out)
    return read_report(out)


def _tidy(out: Path) -> None:
    """Remove the files that only an unfinished output needs."""
    shutil.rmtree(out / "notes", ignore_errors=True)
    for left in (out / LOCK, *out.glob(".*.part*")):  # the latter of a process that was killed
        left.unlink(missing_ok=True)
