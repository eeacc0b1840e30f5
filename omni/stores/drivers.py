"""Requests to stores through fsspec: list a folder, look at an object, read a range of it, write one.

Each is made again while its failure may pass (`omni.stores.tries`); no driver tries again by itself, and none waits longer than
`stall_seconds` for a byte. Credentials are looked for as each store's own tools do.

What is tested is `s3://`, against a server that speaks S3, and `http(s)://`. The others are as good as their fsspec drivers.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from omni.errors import PackageError, UserError, closest
from omni.stores.tries import ChangedError, MissingError, stall_seconds, tried
from omni.utils.remote import shown

SLOWEST = 64 << 10  # bytes a second: a request that is slower as a whole is given up, and made again

VERSIONS = ("ETag", "etag", "generation", "blob_id", "md5Hash")
"""Keys under which drivers give an object's version, the best first."""
TIMES = ("LastModified", "Last-Modified", "last_modified", "updated", "mtime")
"""Keys under which drivers tell when an object was written."""

LOOPBACK = re.compile(r"http://(localhost|127(\.\d+){3}|\[::1\])(:\d+)?(/|$)")
"""Addresses of servers on this machine, which are read without encryption."""


class Scheme(NamedTuple):
    """How addresses of a scheme are read."""

    package: str  # the driver's, by the name it is imported by
    extra: str = ""  # of `omni-speech`, which brings it
    lists: bool = True  # there are folders
    writes: bool = False  # objects are written to it


SCHEMES: Mapping[str, Scheme] = {
    "s3": Scheme("s3fs", "s3", writes=True),
    "gs": Scheme("gcsfs", "gs", writes=True),
    "hf": Scheme("huggingface_hub", "hub"),
    "https": Scheme("aiohttp", lists=False),
    "http": Scheme("aiohttp", lists=False),
}


ALIASES = {"gcs": "gs", "s3a": "s3", "s3n": "s3"}  # names that other programs have for schemes

KNOWN = ("s3", "gs", "hf", "https")  # schemes that messages name


@dataclass(frozen=True)
class StoredObject:
    """A file in a store, as it was when it was listed.

    Attributes:
        address: where it is.
        size: in bytes.
        version: its ETag or checksum, else when it was written; "" where a store tells neither.
    """

    address: str
    size: int
    version: str = ""

    def __str__(self) -> str:
        return shown(self.address)

    @property
    def name(self) -> str:
        """The last part of the address."""
        return bare(self.address).rpartition("/")[2]


def scheme_of(address: str) -> str:
    """The scheme of an address; UserError where it is unknown, or reads without encryption from another machine."""
    prefix = address.partition("://")[0]
    scheme = ALIASES.get(prefix, prefix)
    if prefix in ALIASES:
        raise UserError(f"{shown(address)}: write {scheme}:// in place of {prefix}://")
    if scheme not in SCHEMES:
        raise UserError(f"{shown(address)}: addresses that start with {prefix}:// are not read; {closest(scheme, KNOWN)}")
    if scheme == "http" and not LOOPBACK.match(address):
        raise UserError(
            f"{shown(address)} is not encrypted: give its https:// address (http:// is for servers on this machine)"
        )
    if scheme == "https" and re.match(r"https://(www\.)?huggingface\.co/[^/]+/[^/]+/?$", address):
        raise UserError(f"{shown(address)} is a page: give hf://{address.split('huggingface.co/')[1].rstrip('/')}")
    return scheme


def join(address: str, name: str) -> str:
    """The address of a file below a folder's."""
    return f"{address.rstrip('/')}/{name}"


def bare(address: str) -> str:
    """An address without its query: after a question mark at a web server, where elsewhere it is part of a name."""
    return address.partition("?")[0] if address.startswith("http") else address


def parent(address: str) -> str:
    """The address of the folder that a file is in."""
    return bare(address).rpartition("/")[0]


def inner_name(address: str, folder: str) -> str:
    """The path of an object relative to a folder of addresses; UserError where it would lead out of a folder here."""
    name = bare(address).removeprefix(folder.rstrip("/") + "/")
    parts = PurePosixPath(name).parts
    foreign = os.name == "nt" and ("\\" in name or ":" in name)
    if not parts or ".." in parts or name.startswith("/") or "\0" in name or foreign:
        raise UserError(f"{shown(address)} has a name that no file in a folder can have: rename it")
    return str(PurePosixPath(name))


# --- requests -----------------------------------------------------------------------------------------------------------


def list_objects(address: str, deep: bool = False) -> list[StoredObject]:
    """The objects in a folder, sorted by address: one request, or one for each thousand. UserError: the store has no folders,
    or cannot be listed. MissingError: nothing is there.

    Args:
        deep: also those in folders below it.
    """
    scheme = scheme_of(address)
    if not SCHEMES[scheme].lists:
        raise UserError(
            f"{shown(address)}: {scheme}:// has no folders that can be listed; name a file, or a folder of s3, gs or hf"
        )

    base = address.rstrip("/") + "/"
    if deep:
        listed = tried(lambda: _system(scheme).find(address, detail=True).values(), address, "listed")
    else:
        listed = tried(lambda: _system(scheme).ls(address, detail=True), address, "listed")
    infos = [info for info in listed if info.get("type") == "file"]
    names = [str(info["name"]) for info in infos]
    addresses = [name if "://" in name else f"{scheme}://{name}" for name in names]
    objects = [_object(address, info) for address, info in zip(addresses, infos, strict=True)]
    objects = [stored for stored in objects if stored.address.startswith(base) and not stored.address.endswith("/")]
    if not objects:
        raise MissingError(f"{shown(address)} is not there, or holds nothing: check the name")
    return sorted(objects, key=lambda stored: stored.address)


def look_up(address: str) -> StoredObject:
    """An object as it is now. UserError: it cannot be looked at, or the server does not tell its size. MissingError: there is
    none; the closest name beside it is told."""
    scheme = scheme_of(address)
    try:
        info = dict(tried(lambda: _system(scheme).info(address), address))
        if info.get("type") != "file":
            raise MissingError(f"{shown(address)} is a folder, not a file: name one in it")
    except MissingError as error:
        raise MissingError(f"{error}{_near(address)}") from error
    if info.get("size") is None:
        raise UserError(f"{shown(address)}: the server does not tell its size; download it, and name the file")
    return _object(address, info)


def look_up_all(address: str) -> list[StoredObject]:
    """The objects in a folder and below it, or the one that has just this address; MissingError where there are neither."""
    if SCHEMES[scheme_of(address)].lists:
        try:
            return list_objects(address, deep=True)
        except MissingError:
            pass
    return [look_up(address)]


def read_range(of: StoredObject, start: int, stop: int) -> bytes:
    """Bytes `start` to `stop` of an object. ChangedError: it is not any more what was listed. UserError: it cannot be read."""
    if start >= stop:
        return b""
    scheme = scheme_of(of.address)

    def work() -> bytes:
        data = _read(scheme, of, start, stop)
        if len(data) == of.size > stop - start:  # a server that knows no ranges
            data = data[start:stop]
        if len(data) > stop - start:
            raise ChangedError(f"{of} has changed, or was replaced, since it was listed: run the same command again")
        if len(data) < stop - start:  # the connection was cut
            raise ConnectionError(errno.ECONNRESET, f"{len(data)} bytes of {stop - start} came from {of}")
        return data

    return tried(work, of.address)


def write_object(source: bytes | str | os.PathLike[str], address: str) -> None:
    """Write a file, or bytes, to an address, replacing what is there; UserError where that is refused, or goes on failing."""
    check_writable(address)
    system = _system(scheme_of(address))
    if isinstance(source, bytes):
        tried(lambda: system.pipe_file(address, source), address, "written")
    else:
        tried(lambda: system.put_file(os.fspath(source), address), address, "written")


def check_writable(address: str) -> None:
    """UserError for an address that objects are not written to, or whose driver is not installed."""
    if not SCHEMES[scheme_of(address)].writes:
        known = " and ".join(name for name, scheme in SCHEMES.items() if scheme.writes)
        hub = "; a finished model goes to hf:// by `omni-train push`" if scheme_of(address) == "hf" else ""
        raise UserError(f"{shown(address)} cannot be written: give an address of {known}{hub}")
    _system(scheme_of(address))


# --- drivers ------------------------------------------------------------------------------------------------------------


def _system(scheme: str) -> Any:
    """The driver of a scheme; fsspec keeps one in each process."""
    import fsspec

    seconds, options = stall_seconds(), dict[str, Any](use_listings_cache=False)
    try:
        if scheme == "s3":
            options["config_kwargs"] = {
                "connect_timeout": seconds, "read_timeout": seconds, "retries": {"total_max_attempts": 1},
            }  # fmt: skip
        if scheme in ("http", "https"):
            from aiohttp import ClientTimeout

            options["client_kwargs"] = {"timeout": ClientTimeout(None, sock_connect=seconds, sock_read=seconds)}
        system = fsspec.filesystem(scheme, **options)
    except ImportError as error:
        row = SCHEMES[scheme]
        install = f'"omni-speech[{row.extra}]"' if row.extra else row.package
        raise PackageError(f"{scheme}:// needs the package {row.package}: pip install {install}") from error
    if scheme == "s3":
        system.retries = 1
    return system


def _object(address: str, info: Mapping[str, Any]) -> StoredObject:
    stamp = next((info[key] for key in (*VERSIONS, *TIMES) if info.get(key)), "")
    version = stamp.isoformat() if isinstance(stamp, datetime) else str(stamp)
    return StoredObject(address, int(info.get("size") or 0), version)


def _read(scheme: str, of: StoredObject, start: int, stop: int) -> bytes:
    """A range of the object that was listed, where the store gives strong ETags; it is given up where it takes too long."""
    system, same = _system(scheme), of.version.startswith('"')
    limit = {"timeout": stall_seconds() + (stop - start) / SLOWEST} if system.async_impl else {}
    if scheme == "s3":
        return _read_s3(system, of.address, f"bytes={start}-{stop - 1}", {"IfMatch": of.version} if same else {}, limit)
    headers = {"headers": {"If-Match": of.version}} if same and scheme.startswith("http") else {}
    return bytes(system.cat_file(of.address, start=start, end=stop, **headers, **limit))


def _read_s3(system: Any, address: str, wanted: str, same: Mapping[str, str], limit: Mapping[str, float]) -> bytes:
    """A range with a condition, of which the driver's own `cat_file` knows none."""
    from fsspec.asyn import sync

    bucket, key, version = system.split_path(address)
    named = {"VersionId": version} if version else {}
    body = system.call_s3("get_object", Bucket=bucket, Key=key, Range=wanted, **named, **same, **limit)["Body"]

    async def read() -> bytes:
        async with body:
            return bytes(await body.read())

    return bytes(sync(system.loop, read, **limit))


def _near(address: str) -> str:
    """The hint that names the object closest to one that is not there; "" for none."""
    from difflib import get_close_matches

    folder = parent(address)
    if not SCHEMES[scheme_of(address)].lists or "://" not in folder:
        return ""
    try:
        infos = _system(scheme_of(address)).ls(folder, detail=False)
        names = [str(name).rstrip("/").rpartition("/")[2] for name in infos]
    except Exception:  # the hint alone is lost
        return ""
    close = get_close_matches(address.rpartition("/")[2], names, n=1, cutoff=0.6)
    return f"; did you mean {shown(join(folder, close[0]))}?" if close else ""
