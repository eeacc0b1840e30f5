"""Lists the files below a folder; knows where records and messages name recordings and pictures, and opens the recordings.

They are named in fields, in parts, as turns of a type, or by tags in texts, and lie inside the data's folder:

    audios, speech, wavpath, ...                                    fields of a record or message, see `RECORDING`
    {"type": "audio" | "input_audio" | "audio_url", ...}            a part of a message's content, or a message
    <audio>, <speech>, <|AUDIO|>, <audio>a.wav</audio>, ...         a tag in a text, see `TAG`
"""

from __future__ import annotations

import base64
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from omni.audio.decode import SUFFIXES
from omni.audio.io import AudioInfo, audio_info, read_part
from omni.errors import UserError
from omni.files import refuse_pointer
from omni.stores.cache import address_of, pointed_at
from omni.stores.reading import guarded
from omni.stores.tries import StoreError
from omni.utils.remote import check_there, find_address
from train.data.readers.contract import ReaderOptions
from train.data.rows.reference import SoundPart
from train.data.rows.row import Sound, checked, inside


def list_files(folder: str | os.PathLike[str], endings: Sequence[str] = ("",), depth: int = sys.maxsize) -> Iterator[str]:
    """Iterate over the files in a folder and the folders in it, to this depth, in the order of paths by their parts; over none
    where it cannot be read. Hidden files and folders are left out. Links to folders are not followed; one that leads nowhere is
    a file, whose reader says so. `endings`: of the names that are wanted, in lower case."""
    entries: list[os.DirEntry[str]] = []
    with suppress(OSError), os.scandir(folder) as scanned:
        entries += (e for e in scanned if e.name.lower().endswith(tuple(endings)) or e.is_dir(follow_symlinks=False))
    for entry in sorted(entries, key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from list_files(entry.path, endings, depth - 1) if depth else ()
        elif entry.is_file(follow_symlinks=False) or (entry.is_symlink() and not os.path.isdir(entry.path)):
            yield entry.path


# ------------------------------------------------------------------------------------------------ what is named where

_SOUND, _HELD = r"(?:audio|sound|speech|wav|recording)(?:e?s)?", r"(?:_?(?:path|file|filepath|filename|url|uri|bytes|data)s?)?"
RECORDING = rf"(?:(?:question|input|user)_)?{_SOUND}{_HELD}"
"""Names of fields, and of types, that hold recordings of questions, or of who speaks in a message."""
RECORDING_OF = rf"(?:\w+_)?{_SOUND}{_HELD}"
"""Names of fields that hold recordings of whatever it may be."""
PICTURE = rf"(?:input_)?(?:image|picture|photo|img|video)s?{_HELD}"
"""Names of fields, and of types, that hold what no reader takes."""
TAG = re.compile(
    r"<(audio|speech|sound|wav)>(?P<inner>.*?)</\1>"
    r"|<\|?(?P<no>/|(?:start|begin|end)_of_)?(?:audio|speech|sound|wav|recording)(?:here)?"
    r"(?:_?\d+|_(?:pad|token|placeholder|soft_token)|(?P<end>_(?:bos|eos|start|end)))?\|?>",
    re.IGNORECASE | re.DOTALL,
)
"""A placeholder of a recording in a text; such as have `no` or `end` only frame one."""
_PICTURE_TAG = re.compile(r"<\|?(?:image|video|picture)(?:_?\d+|_(?:pad|token|placeholder))?\|?>", re.IGNORECASE)

_PLAIN = {("role", "content"): "content", ("from", "value"): "value"}
_TEXTS, _ABOUT = ("text", "input_text", "output_text"), ("type", "role", "from", "duration")


class Said(NamedTuple):
    """A text, in which recordings may have tags, those that are named beside it, and the message that says it."""

    text: str
    recordings: list[Any]
    message: Mapping[str, Any]


@lru_cache(256)
def named(pattern: str, *names: str) -> tuple[str, ...]:
    """The names of fields, or types, that match a pattern."""
    return tuple(name for name in names if re.fullmatch(pattern, name.replace(" ", "_"), re.IGNORECASE))


def present(value: Any) -> bool:
    """True where a field holds something: no null, empty text or list, nor an object of nulls."""
    if isinstance(value, dict):
        return any(map(present, value.values()))
    return any(map(present, value)) if isinstance(value, list) else value is not None and value != ""


def recording_fields(data: Mapping[str, Any]) -> list[str]:
    """Names of the fields that hold a recording, by their name or by the ending of their value."""
    known = named(RECORDING_OF, *data)
    return [
        name
        for name, value in data.items()
        if (isinstance(value, str) and "." in value[-6:] and value.lower().endswith(SUFFIXES))
        or (name in known and present(value))
    ]


def tags(text: str) -> int:
    """Number of recordings that a text has tags of; UserError for a tag of a picture."""
    if "<" not in text:
        return 0
    picture = _PICTURE_TAG.search(text)
    if picture is not None:
        raise UserError(f"a text has {picture[0]}, and pictures are not read: drop the row")
    return sum(not (match["no"] or match["end"]) for match in TAG.finditer(text))


def refuse_pictures(data: Mapping[str, Any]) -> None:
    """UserError where a record, message or part has a picture or video."""
    for name in named(PICTURE, *data):
        if present(data[name]):
            raise UserError(f"has {name!r}, and pictures and videos are not read: drop the row, or the field")


def recordings_of(data: Mapping[str, Any]) -> Any:
    """The recording, or list of them, that a record names in a field; None for none. UserError where two fields do."""
    names = [name for name in named(RECORDING, *data) if present(data[name])]
    if len(names) > 1:
        raise UserError(f"has recordings in {' and in '.join(map(repr, names))}: keep one of these fields")
    return data[names[0]] if names else None


def listed(value: Any) -> list[Any]:
    """The recordings in a field that may hold one or several; a list of numbers is one."""
    if isinstance(value, list) and not any(isinstance(entry, int | float) for entry in value[:1]):
        return value
    return [value] if present(value) else []


def read_said(message: Mapping[str, Any]) -> Said:
    """What a message, or a part of its content, says, and its recordings; UserError for pictures and parts of other types. A
    text beside a recording has a tag for it where that is a part of the content, and none where it is a field of the
    message."""
    plain = message[_PLAIN[names]] if (names := tuple(message)) in _PLAIN else None
    if isinstance(plain, str) and "<" not in plain:
        return Said(plain.strip(), [], message)
    refuse_pictures(message)
    part_type, own = message.get("type") or "text", recordings_of(message)
    held = next((message[name] for name in ("content", "value", "text") if present(message.get(name))), "")
    if not isinstance(part_type, str) or named(PICTURE, part_type):
        raise UserError(f"has a part of type {part_type!r}, and only text and recordings are read: drop the row")
    if named(RECORDING, part_type):
        rest = {name: value for name, value in message.items() if name not in _ABOUT and present(value)}
        return Said("<audio>", listed(own) or listed(held) or listed(rest), message)
    parts = [_read_part(part) for part in (held if isinstance(held, list) else [held])]
    text = "\n".join(filter(None, (part.text.strip() for part in parts)))
    recordings = [recording for part in parts for recording in part.recordings]
    if recordings and not tags(text):
        text = "\n".join(["<audio>"] * len(recordings) + [text])
    inner = [path for match in TAG.finditer(text) if (path := (match["inner"] or "").strip("./ \n")) and "<" not in path]
    return Said(text, recordings or listed(own) or inner, message)


def _read_part(part: Any) -> Said:
    if isinstance(part, str | int | float) and not isinstance(part, bool):
        return Said(str(part), [], {})
    part_type = part.get("type") or "text" if isinstance(part, Mapping) else type(part).__name__
    if part_type not in _TEXTS and not (isinstance(part_type, str) and named(RECORDING, part_type)):
        raise UserError(f"has a part of type {part_type!r}, and only parts of type 'text' and 'audio' are read: drop the row")
    return read_said(part)


# ------------------------------------------------------------------------------------------------------ recordings

HELD = ("bytes", "data", "array", "audio", "input_audio", "audio_url", "url", "path", "file", "filename", "value")
"""Fields of an object that is a recording, the first that is there counts; and those of the rate of its samples."""
RATES = ("sampling_rate", "sample_rate", "rate", "sr")

Made = TypeVar("Made")

_counting = threading.Lock()


@dataclass(frozen=True)
class Files:
    """The files of one data set.

    Attributes:
        folder: the folder that paths are relative to and must lie in; None where there is none, as in a store.
        left_out: recordings that this process has left out so far, of all data sets.
    """

    left_out: ClassVar[int] = 0
    folder: Path | None
    prefix: str = ""
    audio: str = "required"

    @classmethod
    def of(cls, path: str | os.PathLike[str], options: ReaderOptions) -> Files:
        """The files of a data set that is the file or folder `path`; none of one in a store, whose records hold their sound."""
        if find_address(path) is not None and not options.folder:
            return cls(None, options.prefix, options.audio)
        folder = Path(options.folder or path)
        folder = folder if folder.is_dir() or options.folder else folder.parent
        otherwise = f"folder {folder} of the recordings does not exist: name the one that the data's paths start at with "
        check_there(folder, "folder of the recordings", f"{otherwise}--read.folder", Path.is_dir)
        return cls(folder, options.prefix or address_of(folder), options.audio)

    def file(self, name: str, noun: str = "audio") -> Path:
        """The file at a path in the data; UserError where it leaves the folder or is missing. `noun` names it in messages."""
        full = _present(name, self.locate(name, noun)[1])
        refuse_pointer(full)
        return full

    def locate(self, name: str, noun: str = "audio") -> tuple[str, Path]:
        """A path in the data relative to the folder, and the full one; an absolute one may lie inside it. UserError where it
        leaves the folder."""
        cut = name.removeprefix(self.prefix).lstrip("/\\") if self.prefix and name.startswith(self.prefix) else name
        if "\\" in cut and not (self.folder and (self.folder / cut).exists()):  # a path of Windows
            cut = cut.replace("\\", "/")
        drive = re.match("[A-Za-z]:/", cut) and not os.path.exists(cut)
        if not (drive or os.path.isabs(cut)) or self.folder is None:
            try:
                return cut, inside(self.folder, cut)
            except UserError as error:
                raise UserError(noun + str(error).removeprefix("audio")) from error
        root, full = self.folder.resolve(), Path(cut).resolve()
        if drive or not full.is_relative_to(root):
            raise UserError(
                f"{name!r} leaves the data's folder {self.folder}: name the folder that it lies in with --read.folder; of the "
                "path of another machine, name with --read.prefix what to cut off its beginning"
            )
        return str(full.relative_to(root)), full

    def sound(self, value: Any) -> Sound | None:
        """Make a recording of its path, its encoded bytes, or an object that holds them, samples or a path (`HELD`), also as
        the one entry of a list; its header is checked, the rest stays as it is. None where none is named or wanted, or where an
        optional one is missing or broken; UserError where it is required."""
        if value is None:
            return None
        emptied = isinstance(value, dict) and any(value.get(name) is not None for name in HELD[:3])
        if self.audio == "none" or not (present(value) or emptied):
            return None
        return self.or_without(lambda: self._sound(value))

    def or_without(self, make: Callable[[], Made]) -> Made | None:
        """Return what `make` returns; None where it raises UserError, as the recording is missing or broken, and is optional.
        A StoreError is raised: a store that refuses or does not answer says nothing about the recording."""
        try:
            return make()
        except StoreError:
            raise
        except UserError:
            if self.audio != "optional":
                raise
            with _counting:
                Files.left_out += 1
            return None

    def _sound(self, value: Any) -> Sound | None:
        if isinstance(value, list) and len(value) == 1:
            return self._sound(value[0])
        if isinstance(value, Mapping):
            name = next((name for name in HELD if present(value.get(name))), "")
            if name == "array":
                return _of_samples(value)
            if not name:
                raise UserError(
                    f"its recording is an object of {', '.join(value)}, which holds none of {', '.join(HELD)}: fix the row"
                )
            return _encoded(value[name]) if name in ("bytes", "data") else self._sound(value[name])
        if isinstance(value, bytes) or (isinstance(value, str) and value.startswith("data:")):
            return _encoded(value)
        if not isinstance(value, str):
            several = f" of {len(value)}" if isinstance(value, list) else ""
            raise UserError(f"its recording is {type(value).__name__}{several}, no path and no {{bytes, path}}: fix the row")
        relative, full = self.locate(unquote(urlsplit(value).path) if value.startswith("file://") else value)
        header(_present(value, full))
        return Sound(path=relative, folder=self.folder)

    def cut(self, name: str, start: float, end: float, *channels: int) -> Sound | None:
        """Cut seconds `start` to `end` out of a recording by `cut`; None and UserError as for `sound`."""
        if self.audio == "none":
            return None
        return self.or_without(lambda: cut(self.file(name), start, end, *channels))


def _present(name: str, full: Path) -> Path:
    if not full.is_file():
        raise UserError(f"{name!r} is not there: {full} does not exist or is no file")
    return full


def _encoded(value: Any) -> Sound:
    """The recording in bytes, or in base64, also as a `data:` address."""
    try:
        text = value.partition(",")[2] if str(value).startswith("data:") else value
        value = base64.b64decode("".join(unquote(text).split()), validate=True) if isinstance(text, str) else bytes(text)
        header(value)
    except (ValueError, TypeError) as error:
        raise UserError(f"its recording is no sound in bytes or base64 ({error}): fix the row") from error
    return Sound(data=value)


def _of_samples(value: Mapping[str, Any]) -> Sound:
    """The recording of samples `array` [S] (or one list for each channel, or sample) at `sampling_rate`."""
    import numpy as np
    import torch

    rate: Any = next((value[name] for name in RATES if value.get(name)), None)
    try:
        samples = np.asarray(value["array"])
        samples = samples.astype(np.float32) / (32768 if samples.dtype.kind in "iu" else 1)
        samples = samples.mean(int(np.argmin(samples.shape))) if samples.ndim == 2 else samples
        whole = samples.ndim == 1 and np.abs(samples).max(initial=-1) <= 2 and int(rate) == rate > 0
    except (ValueError, TypeError):
        whole = False
    if not whole:
        raise UserError(f"its recording's array is no list of samples from -1 to 1 at a sampling_rate (it is {rate!r}): fix it")
    return Sound(samples=torch.from_numpy(samples), sample_rate=int(rate))


def header(source: Path | bytes) -> AudioInfo:
    """Read the header of a recording, or of what a pointer file stands for; UserError where it is none or holds no sound."""
    if isinstance(source, bytes):
        return _whole(audio_info(source), "its recording")
    with _opened(source) as file:
        return _whole(audio_info(file, name=None if file is source else f"'{source}'"), source)


def _opened(path: Path) -> AbstractContextManager[Path | BinaryIO]:
    """A context with a recording: its path, or the open object that a pointer file stands for."""
    stored_object = pointed_at(path)
    return nullcontext(path) if stored_object is None else guarded(stored_object)


def _whole(info: AudioInfo, name: object) -> AudioInfo:
    if info.samples < 1:
        raise UserError(f"{name} holds no samples: record it again")
    return info


def seconds(sound: Sound | None) -> float | None:
    """Duration of a recording in seconds by its header; None without one."""
    return None if sound is None else _whole(sound.info(), sound.path or "its recording").seconds


def cut(path: Path, start: float, end: float, *channels: int) -> Sound:
    """Cut seconds `start` to `end` out of a recording, as the mean of these channels, decoding only that part. Without channels
    named, those of a recording with one or two are mixed. UserError: times beyond the recording, no such channel, more than two
    channels and none named, a damaged part, or samples that are not finite."""
    info = header(path)
    rate, held, span = info.sample_rate, info.channels, f"{start:.2f} to {end:.2f} s"
    first, last = round(start * rate), min(round(end * rate), info.samples)
    if first < 0 or round(end * rate) > info.samples + 0.1 * rate:
        raise UserError(f"{span} lies beyond {path}, which lasts {info.seconds:.2f} s")
    if first >= last:
        raise UserError(f"{span} of {path} holds no samples")
    if not set(channels) <= set(range(held)):
        raise UserError(f"{path} has no channel {max(channels)}: it has {held}, counted from 0")
    if not channels and held > 2:
        why = f"{held} channels and only 1 or 2 are mixed: name one of 0 to {held - 1}, or write it as mono"
        raise UserError(f"{path} has {why}")
    with _opened(path) as source:
        samples, _ = read_part(source, first, last, name=str(path))  # [S, C]
    if len(samples) < last - first:
        raise UserError(f"{path} is cut short: it ends within {span}; download or convert it again")
    mixed = checked(samples[:, list(channels) or list(range(held))].mean(1))
    part = SoundPart(first, first + len(samples), channels)
    return Sound(samples=mixed, sample_rate=rate, path=str(path.absolute()), part=part)
