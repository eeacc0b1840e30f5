"""Reads a YAML file and dotted overrides into a typed configuration; every error is one line."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Union

import jsonargparse
import yaml

from omni import old_names
from omni.errors import UserError
from omni.plugins import load_plugins
from train.config.run import FitConfig
from train.console.command import GIVE, find_config, read_config
from train.data.config import DataConfig


def read_fit_config(argv: Sequence[str]) -> tuple[FitConfig, str]:
    """Reads the configuration of `fit`; returns it with the name of its file (without folder and ending).

    Args:
        argv: `[--config] FILE.yaml` and overrides such as `--optimizer.lr 3e-4`.

    Raises:
        UserError: no file, an unknown key (the closest is named), a value of the wrong type.
        SystemExit: after `--help` or `--print_config`.
    """
    file, overrides = _split(argv)
    if file is None and not overrides:
        raise UserError(f"no configuration is given: {GIVE}")
    source = str(file)
    if file is not None:
        data = read_config(file)
        _load_plugins(data, file)
        overrides, numbered = _numbered(overrides)
        for path, value in numbered:
            _set(data, path, value, file)
        if numbered:
            source = yaml.safe_dump(data)
        check_keys(FitConfig, data, str(file))
    for argument, after in zip(overrides, [*overrides, None][1:], strict=True):
        if argument.startswith("--") and argument.split("=")[0].split(".help")[0] not in _OPTIONS:
            name, equals, value = argument[2:].partition("=")
            section = check_option(FitConfig, argument, after)
            if dataclasses.is_dataclass(section):
                given = yaml.safe_load(value if equals else after or "")
                if given is not None and not isinstance(given, Mapping):
                    raise UserError(f"option --{_no_section(section, name, given)}")
    arguments = ([f"--config={source}"] if file is not None else []) + overrides
    parser = fit_parser()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            parsed = parser.parse_args(arguments)
            parsed.pop("config", None)
            check_whole(FitConfig, parsed.as_dict())
            config = FitConfig(**vars(parser.instantiate(parsed)))
        except jsonargparse.ArgumentError as error:
            raise UserError(_one_line(error, file, overrides)) from error
        except ValueError as error:  # an optional section: the parser reports both alternatives
            ours = _ours(error)
            if ours is None:
                raise
            raise UserError(str(ours)) from error
    config.check_head()
    return config, file.stem if file is not None else "run"


def _load_plugins(data: Mapping[str, Any], file: Path) -> None:
    """Loads the plug-ins that a file names under `plugins`, before its other keys are read."""
    names = data.get("plugins") or ()
    if not isinstance(names, (list, tuple)):
        raise UserError(f"{file}: plugins is {names!r}; it must be a list of modules' names")
    load_plugins(names, f"{file}: plugins:")


_OPTIONS = ("--help", "-h", "--print_config", "--config")


def read_run(argv: Sequence[str]) -> FitConfig:
    """Reads as `read_fit_config`, and sets the run's folder: `runs/` and the file's name where none is given."""
    config, name = read_fit_config(argv)
    return config if config.run_folder else dataclasses.replace(config, run_folder=str(Path("runs") / name))


def recipe(source: str | Path, /, **changes: Any) -> FitConfig:
    """Reads a recipe (`nano`) or a YAML file, with changes: sections as mappings (other keys stay), or values by dotted keys.

        recipe("nano", budget={"steps": 100}, **{"data.workers": 2})

    Raises:
        UserError: as of `read_fit_config`.
    """
    words = {key: value if isinstance(value, str) else json.dumps(value) for key, value in changes.items()}
    return read_run([str(source), *(f"--{key}={value}" for key, value in words.items())])


def fit_parser() -> jsonargparse.ArgumentParser:
    """The parser of `fit`: one option for every key of `FitConfig`."""
    parser = jsonargparse.ArgumentParser(
        prog="omni-train fit FILE.yaml",
        description="Train a model. Every key of the file can be overridden; --dry_run builds the model and one batch only.",
        exit_on_error=False,
        default_env=False,
    )
    parser.add_argument("--config", action="config", help="the YAML file (also as the first argument)")
    parser.add_class_arguments(FitConfig, None)
    printable(parser)
    return parser


def printable(parser: jsonargparse.ArgumentParser) -> None:
    """Makes the default of `data.sources`, where there is such an option, plain data, which `--print_config` can write."""
    if parser.get_defaults().get("data.sources") is not None:
        parser.set_defaults({"data.sources": [dataclasses.asdict(source) for source in DataConfig().sources]})


def _split(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Splits arguments into the configuration file, given first or with `--config`, and the others."""
    rest = list(argv)
    file: str | None = None
    if rest and not rest[0].startswith("-"):
        file = rest.pop(0)
    for i, argument in enumerate(rest):
        if argument == "--config" and i + 1 < len(rest):
            file = rest[i + 1]
            del rest[i : i + 2]
            break
        if argument.startswith("--config="):
            file = argument.partition("=")[2]
            del rest[i]
            break
    if file == "":
        raise UserError(f"the configuration's name is empty; {GIVE}")
    extra = next((a for i, a in enumerate(rest) if not a.startswith("-") and (i == 0 or not _takes(rest[i - 1]))), None)
    if extra is not None:
        raise UserError(
            f"argument {extra!r} belongs to no option; overrides are written --key value, such as --optimizer.lr 3e-4"
        )
    return find_config(file) if file is not None else None, rest


def _numbered(overrides: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Separates overrides that reach into a list (`--data.sources.0.weight 2`), the second result, from the others."""
    rest, numbered = [], []
    arguments = iter(overrides)
    for argument in arguments:
        path, equals, value = argument[2:].partition("=")
        if argument.startswith("--") and any(part.isdigit() for part in path.split(".")):
            numbered.append((path, value if equals else next(arguments, "")))
        else:
            rest.append(argument)
    return rest, numbered


def _set(data: Any, path: str, value: str, file: Path) -> None:
    """Sets a dotted key of plain data; numbers in it are places in lists, and missing mappings are made."""
    *way, last = path.split(".")
    here = data
    for i, part in enumerate([*way, last]):
        if isinstance(here, list):
            if not (part.isdigit() and int(part) < len(here)):
                where = ".".join(path.split(".")[:i])
                raise UserError(f"option --{path}: {where} of {file} has {len(here)} entries, counted from 0; {part} is none")
        elif not isinstance(here, dict):
            raise UserError(f"option --{path}: {'.'.join(path.split('.')[:i])} of {file} is {here!r}; it holds no {part}")
        place: Any = int(part) if isinstance(here, list) else part
        if i == len(way):
            here[place] = yaml.safe_load(value)
        else:
            here = here[place] if isinstance(here, list) else here.setdefault(place, {})


def _takes(argument: str) -> bool:
    """True where the next argument can be this one's value."""
    return argument.startswith("--") and "=" not in argument


# --- keys -------------------------------------------------------------------------------------------------------------


def check_keys(kind: Any, data: Any, where: str, path: str = "") -> None:
    """Refuse keys of plain data that a dataclass does not have, however deep."""
    kind = _inner(kind)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and data is not None and not isinstance(data, Mapping):
        raise UserError(f"{where}: {_no_section(kind, path, data)}")
    if dataclasses.is_dataclass(kind) and isinstance(data, Mapping):
        hints = typing.get_type_hints(kind)
        for key, value in data.items():
            if key not in hints:
                raise UserError(f"{where}: unknown key {_dotted(path, key)}; {_hint(path, key, kind)}")
            check_keys(hints[key], value, where, _dotted(path, key))
    elif origin in (tuple, list) and isinstance(data, Sequence) and not isinstance(data, str) and args:
        for i, value in enumerate(data):
            check_keys(args[0], value, where, f"{path}[{i}]")
    elif origin is dict and isinstance(data, Mapping):
        for key, value in data.items():
            check_keys(args[1], value, where, _dotted(path, key))


def _no_section(kind: Any, path: str, value: Any) -> str:
    """The message for a value where a section's keys belong."""
    names = list(typing.get_type_hints(kind))
    return f"{path} is {value!r}; give it keys, such as {path}.{names[0]}: {', '.join(names)}"


def check_whole(kind: Any, data: Any, path: str = "") -> None:
    """Refuse parts without any key (`validation:` with nothing below it), where a part cannot be absent."""
    if dataclasses.is_dataclass(kind) and data is None:
        raise UserError(f"{path} is empty: give keys of it, or leave it out for what it is by default")
    if dataclasses.is_dataclass(kind) and isinstance(data, Mapping):
        for key, hint in typing.get_type_hints(kind).items():
            check_whole(hint, data.get(key, ...), _dotted(path, key))


def check_path(kind: Any, path: str) -> Any:
    """Refuses an override whose dotted key does not exist; returns the type of its value, None where any is allowed."""
    here, names = kind, path.split(".")
    for i, part in enumerate(names):
        here = _inner(here)
        if not dataclasses.is_dataclass(here):
            return None  # below the typed keys: those of a mapping, which the parser checks
        hints = typing.get_type_hints(here)
        part = part.rstrip("+")
        if part not in hints:
            around, key = path.rpartition(".")[::2]
            if old_names.new_key(here, part) != part:
                around, key = ".".join(names[:i]), part
            raise UserError(f"unknown option --{path}; {_hint(around, key, here, '--')}")
        here = hints[part]
    return _inner(here)


def check_option(kind: Any, word: str, after: str | None) -> Any:
    """Refuses an override whose dotted key does not exist, or whose value is empty, and returns as `check_path` does.

    Args:
        after: the next word, its value unless that follows an equals sign; None for none.
    """
    name, equals, value = word[2:].partition("=")
    if (value if equals else after) == "":
        raise UserError(f"option --{name} is empty; give a value, or leave it out")
    return check_path(kind, name.split(".help")[0])


def _inner(kind: Any) -> Any:
    """`X | None` without the None."""
    if typing.get_origin(kind) in (Union, types.UnionType):
        rest = [a for a in typing.get_args(kind) if a is not type(None)]
        return rest[0] if len(rest) == 1 else kind
    return kind


def _dotted(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _hint(path: str, key: str, kind: Any, mark: str = "") -> str:
    """Suggests what was meant by a key that a dataclass does not have: its new name, one beside it, or one elsewhere; `mark` is
    printed before it."""
    if (new := old_names.new_key(kind, key)) != key:
        return f"it is now called {mark}{_dotted(path, new)}: give that instead"
    near = [_dotted(path, name) for name in get_close_matches(str(key), list(typing.get_type_hints(kind)), n=2, cutoff=0.7)]
    known = list(all_keys(FitConfig))
    same = [name for name in known if name.rsplit(".", 1)[-1] == key]
    close = near or same or get_close_matches(_dotted(path, key), known, n=2, cutoff=0.5)
    return f"did you mean {' or '.join(mark + name for name in close[:2])}?" if close else "see omni-train fit --help"


def all_keys(kind: Any, path: str = "") -> Iterator[str]:
    """Every dotted key of a dataclass that holds a value, however deep."""
    for name, hint in typing.get_type_hints(kind).items():
        inner = _inner(hint)
        if dataclasses.is_dataclass(inner):
            yield from all_keys(inner, _dotted(path, name))
        else:
            yield _dotted(path, name)


def _ours(error: BaseException) -> UserError | None:
    """The UserError of a section's own checks that caused the parser's error; None where there is none."""
    here: BaseException | None = error
    while here is not None and not isinstance(here, UserError):
        here = here.__cause__ or here.__context__
    return here


_PLAIN = (
    (r"Expected an? <class 'dict'>", "expected a mapping of keys"),
    (r"Expected an? <class '(tuple|list)'>", "expected a list"),
    (r"Expected an? <class 'float'>", "expected a number"),
    (r"Expected an? <class 'int'>", "expected a whole number"),
    (r"Expected an? <class 'bool'>", "expected true or false"),
    (r"Expected an? <class 'str'>", "expected a text"),
    (r"Expected an? typing\.Literal\[(.*?)\]", r"expected one of \1"),
    (r'Parser key "([^"]*)":', r"\1:"),
    (r"\. Got value: ", ", got "),
    (r"Does not validate against any of the Union .*? Errors: - (expected [\w ]+) - Expected .* value: ", r"\1, got "),
    (r"Does not validate against any of the Union .*?(Problem with .*?)( - Expected.*)?$", r"\1"),
    (r": Problem with given class_path '[\w.]+': (\w+): ", r".\1: "),
)
"""Patterns of the parser's messages, and their replacements."""


def _one_line(error: BaseException, file: Path | None, overrides: Sequence[str]) -> str:
    """The parser's error as one line, which names the option where the value was given by one."""
    text = " ".join(str(error).split())
    for pattern, replacement in _PLAIN:
        text = re.sub(pattern, replacement, text)
    key = re.match(r"[\w.]+(?=: )", text)
    if key is not None and any(word.split("=")[0].rstrip("+") == f"--{key[0]}" for word in overrides):
        return f"option --{text}"
    return f"{file}: {text}" if file is not None else text
