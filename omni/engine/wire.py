"""Messages between an engine's process and the process of its clients: pickles, and sound as raw float32.

Both ends belong to the same program, so pickles are safe here. A message is the length of its head (4 bytes, little-endian),
the head, and the samples of all chunks in it, one after another.
"""

from __future__ import annotations

import pickle
import struct
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from omni.config import ModelConfig
from omni.errors import BusyError, RoomError, UserError
from omni.generate.results import AudioChunk

LARGEST = 1 << 28
"""Bytes of the largest message that a client may send."""

_LENGTH = struct.Struct("<I")
_CHUNK = "chunk"


class EngineLost(UserError):
    """The engine's process has ended; another can be started."""


Item = tuple[Any, ...]
"""What a message holds: its kind first."""


@dataclass(frozen=True)
class ModelFacts:
    """What clients know of the model in the engine's process.

    Attributes:
        shown: its `repr`.
        codec: the codec's name, None without one; sample_rate: in Hz, and frame_rate: frames a second (0 without one).
        portable: whether listeners' processes decode.
    """

    config: ModelConfig
    shown: str
    codec: str | None = None
    sample_rate: int = 0
    frame_rate: float = 0.0
    portable: bool = False


def pack(items: Sequence[Item]) -> bytes:
    """One message of items; lists in them may hold events."""
    sounds: list[Any] = []
    head = pickle.dumps([tuple(_plain(part, sounds) for part in item) for item in items], protocol=5)
    return b"".join([_LENGTH.pack(len(head)), head, *sounds])


def _plain(part: Any, sounds: list[Any]) -> Any:
    if not isinstance(part, list):
        return part
    out = []
    for event in part:
        if isinstance(event, AudioChunk):
            samples = np.ascontiguousarray(event.samples.numpy(force=True), np.float32)
            sounds.append(samples)
            event = (_CHUNK, samples.size, event.start, event.end)
        out.append(event)
    return out


def unpack(message: bytes) -> list[Item]:
    """The items of a message. Each chunk has memory of its own: one that is kept does not keep the message."""
    (length,) = _LENGTH.unpack_from(message)
    place = _LENGTH.size + length
    items: list[Item] = pickle.loads(memoryview(message)[_LENGTH.size : place])
    for item in items:
        for part in item:
            if not isinstance(part, list):
                continue
            for number, event in enumerate(part):
                if type(event) is tuple and event and event[0] == _CHUNK:
                    _, count, start, end = event
                    samples = torch.from_numpy(np.frombuffer(message, np.float32, count, place).copy())
                    place += 4 * count
                    part[number] = AudioChunk(samples, start, end)
    return items


def pack_request(what: str, item: Item) -> bytes:
    """One message of a client.

    Raises:
        UserError: it cannot be pickled, or is larger than `LARGEST`.
    """
    try:
        message = pack([item])
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{what} cannot be sent to the engine's process ({' '.join(str(error).split())}); give values without open files, "
            "functions or locks"
        ) from error
    if len(message) > LARGEST:
        raise UserError(f"{what} takes {len(message) >> 20} MiB, and {LARGEST >> 20} MiB is the most that is sent; give less")
    return message


def pack_error(error: BaseException) -> tuple[str, str]:
    """Kind and text of an exception."""
    kinds = [kind for kind in _KINDS if isinstance(error, _KINDS[kind])]
    if kinds:
        return kinds[0], str(error)
    return "RuntimeError", f"in the engine's process: {type(error).__name__}: {error}"


def unpack_error(kind: str, text: str) -> BaseException:
    return _KINDS.get(kind, RuntimeError)(text)


_KINDS: dict[str, type[BaseException]] = {
    "EngineLost": EngineLost, "BusyError": BusyError, "RoomError": RoomError, "UserError": UserError, "TypeError": TypeError,
    "MemoryError": MemoryError, "OutOfMemoryError": torch.OutOfMemoryError,
}  # fmt: skip


class Sender:
    """Sends messages of many threads in their order.

    A thread that finds another one sending leaves its message to that one, so that a finalizer, which may run in the middle
    of a `send`, never waits and never writes into another message.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._waiting: deque[bytes] = deque()
        self._writing = threading.Lock()
        self._writer = 0

    @property
    def here(self) -> bool:
        """Whether the caller runs within a `send` of its own thread, as a finalizer may."""
        return self._writer == threading.get_ident()

    def send(self, message: bytes) -> None:
        """Send a message. Where the other process has ended, nothing happens: who reads the pipe notices it."""
        self._waiting.append(message)
        while self._waiting and self._writing.acquire(blocking=False):
            self._writer = threading.get_ident()
            try:
                while self._waiting:
                    self._pipe.send_bytes(self._waiting.popleft())
            except (OSError, ValueError):  # the other end, or this one, is closed
                self._waiting.clear()
            finally:
                self._writer = 0
                self._writing.release()

    def close(self) -> None:
        """Close the pipe, once nobody writes into it."""
        with self._writing:
            self._pipe.close()
