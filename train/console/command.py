"""What commands read, before anything heavy is imported: their options, configurations in YAML, and folders to write."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path, PurePath
from typing import Any

import yaml

from omni.errors import UserError, closest
from omni.pretrained import find_model
from omni.utils.arguments import Help, Parser
from omni.utils.configuration import read_yaml
from omni.utils.remote import refuse_remote

RECIPES = Path(__file__).parent.parent / "recipes"
"""Folder of the recipes, `configs` of a checkout: they come with the package, and are found by name."""


GIVE = "give a YAML file, or a recipe's name such as nano"
"""What to do where a configuration is missing."""


def check_command(name: str, known: Iterable[str], of: str = "") -> None:
    """Refuse an unknown command `of` `data`, `edit`, or `omni-train` itself: UserError with the closest name."""
    names = list(known)
    if name not in names:
        raise UserError(f"{of} command {name!r} is unknown; {closest(name, names)}".strip())


def asks_for_help(argv: Sequence[str], text: str) -> bool:
    """Prints the help of a command where its words ask for it, and tells whether they do."""
    asked = "-h" in argv or "--help" in argv
    if asked:
        print(text)
    return asked


Subcommands = Mapping[str, tuple[Callable[[Sequence[str]], int], str]]


def run_subcommand(of: str, argv: Sequence[str], commands: Subcommands, more: str = "") -> int:
    """Runs one of the commands `of` a command: each has a function, which returns the exit code, and a line for `--help`."""
    listed = "\n".join(f"  {name:<9} {text}" for name, (_, text) in commands.items())
    end = f"`omni-train {of} COMMAND --help` explains a command.{more}"
    if asks_for_help(argv[:1] or ["--help"], f"usage: omni-train {of} COMMAND [options]\n\n{listed}\n\n{end}"):
        return 0 if argv else 2
    check_command(argv[0], commands, of)
    return commands[argv[0]][0](argv[1:])


def find_config(name: str | Path) -> Path:
    """The file of a configuration, given by its path or by the name of a recipe, such as `nano` or `voiceassistant/stage1`."""
    file, recipe = Path(name), RECIPES / f"{name}.yaml"
    known = ".." not in file.parts and not file.is_absolute() and recipe.is_file()
    return recipe if known and not file.is_file() else file


def _near(file: Path) -> str:
    """The hint that names the YAML file closest to one that does not exist, beside it or among the recipes; "" for none."""
    beside = {p.stem: str(p) for p in sorted(file.parent.glob("*.yaml")) if not p.name.startswith(".")}
    named = {p.stem: p.stem for p in sorted(RECIPES.glob("*.yaml"))} | beside
    close = get_close_matches(file.stem, named, n=1, cutoff=0.7)
    return f"did you mean {named[close[0]]}?" if close else ""


def read_config(file: Path) -> dict[str, Any]:
    """Reads a YAML file that holds a configuration; UserError where it is none (the closest is named)."""
    refuse_remote(file, "configuration")
    if file.exists() and not file.is_file():
        raise UserError(f"configuration {file} is a folder, a pipe or a device; {GIVE}")
    if not file.is_file():
        raise UserError(f"configuration {file} does not exist; {_near(file) or GIVE}")
    return read_yaml(file)


def check_folder_to_be(folder: Path, key: str) -> None:
    """Refuse a folder that cannot be made because a file is in its place (UserError); `key` names the option."""
    taken = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if taken is not None and not taken.is_dir():
        raise UserError(f"{key} {folder}: {taken} is a file where a folder belongs; name another folder")


def given_path(text: str) -> Path:
    """The type of an option that names a file or folder: refuses an empty text, which `Path` takes for the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; give a path")
    return Path(text)


def given_model(text: str) -> Path:
    """The type of an option that names a model folder, or one that ships."""
    try:
        return given_path(find_model(text))
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


yaml.SafeDumper.add_multi_representer(PurePath, lambda dumper, path: dumper.represent_str(str(path)))  # for --print_config


def add_progress(parser: Parser) -> None:
    """Adds the option `--progress`."""
    parser.add_argument("--progress", choices=("auto", "bar", "lines", "off"), default="auto", help="what is shown")


def check_least(values: Mapping[str, Any], **least: int) -> None:
    """Refuses (UserError) options of a number below its least, where they are given."""
    for name, number in least.items():
        value = values.get(name)
        if value is not None and value < number:
            raise UserError(f"--{name} is {value}; it must be at least {number}")


class Listing(Help, argparse.RawDescriptionHelpFormatter):
    """A formatter of help that leaves the lines of the description as they are."""
