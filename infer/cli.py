"""Parses a command line into a command's options; a mistake gives one line that names the closest option.

Errors of the parsing library are rewritten here: `error: unknown option --modle; did you mean --model?`
"""

from __future__ import annotations

import dataclasses
import re
import typing
from argparse import ArgumentError
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from jsonargparse import ArgumentParser

from infer.given import take_questions
from infer.options import AskOptions, BenchOptions
from omni.errors import UserError, closest

COMMANDS: dict[str, type[Any]] = {"ask": AskOptions, "bench": BenchOptions}

Command = AskOptions | BenchOptions

DESCRIPTION = (
    "Talk to a speech language model. With any command, --plugin NAME imports a module of one's own, such as "
    "my_package.my_module, that brings the model's codec, encoder or task (docs/extending.md)."
)


def build_parser() -> ArgumentParser:
    """The parser of `omni-infer`, with one subcommand per entry of `COMMANDS`."""
    settings: dict[str, Any] = {"exit_on_error": False, "allow_abbrev": False}
    parser = ArgumentParser(prog="omni-infer", description=DESCRIPTION, **settings)
    commands = parser.add_subcommands(metavar="COMMAND", title="commands")
    for name, kind in COMMANDS.items():
        help = (kind.__doc__ or "").strip()
        command = ArgumentParser(description=help, **settings)
        add_options(command, kind)
        commands.add_subcommand(name, command, help=help.splitlines()[0])
    return parser


def add_options(parser: ArgumentParser, kind: type[Any]) -> None:
    """Add one argument per field of a dataclass made with `option`."""
    hints = typing.get_type_hints(kind)
    for f in dataclasses.fields(kind):
        if "help" not in f.metadata:  # no option: `parse` fills it in
            continue
        more = dict(f.metadata)
        positional = more.pop("positional", False)
        several = isinstance(f.default, tuple)
        if hints[f.name] is bool:
            more["action"] = "store_true"
        elif several:
            more |= {"type": str, "nargs": "*" if positional else "+", "default": []}
        else:
            more |= {"type": _given(hints[f.name]), "default": f.default}
        parser.add_argument(f.name if positional else f"--{f.name}", **more)


def _given(hint: Any) -> Any:
    """The type of a given value: `X` of `X | None`."""
    return next((kind for kind in typing.get_args(hint) if kind is not type(None)), hint)


def parse(words: Sequence[str]) -> Command:
    """Parses the words of a command line into the options of their command.

    Raises:
        UserError: an unknown command or option (naming the closest), or a value of the wrong type.
        SystemExit: after `--help`.
    """
    if not words:
        raise UserError(f"no command was given; use one of {', '.join(COMMANDS)} (see omni-infer --help)")
    asked: dict[str, Any] = {}
    rest = list(words)
    if rest[0] == "ask":
        others, files, texts, order = take_questions(rest[1:], AskOptions)
        rest, asked = ["ask", *others], {"files": files, "text": texts, "order": order}
    try:
        found = build_parser().parse_args(rest)
    except ArgumentError as error:
        raise UserError(explain(str(error), words)) from error
    name = found.subcommand
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in found[name].as_dict().items()}
    return COMMANDS[name](**{**values, **asked})


def explain(message: str, words: Sequence[str]) -> str:
    """Rewrites an error of the parser as one line in our words."""
    if unknown := re.match(r"unrecognized arguments: (\S+)", message):
        return _unknown_option(unknown[1], words)
    if choice := re.search(r"invalid choice: '([^']*)'", message):
        return f"command {choice[1]!r} is unknown; {closest(choice[1], COMMANDS)}"
    if value := re.match(r'Parser key "([^"]+)":\s*(.*)', message, re.DOTALL):
        name = value[1].split(".")[-1]
        reason = " ".join(value[2].split())
        if kind := re.search(r"Expected an? <class '(\w+)'>. Got value: ?(.*)", reason):
            given = kind[2] if len(kind[2]) <= 40 else f"{kind[2][:30]}..."
            return f"--{name} is {given!r}; it must be of type {kind[1]}"
        return f"--{name}: {reason}"
    return " ".join(message.removeprefix("argument ").split())


def _unknown_option(word: str, words: Sequence[str]) -> str:
    option = word.split("=")[0]
    kind = next((COMMANDS[w] for w in words if w in COMMANDS), None)
    fields = dataclasses.fields(kind) if kind is not None else ()
    known = [f"--{f.name}" for f in fields if "help" in f.metadata and not f.metadata.get("positional")]
    if not option.startswith("-"):
        return f"{word!r} is one word too many; see --help"
    name = option.replace("-", "_").replace("__", "--", 1)
    close = [k for k in known if k.startswith(name)] or get_close_matches(name, known, n=1, cutoff=0.5)
    return f"option {option} is unknown; {f'did you mean {close[0]}? ' if close else ''}see --help"
