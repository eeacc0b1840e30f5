"""URLs of objects for libraries that open files by fsspec themselves, such as `datasets`: they are read as all else here.

So their requests are made again, what is read is cached, and objects that change are refused. The URL has the object's address
quoted as one name, without a character that libraries take for a folder or a pattern.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, unquote

import fsspec

from omni.stores.drivers import StoredObject
from omni.stores.reading import ObjectReader, looked_up

PROTOCOL = "omni-store"

_known: dict[str, StoredObject] = {}


def url_of(stored: StoredObject) -> str:
    """The URL by which fsspec opens an object in this process, without looking at it again."""
    _known[stored.address] = stored
    return f"{PROTOCOL}://{quote(stored.address, safe='')}"


def _object_of(url: str) -> StoredObject:
    address = unquote(url.removeprefix(f"{PROTOCOL}://"))
    return _known[address] if address in _known else looked_up(address)


class StoreFiles(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """fsspec's interface to objects by their URL."""

    protocol = PROTOCOL

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        stored = _object_of(path)
        return {"name": path.removeprefix(f"{PROTOCOL}://"), "size": stored.size, "type": "file", "ETag": stored.version}

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        return [self.info(path) if detail else self.info(path)["name"]]

    def open(self, path: str, mode: str = "rb", *unused: Any, **options: Any) -> Any:
        return ObjectReader(_object_of(path))


fsspec.register_implementation(PROTOCOL, StoreFiles, clobber=True)
