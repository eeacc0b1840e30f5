"""Parses a command line into a command's options; a mistake gives one line that names the closest option."""

from __future__ import annotations

import dataclasses
import inspect
import os
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer.options import SOUND, TEXT, AskOptions, BenchOptions, ChatOptions, Command, GetOptions, QuantizeOptions, ServeOptions
from omni.errors import UserError, closest
from omni.utils.arguments import Parser, is_option
from omni.utils.configuration import read_yaml, validate

COMMANDS: dict[str, type[Any]] = {
    "ask": AskOptions,
    "chat": ChatOptions,
    "serve": ServeOptions,
    "bench": BenchOptions,
    "quantize": QuantizeOptions,
    "get": GetOptions,
}

HELP = """usage: omni-infer COMMAND [options]

Talk to a speech language model.

{commands}

  --plugin    with any command: a module of one's own, such as my_package.my_module, that brings the model's codec, encoder or
              task (docs/extending.md)

`omni-infer COMMAND --help` explains a command."""


def command_parser(name: str) -> Parser:
    """The parser of a command: one argument per field of its dataclass that was made with `option`."""
    command = COMMANDS[name]
    parser, hints = Parser(f"omni-infer {name}", inspect.getdoc(command) or ""), typing.get_type_hints(command)
    rank = {name: index for index, owner in reversed([*enumerate(command.__mro__)]) for name in inspect.get_annotations(owner)}
    shown = [f for f in dataclasses.fields(command) if "help" in f.metadata and "rare" not in f.metadata]
    for f in sorted(shown, key=lambda f: rank[f.name]):  # its own first
        more = dict(f.metadata)
        positional = more.pop("positional", False)
        if hints[f.name] is bool:
            more["action"] = "store_true"
        elif isinstance(f.default, tuple):
            more |= {"nargs": "*", "default": []} if positional else {"nargs": "+", "action": "extend", "default": []}
        elif not positional or "nargs" in more:
            more["default"] = f.default
        parser.add_argument(f.name if positional else f"--{f.name}", **more)
    if rare := rare_options(command):
        words = f"YAML file with values of these options, and of {', '.join(rare)}"
        parser.add_argument("--config", metavar="FILE", help=words)
    return parser


def rare_options(command: type[Any]) -> list[str]:
    """Options of a command that only the file of `--config` sets."""
    return [f.name for f in dataclasses.fields(command) if "rare" in f.metadata]


def parse(words: Sequence[str]) -> Command:
    """Parses the words of a command line into the options of their command; UserError for an unknown command or option (the
    closest is named) or a wrong value, SystemExit after `--help`."""
    if not words:
        raise UserError(f"no command was given; use one of {', '.join(COMMANDS)} (see omni-infer --help)")
    name, *rest = words
    if name in ("-h", "--help"):
        listed = (f"  {name:<9} {(command.__doc__ or '').partition(chr(10))[0]}" for name, command in COMMANDS.items())
        print(HELP.format(commands="\n".join(listed)))
        raise SystemExit(0)
    if name not in COMMANDS:
        raise UserError(f"command {name!r} is unknown; {closest(name, COMMANDS)}")
    asked: dict[str, Any] = {}
    if name == "ask":
        rest, files, texts, order = take_questions(rest, AskOptions)
        asked = {"files": files, "text": texts, "order": order} if order else {}
    named = {word.partition("=")[0][2:] for word in rest if is_option(word)} | asked.keys()
    if rare := sorted(named & {*rare_options(COMMANDS[name])}):
        raise UserError(f"--{rare[0]} is set in the file of --config; write {rare[0]}: VALUE there")
    values = command_parser(name).read(rest)
    file = values.pop("config", None)
    named |= {key for key, value in values.items() if value and key in ("files", "model", "out")}
    data = {} if file is None else read_yaml(Path(file), "--config")
    stored = {key: value for key, value in data.items() if key not in named}
    return validate(COMMANDS[name], {**values, **stored, **asked}, lambda path: f"{file}: " if path in stored else "--")


def take_questions(words: Sequence[str], command: type[Any]) -> tuple[list[str], tuple[str, ...], tuple[str, ...], str]:
    """Take files and texts out of a command's words, in their order, wherever they are among the options: parsers take a list
    of positionals in one piece only.

    Words after `--text`, up to the next option, are texts; but a word after the first that is the name of a file (or `-`) is
    that file, so that `--text "hello" q.wav` asks both. Returns the other words, the files, the texts, and the kind of each
    question in order, `s` or `t`."""
    flags = {f"--{name}" for name, hint in typing.get_type_hints(command).items() if hint is bool}
    known = {f"--{f.name}" for f in dataclasses.fields(command)} | {"-h", "--help", "--config"}
    rest: list[str] = []
    questions: list[tuple[str, str]] = []
    option, values = "", 0  # the option that the next words may belong to, and the number of words that did

    for at, word in enumerate(words):
        if word == "--":  # files whose names start with a dash
            questions += [(SOUND, name) for name in words[at + 1 :]]
            break
        if is_option(word):
            _close(option, values, rest)
            option, values = word, 0
            if word.startswith("--text="):
                questions.append((TEXT, word.removeprefix("--text=")))
                option = ""
            elif word != "--text":
                rest.append(word)
                takes_one = word in known and word not in flags
                option = word if takes_one else ""
        elif option == "--text" and not (values and (word == "-" or os.path.isfile(word))):
            questions.append((TEXT, word))
            values += 1
        elif option and option != "--text":
            rest.append(word)
            option = ""
        else:
            questions.append((SOUND, word))
    _close(option, values, rest)
    files = tuple(word for kind, word in questions if kind == SOUND)
    texts = tuple(word for kind, word in questions if kind == TEXT)
    return rest, files, texts, "".join(kind for kind, _ in questions)


def _close(option: str, values: int, rest: list[str]) -> None:
    """Passes a `--text` without a text on to the parser, which refuses it."""
    if option == "--text" and not values:
        rest.append(option)
