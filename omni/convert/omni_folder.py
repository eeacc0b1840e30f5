"""Opens our own model folders (see `folder.py`) without reading their weights, and writes them without holding the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from omni.checkpoint.bounds import check_header
from omni.checkpoint.folder import check_full_precision, listed_files, read_config, stored_extra
from omni.checkpoint.places import CODEC, CONFIG, TOKENIZER, WEIGHTS
from omni.checkpoint.tensors import FileStamp, copy_file, read_json, read_safetensors, write_file, write_safetensors
from omni.config import FORMAT_VERSION, ModelConfig, to_dict
from omni.convert import codecs as codec_weights
from omni.convert.contract import Foreign, check_tokenizer, match
from omni.convert.lazy import WriteCallback
from omni.errors import UserError
from omni.files import replacing_folder
from omni.model.speech_model import SpeechModel
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
    data = read_json(path / CONFIG)
    extra = stored_extra(data, path / CONFIG)
    for name, (wanted, _) in listed_files(data, path / CONFIG).items():
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size != wanted:
            what = "missing" if size is None else f"{size} bytes long instead of {wanted}"
            raise UserError(f"{path / name} is {what}; fetch or save the folder again")
    check_header(config, path / WEIGHTS)
    shapes = model_shapes(config)
    tensors = match(read_safetensors(path / WEIGHTS), {name: name for name in shapes}, shapes, path / WEIGHTS)
    tokenizer = Tokenizer.from_file(path / TOKENIZER)
    codec = path / CODEC
    return Foreign("omni", path, config, tensors, tokenizer, extra=extra, codec_folder=codec if codec.is_dir() else None)


def write(
    source: Foreign, target: Path, on_progress: WriteCallback | None = None, *, codec: Foreign | None = None
) -> dict[str, FileStamp]:
    """Write a whole model as a model folder: beside its name, then renamed.

    Args:
        source: `config` is a `ModelConfig`, and there is a tokenizer.
        codec: the codec's weights, written under `codec/`; without it, those of `source.codec_folder` are copied.

    Returns:
        size and CRC-32 of each file but `config.json`, which holds them.

    Raises:
        UserError: a tensor is missing or does not fit, the tokenizer has ids beyond the table, or the place cannot be written.
    """
    config = source.config
    if not isinstance(config, ModelConfig) or source.tokenizer is None:
        raise UserError(f"{source.place} is no whole speech model with a tokenizer; it cannot be written as a model folder")
    shapes = model_shapes(config)
    tensors = match(source.tensors, {name: name for name in shapes}, shapes, source.place)
    check_tokenizer(source.tokenizer, config.layout.text.size, source.place)
    files: dict[str, FileStamp] = {}
    with replacing_folder(target, source.nbytes + (codec.nbytes if codec is not None else 0)) as folder:
        files[WEIGHTS] = write_safetensors(folder / WEIGHTS, tensors, on_progress)
        files[TOKENIZER] = write_file(folder / TOKENIZER, source.tokenizer.inner.to_str(pretty=True).encode())
        if codec is not None:
            (folder / CODEC).mkdir()
            files |= {f"{CODEC}/{name}": stamp for name, stamp in codec_weights.fill(folder / CODEC, codec).items()}
            opened = codec_weights.check(codec, folder / CODEC, config.codec)
            if opened.name != config.codec or tuple(opened.codebook_sizes) != config.layout.codebook_sizes:
                raise UserError(
                    f"{codec.place} is {opened.name} with codebooks {tuple(opened.codebook_sizes)}, the model's codec is "
                    f"{config.codec} with {config.layout.codebook_sizes}; give the codec that fits"
                )
        elif source.codec_folder is not None:
            for path in sorted(p for p in source.codec_folder.rglob("*") if p.is_file()):
                name = f"{CODEC}/{path.relative_to(source.codec_folder).as_posix()}"
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                files[name] = copy_file(path, folder / name)
        data: dict[str, Any] = {
            "format": FORMAT_VERSION,
            "model": to_dict(config),
            "files": {name: {"bytes": stamp.bytes, "crc32": stamp.crc32} for name, stamp in sorted(files.items())},
            "extra": dict(source.extra),
        }
        write_file(folder / CONFIG, (json.dumps(data, indent=2) + "\n").encode())
    return files


@lru_cache(4)
def model_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of a whole model's tensors."""
    with torch.device("meta"):
        state = SpeechModel(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}
