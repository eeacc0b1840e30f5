"""Extracts the questions from a command line, in their order, wherever they are among the options.

Python's parsers take a list of positionals in one piece only, so `ask a.wav --chat b.wav` would have one word too many, and the
order of sound files and of texts would be lost.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Sequence
from typing import Any

from omni.utils.arguments import is_option

SOUND, TEXT = "s", "t"


def take_questions(words: Sequence[str], kind: type[Any]) -> tuple[list[str], tuple[str, ...], tuple[str, ...], str]:
    """Take files and texts out of a command's words.

    Words after `--text`, up to the next option, are texts; but a word after the first that is the name of a file (or `-`) is
    that file, so that `--text "hello" q.wav` asks both.

    Args:
        words: after the command's name.
        kind: the dataclass of its options.

    Returns:
        the other words, the files, the texts, and the kind of each question in order: `s` or `t` each.
    """
    flags = {f"--{name}" for name, hint in typing.get_type_hints(kind).items() if hint is bool}
    known = {f"--{f.name}" for f in dataclasses.fields(kind)} | {"-h", "--help"}
    rest: list[str] = []
    found: list[tuple[str, str]] = []
    option, values = "", 0  # the option that the next words may belong to, and the number of words that did

    for at, word in enumerate(words):
        if word == "--":  # files whose names start with a dash
            found += [(SOUND, name) for name in words[at + 1 :]]
            break
        if is_option(word):
            _close(option, values, rest)
            option, values = word, 0
            if word.startswith("--text="):
                found.append((TEXT, word.removeprefix("--text=")))
                option = ""
            elif word != "--text":
                rest.append(word)
                takes_one = word in known and word not in flags
                option = word if takes_one else ""
        elif option == "--text" and not (values and _is_file(word)):
            found.append((TEXT, word))
            values += 1
        elif option and option != "--text":
            rest.append(word)
            option = ""
        else:
            found.append((SOUND, word))
    _close(option, values, rest)
    files = tuple(word for kind_, word in found if kind_ == SOUND)
    texts = tuple(word for kind_, word in found if kind_ == TEXT)
    return rest, files, texts, "".join(kind_ for kind_, _ in found)


def _close(option: str, values: int, rest: list[str]) -> None:
    """Passes a `--text` without a text on to the parser, which refuses it."""
    if option == "--text" and not values:
        rest.append(option)


def _is_file(word: str) -> bool:
    return word == "-" or os.path.isfile(word)
