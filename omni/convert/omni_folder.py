"""Opens our own model folders (`omni.checkpoint.folder`) without reading their weights, and writes them without holding the
weights, also in int8 (`omni.checkpoint.folder`), a piece at a time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from omni.checkpoint.folder import (
    QUANTIZED_FORMAT,
    check_full_precision,
    check_sizes,
    int8_tensors,
    listed_files,
    read_config,
    stored_extra,
    stored_form,
    write_config,
)
from omni.checkpoint.places import ADAPTERS, CODEC, CONFIG, TOKENIZER, WEIGHTS
from omni.checkpoint.tensors import (
    FileStamp,
    check_header,
    copy_file,
    crc32_of,
    not_finite,
    read_pieces,
    read_safetensors,
    write_safetensors,
)
from omni.config import FORMAT_VERSION, to_dict
from omni.convert.contract import Foreign, check_tokenizer, match, model_shapes, whole_model, write_texts
from omni.convert.lazy import Lazy, Progress, WriteCallback
from omni.convert.parts import check_codec, fill_codec
from omni.errors import UserError
from omni.files import read_json, replacing_folder
from omni.text import Tokenizer


def recognise(path: Path) -> bool:
    """Whether this is a folder of ours."""
    if not (path / CONFIG).is_file():
        return False
    data = read_json(path / CONFIG)
    return "format" in data and "model" in data


def read(path: Path) -> Foreign:
    """Open a model folder; UserError where a file is missing, truncated, or does not fit the configuration.

    The checksum of the weights is not computed here (that would read them twice); every size is compared.
    """
    check_full_precision(path, "converting")
    config = read_config(path)
    extra = stored_extra(read_json(path / CONFIG), path / CONFIG)
    check_sizes(path)
    check_header(config, path / WEIGHTS)
    shapes = model_shapes(config)
    tensors = match(read_safetensors(path / WEIGHTS), {name: name for name in shapes}, shapes, path / WEIGHTS)
    tokenizer = Tokenizer.from_file(path / TOKENIZER)
    codec = path / CODEC
    return Foreign("omni", path, config, tensors, tokenizer, extra=extra, codec_folder=codec if codec.is_dir() else None)


def write(
    source: Foreign, target: Path, on_progress: WriteCallback | None = None, *, codec: Foreign | None = None
) -> dict[str, FileStamp]:
    """Write a whole model as a model folder: beside its name, then renamed. Returns size and CRC-32 of each file but
    `config.json`, which holds them. UserError: a tensor is missing or does not fit, the tokenizer has ids beyond the table, or
    the place cannot be written.

    Args:
        source: `config` is a `ModelConfig`, and there is a tokenizer.
        codec: the codec's weights, written under `codec/`; without it, those of `source.codec_folder` are copied.
    """
    config, tokenizer = whole_model(source, "a model folder")
    shapes = model_shapes(config)
    tensors = match(source.tensors, {name: name for name in shapes}, shapes, source.path)
    check_tokenizer(tokenizer, config.layout.text.size, source.path)
    files: dict[str, FileStamp] = {}
    with replacing_folder(target, source.nbytes + (codec.nbytes if codec is not None else 0)) as folder:
        files[WEIGHTS] = write_safetensors(folder / WEIGHTS, tensors, on_progress)
        files |= write_texts(folder, tokenizer, {})
        if codec is not None:
            (folder / CODEC).mkdir()
            files |= {f"{CODEC}/{name}": stamp for name, stamp in fill_codec(folder / CODEC, codec).items()}
            opened = check_codec(codec, folder / CODEC, config.codec)
            if opened.name != config.codec or tuple(opened.codebook_sizes) != config.layout.codebook_sizes:
                raise UserError(
                    f"{codec.path} is {opened.name} with codebooks {tuple(opened.codebook_sizes)}, the model's codec is "
                    f"{config.codec} with {config.layout.codebook_sizes}; give the codec that fits"
                )
        elif source.codec_folder is not None:
            for path in sorted(p for p in source.codec_folder.rglob("*") if p.is_file()):
                name = f"{CODEC}/{path.relative_to(source.codec_folder).as_posix()}"
                files[name] = copy_file(path, folder / name)
        write_config(folder, {"format": FORMAT_VERSION, "model": to_dict(config)}, files, source.extra)
    return files


def quantize_folder(source: Path, target: Path, on_progress: WriteCallback | None = None) -> dict[str, FileStamp]:
    """Write the model folder `source` as `target`, beside its name first, then renamed: linears and tables in int8, all else as
    it is, with tokenizer, codec, plain data and adapters. Returns size and CRC-32 of each file that `config.json` lists.
    UserError: the folder is quantised already, damaged or does not fit its configuration, or the place cannot be written.

    Args:
        on_progress: called with the bytes of the weights that were read, and the number that will be: each is read for its
            checksum, and rounded in two readings.
    """
    config, data = read_config(source), read_json(source / CONFIG)
    held = stored_form(data, source / CONFIG)
    if held is not None:
        raise UserError(f"{source} is quantised already ({held}); quantise the folder in full precision that it was made from")
    listed, extra = listed_files(data, source / CONFIG), stored_extra(data, source / CONFIG)
    check_sizes(source)
    check_header(config, source / WEIGHTS)
    check_tokenizer(Tokenizer.from_file(source / TOKENIZER), config.layout.text.size, source)
    progress = _Reading(0, on_progress)
    state = {name: progress.counted(tensor) for name, tensor in read_pieces(source / WEIGHTS).items()}
    tensors, checksums = int8_tensors(config, state, str(source / WEIGHTS))
    progress.total = listed[WEIGHTS][0] + sum(t.nbytes * (2 if tensors[n].dtype == torch.int8 else 1) for n, t in state.items())
    others = [source / name for name in listed if name != WEIGHTS]
    others += [path for path in sorted((source / CODEC).rglob("*")) if path.is_file() and path not in others]
    adapters = [path for path in sorted((source / ADAPTERS).rglob("*")) if path.is_file()]  # of no checksum in `config.json`
    files: dict[str, FileStamp] = {}
    with replacing_folder(target, sum(t.nbytes for t in tensors.values()) + sum(p.stat().st_size for p in others)) as folder:
        if crc32_of(source / WEIGHTS, progress.add) != listed[WEIGHTS][1]:
            raise UserError(f"{source / WEIGHTS} does not match its checksum in {CONFIG}; fetch or save the folder again")
        files[WEIGHTS] = write_safetensors(folder / WEIGHTS, tensors)
        for name in files[WEIGHTS].nonfinite:  # one that is not held in int8
            raise not_finite(name, source / WEIGHTS)
        for path in others:
            name = path.relative_to(source).as_posix()
            files[name] = copy_file(path, folder / name)
            if name in listed and files[name].crc32 != listed[name][1]:
                raise UserError(f"{path} does not match its checksum in {CONFIG}; fetch or save the folder again")
        for path in adapters:
            copy_file(path, folder / path.relative_to(source))
        head = {"format": QUANTIZED_FORMAT, "quantized": {"form": "int8", "checksums": checksums()}, "model": to_dict(config)}
        write_config(folder, head, files, extra)
    return files


class _Reading(Progress):
    """Counts the bytes of the weights that were read."""

    def counted(self, tensor: Lazy) -> Lazy:
        """The tensor, whose readings are counted."""
        return replace(tensor, read=partial(self._read, tensor))

    def _read(self, tensor: Lazy, start: int, stop: int) -> Tensor:
        rows = tensor.read(start, stop)
        self.add(rows.nbytes)
        return rows
