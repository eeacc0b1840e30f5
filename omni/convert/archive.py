"""Files as `torch.save` writes them, streamed: no tensor ever stands whole in memory.

The format, which `torch.load` reads, mapped or not: a zip archive without compression. `data.pkl` is the pickled object, in
which a tensor is `torch._utils._rebuild_tensor_v2` of a storage, and a storage a persistent id: `("storage", class, key, "cpu",
elements)`. `data/KEY` are the bytes of a storage and begin at a multiple of 64. Source: PyTorch's `torch/serialization.py`
(`_save`) and `caffe2/serialize/inline_container.cc`.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import torch
from torch._utils import _rebuild_tensor_v2

from omni.checkpoint.tensors import Written, finite, pieces
from omni.convert.contract import Lazy

ALIGNED = 64
"""What the bytes of a storage begin at a multiple of."""

_CLASSES = {
    torch.float32: torch.FloatStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage,
}


@dataclass(frozen=True)
class _Storage:
    """The elements of a tensor, under a key."""

    key: str
    tensor: Lazy


@dataclass(frozen=True)
class _Tensor:
    """What is pickled in place of a tensor."""

    storage: _Storage

    def __reduce__(self) -> tuple[Any, ...]:
        shape = self.storage.tensor.shape
        stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        return _rebuild_tensor_v2, (self.storage, 0, shape, stride, False, OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, item: Any) -> Any:
        if not isinstance(item, _Storage):
            return None
        tensor = item.tensor
        return "storage", _CLASSES[tensor.dtype], item.key, "cpu", prod(tensor.shape)


class _Out(io.RawIOBase):
    """A file that is written from its beginning to its end: takes size and CRC-32 on the way."""

    def __init__(self, handle: BinaryIO, told: Callable[[int], None]) -> None:
        self.handle, self.told = handle, told
        self.bytes = self.crc32 = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.handle.write(view)
        self.crc32, self.bytes = zlib.crc32(view, self.crc32), self.bytes + len(view)
        self.told(len(view))
        return len(view)


def write_archive(
    handle: BinaryIO, tensors: Mapping[str, Lazy], wrap: Callable[[dict[str, Any]], Any], told: Callable[[int], None]
) -> Written:
    """Write `wrap(tensors)` as `torch.save` would, piece by piece.

    Args:
        tensors: of floating-point types.
        wrap: makes the object that is pickled of a mapping from names to tensors, which it must not look into.
        told: called with the bytes of each piece.

    Raises:
        OSError: as the disk has it.
    """
    out = _Out(handle, told)
    storages = {name: _Storage(str(key), tensor) for key, (name, tensor) in enumerate(tensors.items())}
    odd: dict[str, None] = {}
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=2).dump(wrap({name: _Tensor(storage) for name, storage in storages.items()}))
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:  # type: ignore[arg-type]
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), pickled.getvalue())
        archive.writestr(zipfile.ZipInfo("archive/byteorder"), sys.byteorder)
        for name, storage in storages.items():
            entry = zipfile.ZipInfo(f"archive/data/{storage.key}")
            entry.file_size = storage.tensor.nbytes
            entry.extra = _padding(archive.start_dir, entry.filename)
            with archive.open(entry, "w", force_zip64=True) as file:
                for piece in pieces(storage.tensor):
                    if not finite(piece):
                        odd[name] = None
                    data: Any = piece.contiguous().view(-1).view(torch.uint8).numpy()
                    file.write(memoryview(data))
        archive.writestr(zipfile.ZipInfo("archive/version"), "3\n")
    return Written(out.bytes, out.crc32, tuple(odd))


def _padding(start: int, name: str) -> bytes:
    """The extra field that brings the bytes behind a header at `start` to a multiple of `ALIGNED`."""
    sizes = 20  # the field of zip64, which stands before it
    header = start + 30 + len(name) + sizes + 4
    return struct.pack("<2sH", b"FB", -header % ALIGNED) + b"\0" * (-header % ALIGNED)
