"""Options of several commands, and the type of those that name a file or folder."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any, Literal

import jsonargparse
import yaml

from omni.errors import UserError
from omni.pretrained import find_model
from omni.utils.arguments import StrictParser


class Parser(StrictParser, jsonargparse.ArgumentParser):
    """The parser of a command."""

    mistake = jsonargparse.ArgumentError


class _GivenPath:
    """Type of an option that names a file or folder: refuses an empty text, which `Path` takes for the current folder."""

    def __init__(self, find: Callable[[str], str] = str) -> None:
        self._find = find

    def __call__(self, text: str) -> Path:
        if not text:
            raise argparse.ArgumentTypeError("it is empty; give a path")
        return Path(self._find(text))

    def __repr__(self) -> str:  # the parser's help prints it
        return "path"


given_path, given_model = _GivenPath(), _GivenPath(find_model)
yaml.SafeDumper.add_multi_representer(PurePath, lambda dumper, path: dumper.represent_str(str(path)))  # for --print_config


def add_progress(parser: Parser) -> None:
    """Adds the option `--progress`."""
    parser.add_argument("--progress", type=Literal["auto", "bar", "lines", "off"], default="auto", help="what is shown")


def check_least(values: Mapping[str, Any], **least: int) -> None:
    """Refuses (UserError) options of a number below its least, where they are given."""
    for name, number in least.items():
        value = values.get(name)
        if value is not None and value < number:
            raise UserError(f"--{name} is {value}; it must be at least {number}")


class Listing(jsonargparse.DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """A formatter of help that leaves the lines of the description as they are."""
