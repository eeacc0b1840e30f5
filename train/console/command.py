"""Checks of a command line before anything heavy is imported: its command, its options, its files and folders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omni.errors import UserError
from omni.remote import refuse_remote


def check_command(name: str, known: Iterable[str], of: str = "") -> None:
    """Refuse an unknown command `of` `data`, `edit`, or `python -m train` itself: UserError with the closest name."""
    names = list(known)
    if name not in names:
        close = get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(f"{of} command {name!r} is unknown; {hint}known: {', '.join(names)}".strip())


def check_config(file: Path) -> None:
    """Refuse a configuration file that does not exist or is no file: UserError with the closest name."""
    refuse_remote(file, "configuration")
    if file.exists() and not file.is_file():
        raise UserError(f"configuration {file} is a folder, a pipe or a device; give a YAML file such as configs/nano.yaml")
    if not file.is_file():
        near = sorted(str(p) for p in file.parent.glob("*.yaml")) if file.parent.is_dir() else []
        close = get_close_matches(str(file), near, n=1, cutoff=0.3)
        hint = f"did you mean {close[0]}?" if close else "give a YAML file such as configs/nano.yaml"
        raise UserError(f"configuration {file} does not exist; {hint}")


def check_folder_to_be(folder: Path, key: str) -> None:
    """Refuse a folder that cannot be made because a file is in its place (UserError); `key` names the option."""
    taken = next((place for place in (folder, *folder.parents) if place.exists()), None)
    if taken is not None and not taken.is_dir():
        raise UserError(f"{key} {folder}: {taken} is a file where a folder belongs; name another folder")


def take_options(
    argv: Sequence[str], values: Mapping[str, type], flags: Iterable[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Separate a command's own options from the words that belong to the configuration.

    Args:
        values: options with a number or a text: name and type.
        flags: options without a value, True where they are given.

    Raises:
        UserError: a value is missing or no number.
    """
    found: dict[str, Any] = {}
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        name, equals, value = argument.removeprefix("--").partition("=")
        if argument.startswith("--") and name in flags:
            found[name] = True
        elif argument.startswith("--") and name in values:
            given = value if equals else next(arguments, "")
            try:
                found[name] = values[name](given)
            except ValueError as error:
                raise UserError(f"--{name} is {given!r}; it must be a number") from error
        else:
            rest.append(argument)
    return found, rest
