"""Reads a YAML file and dotted overrides into a typed configuration; every error is one line."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from argparse import SUPPRESS
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

import yaml

from omni.errors import UserError
from omni.plugins import load_plugins, loaded
from omni.utils.arguments import meant
from train.config.run import FitConfig
from train.console.command import GIVE, RECIPES, Parser, find_config, load_yaml, read_config
from train.data.config import SourceConfig
from train.data.sources import SOURCES, find_source, shipped


def read_fit_config(argv: Sequence[str]) -> tuple[FitConfig, str]:
    """Reads the configuration of `fit` from `[--config] FILE.yaml` and overrides such as `--optimizer.lr 3e-4`; returns it
    with the name of its file. UserError for no file, an unknown key (the closest is named), a value of the wrong type."""
    config, name, _ = read_with_options(argv, {})
    return config, name


def read_with_options(
    argv: Sequence[str],
    options: Mapping[str, type],
    check: Callable[[dict[str, Any]], None] | None = None,
    command: str = "fit",
) -> tuple[FitConfig, str, dict[str, Any]]:
    """Reads as `read_fit_config`, and a command's own options by their types (`bool` for a flag); those given are returned.
    `check` refuses values of theirs, before the configuration is made, for which PyTorch may be imported."""
    parser = fit_parser(command)
    for name, option_type in options.items():
        more: dict[str, Any] = {"action": "store_true"} if option_type is bool else {"type": option_type}
        parser.add_argument(f"--{name}", help=SUPPRESS, **more)  # else --print_config has them
    if not argv:
        raise UserError(f"no configuration is given: {GIVE}")
    values = parser.read(file_first(argv))
    chosen = {name: values[name] for name in options if values[name] is not None and values[name] is not False}
    if check is not None:
        check(chosen)
    config = parser.configuration(values)
    config.check_head()
    return config, parser.file.stem if parser.file else "run", chosen


def _load_plugins(data: dict[str, Any], file: Path) -> None:
    """Loads the plug-ins that a file names under `plugins`, before its other keys are read; paths there start at the file, and
    those that are not there at the recipes, for copies of these."""
    names = data.get("plugins") or ()
    if not isinstance(names, (list, tuple)):
        raise UserError(f"{file}: plugins is {names!r}; it must be a list of modules' names")
    if names:
        beside = {n: RECIPES / n for n in map(str, names) if n.startswith("./") and not (file.parent / n).exists()}
        names = [str(beside[n]) if n in beside and beside[n].exists() else n for n in map(str, names)]
        load_plugins(names, f"{file}: plugins:", file.parent)
        data["plugins"] = _own_plugins()


def _own_plugins() -> list[str]:
    """Names of the plug-ins of this process, by `--plugin` too, without those that ship with the package."""
    return [name for name in loaded() if name not in shipped()]


def read_run(argv: Sequence[str]) -> FitConfig:
    """Reads as `read_fit_config`, and sets the run's folder: `runs/` and the file's name where none is given."""
    return in_folder(*read_fit_config(argv))


def in_folder(config: FitConfig, name: str) -> FitConfig:
    """The configuration with the run's folder: `runs/` and the name where none is given."""
    return config if config.run_folder else dataclasses.replace(config, run_folder=str(Path("runs") / name))


def recipe(source: str | Path, /, **changes: Any) -> FitConfig:
    """Reads a recipe (`nano`) or a YAML file, with changes: sections as mappings (other keys stay), or values by dotted keys.

        recipe("nano", budget={"steps": 100}, **{"data.workers": 2})

    Raises:
        UserError: as of `read_fit_config`.
    """
    try:
        words = {key: value if isinstance(value, str) else json.dumps(value) for key, value in changes.items()}
    except TypeError as error:
        raise UserError(f"recipe: a change is no plain data ({error}); give numbers, texts, lists and mappings") from error
    return read_run([str(source), *(f"--{key}={value}" for key, value in words.items())])


def fit_parser(command: str = "fit") -> ConfigParser:
    """The parser of a command that takes a run's configuration: one option for every key of `FitConfig`."""
    parser = ConfigParser(
        prog=f"omni-train {command} FILE.yaml",
        description="Train a model. Every key of the file can be overridden. --dry_run checks everything, describes the model "
        "and one batch, and measures two steps; --profile 10:15 traces these steps; --debug shows where an error came from "
        "(docs/training.md).",
    )
    parser.add_config(FitConfig, "the YAML file (also as the first argument)")
    if named := _own_plugins():  # so that --print_config names them
        parser.set_defaults({"plugins": named})
    parser.may_be_empty = False
    return parser


def file_first(argv: Sequence[str]) -> list[str]:
    """The words of a command whose configuration may be given as the first of them, with `--config` before it."""
    return ["--config", *argv] if argv and not argv[0].startswith("-") else list(argv)


@dataclasses.dataclass(frozen=True)
class NoKeys:
    """The configuration of a command without one."""


class ConfigParser(Parser):
    """Parses the words of a command that has a configuration: a YAML file after `--config`, and dotted overrides."""

    config_class: Any = NoKeys
    file: Path | None = None

    def add_config(self, config_class: type, help: str = "YAML file with any of the following", **more: Any) -> None:
        """Adds `--config`, and an option for every key of a dataclass."""
        self.config_class = config_class
        self.add_argument("--config", action="config", help=help)
        self.add_class_arguments(config_class, None, **more)

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """Values by name; UserError also for a key of the file that is unknown, or there twice."""
        file, words = _take_file(words)
        if file is not None:
            self.file, self.source = file, f"{file} or "
            data = dict(read_config(file))
            if "plugins" in typing.get_type_hints(self.config_class):
                _load_plugins(data, file)
                self.epilog = "\n".join(
                    f"options of the source {source}: {', '.join(field.name for field in dataclasses.fields(options))}."
                    for source, options in SOURCES.items()
                    if dataclasses.fields(options)
                )
            words, numbered = _numbered(words)
            for path, value in numbered:
                _set(data, path, value, file)
            self._check_keys(self.config_class, data, str(file))
            words = [f"--config={yaml.safe_dump(data, default_style=chr(34))}", *words]
        return super().read(words)

    def configuration(self, values: Mapping[str, Any]) -> Any:
        """The configuration among the values that were read."""
        return self.config_class(**{field.name: values[field.name] for field in dataclasses.fields(self.config_class)})

    @property
    def options(self) -> list[str]:
        return [*super().options, *all_keys(self.config_class)]

    def check_option(self, name: str, value: str | None, inner: bool = False) -> None:
        path = name[2:].partition(".help")[0].rstrip("+")
        own = name in self._option_string_actions and path.partition(".")[0] not in typing.get_type_hints(self.config_class)
        if own or not name.startswith("--"):
            return super().check_option(name, value)
        hint, action = self._type_of(path), self._option_string_actions.get(name)
        super().check_option(name, value, inner=True)
        if value is not None and (action is None or action.nargs != 0):
            self._check_keys(hint, _plain(value), f"option {name}", path)

    def _check_keys(self, hint: Any, data: Any, where: str, path: str = "") -> None:
        """Refuses keys of plain data that a dataclass does not have, and sections without keys, however deep."""
        optional, hint = hint, _inner(hint)
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if dataclasses.is_dataclass(hint):
            hints = typing.get_type_hints(hint)
            if data is None and optional is hint:
                raise UserError(f"{where}: {path} is empty: give keys of it, or leave it out for what it is by default")
            if data is not None and not isinstance(data, Mapping):
                first = next(iter(hints), "none")
                raise UserError(f"{where}: {path} is {data!r}; give it keys, such as {path}.{first}: {', '.join(hints)}")
            data = data or {}
            if hint is SourceConfig:
                hints["options"] = find_source(str(data.get("kind", "stored")), f"{where}: {_dotted(path, 'kind')}")
            for key in data:
                if key not in hints:
                    raise UserError(f"{where}: unknown key {_dotted(path, key)}; {self._hint(path, str(key), hint)}")
                self._check_keys(hints[key], _as_text(hints[key], data, key), where, _dotted(path, key))
        elif origin in (tuple, list) and isinstance(data, Sequence) and not isinstance(data, str) and args:
            for i, value in enumerate(data):
                self._check_keys(args[0], value, where, f"{path}[{i}]")
        elif origin is dict and isinstance(data, Mapping):
            for key, value in data.items():
                _as_text(args[1], data, key)
                self._check_keys(args[1], value, where, _dotted(path, key))
        elif (wanted := _wanted(optional)) is not None and not _fits(optional, data):
            location = where if where.endswith(path) else f"{where}: {path}"
            raise UserError(f"{location} is {data!r:.80}; give {wanted}")

    def _type_of(self, path: str) -> Any:
        """Type of the value at a dotted key, None where any is allowed; UserError where there is no such key."""
        here: Any = self.config_class
        for part in path.split("."):
            here = _inner(here)
            if not dataclasses.is_dataclass(here):
                return None  # below the typed keys: those of a mapping, which the parser checks
            hints = typing.get_type_hints(here)
            if part not in hints:
                around, key = path.rpartition(".")[::2]
                raise UserError(f"unknown option --{path}; {self._hint(around, key, here, '--')}")
            here = hints[part]
        return here

    def _hint(self, path: str, key: str, config_class: Any, mark: str = "") -> str:
        """Suggests what was meant by a key that a dataclass does not have; `mark` is printed before it."""
        beside = [_dotted(path, name) for name in typing.get_type_hints(config_class)]
        known = self.options if mark else all_keys(self.config_class)
        return meant(_dotted(path, key), [*beside, *known], mark) or f"see {self.command} --help"


def all_keys(config_class: Any, path: str = "") -> Iterator[str]:
    """Every dotted key of a dataclass that holds a value, however deep."""
    for name, hint in typing.get_type_hints(config_class).items():
        inner = _inner(hint)
        if dataclasses.is_dataclass(inner):
            yield from all_keys(inner, _dotted(path, name))
        else:
            yield _dotted(path, name)


def _take_file(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Separates the file after `--config` from the other words; UserError where there are two."""
    files: list[str] = []
    rest: list[str] = []
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if name == "--config":
            files.append(value if equals else next(left, ""))
        else:
            rest.append(word)
    if "" in files:
        raise UserError(f"the configuration's name is empty; {GIVE}")
    if len(files) > 1:
        raise UserError(f"the configurations {' and '.join(files)} are both given; name one")
    return find_config(files[0]) if files else None, rest


def _numbered(words: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Separates overrides that reach into a list (`--data.sources.0.weight 2`), the second result, from the other words."""
    rest, numbered = [], []
    left = iter(words)
    for word in left:
        path, equals, value = word[2:].partition("=")
        if word.startswith("--") and any(part.isdigit() for part in path.split(".")):
            numbered.append((path, value if equals else next(left, "")))
        else:
            rest.append(word)
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
        key: Any = int(part) if isinstance(here, list) else part
        if i == len(way):
            here[key] = _plain(value)
        else:
            here = here[key] if isinstance(here, list) else here.setdefault(key, {})


def _plain(text: str) -> Any:
    """The value of a word as YAML, or the word itself where it is none."""
    try:
        return load_yaml(text)
    except yaml.YAMLError:
        return text


def _wanted(hint: Any) -> str | None:
    """What a value of a plain type is, for messages; None for a type that is left to the parser."""
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        parts = [_wanted(part) for part in args]
        return None if None in parts else ", or ".join(part for part in parts if part)
    if origin is Literal:
        return ", ".join(map(str, args[:-1])) + f" or {args[-1]}" if len(args) > 1 else str(args[0])
    if origin in (tuple, list):
        sorts = {float: ", such as [0.9, 0.95]", str: ", such as ['name']"}
        return f"a list{sorts.get(args[0], '') if args else ''}"
    return plain.get(hint)


def _fits(hint: Any, value: Any) -> bool:
    """Whether a plain value, or a text that the parser turns into one, has a type that `_wanted` names."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(part, value) for part in args)
    if origin is Literal:
        return value in args
    if origin in (tuple, list):
        return isinstance(value, (list, tuple))
    if hint is float:
        return not isinstance(value, bool) and _is_number(value)
    if hint is str:
        return not isinstance(value, (list, dict))
    return type(value) is hint


def _as_text(hint: Any, data: Any, key: Any) -> Any:
    """The value of a key; where a text is wanted, a number becomes one as it is written."""
    if _inner(hint) is str and isinstance(data[key], int | float) and not isinstance(data[key], bool):
        data[key] = str(data[key])
    return data[key]


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) or math.isfinite(float(value))  # YAML takes 3e-4 for a text
    except (TypeError, ValueError):
        return False


def _inner(hint: Any) -> Any:
    """`X | None` without the None."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        rest = [a for a in typing.get_args(hint) if a is not type(None)]
        return rest[0] if len(rest) == 1 else hint
    return hint


def _dotted(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
