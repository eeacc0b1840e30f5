"""Tells addresses of stores and servers (`s3://…`, `gs://…`, `hf://…`, `https://…`) from paths of this machine.

`omni.stores` reads what is at an address. What takes no address refuses it here, with what to do instead.
"""

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

LONGEST_SHOWN = 200  # most characters of an address in a message


def find_address(path: str | os.PathLike[str], folder: str | os.PathLike[str] = ".") -> str | None:
    """The address that a path is, as `scheme://rest` without a slash at its end; None for a path of this machine, which is
    any for which something is there.

    Args:
        folder: where relative paths start.
    """
    name = os.fspath(path)
    match = ADDRESS.match(name) if isinstance(name, str) else None
    if match is None or os.path.exists(os.path.join(folder, name)):
        return None
    return f"{match[1].lower()}://{name[match.end() :].rstrip('/')}"


def spelled(path: object) -> str:
    """A path or a word as a user writes it: an address with both slashes, of which a `Path` keeps one."""
    return (find_address(path) if isinstance(path, Path) else None) or str(path)


def shown(address: str) -> str:
    """An address for messages: cut to `LONGEST_SHOWN` characters, and without a query, which may hold a signature."""
    start, query, _ = address.partition("?")
    text = start + ("?…" if query else "")
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def refuse_remote(path: str | os.PathLike[str], noun: str, folder: str | os.PathLike[str] = ".", write: bool = False) -> None:
    """UserError where a path is a remote address, and no local file has that name.

    Args:
        noun: kind of file or folder, for the message.
        folder: where relative paths start.
        write: the path is to be written, not read.
    """
    address = find_address(path, folder)
    if address is None:
        return
    scheme, _, rest = address.partition("://")
    copy = "`hf download`" if rest.startswith("huggingface.co/") else COPIES.get(scheme, "")
    way = f"copy it here first{f' ({copy})' if copy else ''}, and name the copy"
    if write:
        way = "name a folder here, and copy that there"
    verb = "written" if write else "read"
    raise UserError(f"{noun} {shown(address)!r} is not on this machine, and {scheme}:// is not {verb} here: {way}")


def check_there(path: str | os.PathLike[str], noun: str, otherwise: str, exists: Callable[[Path], bool] = Path.exists) -> None:
    """UserError where a path is a remote address (see `refuse_remote`), or where `exists(path)` is false (`otherwise`)."""
    if not exists(Path(path)):
        refuse_remote(path, noun)
        raise UserError(otherwise)
