"""One command at a time for one output.

The lock is the operating system's, on a file in the working folder: it falls with the process that holds it, however that
ended, so nobody has to clear up after a crash. The file says who holds it.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType

from omni.errors import UserError

NAME = "lock"


class FolderLock:
    """A context in which this process alone works in `folder`, which is made where it is not there.

    Raises:
        UserError: another process holds it (it is named), or the file system has no locks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> FolderLock:
        try:
            import fcntl
        except ImportError as error:
            raise UserError("data are written on Linux or macOS: this system has no file locks of theirs") from error
        path = self.folder / NAME
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except FileNotFoundError:  # the folder has just been renamed by the process that finished it
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = _holder(handle)
                os.close(handle)
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise UserError(
                        f"{self.folder} is in use: {holder} writes into it; wait for it, or choose another output"
                    ) from error
                raise UserError(f"{path} cannot be locked ({error.strerror}): work on another file system") from error
            if _same(handle, path):
                break
            os.close(handle)  # locked, but it has been removed or renamed meanwhile
        os.ftruncate(handle, 0)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        os.pwrite(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": started}).encode(), 0)
        self._handle = handle
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._handle)


def _same(handle: int, path: Path) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _holder(handle: int) -> str:
    """Who holds the lock, as far as it has said so."""
    try:
        data = json.loads(os.pread(handle, 4096, 0))
        return f"process {data['pid']} on {data['host']}, since {data['started']},"
    except (ValueError, KeyError, TypeError):
        return "another process"
