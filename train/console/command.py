"""What commands read, before anything heavy is imported: their options, configurations in YAML, and folders to write."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path, PurePath
from typing import Any, ClassVar, Literal

import jsonargparse
import yaml

from omni.errors import UserError, closest
from omni.files import refuse_pointer
from omni.pretrained import find_model
from omni.utils.arguments import StrictParser
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


def find_config(name: str | Path) -> Path:
    """The file of a configuration, given by its path or by the name of a recipe, such as `nano` or `voiceassistant/stage1`."""
    file, recipe = Path(name), RECIPES / f"{name}.yaml"
    known = ".." not in file.parts and not file.is_absolute() and recipe.is_file()
    return recipe if known and not file.is_file() else file


def check_config(file: Path) -> None:
    """Refuse a configuration file that does not exist or is no file: UserError with the closest name."""
    refuse_remote(file, "configuration")
    if file.exists() and not file.is_file():
        raise UserError(f"configuration {file} is a folder, a pipe or a device; {GIVE}")
    if not file.is_file():
        raise UserError(f"configuration {file} does not exist; {_near(file) or GIVE}")


def _near(file: Path) -> str:
    """The hint that names the YAML file closest to one that does not exist, beside it or among the recipes; "" for none."""
    beside = {p.stem: str(p) for p in sorted(file.parent.glob("*.yaml")) if not p.name.startswith(".")}
    named = {p.stem: p.stem for p in sorted(RECIPES.glob("*.yaml"))} | beside
    close = get_close_matches(file.stem, named, n=1, cutoff=0.7)
    return f"did you mean {named[close[0]]}?" if close else ""


class Spelled(float):
    """A number with a point or exponent; its `str` is as it is written."""

    text = ""

    def __str__(self) -> str:
        return self.text


class Loader(yaml.SafeLoader):
    """Reads YAML 1.2 (PyYAML knows 1.1, to which `1:30` is 90 and `off` false): the core schema, but with `007` for a text.

    A mapping with a key that is there twice is refused, of which YAML's own loader keeps the last.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], Any] = {}
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            before = first.setdefault((key.tag, key.value), key)
            if before is not key:
                line, other = key.start_mark.line + 1, before.start_mark.line + 1
                raise UserError(f"line {line}: {key.value} is given again, after line {other}; keep one")
        return node


_WHOLE = r"(?:0|[1-9][0-9]*)"
for _tag, _pattern, _first in (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", rf"[-+]?{_WHOLE}", "-+0123456789"),
    ("float", rf"[-+]?(?:\.[0-9]+|{_WHOLE}(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?i:inf)|\.(?i:nan)", "-+.0123456789"),
    ("merge", "<<", "<"),
):
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), list(_first))


class _SpellingLoader(Loader):
    """Keeps how numbers are written, for where a text is wanted."""

    def construct_yaml_float(self, node: yaml.ScalarNode) -> Spelled:
        number = Spelled(super().construct_yaml_float(node))  # type: ignore[no-untyped-call]
        number.text = node.value
        return number


_SpellingLoader.add_constructor("tag:yaml.org,2002:float", _SpellingLoader.construct_yaml_float)
yaml.SafeDumper.add_representer(Spelled, yaml.SafeDumper.represent_float)


def load_yaml(text: str) -> Any:
    """The value of a text in YAML; YAMLError for none."""
    return yaml.load(text, Loader)


jsonargparse.set_loader("yaml", load_yaml, (yaml.YAMLError,))


def read_yaml(file: Path, noun: str = "configuration") -> Any:
    """Reads a YAML file, numbers with a point as `Spelled`; UserError where it is none, or a mapping has a key twice. `noun`
    names it in the message."""
    try:
        refuse_pointer(file)
        return yaml.load(file.read_text(encoding="utf-8"), _SpellingLoader)
    except UserError as error:
        raise UserError(f"{noun} {file} {error}") from None
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{noun} {file} cannot be read ({' '.join(str(error).split())}); give a YAML file") from error


def read_config(file: Path) -> Mapping[str, Any]:
    """Reads a YAML file that holds a configuration; UserError where it is none, or holds no keys."""
    check_config(file)
    data = read_yaml(file)
    if not isinstance(data, Mapping):
        raise UserError(f"configuration {file} holds {type(data).__name__}; it must be a mapping of keys")
    return data


def check_folder_to_be(folder: Path, key: str) -> None:
    """Refuse a folder that cannot be made because a file is in its place (UserError); `key` names the option."""
    taken = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if taken is not None and not taken.is_dir():
        raise UserError(f"{key} {folder}: {taken} is a file where a folder belongs; name another folder")


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
