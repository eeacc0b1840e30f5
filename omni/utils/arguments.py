"""Base of both command lines' parsers: a mistake is one line (UserError) that names the option and the way out."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from omni.errors import UserError

LONGEST = 400
"""Most characters of the library's messages, which may hold a value of any length."""

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
    may_be_empty = True
    """An option may be an empty text where that is its default."""
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
        """Values by name, dataclasses instantiated.

        Raises:
            UserError: an unknown option (the closest is named), an empty one, a missing one, a value of the wrong type.
            SystemExit: after `--help`.
        """
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
            if (ours := _ours(error)) is not None:
                raise ours from error
            if isinstance(error, self.mistake):
                text = " ".join(str(error).split()).replace("<class '", "").replace("'>", "")
                text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
                raise UserError(f"{text}; see {self.source}{self.command} --help") from error
            raise

    def check_option(self, name: str, value: str | None, inner: bool = False) -> None:
        """Refuses an option that does not exist, or is empty.

        Args:
            value: its own, or the next word; None for neither.
            inner: it is known as a key of another option's value.
        """
        action = self._option_string_actions.get(name)
        if action is None and not inner:
            hint = meant(name[2:], self.options, "--") if name.startswith("--") else ""
            raise UserError(f"unknown option {name}; {hint or f'see {self.command} --help'}")
        allowed = action is not None and (action.nargs == 0 or (self.may_be_empty and action.default == ""))
        if value == "" and not allowed:
            raise UserError(f"option {name} is empty; give a value, or leave it out")


def _ours(error: BaseException) -> UserError | None:
    """The UserError of a value's own checks that caused the library's error; None where there is none."""
    here: BaseException | None = error
    while here is not None and not isinstance(here, UserError):
        here = here.__cause__ or here.__context__
    return here
