"""An argument parser that says what is wrong in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jsonargparse

from omni.errors import UserError


class DataParser(jsonargparse.ArgumentParser):
    """Arguments of `python -m train data NAME`; what is wrong with them is one line."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(prog=f"python -m train data {name}", description=description, exit_on_error=False, default_env=False)
        self._name = name

    def error(self, message: str, ex: BaseException | None = None) -> None:  # type: ignore[override]
        text = " ".join(str(message).split())
        raise UserError(f"data {self._name}: {text}; see python -m train data {self._name} --help") from ex

    def progress(self) -> None:
        """The option for what is shown."""
        self.add_argument("--progress", type=Literal["auto", "bar", "lines", "off"], default="auto", help="what is shown")

    def values(self, argv: Sequence[str]) -> dict[str, Any]:
        """The arguments by name, dataclasses made."""
        return vars(self.instantiate(self.parse_args(list(argv))))
