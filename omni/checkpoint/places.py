"""File names in a model folder, and checks of its path before anything is read."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from omni.errors import UserError, closest
from omni.files import real_place
from omni.stores.reading import local_path, naming

WEIGHTS, CONFIG, TOKENIZER, CODEC = "model.safetensors", "config.json", "tokenizer.json", "codec"
ADAPTERS, ADAPTER_CONFIG = "adapters", "adapter_config.json"

PROTOCOLS = (b"\x02", b"\x03", b"\x04", b"\x05")  # second byte of a pickle, by protocol


def is_pickle(file: Path) -> bool:
    """Whether a file starts as `torch.save` writes (a zip archive, or a pickle of protocol 2 to 5). A safetensors file starts
    with the length of its header, eight bytes that may look like a protocol; a `{` follows."""
    if not file.is_file():
        return False
    with file.open("rb") as handle:
        head = handle.read(9)
    return head[:4] == b"PK\x03\x04" or (head[:1] == b"\x80" and head[1:2] in PROTOCOLS and head[4:] != b"\0\0\0\0{")


def adapters_in(folder: Path) -> dict[str, Path]:
    """The adapters that a model folder holds (`adapters/NAME`), by name."""
    configs = sorted((folder / ADAPTERS).glob(f"*/{ADAPTER_CONFIG}"))
    return {config.parent.name: config.parent for config in configs}


def find_adapter(adapter: str | os.PathLike[str], model: str | os.PathLike[str] | None) -> Path:
    """The folder of an adapter: `adapter`, or, where nothing is there, the one of that name in the model's folder. UserError:
    there is no such folder, and the model has other adapters."""
    path = Path(adapter)
    if model is None or path.exists():
        return path
    known = adapters_in(local_path(model))
    if known and str(path) not in known:
        raise UserError(f"adapter {path} is neither a folder nor in {Path(model) / ADAPTERS}; {closest(path, known)}")
    return known.get(str(path), path)


def check_folder(path: Path) -> None:
    """UserError where there is no model folder of that name; one at an address is brought here first."""
    here = local_path(path)
    with naming(path, here):
        if not here.is_dir():
            wanted = f"a folder with {CONFIG} and {WEIGHTS}"
            if here.is_file():
                form = "a pickle, which could run code; convert it to safetensors, and"
                raise UserError(f"model {here} is {form if is_pickle(here) else 'a file, not a folder;'} give {wanted}")
            resolved = real_place(here)
            left = sorted(resolved.parent.glob(f".{glob.escape(resolved.name)}.old-*"))
            way = f"but {left[-1]} is what a save that broke off left of it; rename it back" if left else f"give {wanted}"
            raise UserError(f"model folder {here} does not exist{',' if left else ';'} {way}")
        if not (here / CONFIG).is_file():
            of_run = here / "model"
            hint = f"that of this run is {of_run}" if (of_run / CONFIG).is_file() else "see `omni-train fit`"
            raise UserError(f"{here} has no {CONFIG}; it is not a model folder ({hint})")
