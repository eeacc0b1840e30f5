"""The base of both command lines' parsers, and patterns of parameters' names: a mistake is one line (UserError) that names the
option or key and the way out."""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from omni.errors import UserError

LONGEST = 400  # most characters of the library's messages, which may hold a value of any length

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


class StrictParser:
    """Mixed into a parser of jsonargparse: options by their whole names, and empty texts only where that is the default."""

    mistake: type[Exception]
    """Exception of the library for a user's mistake."""
    source = ""
    """A file whose values are parsed as well, and "or": for messages."""
    prog: str
    instantiate: Any
    parse_args: Any
    _option_string_actions: Any

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{"exit_on_error": False, "default_env": False, "allow_abbrev": False, **more})

    @property
    def command(self) -> str:
        """The command as it is typed."""
        return self.prog.replace(" [options]", "").replace(" FILE.yaml", "")

    @property
    def options(self) -> list[str]:
        """Names of the options, without dashes."""
        return [name[2:] for name in self._option_string_actions if name.startswith("--") and not name.endswith("+")]

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """Values by name, dataclasses instantiated. UserError: an unknown option (the closest is named), an empty one, a
        missing one, a value of the wrong type. SystemExit: after `--help`."""
        for word, after in zip(words, [*words, None][1:], strict=False):
            if word == "--":
                break
            if is_option(word):
                name, equals, value = word.partition("=")
                self.check_option(name, value if equals else None if after is not None and is_option(after) else after)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return vars(self.instantiate(self.parse_args(list(words))))
        except (self.mistake, ValueError) as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, UserError):
                cause = cause.__cause__ or cause.__context__
            if cause is not None:  # of a value's own checks
                raise cause from error
            if not isinstance(error, self.mistake):
                raise
            text = " ".join(str(error).split()).replace("<class '", "").replace("'>", "")
            text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
            raise UserError(f"{text}; see {self.source}{self.command} --help") from error

    def check_option(self, name: str, value: str | None) -> None:
        """Refuses an option that does not exist, or is empty; its `value` may be the next word."""
        action = self._option_string_actions.get(name)
        if action is None:
            hint = meant(name[2:], self.options, "--") if name.startswith("--") else ""
            raise UserError(f"unknown option {name}; {hint or f'see {self.command} --help'}")
        if value == "" and action.nargs != 0 and action.default != "":
            raise UserError(f"option {name} is empty; give a value, or leave it out")


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
