"""Saves and loads model folders: `config.json`, `model.safetensors`, `tokenizer.json`, `codec/` where the codec has weights.

Nothing in it can run code. A folder is written beside its name and renamed when it is whole; `config.json` holds the size and
the CRC-32 of every other file, so a truncated or mixed-up folder is refused. The header of the weights is compared with the
configuration before they are read.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from omni.checkpoint.places import CODEC, CONFIG, TOKENIZER, WEIGHTS, check_folder, is_pickle
from omni.checkpoint.tensors import (
    DTYPES,
    FileStamp,
    check_inside,
    crc32_of,
    finite,
    not_finite,
    read_pieces,
    read_safetensors,
    save_tensors,
)
from omni.codec.base import AudioCodec
from omni.codec.registry import load_if_given
from omni.config import ModelConfig, from_dict, to_dict
from omni.convert.lazy import FLOATS, Lazy, WriteCallback, lazies_of, type_name
from omni.cpu.int8 import MOST, check_linears, empty_int8, largest_of, whole_numbers
from omni.errors import PackageError, UserError
from omni.files import AGAIN, read_json, refuse_pointer, replacing_folder
from omni.model.linears import TEXT_HEAD, crc_of
from omni.model.speech_model import SpeechModel, check_state
from omni.stores.reading import local_path, naming
from omni.text import Tokenizer
from omni.utils.configuration import validate

LOG = logging.getLogger(__name__)

LONGEST = 16_000_000  # most bytes of a `config.json`


@dataclass(frozen=True)
class Quantized:
    """How weights are held in fewer bits.

    Attributes:
        checksums: of the linears' weights in full precision (`omni.model.linears.checksum_of`), by name.
    """

    form: Literal["int8"]
    checksums: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FolderConfig:
    """The `config.json` of a model folder.

    Attributes:
        format: 2 where the weights are held in fewer bits, which readers that know of format 1 alone refuse.
        model: plain data of a `ModelConfig`.
        files: sizes and checksums of all other files.
        extra: plain data.
        quantized: None for weights in full precision.
    """

    format: Literal[1, 2]
    model: dict[str, Any]
    files: dict[str, FileStamp]
    extra: dict[str, Any] = field(default_factory=dict)
    quantized: Quantized | None = None

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        stamps = {name: {"bytes": stamp.bytes, "crc32": stamp.crc32} for name, stamp in sorted(self.files.items())}
        held = {} if self.quantized is None else {"quantized": asdict(self.quantized)}
        data = {"format": self.format, **held, "model": self.model, "files": stamps, "extra": self.extra}
        (folder / CONFIG).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class LoadedFolder:
    """Contents of a model folder.

    Attributes:
        codec: None where there are no weights of it.
        extra: the plain data of `config.json`.
    """

    model: SpeechModel
    tokenizer: Tokenizer
    config: ModelConfig
    codec: AudioCodec | None
    extra: dict[str, Any]


def save_folder(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    state: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    *,
    codec_folder: str | os.PathLike[str] | None = None,
    write_codec: Callable[[Path], object] | None = None,
    extra: Mapping[str, Any] | None = None,
    only_finite: bool = False,
    needed: int = 0,
    on_progress: WriteCallback | None = None,
) -> dict[str, FileStamp]:
    """Write a model folder beside its name, then rename it, which replaces an older folder of that name. UserError: the disk is
    full, or the place cannot be written; nothing half-written is left.

    Where the name is a symbolic link, its target is replaced.

    Args:
        state: the `state_dict` of a `SpeechModel` (tied tensors once); lazy tensors are read one after another.
        codec_folder: weights of the codec to copy along.
        write_codec: writes them into a folder, where they are nowhere.
        extra: plain data kept under `extra` in `config.json`.
        only_finite: refuse weights that are not finite (`NotFinite`).
        needed: bytes that will be written; a disk that is too small is refused before anything is.
        on_progress: called with the bytes of the weights that are written, and their total.

    Returns:
        size and CRC-32 of each file but `config.json`, which holds them.
    """
    with replacing_folder(folder, needed) as staging:
        weights = save_tensors(lazies_of(state), staging / WEIGHTS, only_finite=only_finite, on_progress=on_progress)
        tokenizer.save(staging / TOKENIZER)
        if write_codec is not None:
            (staging / CODEC).mkdir()
            write_codec(staging / CODEC)
        elif codec_folder is not None:
            shutil.copytree(codec_folder, staging / CODEC)
        others = {p.relative_to(staging).as_posix(): p for p in staging.rglob("*") if p.is_file()}
        files = {WEIGHTS: weights, **{name: FileStamp.of(p) for name, p in others.items() if name != WEIGHTS}}
        FolderConfig(1, to_dict(config), files, dict(extra or {})).write(staging)
    return files


def check_full_precision(folder: str | os.PathLike[str], work: str) -> None:
    """Refuse a model folder whose weights are held in fewer bits (UserError), for `work` needs them in full precision."""
    held = read_stored(folder).quantized
    if held is not None:
        made_from = "the folder in full precision that it was made from"
        raise UserError(f"{folder} holds {held.form} weights, which only answer: {work} needs {made_from}")


def read_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """The model's configuration; UserError where the folder is not a model folder of a known version."""
    return from_dict(ModelConfig, read_stored(folder).model, f"{folder}/{CONFIG}: model")


def load_folder(
    folder: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    quantize: str | None = None,
    codec_folder: str | os.PathLike[str] | None = None,
    weights: bool = True,
    mute: bool = False,
) -> LoadedFolder:
    """Read a model folder. UserError: a file is missing, not listed, truncated or altered, a tensor does not fit the
    configuration or holds numbers that are not finite, it is a pickle, or the device does not take weights in int8.

    Args:
        folder: its path, or its address, from which it is brought into the cache (`omni.stores`).
        dtype: type that the weights are converted to while they are read; what is held in int8 stays so.
        quantize: `int8` for linears and tables in int8 (`omni.cpu.int8`), made of the stored weights while they are
            read, a piece at a time; a folder in int8 is so anyway.
        codec_folder: the codec's weights, where they are not in the folder.
        weights: False leaves the file of weights unread, and the model's parameters on the meta device.
        mute: leave out a codec whose package is not installed, with a line in the log, instead of raising.
    """
    path = local_path(folder)
    with naming(folder, path):
        stored, config = read_stored(path), read_config(path)
        if stored.quantized is not None and torch.device(device).type != "cpu":
            raise UserError(
                f"{path} holds {stored.quantized.form} weights, which are for device cpu, not for {device}; use 'cpu'"
            )
        model = _load_model(path, stored, config, quantize, weights)
        if weights:
            model.to(device=device, dtype=dtype)
            for name, tensor in model.state_dict().items():
                if not finite(tensor):
                    way = f"load it in another type than {dtype}, or " if dtype is not None else ""
                    raise not_finite(name, path / WEIGHTS, way)
        tokenizer = Tokenizer.from_file(path / TOKENIZER)
        if len(tokenizer) > config.layout.text.size:
            raise UserError(
                f"{path / TOKENIZER} has {len(tokenizer)} ids, but the layout's text stream only {config.layout.text.size}; "
                "is it the tokenizer of another model?"
            )
        try:
            codec = load_codec_of(path, config, codec_folder, device)
        except PackageError as error:
            if not mute:
                raise
            LOG.warning("%s answers without sound: %s", path, error)
            codec = None
    return LoadedFolder(model.eval(), tokenizer, config, codec, stored.extra)


def load_codec_of(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    codec_folder: str | os.PathLike[str] | None = None,
    device: torch.device | str = "cpu",
) -> AudioCodec | None:
    """The codec of a model folder; None where it has weights that are neither in it nor in `codec_folder`. PackageError where
    its package is not installed."""
    own = local_path(folder) / CODEC
    weights = Path(codec_folder) if codec_folder is not None else own if own.is_dir() else None
    return load_if_given(config.codec, weights, device)


def stored_dtype(folder: str | os.PathLike[str]) -> torch.dtype | None:
    """Number format of a model folder's largest tensor; None where it cannot be read (`load_folder` says why)."""
    try:
        with safe_open(local_path(folder) / WEIGHTS, "pt") as file:
            shapes = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            largest = max(shapes.values(), key=lambda tensor: math.prod(tensor.get_shape()))
            return DTYPES.get(largest.get_dtype())
    except (OSError, SafetensorError, ValueError):
        return None


def _load_model(path: Path, stored: FolderConfig, config: ModelConfig, quantize: str | None, weights: bool) -> SpeechModel:
    """The model of a folder, all of whose files are compared with what was saved; without `weights`, their sizes alone, and its
    parameters are on the meta device."""
    file, held = path / WEIGHTS, stored.quantized
    if is_pickle(file):  # before its size is compared: a pickle has another
        raise UserError(f"{file} is a pickle, which could run code; convert it to safetensors first")
    check_files(path)
    if held is None:
        model = SpeechModel.unfilled(config)
        check_state(read_safetensors(file), model.state_dict(), str(file))
    for name, stamp in stored.files.items():
        if weights or name != WEIGHTS:
            check_sum(path / name, stamp.crc32)
    if not weights:
        return SpeechModel.unfilled(config)
    try:
        if held is None and quantize is not None:
            tensors, checksums = int8_tensors(config, read_pieces(file), str(file))
            return model_in_int8(config, {name: tensor() for name, tensor in tensors.items()}, checksums(), str(file))
        state = load_file(file)
    except (OSError, SafetensorError, struct.error) as error:
        raise UserError(f"weights {file} cannot be read ({error}); {AGAIN}") from error
    if held is not None:
        return model_in_int8(config, state, held.checksums, str(file))
    model.load_state_dict(state, assign=True)
    return model


def read_stored(folder: str | os.PathLike[str]) -> FolderConfig:
    """The `config.json` of a model folder; UserError: of no known version, lists files outside, or lacks the weights."""
    path = local_path(folder)
    with naming(folder, path):
        check_folder(path)
        file = path / CONFIG
        data = read_json(file, longest=LONGEST)
        if "architectures" in data:
            raise UserError(f"{file} is of a model of transformers; bring it in by omni-train convert")
        known = {entry.name: data[entry.name] for entry in fields(FolderConfig) if entry.name in data}
        stored = validate(FolderConfig, known, lambda key: f"{file}: ")
        for name in stored.files:
            check_inside(path, name, file)
        for name in (WEIGHTS, TOKENIZER):
            if name not in stored.files:
                raise UserError(f"{file}: files does not list {name}, whose checksum it must hold; {AGAIN}")
    return stored


def check_files(folder: str | os.PathLike[str], sums: bool = False) -> None:
    """Refuse a model folder one of whose files is missing, has another size, or, with `sums`, for which all are read, is not
    what was saved (UserError)."""
    path, files = local_path(folder), read_stored(folder).files
    with naming(folder, path):
        for file, wanted in ((path / name, stamp.bytes) for name, stamp in files.items()):
            if not file.is_file():
                raise UserError(f"{file} is missing; {AGAIN}")
            size = file.stat().st_size
            if size != wanted:
                refuse_pointer(file)
                problem = "truncated" if size < wanted else "longer than it was"
                raise UserError(f"{file} is {problem}: {size} bytes of {wanted}; {AGAIN}")
        for name, stamp in files.items() if sums else ():
            check_sum(path / name, stamp.crc32)


def check_sum(file: Path, wanted: int, on_read: Callable[[int], object] = lambda count: None) -> None:
    """Refuse a file whose CRC-32 is another (UserError); `on_read` is called with the bytes of each piece."""
    if crc32_of(file, on_read) != wanted:
        raise UserError(f"{file} does not match its checksum in {CONFIG}; {AGAIN}")


PIECE = 2 << 20
"""Bytes of a weight in full precision that are held at once; rounding them takes twice as much besides."""


def _rounded(name: str, source: Lazy, where: str, counted: int) -> tuple[Lazy, Lazy, Callable[[], int]]:
    """The int8 rows of a weight [N, K] in full precision, and their scales [N], computed as they are read; and what gives the
    checksum of its first `counted` rows (`omni.model.linears.checksum_of`). UserError, when read: a row is not finite."""

    def pieces(start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        step = max(1, PIECE * source.length // max(1, source.nbytes))  # at least a row
        for first in range(start, stop, step):
            yield first, source.read(first, min(first + step, stop))

    @cache
    def largest() -> tuple[Tensor, int]:
        """The largest |w| of each row, [N], and the checksum."""
        out, value = torch.empty(source.length), zlib.crc32(name.removesuffix(".weight").encode())
        for start, rows in pieces(0, source.length):
            if not finite(rows):
                raise not_finite(name, where)
            out[start : start + len(rows)] = largest_of(rows)
            if start < counted:
                value = crc_of(rows[: counted - start].to(torch.bfloat16), value)
        return out, value

    def weight(start: int, stop: int) -> Tensor:
        out = torch.empty(stop - start, *source.shape[1:], dtype=torch.int8)
        for first, rows in pieces(start, stop):
            out[first - start : first - start + len(rows)] = whole_numbers(rows, largest()[0][first : first + len(rows)])
        return out

    scale = Lazy(source.shape[:1], torch.float32, lambda start, stop: largest()[0][start:stop] / MOST)
    return Lazy(source.shape, torch.int8, weight), scale, lambda: largest()[1]


def int8_tensors(
    config: ModelConfig, state: Mapping[str, Lazy], where: str
) -> tuple[dict[str, Lazy], Callable[[], dict[str, int]]]:
    """The tensors in int8 of a model in full precision, none of them read yet. UserError: a tensor is missing, of another
    shape, not part of the configuration or no floating-point weight, or a module cannot be replaced
    (`omni.cpu.int8.check_linears`).

    Returns:
        the tensors, and the checksums of the linears' weights in full precision, which are known after the scales were read.
    """
    model = SpeechModel.unfilled(config)
    check_state(state, model.state_dict(), where)
    for name, tensor in state.items():
        if tensor.dtype not in FLOATS:
            raise UserError(
                f"{where}: tensor {name} is {type_name(tensor.dtype)}, not in full precision; quantise the original model"
            )
    linears = [f"{name}.weight" for name in check_linears(model)]
    out, checksums = dict(state), dict[str, Callable[[], int]]()
    for name, scale in empty_int8(model).items():
        counted = config.layout.text.size if name == f"{TEXT_HEAD}.weight" else state[name].length
        out[name], out[scale], checksums[name] = _rounded(name, state[name], where, counted)
    return out, lambda: {name.removesuffix(".weight"): checksums[name]() for name in linears}


def model_in_int8(config: ModelConfig, state: Mapping[str, Tensor], checksums: Mapping[str, int], where: str) -> SpeechModel:
    """The model of tensors in int8 (not copied). UserError: a tensor is missing, of another shape or type, or not part of the
    configuration."""
    model = SpeechModel.unfilled(config)
    norm = state.get("decoder.norm.weight")
    held = empty_int8(model, checksums, torch.float32 if norm is None else norm.dtype)
    check_state(state, model.state_dict(), where)
    wanted = {**dict.fromkeys(held, torch.int8), **dict.fromkeys(held.values(), torch.float32)}
    for name, tensor in state.items():
        dtype = wanted.get(name)
        if tensor.dtype != dtype if dtype is not None else tensor.dtype not in FLOATS:
            raise UserError(
                f"{where}: tensor {name} is {type_name(tensor.dtype)}, which does not fit a model in int8; quantise the "
                "original model again"
            )
    model.load_state_dict(state, assign=True)
    return model
