"""Parses a command line into a command's options; a mistake gives one line that names the closest option."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

import jsonargparse

from infer.given import take_questions
from infer.options import AskOptions, BenchOptions, ChatOptions, QuantizeOptions, ServeOptions
from omni.errors import UserError, closest
from omni.utils.arguments import StrictParser

COMMANDS: dict[str, type[Any]] = {
    "ask": AskOptions,
    "chat": ChatOptions,
    "serve": ServeOptions,
    "bench": BenchOptions,
    "quantize": QuantizeOptions,
}

Command = AskOptions | ChatOptions | ServeOptions | BenchOptions | QuantizeOptions

DESCRIPTION = (
    "Talk to a speech language model. With any command, --plugin NAME imports a module of one's own, such as "
    "my_package.my_module, that brings the model's codec, encoder or task (docs/extending.md)."
)


class InferParser(StrictParser, jsonargparse.ArgumentParser):
    """The parser of a command."""

    mistake = jsonargparse.ArgumentError


def build_parser() -> InferParser:
    """The parser of `omni-infer`, with one subcommand per entry of `COMMANDS`."""
    parser = InferParser(prog="omni-infer", description=DESCRIPTION)
    commands = parser.add_subcommands(metavar="COMMAND", title="commands")
    for name, kind in COMMANDS.items():
        commands.add_subcommand(name, command_parser(name), help=(kind.__doc__ or "").strip().splitlines()[0])
    return parser


def command_parser(name: str) -> InferParser:
    """The parser of a command: one argument per field of its dataclass that was made with `option`."""
    kind = COMMANDS[name]
    parser = InferParser(prog=f"omni-infer [options] {name}", description=(kind.__doc__ or "").strip())
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
            more |= {} if positional else {"action": "extend"}
        else:
            more |= {"type": _given(hints[f.name])} | ({} if positional and "nargs" not in more else {"default": f.default})
        parser.add_argument(f.name if positional else f"--{f.name}", **more)
    return parser


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
    name, *rest = words
    if name in ("-h", "--help"):
        build_parser().parse_args([name])
    if name not in COMMANDS:
        raise UserError(f"command {name!r} is unknown; {closest(name, COMMANDS)}")
    asked: dict[str, Any] = {}
    if name == "ask":
        rest, files, texts, order = take_questions(rest, AskOptions)
        asked = {"files": files, "text": texts, "order": order}
    values = command_parser(name).read(rest)
    return COMMANDS[name](**{**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}, **asked})
