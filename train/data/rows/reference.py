"""Recordings that rows name instead of holding them, with what tells whether they are still the same.

    file:///data/clips/a%20b.flac#size=51234&time=1700000000123456789&crc32=2309737967
    s3://speech/clips/a.flac#size=51234&version=%22d41d8cd98f%22
    ...&start=16000&stop=48000&channels=0,1       samples 16000 to 48000 of it, as the mean of these channels

The text is the `path` of a row's sound (`row`); one without such a fragment is a path below the rows' folder. A file is the
same where its size and time (of its last change, in ns) are, or else its size and CRC-32: a copy has another time. An object of
a store is the same where its size and version are. Nobody can name a file of this machine without knowing these of it.

Dimensions: S samples, C channels.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias
from urllib.parse import parse_qsl, quote, unquote, unquote_to_bytes, urlencode

from omni.audio.io import AudioInfo, audio_info, read_audio, read_part
from omni.audio.resample import resample
from omni.errors import UserError
from omni.stores.drivers import StoredObject, look_up
from omni.stores.reading import PIECE, ObjectReader, guarded
from omni.stores.tries import ChangedError, MissingError
from omni.utils.remote import shown

if TYPE_CHECKING:
    from torch import Tensor

DataFile: TypeAlias = Path | StoredObject
"""A file of rows: here, or in a store. Its `name`, and its text for messages, are alike."""

FILE = "file://"
AGAIN = "prepare the data again"
_PLAIN = "".join(chr(code) for code in range(33, 127) if chr(code) not in "#%")
"""Characters of an address that a reference has as they are."""


class UnfitReference(UserError):
    """A recording that cannot be had; `kind` is `missing_reference` or `changed_reference`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class SoundPart:
    """Samples `start` to `stop` of a recording, as the mean of these channels (none: of all)."""

    start: int
    stop: int
    channels: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reference:
    """A recording elsewhere.

    Attributes:
        address: of a store, or the absolute path of a file.
        time: of a file's last change, in ns.
        part: what is wanted of it; None for all.
    """

    address: str
    size: int
    version: str = ""
    time: int = 0
    crc32: int = 0
    part: SoundPart | None = None

    @classmethod
    def of(cls, address: str, part: SoundPart | None = None) -> Reference:
        """Name a file, or an object of a store, as it is now; OSError or UserError where it cannot be looked at."""
        if "://" in address:
            stored = look_up(address)
            return cls(stored.address, stored.size, version=stored.version, part=part)
        path = os.path.abspath(address)
        state = os.stat(path)
        return cls(path, state.st_size, time=state.st_mtime_ns, crc32=_crc32(path, state.st_size, state.st_mtime_ns), part=part)

    @classmethod
    def read(cls, text: str | None) -> Reference | None:
        """The reference that a row's `path` is; None for a path below the rows' folder."""
        address, _, fragment = (text or "").partition("#")
        if "://" not in address or not fragment:
            return None
        fields = dict(parse_qsl(fragment, keep_blank_values=True))
        try:
            numbers = {name: int(fields[name]) for name in ("size", "time", "crc32", "start", "stop") if name in fields}
            channels = tuple(int(number) for number in fields.get("channels", "").split(",") if number)
        except ValueError:
            return None
        here = address.startswith(FILE)
        if "size" not in numbers or (here and not {"time", "crc32"} <= numbers.keys()):
            return None
        part = SoundPart(numbers.pop("start"), numbers.pop("stop"), channels) if {"start", "stop"} <= numbers.keys() else None
        location = os.fsdecode(unquote_to_bytes(address[len(FILE) :])) if here else unquote(address)
        return cls(location, version=fields.get("version", ""), part=part, **numbers)

    def __str__(self) -> str:
        fields: dict[str, Any] = {"size": self.size}
        fields |= {"time": self.time, "crc32": self.crc32} if self.is_file else {"version": self.version}
        if self.part is not None:
            fields |= {"start": self.part.start, "stop": self.part.stop}
            fields |= {"channels": ",".join(map(str, self.part.channels))} if self.part.channels else {}
        address = Path(self.address).as_uri() if self.is_file else quote(self.address, safe=_PLAIN)
        return f"{address}#{urlencode(fields, safe=',')}"

    @property
    def is_file(self) -> bool:
        """True for a file, false for an object of a store."""
        return "://" not in self.address

    @property
    def name(self) -> str:
        """The file or address, for messages."""
        return self.address if self.is_file else shown(self.address)

    def info(self) -> AudioInfo:
        """The header of the recording, with the length of the wanted part; errors as of `load`."""
        with self._opened() as source:
            info = audio_info(source, name=self.name)
        if self.part is None:
            return info
        return AudioInfo(info.sample_rate, self.part.stop - self.part.start, 1, info.format)

    def load(self, sample_rate: int) -> Tensor:
        """Load mono samples [S] (float32) at `sample_rate`.

        Raises:
            UnfitReference: it is not there, or has changed since it was named, or changes while it is read.
            UserError: it is no sound.
        """
        with self._opened() as source:
            if self.part is None:
                return read_audio(source, sample_rate, name=self.name)
            start, stop = self.part.start, self.part.stop
            samples, rate = read_part(source, start, stop, name=self.name)
        wanted = list(self.part.channels) or list(range(samples.shape[1]))
        if len(samples) < stop - start or max(wanted) >= samples.shape[1]:
            raise UserError(f"{self.name} has no samples {start} to {stop} in channels {wanted}: {AGAIN}")
        return resample(samples[:, wanted].mean(1), rate, sample_rate, name=self.name)

    def content(self) -> bytes:
        """The whole recording as it is; errors as of `load`."""
        with self._opened() as source:
            return Path(source).read_bytes() if isinstance(source, str) else source.read()

    @contextmanager
    def _opened(self) -> Iterator[str | BinaryIO]:
        """Context with the recording as a path or an open file, around which it is the same."""
        if self.is_file:
            before = self._check()
            yield self.address
            if self._check() != before:
                raise UnfitReference("changed_reference", f"{self.name} changes while it is read: wait, then {AGAIN}")
            return
        stored_object = StoredObject(self.address, self.size, self.version)
        try:
            if not self.version.startswith('"'):  # a condition that no request can have
                current = look_up(self.address)
                if (current.size, current.version) != (self.size, self.version):
                    raise ChangedError(self.name)
            with _read(stored_object, self.part) as source:
                yield source
        except ChangedError as error:
            text = f"{self.name} is not the recording that the data was prepared with: bring that back, or {AGAIN}"
            raise UnfitReference("changed_reference", text) from error
        except MissingError as error:
            raise UnfitReference("missing_reference", f"{error}: bring it back, or {AGAIN}") from error

    def _check(self) -> tuple[int, int]:
        """Size and time of the file, which is checked to be the one that was named."""
        try:
            state = os.stat(self.address)
            now = (state.st_size, state.st_mtime_ns)
            same = now[0] == self.size and (now[1] == self.time or _crc32(self.address, *now) == self.crc32)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            text = f"recording {self.name} cannot be read ({why}): bring it back, or {AGAIN}"
            raise UnfitReference("missing_reference", text) from error
        if not same:
            change = f"it has {now[0]} bytes and had {self.size}" if now[0] != self.size else "its content is another one"
            why = f"is not the one that the data was prepared with ({change}): bring that back, or {AGAIN}"
            raise UnfitReference("changed_reference", f"recording {self.name} {why}")
        return now


@dataclass(frozen=True)
class PointedRecording(Reference):
    """A recording of a data set that is read, of which only a pointer file was brought here (`omni.stores.cache`). Its
    methods raise StoreError where it cannot be had."""

    @contextmanager
    def _opened(self) -> Iterator[str | BinaryIO]:
        with _read(StoredObject(self.address, self.size, self.version), self.part) as source:
            yield source


@contextmanager
def _read(stored_object: StoredObject, part: SoundPart | None) -> Iterator[BinaryIO]:
    """A context with a recording of a store: all of it in memory, or open at any place for a part."""
    if part is None:
        yield io.BytesIO(ObjectReader(stored_object).read())
        return
    with guarded(stored_object) as source:
        yield source


@lru_cache(maxsize=4096)
def _crc32(path: str, size: int, time: int) -> int:
    """Checksum of a file of this size and time, which many rows may name."""
    return checksum(Path(path))


def reading(file: DataFile) -> BinaryIO:
    """A file, open for reading from its start to its end: one of a store by large ranges."""
    return open(file, "rb") if isinstance(file, Path) else io.BufferedReader(ObjectReader(file), PIECE)


def checksum(file: DataFile) -> int:
    """CRC-32 of a file."""
    value = 0
    with reading(file) as stream:
        while part := stream.read(1 << 20):
            value = zlib.crc32(part, value)
    return value
