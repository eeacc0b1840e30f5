"""Reads weights lazily and writes them as a stream; no code in a file is ever run.

Reading: safetensors (one file, or shards listed in an index) and files of `torch.save` mapped into memory, so that only the
rows that are asked for are read; the latter under `weights_only`, which refuses whatever could run code.

Writing: header first, then each tensor in pieces of a few megabytes, its CRC-32 taken on the way.

The format: https://github.com/huggingface/safetensors#format (8 bytes of header length, a JSON header, the data).
"""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from omni.checkpoint.places import is_pickle
from omni.convert.lazy import Lazy, Progress, WriteCallback
from omni.errors import UserError
from omni.files import AGAIN, LargeFile, read_json, refuse_pointer


def open_safetensors(path: Path) -> Any:
    """Opens a safetensors file, whose header is checked and whose tensors are mapped, not read. UserError: the file is missing,
    truncated, a pickle, or its header contradicts itself."""
    if not path.is_file():
        raise UserError(f"{path} is missing; {AGAIN}")
    refuse_pointer(path)
    if is_pickle(path):
        raise UserError(f"{path} is a pickle, which could run code; fetch the safetensors of this model")
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise UserError(
            f"{path} is truncated or no safetensors file ({path.stat().st_size} bytes; {reason}); {AGAIN}"
        ) from error


def check_inside(folder: Path, name: str, where: Path) -> None:
    """Refuse the name of a file that is not below the folder, links followed (UserError). A snapshot in a Hugging Face cache
    links its files to the `blobs` beside the snapshots; those belong to it."""
    out = UserError(f"{where}: files: {name!r:.100} lies outside of the folder; {AGAIN}")
    if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise out
    try:
        home, target = folder.resolve(), (folder / name).resolve()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{where}: files: {name!r:.100} cannot be followed ({error}); {AGAIN}") from error
    homes = [home, *(parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots")]
    if not any(target.is_relative_to(root) for root in homes):
        raise out


def finite(piece: Tensor) -> bool:
    """Whether all values of a tensor are finite; makes no copy of it, and takes a quarter to a half of its checksum's time."""
    if not piece.is_floating_point() or piece.dtype.itemsize == 1 or not piece.numel():
        return True
    return all(bool(end.isfinite()) for end in torch.aminmax(piece))


class NotFinite(UserError):
    """A tensor that is written holds numbers that are not finite; its text names the tensor."""

    def __init__(self, name: str) -> None:
        super().__init__(f"tensor {name} holds numbers that are not finite")


def not_finite(name: str, where: object, way: str = "") -> UserError:
    """The error for a tensor with NaN or infinity; `way`: advice that comes first."""
    return UserError(
        f"{where}: tensor {name} holds numbers that are not finite, so the model can answer nothing; {way}take the weights of "
        "an earlier step, or fetch them again"
    )


PIECE = 8 << 20
"""Bytes of a tensor that are held in memory at once."""

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}
PT = {"format": "pt"}
"""Metadata of files for transformers."""


# --- reading ----------------------------------------------------------------------------------------------------------


def read_safetensors(path: Path) -> dict[str, Lazy]:
    """The tensors of one file, none of them read yet. UserError: the file is missing, truncated, a pickle, its header
    contradicts itself, or a tensor's type is not known."""
    file = open_safetensors(path)
    out = {}
    for name in file.offset_keys():
        rows = file.get_slice(name)
        code, shape = rows.get_dtype(), tuple(rows.get_shape())
        if code not in DTYPES:
            raise UserError(f"{path}: tensor {name} is {code}; known are {', '.join(DTYPES)}: fetch the original model")
        read = lambda start, stop, rows=rows, shape=shape: rows[start:stop] if shape else rows[...]  # noqa: E731
        out[name] = Lazy(shape, DTYPES[code], read)
    return out


def read_pieces(path: Path) -> dict[str, Lazy]:
    """The tensors of one file as `read_safetensors` gives them, but read instead of mapped: what was read and dropped is no
    longer part of the process's memory, also not of the share that is backed by the file. UserError: as `read_safetensors`."""
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    out = {}
    for name, tensor in read_safetensors(path).items():  # in the order of the file, which has no gaps
        out[name] = Lazy(tensor.shape, tensor.dtype, partial(_piece, path, start, tensor))
        start += tensor.nbytes
    return out


def _piece(path: Path, offset: int, tensor: Lazy, start: int, stop: int) -> Tensor:
    """Rows `[start, stop)` of a tensor whose bytes begin at `offset`."""
    size = tensor.nbytes // max(1, tensor.length)
    data = np.fromfile(path, np.uint8, (stop - start) * size, offset=offset + start * size)
    return torch.from_numpy(data).view(tensor.dtype).reshape((stop - start, *tensor.shape[1:]) if tensor.shape else ())


def read_torch(path: Path) -> Any:
    """Reads a file of `torch.save`, its tensors mapped, not read. Only tensors and plain containers: no code is run. UserError:
    missing, truncated, or a pickle that asks for anything else."""
    if not path.is_file():
        raise UserError(f"{path} is missing; fetch it again")
    refuse_pointer(path)
    try:
        with path.open("rb") as handle:
            mapped = handle.read(2) == b"PK"  # the older format, before 2020, cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        reason = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line), "")
        raise UserError(
            f"{path} is a pickle with more than tensors in it, which could run code: nothing was run, and it is not read"
            f"{f' ({reason})' if reason else ''}; fetch the weights as safetensors"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is truncated or no file of weights ({reason}); fetch it again") from error


def state_of(data: Any, path: Path) -> dict[str, Lazy]:
    """A state dict read by `read_torch`; UserError where it is none."""
    if not isinstance(data, Mapping) or not all(isinstance(t, Tensor) for t in data.values()):
        raise UserError(f"{path} holds a {type(data).__name__}, not a mapping of names to tensors; fetch the original weights")
    return {str(name): Lazy.of(tensor.detach()) for name, tensor in data.items()}


def read_weights(folder: Path) -> dict[str, Lazy]:
    """The weights of a folder as Hugging Face writes them: safetensors or `torch.save`, single or in shards. UserError: no
    weights, a missing shard, or shards that are not what their index says."""
    for stem in ("model.safetensors", "pytorch_model.bin"):
        if (folder / stem).is_file():
            return _read_any(folder / stem)
        index = folder / f"{stem}.index.json"
        if index.is_file():
            return _read_shards(index)
    raise UserError(f"{folder} has no weights; it needs model.safetensors, or shards with a model.safetensors.index.json")


def _read_any(path: Path) -> dict[str, Lazy]:
    return read_safetensors(path) if path.suffix == ".safetensors" else state_of(read_torch(path), path)


def _read_shards(index: Path) -> dict[str, Lazy]:
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise UserError(f"{index} has no weight_map; fetch it again")
    out: dict[str, Lazy] = {}
    shards = sorted(map(str, set(shard_of.values())))
    for number, shard in enumerate(shards, 1):
        path = index.parent / shard
        if Path(shard).name != shard:
            raise UserError(f"{index}: shard {shard!r} lies outside of the folder; fetch the index again")
        if not path.is_file():
            raise UserError(f"shard {path} is missing ({number} of {len(shards)} in {index.name}); fetch it")
        tensors = _read_any(path)
        if wrong := tensors.keys() ^ {name for name, other in shard_of.items() if other == shard}:
            raise UserError(f"{path} and {index.name} do not agree about tensor {min(wrong)}; fetch the folder again")
        out |= tensors
    return out


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileStamp:
    """Size and CRC-32 of a file.

    Attributes:
        nonfinite: the names of its tensors that hold NaN or infinity.
    """

    bytes: int
    crc32: int
    nonfinite: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """The stamp of a file that is there."""
        return cls(path.stat().st_size, crc32_of(path))


ORDER = ("I64", "F64", "F32", "I32", "BF16", "F16", "I16", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL")
"""Types in the order in which `safetensors.torch.save_file` writes their tensors."""


def file_layout(
    tensors: Mapping[str, Tensor | Lazy], notes: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int], int]:
    """The first bytes of a safetensors file of these tensors, the offset of each tensor in it, in their order, and its size."""
    names = sorted(tensors, key=lambda name: (ORDER.index(CODES[tensors[name].dtype]), name))
    offsets: dict[str, int] = {}
    entries: dict[str, Any] = {} if notes is None else {"__metadata__": dict(sorted(notes.items()))}
    end = 0
    for name in names:
        tensor = tensors[name]
        offsets[name], size = end, tensor.nbytes
        data_offsets = [end, end + size]
        entries[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": data_offsets}
        end += size
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {name: start + offset for name, offset in offsets.items()}, start + end


def save_tensors(
    tensors: Mapping[str, Tensor | Lazy],
    path: Path,
    notes: Mapping[str, str] | None = None,
    *,
    only_finite: bool = False,
    checksum: bool = True,
    on_progress: WriteCallback | None = None,
) -> FileStamp:
    """Write a safetensors file, byte for byte as `safetensors.torch.save_file` writes it, never holding more than a piece of a
    tensor besides those that are in memory. OSError: from the file system; see `omni.files.replacing_folder`, which syncs what
    is written. NotFinite: a tensor has such values.

    Large files do not go through the page cache (`omni.files.LargeFile`), and any file has the permissions of any other.

    Args:
        notes: stored in the file's metadata.
        only_finite: refuse values that are not finite.
        checksum: look at all values on the way; without, the stamp has a CRC-32 of 0, and names no tensors.
        on_progress: called with the bytes written so far and the total.
    """
    head, offsets, size = file_layout(tensors, notes)
    progress = Progress(size - len(head), on_progress)
    crc, nonfinite = zlib.crc32(head), dict[str, None]()
    with LargeFile(path, size) as file:
        file.write(head)
        for name in offsets:
            tensor = tensors[name]
            for piece in pieces(tensor if isinstance(tensor, Lazy) else Lazy.of(tensor)):
                if (only_finite or checksum) and not finite(piece):
                    if only_finite:
                        raise NotFinite(name)
                    nonfinite[name] = None
                data: Any = piece.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy()
                file.write(data)
                crc = zlib.crc32(data, crc) if checksum else 0
                progress.add(len(data))
                del piece, data  # they may keep a tensor alive while the next one is made
    return FileStamp(size, crc, tuple(nonfinite))


def pieces(tensor: Lazy) -> Iterator[Tensor]:
    """Splits a tensor into groups of rows of at most `PIECE` bytes (or of one row)."""
    if not tensor.nbytes:
        return
    step = max(1, PIECE * tensor.length // tensor.nbytes)
    for start in range(0, tensor.length, step):
        stop = min(start + step, tensor.length)
        piece = tensor.read(start, stop)
        wanted = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
        assert tuple(piece.shape) == wanted and piece.dtype == tensor.dtype, (piece.shape, wanted, piece.dtype)
        yield piece


def write_file(path: Path, data: bytes) -> FileStamp:
    """Write a small file."""
    path.write_bytes(data)
    return FileStamp(len(data), zlib.crc32(data))


def copy_file(source: Path, target: Path) -> FileStamp:
    """Copy a file into a folder, which is made where it is missing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    return FileStamp.of(target)


def crc32_of(path: Path, on_read: Callable[[int], object] = lambda count: None) -> int:
    """CRC-32 of a file; `on_read` is called with the number of bytes of each piece."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(PIECE):
            value = zlib.crc32(block, value)
            on_read(len(block))
    return value
