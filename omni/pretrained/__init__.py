"""Model folders that ship with the package, by name; each is a folder here, with its model card and a question to ask."""

from __future__ import annotations

import os
from pathlib import Path

from omni.checkpoint.places import WEIGHTS
from omni.errors import UserError

SHIPPED = Path(__file__).parent
NAMES = ("nano",)
ADAPTED = ("smol",)  # adapters alone, which `omni-infer get` puts into models
QUESTION = "question.wav"


def shipped(name: str) -> str | None:
    """The folder of the model of that name; None where its weights are not in this copy of the package."""
    return str(SHIPPED / name) if (SHIPPED / name / WEIGHTS).is_file() else None


def find_model(folder: str | os.PathLike[str]) -> str:
    """The path of a model folder: `folder` as it is, or, where nothing is there, the one of that name that ships.

    Raises:
        UserError: that one's weights are not in this copy of the package, or it has to be put together first.
    """
    path = os.fspath(folder)
    if path in ADAPTED and not os.path.exists(path):
        raise UserError(
            f"the model {path!r} is put together from parts: `omni-infer get {path}` writes the folder models/{path}"
        )
    if path not in NAMES or os.path.exists(path):
        return path
    shipped_folder = shipped(path)
    if shipped_folder is None:
        raise UserError(
            f"the model {path!r} ships with omni-speech, but this copy has no weights in {SHIPPED / path}; `omni-train demo` "
            "trains one, or name a model folder"
        )
    return shipped_folder


def find_question(file: str) -> str:
    """The path of a sound file: `file` as it is, or, where nothing is there, the question of that name that ships."""
    own = SHIPPED / NAMES[0] / QUESTION
    return str(own) if file == QUESTION and not os.path.lexists(file) and own.is_file() else file
