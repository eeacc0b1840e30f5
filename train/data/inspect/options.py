"""Options, and report files, that the commands which inspect rows share: the model that rows are for, and the processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni.checkpoint.places import CODEC, TOKENIZER, check_folder
from omni.config import ModelConfig, preset
from omni.errors import UserError
from omni.files import write_json
from omni.utils.process import importing
from train.console.command import Parser, check_least, given_model, given_path
from train.data.executor import Processes

if TYPE_CHECKING:
    from omni.text import Tokenizer


BYTES = 256
"""Number of text ids of a model whose tokens are bytes."""


@dataclass(frozen=True)
class Target:
    """A model's configuration (without the alignment head, which takes no columns), and its tokenizer."""

    config: ModelConfig
    tokenizer: Tokenizer


def add_options(parser: Parser) -> None:
    """Add the options that name a model."""
    parser.add_argument("--model", type=given_model, help="the model folder that the rows are for")
    parser.add_argument("--preset", type=str, help="or the preset of the model, such as nano")
    parser.add_argument("--tokenizer", type=given_path, help="tokenizer.json of a preset that does not read bytes")


def own_codec(chosen: Mapping[str, Any]) -> Path | None:
    """Folder of the codec's weights: the one that was named, or that in the model folder; None where there is neither."""
    folder = chosen["model"]
    if chosen["codec_folder"] is not None or folder is None or not (folder / CODEC).is_dir():
        return chosen["codec_folder"]
    return Path(folder) / CODEC


def chosen_target(chosen: Mapping[str, Any]) -> Target | None:
    """Load configuration and tokenizer of the named model; None where none is named; UserError where they cannot be read."""
    folder, name, file = chosen["model"], chosen["preset"], chosen["tokenizer"]
    if folder is not None and name is not None:
        raise UserError(f"--model {folder} and --preset {name} are both given: name one")
    if folder is None and name is None:
        if file is not None:
            raise UserError(f"--tokenizer {file} is given without a model: name one with --model or --preset")
        return None
    if folder is not None:
        check_folder(folder)
    with importing():
        from omni.checkpoint.folder import read_config
        from omni.text import Tokenizer

    config = read_config(folder) if folder is not None else preset(str(name))
    if folder is not None and file is None:
        file = folder / TOKENIZER
    if file is not None:
        tokenizer = Tokenizer.from_file(file)
    elif config.layout.text.size == BYTES:
        tokenizer = Tokenizer.bytes()
    else:
        raise UserError(
            f"the preset {name} has a text stream of {config.layout.text.size} ids, so bytes will not do: give the model's "
            "tokenizer.json with --tokenizer"
        )
    if len(tokenizer) > config.layout.text.size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} ids, the layout's text stream {config.layout.text.size}; use the model's own"
        )
    return Target(replace(config, ctc=0, ctc_sounds=0, turn=False), tokenizer)


def add_processes(parser: Parser) -> None:
    """Add the options that say which processes work, see `chosen_processes`."""
    parser.add_argument("--workers", type=int, help="processes; 0 works in this one, by default one on every core")
    parser.add_argument("--ray", type=str, default="", help="a Ray cluster whose processes work, see `data prepare`")


def chosen_processes(chosen: Mapping[str, Any], device: str = "cpu") -> Processes:
    """The processes that the options name; UserError where their number is negative."""
    check_least(chosen, workers=0)
    return Processes(chosen["workers"], device=device, ray=chosen["ray"])


def save_report(path: Path, data: Any) -> None:
    """Write data to a JSON file, making its folder."""
    make_folder(path.parent)
    write_json(path, data)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; UserError where a file is in its place."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{folder} lies in a file, or is one: name a folder") from error
