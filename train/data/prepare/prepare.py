"""Runs a preparation from the start, or from where it was interrupted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from omni.errors import UserError
from omni.files import LOCK, flush, locked
from omni.stores.reading import naming
from omni.utils.remote import find_address, refuse_remote
from train.console.progress import Display, Kind, counted
from train.data.executor import imap
from train.data.prepare.config import BLOCK, PrepareConfig
from train.data.prepare.report import REPORT, read_report, write_report
from train.data.prepare.rows import PrepareTally
from train.data.prepare.settings import check_settings, discard, settings_of
from train.data.prepare.shards import ShardWriter, stored
from train.data.prepare.worker import block_maker, codec_of, voice_of
from train.data.readers import OpenedSource, data_path, open_source
from train.data.rows.row import features

_MAX_WITHOUT_ROW = 1000
"""Number of items without a single row after which a preparation stops: the settings must be wrong."""


def prepare(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    config: PrepareConfig | None = None,
    progress: Kind = "off",
    opener: Callable[[Path], OpenedSource] | None = None,
) -> PrepareTally:
    """Convert a data set to Parquet shards of rows in the folder `out`, which appears when it is complete.

    The same call goes on after an interruption, at the last finished shard (a failure before the first leaves nothing), and
    leaves a finished output as it is. Items that make no row are counted and listed in `out`'s `report.json` and `broken.csv`.

    Args:
        path: file or folder of the data set, or its address (`train.data.readers.data_path`).
        opener: opens the data set, instead of `train.data.readers.open_source`; its result must be picklable.

    Returns:
        Counts of all rows, those of earlier starts included.

    Raises:
        UserError: settings, codec, voice or data set that do not fit; an `out` within the data, or that cannot be replaced;
            another process at work in `out`; a half-made or whole `out` of other settings, or of data that have changed since;
            no space left; a data set of which no item makes a row.
    """
    config, here = config or PrepareConfig(), data_path(path, again=True)
    with naming(path, here):
        return _prepare(here, find_address(path), Path(out), config, progress, opener)


def _prepare(
    path: Path,
    address: str | None,
    out: Path,
    config: PrepareConfig,
    progress: Kind,
    opener: Callable[[Path], OpenedSource] | None,
) -> PrepareTally:
    """`prepare` of a data set that is here, or was brought from an address."""
    out = place_for(out, path)
    source = opener(path) if opener else open_source(path, config.read)
    if address is not None:
        source.brought = path, address
    settings = settings_of(path, source, config, address)
    if occupied(out):
        return whole_already(out, settings)
    work = out.with_name(f"{out.name}.preparing")
    if not (config.ray and config.device != "cpu"):  # this machine may have no such device
        codec_of(config)  # loaded before processes start and folders are made, so that errors come first
    for side in config.sides:
        voice_of(config, side)
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


def _fill(work: Path, source: OpenedSource, config: PrepareConfig, progress: Kind) -> None:
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
    blocks = imap(partial(block_maker, source, config, features().arrow_schema), todo, config.processes)
    try:
        for block in blocks:
            rows += block.tally.rows
            if not first_why and block.broken:
                first_why = f"{block.broken[0].where}: {block.broken[0].why}"
            if not (rows or items.start) and block.stop >= min(items.stop, _MAX_WITHOUT_ROW):
                beside = source.brought is not None and source.origin is None
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
        what = "a mount point" if os.path.ismount(real) else "the folder that this runs in"
        if os.path.ismount(real) or os.path.samefile(real, os.curdir):
            raise UserError(f"output {out} is {what}, which cannot be replaced: name a folder in it, such as {out / 'rows'}")
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
