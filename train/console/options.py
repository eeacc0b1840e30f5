"""An argument parser whose errors are one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jsonargparse

from omni.errors import UserError


class DataParser(jsonargparse.ArgumentParser):
    """Parses the arguments of `python -m train data NAME`; an error is a UserError of one line."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(prog=f"python -m train data {name}", description=description, exit_on_error=False, default_env=False)
        self._name = name

    def error(self, message: str, ex: BaseException | None = None) -> None:  # type: ignore[override]
        text = " ".join(str(message).split())
        raise UserError(f"data {self._name}: {text}; see python -m train data {self._name} --help") from ex

    def progress(self) -> None:
        """Add the option `--progress`."""
        self.add_argument("--progress", type=Literal["auto", "bar", "lines", "off"], default="auto", help="what is shown")

    def values(self, argv: Sequence[str]) -> dict[str, Any]:
        """Parse `argv` into values by name, with dataclasses instantiated."""
        return vars(self.instantiate(self.parse_args(list(argv))))
