"""An argument parser whose errors are one line, and the type of its paths."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any, Literal

import jsonargparse
import yaml

from omni.errors import UserError


class _GivenPath:
    """Type of an option that names a file or folder: refuses an empty text, which `Path` takes for the current folder."""

    def __call__(self, text: str) -> Path:
        if not text:
            raise argparse.ArgumentTypeError("it is empty; give a path")
        return Path(text)

    def __repr__(self) -> str:  # the parser's help prints it
        return "path"


given_path = _GivenPath()
yaml.SafeDumper.add_multi_representer(PurePath, lambda dumper, path: dumper.represent_str(str(path)))  # for --print_config


class DataParser(jsonargparse.ArgumentParser):
    """Parses the arguments of `omni-train data NAME`; an error is a UserError of one line."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(prog=f"omni-train data {name}", description=description, exit_on_error=False, default_env=False)
        self._name = name

    def error(self, message: str, ex: BaseException | None = None) -> None:  # type: ignore[override]
        text = " ".join(str(message).split())
        raise UserError(f"data {self._name}: {text}; see omni-train data {self._name} --help") from ex

    def progress(self) -> None:
        """Add the option `--progress`."""
        self.add_argument("--progress", type=Literal["auto", "bar", "lines", "off"], default="auto", help="what is shown")

    def values(self, argv: Sequence[str]) -> dict[str, Any]:
        """Parse `argv` into values by name, with dataclasses instantiated."""
        return vars(self.instantiate(self.parse_args(list(argv))))
