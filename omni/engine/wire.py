"""Messages between an engine's process and the process of its clients: pickles, with sound as samples or as codes.

Both ends belong to the same program, so pickles are safe here.

What the engine's process does for each listener's sound delays all others, since one lock of the interpreter is shared by its
threads. So a codec without weights decodes on the listeners' side, the sound of all answers of a message in one call.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from omni.codec.base import AudioCodec
from omni.errors import BusyError, RoomError, UserError

LARGEST = 1 << 28
"""Bytes of the largest message that a client may send."""


class EngineLost(UserError):
    """The engine's process has ended; another can be started."""


Item = tuple[Any, ...]
"""Content of a message: its name first."""


class _Pickler(pickle.Pickler):
    """Writes tensors as arrays, which is quicker; each that is read has memory of its own, and does not keep the message."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.dtype == torch.bfloat16:
            return NotImplemented
        return torch.from_numpy, (value.numpy(force=True),)


def pack(items: Sequence[Item]) -> bytes:
    """One message of items."""
    message = io.BytesIO()
    _Pickler(message, protocol=5).dump(items)
    return message.getvalue()


def unpack(message: bytes) -> list[Item]:
    """The items of a message."""
    items: list[Item] = pickle.loads(message)
    return items


def pack_request(name: str, item: Item) -> bytes:
    """One message of a client. UserError: it cannot be pickled, or is larger than `LARGEST`."""
    try:
        message = pack([item])
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{name} cannot be sent to the engine's process ({' '.join(str(error).split())}); give values without open files, "
            "functions or locks"
        ) from error
    if len(message) > LARGEST:
        raise UserError(f"{name} takes {len(message) >> 20} MiB, and {LARGEST >> 20} MiB is the most that is sent; give less")
    return message


def pack_error(error: BaseException) -> tuple[str, str]:
    """Name and text of an exception."""
    names = [name for name in _ERRORS if isinstance(error, _ERRORS[name])]
    if names:
        return names[0], str(error)
    return "RuntimeError", f"in the engine's process: {type(error).__name__}: {error}"


def unpack_error(name: str, text: str) -> BaseException:
    return _ERRORS.get(name, RuntimeError)(text)


_ERRORS: dict[str, type[BaseException]] = {
    "EngineLost": EngineLost, "BusyError": BusyError, "RoomError": RoomError, "UserError": UserError, "TypeError": TypeError,
    "MemoryError": MemoryError, "OutOfMemoryError": torch.OutOfMemoryError,
}  # fmt: skip


class CodedSound(NamedTuple):
    """The next frames of an answer, A codes each; an `AudioChunk` once they are decoded. `start`, `end`: where they are in
    the answer's sound, in seconds."""

    codes: list[list[int]]
    start: float
    end: float


def is_portable(codec: AudioCodec) -> bool:
    """Whether listeners of another process decode: a codec says so, and needs no later frame for a frame's samples."""
    return codec.portable and codec.exact_samples(1) == codec.frame_samples


def cannot_decode(codec: AudioCodec, error: Exception) -> str:
    """Error text of an answer whose codes the codec refuses."""
    return f"codec {codec.name} cannot decode the answer ({error}); generate([...], sound=False) gives its codes"
