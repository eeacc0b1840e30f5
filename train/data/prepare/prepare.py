"""A preparation from beginning to end, or from where it was interrupted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni.errors import UserError
from omni.files import LOCK, flush, locked
from omni.remote import refuse_remote
from train.console.progress import Display, Kind
from train.data.prepare.config import PrepareConfig
from train.data.prepare.pool import make_blocks
from train.data.prepare.report import REPORT, read_report, write_report
from train.data.prepare.rows import PrepareTally
from train.data.prepare.settings import agree, discard, settings_of
from train.data.prepare.shards import ShardWriter, stored
from train.data.prepare.worker import BLOCK, codec_of
from train.data.readers import OpenedSource, open_source
from train.data.tts.voices import make_voice

if TYPE_CHECKING:
    from omni.codec.base import AudioCodec

_HOPELESS = 1000
"""So many items without a single row, and the settings are wrong rather than the data."""


def prepare(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    config: PrepareConfig | None = None,
    progress: Kind = "off",
    opener: Callable[[Path], OpenedSource] | None = None,
) -> PrepareTally:
    """Make the rows of a data set into Parquet shards in the folder `out`, which appears when all is there.

    What is interrupted goes on at the last finished shard when the same call is made again (what fails before the first leaves
    nothing), and what is finished is left as it is. Items that make no row are counted and listed in `out`'s `report.json` and
    `broken.csv`.

    Args:
        path: file or folder of the data set.
        opener: opens it, instead of `train.data.readers.open_source`; what it returns must be picklable.

    Returns:
        Counts of all rows, those of earlier starts included.

    Raises:
        UserError: settings, codec, voice or data set that do not fit; an `out` within the data, or that cannot be replaced;
            another process at work in `out`; a half-made or whole `out` of other settings, or of data that have changed since;
            no space left; a data set of which no item makes a row.
    """
    config = config or PrepareConfig()
    path, out = Path(path), _target(Path(path), Path(out))
    source = opener(path) if opener else open_source(path, config.read)
    settings = settings_of(path, source, config)
    if _occupied(out):
        return _finished(out, settings)
    work = out.with_name(f"{out.name}.preparing")
    codec = codec_of(config)  # before any process starts or a folder is made, to find out what is missing
    for side in config.sides:
        make_voice(config.voice if side == "question" else config.answering)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"output {out} lies in a file: name a folder") from error
    with locked(work):
        if _occupied(out):  # finished while we waited for nothing
            shutil.rmtree(work)
            return _finished(out, settings)
        agree(work, settings, finished=False)
        try:
            _fill(work, source, config, codec, progress)
        except BaseException:
            if not stored(work):
                discard(work)
            raise
        write_report(work, settings, source.note)
        os.rename(work, out)
        flush(out.parent)
        _tidy(out)
        return read_report(out)


def _fill(work: Path, source: OpenedSource, config: PrepareConfig, codec: AudioCodec | None, progress: Kind) -> None:
    """Write all shards that are not there yet."""
    total = min(len(source), config.limit or len(source))
    shards = ShardWriter(work, config.shard_mb << 20)
    display = Display(total, shards.next_item, progress)
    if source.note:
        display.say(source.note)
    if shards.next_item:
        display.say(f"going on after {shards.next_item} items, {shards.done.rows} rows of which are there")
    rows, first_why = shards.done.rows, ""
    blocks = make_blocks(source, config, range(shards.next_item, total, BLOCK), total, display.tick, codec)
    try:
        for block in blocks:
            rows += block.tally.rows
            if not first_why and block.broken:
                first_why = f"{block.broken[0].where}: {block.broken[0].why}"
            if not rows and block.stop >= min(total, _HOPELESS):
                raise UserError(f"none of the first {block.stop} items makes a row; the first, {first_why}")
            shards.add(block)
        shards.finish()
    finally:
        shards.abandon()
        blocks.close()
        display.close()
    if not shards.done.rows:
        raise UserError(f"the source has {total} items and none makes a row: there is nothing to store")


def _target(path: Path, out: Path) -> Path:
    """The folder that appears in the end, links followed; UserError where none can appear there."""
    refuse_remote(out, "output", write=True)
    try:
        real = out.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # links in a circle, NUL
        raise UserError(f"output {out} is no name that leads to a folder ({error}): name another") from error
    if path.is_dir() and real.is_relative_to(path.resolve()):
        raise UserError(f"output {out} lies in the data {path}, of which it would become a part: name a folder outside")
    if real.is_dir() and not _occupied(real):  # it is replaced by the folder that has been filled beside it
        what = "a mount point" if os.path.ismount(real) else "the folder that this runs in"
        if os.path.ismount(real) or os.path.samefile(real, os.curdir):
            raise UserError(f"output {out} is {what}, which cannot be replaced: name a folder in it, such as {out / 'rows'}")
    return real


def _occupied(out: Path) -> bool:
    """Whether something stands where the output goes; an empty folder does not count."""
    return out.exists() and not (out.is_dir() and not any(out.iterdir()))


def _finished(out: Path, settings: dict[str, Any]) -> PrepareTally:
    """An output that is whole already."""
    if not (out / REPORT).is_file():
        raise UserError(f"output {out} exists and is none of this command's: choose another, or remove it")
    agree(out, settings, finished=True)
    _tidy(out)
    return read_report(out)


def _tidy(out: Path) -> None:
    """Remove what only an unfinished output needs."""
    shutil.rmtree(out / "notes", ignore_errors=True)
    for left in (out / LOCK, *out.glob(".*.part*")):  # the latter of a process that was killed
        left.unlink(missing_ok=True)
