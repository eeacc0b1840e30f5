"""Checks of a command line before anything heavy is imported: its command, its options, its files and folders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from omni.errors import UserError, closest
from omni.remote import refuse_remote

RECIPES = Path(__file__).parent.parent / "recipes"
"""Folder of the recipes, `configs` of a checkout: they come with the package, and are found by name."""


GIVE = "give a YAML file, or a recipe's name such as nano"
"""What to do where a configuration is missing."""


def check_command(name: str, known: Iterable[str], of: str = "") -> None:
    """Refuse an unknown command `of` `data`, `edit`, or `omni-train` itself: UserError with the closest name."""
    names = list(known)
    if name not in names:
        raise UserError(f"{of} command {name!r} is unknown; {closest(name, names)}".strip())


def find_config(given: str | Path) -> Path:
    """The file of a configuration, given by its path or by the name of a recipe, such as `nano` or `voiceassistant/stage1`."""
    file, recipe = Path(given), RECIPES / f"{given}.yaml"
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


class _Loader(yaml.SafeLoader):
    """Refuses a mapping with a key that is there twice, of which YAML's own loader keeps the last."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], Any] = {}
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            before = first.setdefault((key.tag, key.value), key)
            if before is not key:
                line, other = key.start_mark.line + 1, before.start_mark.line + 1
                raise UserError(f"line {line}: {key.value} is given again, after line {other}; keep one")
        return node


def read_yaml(file: Path, what: str = "configuration") -> Any:
    """Reads a YAML file; UserError where it is none, or a mapping has a key twice. `what` names it in the message."""
    try:
        return yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except UserError as error:
        raise UserError(f"{what} {file} {error}") from None
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{what} {file} cannot be read ({' '.join(str(error).split())}); give a YAML file") from error


def read_config(file: Path) -> Mapping[str, Any]:
    """Reads a YAML file that holds a configuration; UserError where it is none, or holds no keys."""
    check_config(file)
    data = read_yaml(file)
    if not isinstance(data, Mapping):
        raise UserError(f"configuration {file} holds {type(data).__name__}; it must be a mapping of keys")
    return data


def check_folder_to_be(folder: Path, key: str) -> None:
    """Refuse a folder that cannot be made because a file is in its place (UserError); `key` names the option."""
    taken = next((place for place in (folder, *folder.parents) if place.exists()), None)
    if taken is not None and not taken.is_dir():
        raise UserError(f"{key} {folder}: {taken} is a file where a folder belongs; name another folder")
