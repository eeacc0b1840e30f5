"""Reads a YAML file and dotted overrides into a typed configuration; every error is one line."""

from __future__ import annotations

import dataclasses
import json
import typing
from argparse import SUPPRESS, Action, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import docstring_parser
import yaml

from omni.errors import UserError
from omni.plugins import load_plugins, loaded
from omni.utils.arguments import Parser
from omni.utils.configuration import Loader, all_keys, all_sections, hint_at, inner, plain, validate
from train.config.run import FitConfig
from train.console.command import GIVE, RECIPES, find_config, read_config
from train.data.sources import SOURCES, shipped


def read_fit_config(argv: Sequence[str]) -> tuple[FitConfig, str]:
    """Reads the configuration of `fit` from `[--config] FILE.yaml` and overrides such as `--optimizer.lr 3e-4`; returns it
    with the name of its file. UserError for no file, an unknown key (the closest is named), a value of the wrong type."""
    return read_with_options(argv, {})[:2]


def read_with_options(
    argv: Sequence[str],
    options: Mapping[str, type],
    check: Callable[[dict[str, Any]], None] | None = None,
    command: str = "fit",
) -> tuple[FitConfig, str, dict[str, Any]]:
    """Reads as `read_fit_config`, and a command's own options by their types (`bool` for a flag); those given are returned.
    `check` refuses values of theirs, before the configuration is made, for which PyTorch may be imported."""
    parser = ConfigParser(
        prog=f"omni-train {command}",
        usage=f"omni-train {command} FILE.yaml [--any.key VALUE ...]",
        description="Train a model. Every key of the file can be overridden. --dry_run checks everything, describes the model "
        "and one batch, and measures two steps; --profile 10:15 traces these steps; --debug shows where an error came from "
        "(docs/training.md).",
    )
    parser.add_config(FitConfig, "the YAML file (also as the first argument)")
    for name, option_type in options.items():
        more: dict[str, Any] = {"action": "store_true"} if option_type is bool else {"type": option_type}
        parser.add_argument(f"--{name}", help=SUPPRESS, **more)
    if not argv:
        raise UserError(f"no configuration is given: {GIVE}")
    values = parser.read(file_first(argv))
    chosen = {name: values[name] for name in options if values[name] is not None and values[name] is not False}
    if check is not None:
        check(chosen)
    config = parser.configuration()
    config.check_head()
    return config, parser.file.stem if parser.file else "run", chosen


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


def file_first(argv: Sequence[str]) -> list[str]:
    """The words of a command whose configuration may be given as the first of them, with `--config` before it."""
    return ["--config", *argv] if argv and not argv[0].startswith("-") else list(argv)


class ReadFile(Action):
    """Has the file of a configuration read."""

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        parser.read_file(values)


class ConfigParser(Parser):
    """The parser of a command with a configuration: a YAML file after `--config`, and options for its dotted keys, whose values
    pydantic checks."""

    file: Path | None = None

    def add_config(self, config_class: type, help: str = "YAML file with any of the following") -> None:
        """Adds `--config`, and takes options for the keys of a configuration."""
        self.config_class: Any = config_class
        self.data, self.overridden = dict[str, Any](), set[str]()
        self.add_argument("--config", action=ReadFile, help=help)
        self.add_argument("--print_config", action="store_true", help="print the complete configuration and exit")
        self.set_defaults(keys=[])

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """Values of the command's own options, by name; the configuration is made by `configuration`."""
        if "-h" in words or "--help" in words:
            self._show_keys()
        values = super().read(self._with_keys(words))
        for path, value in values.pop("keys"):
            self._set(path, value)
        if values["print_config"]:
            print(yaml.safe_dump(_keep_given(plain(self.configuration()), self.data), sort_keys=False), end="")
            self.exit()
        return values

    def configuration(self) -> Any:
        """The configuration that was read; UserError for what is wrong with it."""
        return validate(self.config_class, self.data, self._where)

    def _where(self, path: str) -> str:
        """The option or the file that gave a key, before its name in a message."""
        by_option = any(path == key or path.startswith(f"{key}.") for key in self.overridden)
        return "option --" if by_option else f"{self.file}: " if self.file else "--"

    @property
    def options(self) -> list[str]:
        return [*super().options, *all_keys(self.config_class)]

    def _with_keys(self, words: Sequence[str]) -> list[str]:
        """Adds an option for each key that the words name, places in lists and free keys of mappings included; returns the
        words, with the value of a flag that is given without one, and of an empty text."""
        whole, sections = list(words), typing.get_type_hints(self.config_class)
        for at, (word, after) in enumerate(pairwise([*words, ""])):
            name, equals, _ = word.partition("=")
            path = name.removeprefix("--")
            if path == name or path.partition(".")[0] not in sections:
                continue
            if name not in self.actions:
                self.add_argument(name, dest="keys", action="append", type=lambda text, path=path: (path, text), help=SUPPRESS)
            hint = hint_at(self.config_class, path.split("."))
            if hint is bool and not equals and after not in ("true", "false"):
                whole[at] = f"{name}=true"
            elif hint is str and word == f"{name}=":
                whole[at] = f'{name}=""'
        return whole

    def _show_keys(self) -> None:
        """Adds all keys to the help, section by section."""
        self.usage = self.usage or f"{self.format_usage()[7:].rstrip()}\n{' ' * 7}[--any.key VALUE ...]"
        for path, section in all_sections(self.config_class):
            documented, hints = docstring_parser.parse_from_object(section), typing.get_type_hints(section)
            params = [each for base in section.__mro__[-2::-1] for each in docstring_parser.parse_from_object(base).params]
            texts = {name: param.description for param in params for name in param.arg_name.split(", ")}
            group = self.add_argument_group(path.removesuffix(".") or "keys", documented.short_description)
            for field in dataclasses.fields(section):
                hint, default, text = inner(hints[field.name]), field.default, texts.get(field.name) or ""
                if dataclasses.is_dataclass(hint):
                    continue
                if default not in (dataclasses.MISSING, None, "", ()):
                    text += f" (default: {default})"
                hint = Literal["true", "false"] if hint is bool else hint
                choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else None
                more: dict[str, Any] = {} if choices else {"metavar": field.name.upper()}
                more |= {"choices": choices, "default": SUPPRESS, "help": text.replace("%", "%%")}
                group.add_argument(f"--{path}{field.name}", **more)

    def read_file(self, name: str) -> None:
        """Reads the file of the configuration, and loads its plug-ins."""
        file = find_config(name)
        if self.file is not None:
            raise UserError(f"the configurations {self.file} and {name} are both given; name one")
        self.file, self.data = file, read_config(file)
        if "plugins" in typing.get_type_hints(self.config_class):
            self.epilog = _load_plugins(self.data, file)

    def _set(self, path: str, text: str) -> None:
        """Sets a dotted key, in which numbers are places in lists. A section keeps the keys that a mapping does not have."""
        value: Any = text
        with suppress(yaml.YAMLError):
            value = yaml.load(text, Loader)
        parts = [int(part) if part.isdigit() else part for part in path.split(".")]
        if isinstance(value, Mapping) and dataclasses.is_dataclass(inner(hint_at(self.config_class, parts))):
            for key, content in value.items():
                self._set(f"{path}.{key}", json.dumps(content))
            return
        here: Any = self.data
        for at, part in enumerate(parts, 1):
            if isinstance(here, list) and not (isinstance(part, int) and part < len(here)):
                way = f"{'.'.join(map(str, parts[: at - 1]))} of {self.file}"
                raise UserError(f"option --{path}: {way} has {len(here)} entries, counted from 0; {part} is none")
            if not isinstance(here, list):
                here.setdefault(part, None)
            if at == len(parts) or not isinstance(here[part], (dict, list)):
                here[part] = value if at == len(parts) else {}
            here = here[part]
        self.overridden.add(path)


def _keep_given(complete: Any, source: Any) -> Any:
    """The complete configuration with the texts and numbers that were given, where reading decided them (`auto`)."""
    if isinstance(complete, dict) and isinstance(source, Mapping):
        return {key: _keep_given(value, source.get(key, value)) for key, value in complete.items()}
    return complete if isinstance(complete, list) or source is None else source


def _load_plugins(data: dict[str, Any], file: Path) -> str:
    """Loads the plug-ins that a file names under `plugins`, before its other keys are read; paths there start at the file, and
    those that are not there at the recipes, for copies of these. Returns words for the help, of the options of sources."""
    names = data.get("plugins") or ()
    if not isinstance(names, (list, tuple)):
        raise UserError(f"{file}: plugins is {names!r}; it must be a list of modules' names")
    if names:
        beside = {n: RECIPES / n for n in map(str, names) if n.startswith("./") and not (file.parent / n).exists()}
        names = [str(beside[n]) if n in beside and beside[n].exists() else n for n in map(str, names)]
        load_plugins(names, f"{file}: plugins:", file.parent)
    own = [name for name in loaded() if name not in shipped()]  # by `--plugin` too
    if names or own:
        data["plugins"] = own
    options = {name: ", ".join(field.name for field in dataclasses.fields(section)) for name, section in SOURCES.items()}
    return "\n".join(f"options of the source {name}: {names}." for name, names in options.items() if names)
