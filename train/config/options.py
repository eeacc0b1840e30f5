"""Parses the command line of `omni-train edit ...` into typed values; every error is one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jsonargparse

from omni.checkpoint.places import check_folder
from omni.errors import UserError
from omni.remote import check_there
from train.config.parse import check_keys, check_option, printable
from train.console.command import read_config
from train.console.options import given_path

C = TypeVar("C")

_CHOICE = re.compile(r'key "(?P<key>[^"]+)".*Literal\[(?P<names>[^\]]*)\]\. Got value: (?P<value>\S+)')
"""Message of jsonargparse for a value that is not one of the choices."""


class EditParser(jsonargparse.ArgumentParser):
    """A parser whose errors are one line each (UserError)."""

    def error(self, message: str, ex: BaseException | None = None) -> None:  # type: ignore[override]
        if choice := _CHOICE.search(" ".join(str(message).split())):
            names = re.findall(r"'([^']*)'", choice["names"])
            close = difflib.get_close_matches(choice["value"], names, 1)
            hint = f"did you mean {close[0]}? " if close else ""
            what = f"{choice['key']} {choice['value']!r} is unknown"
            raise UserError(f"edit: {what}; {hint}use one of {', '.join(names)}") from ex
        raise UserError(f"edit: {' '.join(str(message).split())}; see omni-train edit --help") from ex


def read_command(
    argv: Sequence[str], name: str, what: str, places: Mapping[str, str], kind: type[C] | None = None
) -> tuple[list[Path], C | None, Mapping[str, Any]]:
    """Reads positional paths, the configuration (a YAML file after `--config`, and dotted overrides), and `--overwrite`.

    Args:
        name: of the command.
        places: the paths it takes, with their help.
        kind: dataclass of its configuration; None for a command without one.

    Raises:
        UserError: an unknown key (the closest is named), a value of the wrong type, a path too many or too few.
        SystemExit: after `--help`.
    """
    parser = EditParser(prog=f"omni-train edit {name}", description=what, exit_on_error=False, default_env=False)
    for place, text in places.items():
        parser.add_argument(place, type=given_path, help=text)
    if kind is None:
        parser.add_argument("--overwrite", type=bool, default=False, help="replace a folder of that name")
    else:
        parser.add_argument("--config", action="config", help="YAML file with any of the following")
        parser.add_class_arguments(kind, None)
        printable(parser)
    _check_words(argv, kind, name)
    try:
        values = vars(parser.instantiate(parser.parse_args(_with_value(argv) if kind is None else list(argv))))
    except jsonargparse.ArgumentError as error:
        raise UserError(f"edit {name}: {' '.join(str(error).split())}") from error
    except TypeError as error:  # jsonargparse's error for a section that holds no mapping
        raise UserError(f"edit {name}: a section of the configuration holds no keys ({error}); write keys below it") from error
    paths = [values.pop(place) for place in places]
    values.pop("config", None)
    return paths, None if kind is None else kind(**values), values


def check_inputs(places: Mapping[str, str], paths: Sequence[Path]) -> None:
    """Refuses (UserError) a model, edits or facts that do not exist; `places` as for `read_command`."""
    for place, path in zip(places, paths, strict=True):
        if place == "model":
            check_folder(path)
        elif place != "out":
            check_there(path, place, f"{path} does not exist; give {places[place]}")


def _with_value(argv: Sequence[str]) -> list[str]:
    """Turns `--overwrite` into `--overwrite=true`, unless true or false follows: any other word after it is a path."""
    words: list[str] = []
    for word in argv:
        if words and words[-1] == "--overwrite=true" and word.lower() in ("true", "false"):
            words[-1] = f"--overwrite={word.lower()}"
        else:
            words.append("--overwrite=true" if word == "--overwrite" else word)
    return words


def _check_words(argv: Sequence[str], kind: type | None, command: str) -> None:
    """Refuse options and keys that do not exist, naming the closest."""
    words = list(argv)
    for i, word in enumerate(words):
        name, _, value = word[2:].partition("=")
        if not word.startswith("--") or name in ("help", "print_config"):
            continue
        if kind is None:
            if name != "overwrite":
                raise UserError(f"edit {command}: unknown option --{name}; its one option is --overwrite")
        elif name == "config":
            file = Path(value or (words[i + 1] if i + 1 < len(words) else ""))
            check_keys(kind, read_config(file), str(file))
        else:
            check_option(kind, word, words[i + 1] if i + 1 < len(words) else None)
