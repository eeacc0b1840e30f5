"""The parser of both command lines, and patterns of parameters' names: a mistake is one line (UserError) that names the option
or key and the way out."""

from __future__ import annotations

import argparse
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, NoReturn

from omni.errors import UserError

_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


def is_option(word: str) -> bool:
    """Whether a word is an option by argparse's rule: it starts with a dash, is no number, no lone dash and has no space."""
    name = word.partition("=")[0]
    return name.startswith("-") and name != "-" and " " not in name and not _NUMBER.fullmatch(word)


def meant(name: str, known: Iterable[str], mark: str = "") -> str:
    """The hint `did you mean x?` for an unknown name: that of which it is the start, one beside it, one elsewhere, or the
    closest; "" for none. Names may be dotted; `mark` is printed before each."""
    names, name = list(dict.fromkeys(known)), name.replace("-", "_")
    around, _, last = name.rpartition(".")
    beside = {key.rpartition(".")[2]: key for key in names if key.rpartition(".")[0] == around}
    close = (
        [key for part, key in beside.items() if part.startswith(last)]
        or [beside[part] for part in get_close_matches(last, beside, n=2, cutoff=0.7)]
        or [key for key in names if key.rpartition(".")[2] == last]
        or get_close_matches(name, names, n=1)
    )
    return f"did you mean {' or '.join(mark + key for key in close[:2])}?" if close else ""


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """A formatter of help that leaves out the defaults that say nothing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False, "", []) else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """The parser of a command, whose options have their whole names. A mistake is a UserError."""

    def __init__(self, prog: str, description: str, **more: Any) -> None:
        self.actions = dict[str, argparse.Action]()
        super().__init__(prog, description=description, **{"formatter_class": Help, "allow_abbrev": False, **more})

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{' '.join(message.split()):.400}; see {self.prog} --help")

    def add_argument(self, *names: Any, **more: Any) -> argparse.Action:
        action = super().add_argument(*names, **more)
        self.actions |= dict.fromkeys(action.option_strings, action)
        return action

    @property
    def options(self) -> list[str]:
        """Names of the options, without dashes."""
        return [name[2:] for name in self.actions if name.startswith("--")]

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """Values by name. UserError: an unknown option (the closest is named), an empty one whose default is another, a missing
        one, a value of the wrong type. SystemExit: after `--help`."""
        for word, after in pairwise([*words, ""]):
            name, equals, value = word.partition("=")
            if word == "--":
                break
            if not is_option(word):
                continue
            if (action := self.actions.get(name)) is None:
                hint = meant(name[2:], self.options, "--") if name.startswith("--") else ""
                raise UserError(f"unknown option {name}; {hint or f'see {self.prog} --help'}")
            if (value if equals else after) == "" and action.nargs != 0 and action.default != "":
                raise UserError(f"option {name} is empty; give a value, or leave it out")
        return vars(self.parse_args(list(words)))


# --- names of parameters --------------------------------------------------------------------------------------------------


def match_names(
    patterns: Iterable[str],
    names: Sequence[str],
    where: str,
    strict: bool = True,
    noun: str = "parameter",
    also: Mapping[str, str] | None = None,
) -> set[str]:
    """The names that at least one pattern matches. UserError: a pattern matches no name (the closest names are given), or is
    not a regular expression.

    A pattern is of the shell's kind (`decoder.blocks.*.mlp.*`; the star also spans dots), or, after `re:`, a regular
    expression for the whole name.

    Args:
        where: the configuration key the patterns come from, for the error.
        strict: refuse a pattern that matches nothing.
        noun: for a name, in the error.
        also: second names, each with the first name that it means (`omni.model.linears.tied_names`); one whose first name is
            not in `names` is ignored.
    """
    chosen: set[str] = set()
    own = {name: name for name in names}
    known = own | {second: first for second, first in (also or {}).items() if first in own}
    for pattern in patterns:
        try:
            expression = re.compile(pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern))
        except re.error as error:
            raise UserError(f"{where}: {pattern!r} is not a regular expression ({error})") from error
        hits = {first for name, first in known.items() if expression.fullmatch(name)}
        if not hits and strict:
            depth = pattern.count(".")  # leading parts of names, as deep as the pattern, resemble it
            heads = [name if name.count(".") <= depth else ".".join(name.split(".")[: max(depth, 1)]) + ".*" for name in names]
            close = get_close_matches(pattern, dict.fromkeys(heads), n=3, cutoff=0.3)
            near = (
                f"the closest names are {', '.join(close)}" if close else f"names are such as {', '.join(names[:3]) or 'none'}"
            )
            raise UserError(f"{where}: pattern {pattern!r} matches no {noun}; {near}")
        chosen |= hits
    return chosen
