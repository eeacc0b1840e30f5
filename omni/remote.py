"""Refuses addresses of stores and servers (`s3://…`, `hf://…`, `https://…`), which are not read yet, in place of paths."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from omni.errors import UserError

ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}(?=[^/])", re.IGNORECASE)
"""Start of an address; one slash is enough, because `Path` makes one of the two."""

COPIES = {
    "s3": "`aws s3 cp`",
    "gs": "`gcloud storage cp`",
    "gcs": "`gcloud storage cp`",
    "hf": "`hf download`",
    "http": "`curl -LO`",
    "https": "`curl -LO`",
}
"""Command that copies from an address, by scheme."""


def refuse_remote(path: str | os.PathLike[str], what: str, folder: str | os.PathLike[str] = ".", write: bool = False) -> None:
    """UserError where a path is a remote address, and no local file has that name.

    Args:
        what: kind of file or folder, for the message.
        folder: where relative paths start.
        write: the path is to be written, not read.
    """
    name = os.fspath(path)
    found = ADDRESS.match(name) if isinstance(name, str) else None
    if found is None or os.path.exists(os.path.join(folder, name)):
        return
    scheme, rest = found[1].lower(), name[found.end() :]
    copy = "`hf download`" if rest.startswith("huggingface.co/") else COPIES.get(scheme, "")
    way = f"copy it here first{f' ({copy})' if copy else ''}, and name the copy"
    if write:
        way = "name a folder here, and copy that there"
    address = f"{found[1]}://{rest}"
    shown = address if len(address) <= 200 else f"{address[:197]}..."
    verb = "written" if write else "read"
    raise UserError(f"{what} {shown!r} is not on this machine, and {scheme}:// is not {verb} yet: {way}")


def check_there(path: str | os.PathLike[str], what: str, otherwise: str, there: Callable[[Path], bool] = Path.exists) -> None:
    """UserError where a path is a remote address (see `refuse_remote`), or where `there(path)` is false (`otherwise`)."""
    if not there(Path(path)):
        refuse_remote(path, what)
        raise UserError(otherwise)
