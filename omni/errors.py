"""The error raised for a user's mistake, the warning about doubtful sound, and one-line texts of errors and values."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any


class UserError(ValueError):
    """Bad input that the user can fix: one line that names the value, its place and the way out.

    The command lines print it without a traceback (unless `--debug`) and exit with `code`.
    """

    code = 2
    alone = False
    """True where one process of a run raises it while the others go on: each then reports its own."""
    shared = False
    """True where all processes of a run raise it together."""
    again = False
    """True where another try may succeed with nothing changed, as where a disk or a network has failed."""


class PackageError(UserError):
    """An optional package that is not installed; the message says what brings it."""


class BusyError(UserError):
    """A question that is refused because nobody else can be heard in time at present.

    Attributes:
        waiting: number of questions that wait already.
    """

    def __init__(self, text: str, waiting: int = 0) -> None:
        super().__init__(text)
        self.waiting = waiting


class RoomError(UserError):
    """A question, or a history, that takes more positions than a conversation has."""


class EngineLost(UserError):
    """The process of an engine has ended; another can be started."""


class LostError(UserError):
    """Another process of a run has died, or does not go on: nobody's mistake, and the same command may succeed."""

    code = 75  # EX_TEMPFAIL of sysexits.h


class SoundWarning(UserWarning):
    """Warning about sound that is accepted but doubtful: silent, very short, or perhaps cut; one line that names it.

    The command lines print it as a line of its own.
    """


def warn_about_sound(text: str) -> None:
    """Give a `SoundWarning` at the line which called the package."""
    package, level, frame = __name__.partition(".")[0], 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, SoundWarning, stacklevel=level)


def closest(word: object, known: Iterable[str]) -> str:
    """The hint `did you mean 'x'? known: ...` for error messages."""
    names = {name.casefold(): name for name in known}
    close = get_close_matches(str(word).casefold(), names, n=1, cutoff=0.4)
    return (f"did you mean {names[close[0]]!r}? " if close else "") + f"known: {', '.join(names.values()) or 'none'}"


def in_one_line(error: BaseException) -> str:
    """One line that describes an unexpected error to a user."""
    text = " ".join(str(error).split())
    type_name = type(error).__name__
    if isinstance(error, MemoryError) or type_name == "OutOfMemoryError" or "can't allocate memory" in text:
        return f"memory ran out ({text or type_name}); give less at a time, or a machine with more memory"
    if isinstance(error, RecursionError):
        return "something is nested too deeply to be read; run with --debug for the traceback"
    if isinstance(error, OSError) and error.strerror:
        file = repr(error.filename) if error.filename is not None else "standard output, or a file,"
        return f"{file} cannot be read or written: {error.strerror}"
    if isinstance(error, ModuleNotFoundError):
        return f"{text}; install omni-speech with what it needs (pip install -e .), or start it by the Python that has it"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type_name}: {text or 'no message'}{where}; run with --debug for the traceback; please report"


LINE, QUOTED = 120, 48
"""Most characters of a `repr`, and of a text within it."""


def brief(value: Any) -> str:
    """A `repr` that fits a line: tensors as their shapes, texts cut, of a dataclass only fields that differ from defaults."""
    from torch import Tensor

    parts = []
    for f in fields(value):
        own = getattr(value, f.name)
        if f.repr and isinstance(own, Tensor):
            parts.append(f"{f.name}=tensor{list(own.shape)}")
        elif f.repr and own is not f.default and own != f.default:
            parts.append(f"{f.name}={quoted(own) if isinstance(own, str) else repr(own)}")
    line = f"{type(value).__name__}({', '.join(parts)})"
    return line if len(line) <= LINE else line[: LINE - 2] + "…)"


def quoted(text: str) -> str:
    """A text's `repr`, or the start of it where it is long."""
    shown = repr(text)
    return shown if len(shown) <= QUOTED else f"{shown[: QUOTED - 2]}…{shown[0]}"
