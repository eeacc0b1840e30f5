"""Copies finished checkpoints and the finished model of a run to a store, beside the steps, and brings the last one back.

    ADDRESS/checkpoints/step-00000100/…     as in the run folder; `state.json` is written last
    ADDRESS/checkpoints/last                then the name of that checkpoint
    ADDRESS/model/…                         `config.json` is written last

Whatever has its last file is whole. What fails is tried again, then told, and never ends a run. Nothing is deleted there.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Thread

from omni.errors import UserError, in_one_line
from omni.stores.drivers import check_writable, join, look_up_all, write_object
from omni.stores.reading import download, read_whole
from omni.stores.tries import MissingError
from omni.utils.remote import find_address, shown
from train.checkpoint.retention import LAST, STATE

MARKERS = (STATE, "config.json", "adapter_config.json")
"""Files that are written last: without one of them nothing reads a folder."""
CHECKPOINTS, LINKED = "checkpoints", ".uploading"


def check_upload(upload: str) -> str:
    """The address of `checkpoint.upload`; UserError where it is none that can be written to."""
    address = find_address(upload)
    if address is None:
        raise UserError(f"checkpoint.upload is {upload!r:.200}; give an address, such as s3://bucket/runs/name")
    check_writable(address)
    return address


class Uploads:
    """Copies folders to a store in threads, one after another.

    Args:
        address: of the folder there.

    Attributes:
        last: done once everything is copied, or has failed; None before there was anything.
        lines: about uploads, for whoever says them to take away.
    """

    def __init__(self, address: str) -> None:
        self.address = check_upload(address)
        self.last: Future[None] | None = None
        self.lines: deque[str] = deque()
        self._checkpoint: tuple[Future[None], str, Path] | None = None  # the last one, with its name and folder

    def add(self, folder: Path) -> None:
        """Copy a finished checkpoint, or a finished model, as soon as those before it are copied. A checkpoint is held by links
        to its files, so that it may be deleted meanwhile. One that still waits when the next one comes is left out."""
        name, held, is_checkpoint = folder.name, folder, folder.parent.name == CHECKPOINTS
        if is_checkpoint:
            name, held = f"{CHECKPOINTS}/{folder.name}", _links(folder)
            if self._checkpoint is not None and self._checkpoint[0].cancel():
                self.lines.append(f"{self._checkpoint[1]} is not uploaded: the next checkpoint came first")
                _discard(self._checkpoint[2])
        self.last = in_background(lambda: self._upload(name, held), after=self.last)
        if is_checkpoint:
            self._checkpoint = self.last, name, held

    def _upload(self, name: str, folder: Path) -> None:
        address = join(self.address, name)
        try:
            files = sorted(file for file in folder.rglob("*") if file.is_file())
            for file in sorted(files, key=lambda file: file.name in MARKERS and file.parent == folder):
                write_object(file, join(address, file.relative_to(folder).as_posix()))
            if name.startswith(f"{CHECKPOINTS}/"):
                write_object(f"{Path(name).name}\n".encode(), join(self.address, f"{CHECKPOINTS}/{LAST}"))
            self.lines.append(f"uploaded {shown(address)}")
        except Exception as error:
            why = str(error) if isinstance(error, UserError) else in_one_line(error)
            self.lines.append(f"{name} is not uploaded, and the run goes on: {why}")
        _discard(folder)


def in_background(work: Callable[[], None], after: Future[None] | None = None) -> Future[None]:
    """Begins a piece of work in a thread of its own, which does not keep the process from ending, once an earlier one is done;
    until then it can be cancelled."""
    done: Future[None] = Future()

    def run() -> None:
        if after is not None:
            wait([after])
        if not done.set_running_or_notify_cancel():
            return
        try:
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    Thread(target=run, name="background", daemon=True).start()
    return done


def _links(folder: Path) -> Path:
    """A folder of links to a checkpoint's files, beside it; the checkpoint itself where the file system has no links."""
    beside = folder.with_name(f".{folder.name}{LINKED}")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        shutil.copytree(folder, beside, copy_function=os.link)
    except (OSError, shutil.Error):
        shutil.rmtree(beside, ignore_errors=True)
        return folder
    return beside


def _discard(folder: Path) -> None:
    """Deletes a folder of links; any other stays."""
    if folder.name.endswith(LINKED):
        shutil.rmtree(folder, ignore_errors=True)


def bring_back(upload: str, parent: Path) -> str | None:
    """Bring the last checkpoint that was uploaded into `parent`, a run's folder of checkpoints; returns its address, None
    where none was uploaded. UserError where it cannot be read, or `parent` cannot be written."""
    base = join(check_upload(upload), CHECKPOINTS)
    try:
        name = read_whole(join(base, LAST)).decode(errors="replace").strip()
    except MissingError:
        return None
    if not (name.startswith("step-") and name[5:].isdigit()):
        raise UserError(
            f"{shown(join(base, LAST))} holds {name!r:.80}, no checkpoint's name: delete it, or give another address"
        )
    address = join(base, name)
    objects = look_up_all(address)
    beside = parent / f".{name}.writing"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        download(address, objects, beside)
        os.rename(beside, parent / name)
    except OSError as error:
        raise UserError(f"{shown(address)} cannot be copied to {parent} ({error.strerror}): free some space there") from error
    return address
