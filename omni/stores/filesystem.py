"""URLs of objects for libraries that open files by fsspec themselves, such as `datasets`: they are read as all else here.

So their requests are made again, what is read is cached, and objects that change are refused. The URL has the object's address
quoted as one name, without a character that libraries take for a folder or a pattern.
"""

from __future__ import annotations

from functools import cache
from urllib.parse import quote, unquote

from omni.stores.drivers import StoredObject, register
from omni.stores.reading import ObjectReader, looked_up

PROTOCOL = "omni-store"

_known: dict[str, StoredObject] = {}


def url_of(stored: StoredObject) -> str:
    """The URL by which fsspec opens an object in this process, without looking at it again."""
    _registered()
    _known[stored.address] = stored
    return f"{PROTOCOL}://{quote(stored.address, safe='')}"


@cache
def _registered() -> None:
    register(PROTOCOL, _look, ObjectReader)


def _look(name: str) -> StoredObject:
    address = unquote(name)
    return _known[address] if address in _known else looked_up(address)
