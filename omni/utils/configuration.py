"""Configurations as frozen dataclasses that pydantic checks, its errors in one line, and their files in YAML."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, Union

import pydantic.dataclasses
import yaml
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import dataclass_transform

from omni.errors import UserError
from omni.files import refuse_pointer
from omni.utils.arguments import meant

T = TypeVar("T")

Share = Annotated[float, Field(ge=0, le=1)]
"""A number from 0 to 1."""


def span(low: float = -math.inf, high: float = math.inf) -> AfterValidator:
    """A check of a pair, the lowest and the highest of a range, which lies between `low` and `high`; None passes."""

    limits = "" if low == -math.inf else f", at least {low:g}" if high == math.inf else f", from {low:g} to {high:g}"

    def check(pair: Any) -> Any:
        if pair is not None and not low <= pair[0] <= pair[1] <= high:
            raise ValueError(f"give the lowest and the highest{limits}")
        return pair

    return AfterValidator(check)


UNKNOWN = "unexpected_keyword_argument"  # pydantic's type of the error
OPTIONS = ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def configuration(section: type[T]) -> type[T]:
    """Makes a class a frozen dataclass whose values are checked wherever it is made; UserError for a wrong one, in one line."""
    made: Any = pydantic.dataclasses.dataclass(frozen=True, config=OPTIONS)(section)
    checked = made.__init__

    @functools.wraps(checked)
    def make(self: Any, *args: Any, **values: Any) -> None:
        try:
            checked(self, *args, **values)
        except ValidationError as error:
            data = {entry.name: value for entry, value in zip(dataclasses.fields(made), args, strict=False)} | values
            raise mistake(error, made, data, lambda path: f"{made.__name__}: ") from error

    made.__init__ = make
    return typing.cast(type[T], made)


def validate(config_type: type[T], data: Any, where: Callable[[str], str] = lambda path: "") -> T:
    """Makes a configuration from plain data. UserError: an unknown key (the closest is named), a missing one, or a wrong value.

    Args:
        where: what is printed before a dotted key in messages: `run.yaml: `, or `option --`.
    """
    if not hasattr(config_type, "__pydantic_config__"):  # a plug-in's dataclass
        config_type.__pydantic_config__ = OPTIONS  # type: ignore[attr-defined]
    try:
        return TypeAdapter(config_type).validate_python(data)
    except ValidationError as error:
        raise mistake(error, config_type, data, where) from error


def mistake(error: ValidationError, config_type: Any, data: Any, where: Callable[[str], str] = lambda path: "") -> UserError:
    """The first error in one line: key, value, what is allowed, the closest."""
    every = error.errors(include_url=False)  # keys that one type of several has not are none of the user's
    known = [each for each in every if each["type"] != UNKNOWN or len(_walk(data, each["loc"])[0]) == len(each["loc"])]
    problems = sorted(known or every, key=lambda problem: problem["type"] != UNKNOWN)
    first, (parts, value) = problems[0], _walk(data, problems[0]["loc"])
    path = ".".join(map(str, first["loc"] if first["type"] == "missing" else parts))
    if first["type"] == UNKNOWN:
        section, around = inner(hint_at(config_type, parts[:-1])), path.rpartition(".")
        beside = typing.get_type_hints(section) if dataclasses.is_dataclass(section) else {}
        names = [*(f"{around[0]}{around[1]}{name}" for name in beside), *all_keys(config_type)]
        mark = "--" if where(path).endswith("--") else ""
        what = f"unknown option --{path}" if mark else f"{where(path)}unknown key {path}"
        return UserError(f"{what}; {meant(path, names, mark) or 'leave it out'}")
    if first["type"] == "missing":
        return UserError(f"{where(path)}{path} is missing; give it")
    own = first.get("ctx", {}).get("error")
    if isinstance(own, UserError):
        in_list = any(isinstance(part, int) for part in parts)
        return UserError(f"{where(path)}{path}: {own}" if in_list else str(own))
    same = [problem for problem in problems if _walk(data, problem["loc"])[0] == parts]
    allowed = [_allowed(problem) for problem in same] + ["null"] * (type(None) in typing.get_args(hint_at(config_type, parts)))
    said = ", or ".join(dict.fromkeys(allowed))
    near = meant(str(value), [str(choice) for problem in same for choice in re.findall(r"'([^']+)'", problem["msg"])])
    return UserError(f"{where(path)}{path} is {value!r:.80}; {said if own else f'it must be {said}'}{near and f'; {near}'}")


def _allowed(problem: Any) -> str:
    """What pydantic takes instead of a value, in words of YAML."""
    text = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    text = re.sub(r", (unable|got) .*|a dictionary or an instance of .*|a valid dictionary", "", text) or "a mapping of keys"
    text = re.sub(r"(?:Tuple|List) should have (.*) after validation.*", r"a list of \1", text)
    for theirs, ours in (("valid integer", "whole number"), ("valid ", ""), ("tuple", "list"), ("a string", "a text")):
        text = text.replace(theirs, ours)
    return text


def _walk(data: Any, loc: Sequence[Any]) -> tuple[list[Any], Any]:
    """The part of an error's place that is in plain data (what follows are names of types), and the value there."""
    parts: list[Any] = []
    for part in loc:
        if part not in (data if isinstance(data, Mapping) else range(len(data)) if isinstance(data, (list, tuple)) else ()):
            break
        data = data[part]
        parts.append(part)
    return parts, data


def inner(hint: Any) -> Any:
    """`X` of `X | None`."""
    rest = [part for part in typing.get_args(hint) if part is not type(None)]
    return rest[0] if len(rest) == 1 and typing.get_origin(hint) in (Union, types.UnionType) else hint


def hint_at(config_type: Any, parts: Sequence[Any]) -> Any:
    """The type of the value at a path; None where the path leads out of the dataclasses."""
    hint: Any = config_type
    for part in parts:
        hint = inner(hint)
        entry = typing.get_args(hint)[0] if typing.get_origin(hint) in (tuple, list) else None
        hint = typing.get_type_hints(hint).get(part) if dataclasses.is_dataclass(hint) else entry
    return hint


def all_sections(config_type: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """A configuration and the sections in it, however deep, each with what is before its keys: `data.packing.`."""
    yield path, config_type
    for name, hint in typing.get_type_hints(config_type).items():
        if dataclasses.is_dataclass(inner(hint)):
            yield from all_sections(inner(hint), f"{path}{name}.")


def all_keys(config_type: Any) -> Iterator[str]:
    """Every dotted key that holds a value."""
    for path, section in all_sections(config_type):
        hints = typing.get_type_hints(section).items()
        yield from (f"{path}{name}" for name, hint in hints if not dataclasses.is_dataclass(inner(hint)))


def plain(config: Any) -> Any:
    """The configuration as plain data: mappings, lists, numbers and texts."""
    return TypeAdapter(type(config)).dump_python(config, mode="json")


# --- files in YAML ----------------------------------------------------------------------------------------------------


class Spelled(float):
    """A number with a point or exponent; its `str` is as it is written."""

    text = ""

    def __str__(self) -> str:
        return self.text


class Loader(yaml.SafeLoader):
    """Reads YAML 1.2 (PyYAML knows 1.1, to which `1:30` is 90 and `off` false): the core schema, but with `007` for a text. A
    mapping with a key that is there twice is refused, of which YAML's own loader keeps the last."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], Any] = {}
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            before = first.setdefault((key.tag, key.value), key)
            if before is not key:
                line, other = key.start_mark.line + 1, before.start_mark.line + 1
                raise UserError(f"line {line}: {key.value} is given again, after line {other}; keep one")
        return node

    def construct_yaml_float(self, node: yaml.ScalarNode) -> Spelled:
        """Keeps how a number is written, for where a text is wanted."""
        number = Spelled(super().construct_yaml_float(node))  # type: ignore[no-untyped-call]
        number.text = node.value
        return number


Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_yaml_float)
_WHOLE = r"(?:0|[1-9][0-9]*)"
for _tag, _pattern, _first in (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", rf"[-+]?{_WHOLE}", "-+0123456789"),
    ("float", rf"[-+]?(?:\.[0-9]+|{_WHOLE}(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?i:inf)|\.(?i:nan)", "-+.0123456789"),
    ("merge", "<<", "<"),
):
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), list(_first))


yaml.SafeDumper.add_representer(Spelled, yaml.SafeDumper.represent_float)


def read_yaml(file: Path, noun: str = "configuration") -> dict[str, Any]:
    """Reads a YAML file that holds a mapping, numbers with a point as `Spelled`; UserError where it is none, or a mapping has a
    key twice. `noun` names it in the message."""
    try:
        refuse_pointer(file)
        data = yaml.load(file.read_text(encoding="utf-8"), Loader)
        if not isinstance(data, dict | None):
            raise UserError(f"holds {type(data).__name__}; it must be a mapping of keys")
        return data or {}
    except UserError as error:
        raise UserError(f"{noun} {file} {error}") from None
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{noun} {file} cannot be read ({' '.join(str(error).split())}); give a YAML file") from error
