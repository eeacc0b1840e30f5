"""Copies finished checkpoints and the finished model of a run to a store, beside the steps, and brings the last one back.

    ADDRESS/checkpoints/step-00000100/…     as in the run folder; `state.json` is written last
    ADDRESS/checkpoints/last                then the name of that checkpoint
    ADDRESS/model/…                         `config.json` is written last

Whatever has its last file is whole. What fails is tried again, then told, and never ends a run. Nothing is deleted there.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from threading import Condition, Thread

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
    """Copies folders to a store in a thread of its own, one after another.

    Args:
        address: of the folder there.
    """

    def __init__(self, address: str) -> None:
        self.address = check_upload(address)
        self._waiting: list[tuple[str, Path]] = []  # names below the address, and folders
        self._lines: list[str] = []
        self._busy = False
        self._turn = Condition()
        self._thread: Thread | None = None

    def add(self, folder: Path) -> None:
        """Copy a finished checkpoint, or a finished model, as soon as those before it are copied.

        A checkpoint is held by links to its files, so that it may be deleted meanwhile. One that still waits when the next one
        comes is left out.
        """
        checkpoint = folder.parent.name == CHECKPOINTS
        name, held = (f"{CHECKPOINTS}/{folder.name}", _links(folder)) if checkpoint else (folder.name, folder)
        with self._turn:
            for other in [waiting for waiting in self._waiting if checkpoint and waiting[0].startswith(f"{CHECKPOINTS}/")]:
                self._waiting.remove(other)
                _discard(other[1])
                self._lines.append(f"{other[0]} is not uploaded: the next checkpoint came first")
            self._waiting.append((name, held))
            if self._thread is None:
                self._thread = Thread(target=self._run, name="upload", daemon=True)
                self._thread.start()
            self._turn.notify_all()

    def messages(self) -> list[str]:
        """Return the lines about uploads since the last call."""
        with self._turn:
            lines, self._lines = self._lines, []
        return lines

    @property
    def left(self) -> bool:
        """True while something is copied, or waits for it."""
        return self._busy or bool(self._waiting)

    def wait(self) -> None:
        """Wait until everything is copied, or has failed."""
        with self._turn:
            while self.left:
                self._turn.wait(0.2)

    def _run(self) -> None:
        while True:
            with self._turn:
                while not self._waiting:
                    self._turn.wait()
                (name, folder), self._busy = self._waiting.pop(0), True
            try:
                self._copy(name, folder)
                line = f"uploaded {shown(join(self.address, name))}"
            except Exception as error:
                why = str(error) if isinstance(error, UserError) else in_one_line(error)
                line = f"{name} is not uploaded, and the run goes on: {why}"
            _discard(folder)
            with self._turn:
                self._lines.append(line)
                self._busy = False
                self._turn.notify_all()

    def _copy(self, name: str, folder: Path) -> None:
        address = join(self.address, name)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        for file in sorted(files, key=lambda file: file.name in MARKERS and file.parent == folder):
            write_object(file, join(address, file.relative_to(folder).as_posix()))
        if name.startswith(f"{CHECKPOINTS}/"):
            write_object(f"{Path(name).name}\n".encode(), join(self.address, f"{CHECKPOINTS}/{LAST}"))


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
