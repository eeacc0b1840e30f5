"""Ranges of a configuration's numbers, declared with its fields."""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any, Literal

from omni.errors import UserError, closest

Limits = tuple[float | None, float | None, float | None, float | None]


def ranged(
    default: Any,
    least: float | None = None,
    most: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
    way: str = "",
) -> Any:
    """A field whose number, or pair of a lowest and a highest, lies in a range where it is not None.

    Args:
        way: the error's advice after the range, such as `, or null for none`.
    """
    return field(default=default, metadata={"range": (least, above, most, below), "way": way})


def check_fields(config: Any, section: str = "") -> None:
    """Refuses (UserError) a dataclass with a number out of its field's range, or a text that is none of its choices.

    Args:
        section: dotted key of the dataclass in its configuration.
    """
    config_type: Any = type(config)
    choices = _choices(config_type)
    for entry in fields(config):
        value, key = getattr(config, entry.name), f"{section}.{entry.name}".removeprefix(".")
        if value is not None and value not in choices.get(entry.name, (value,)):
            raise UserError(f"{key} {value!r} is unknown; {closest(value, choices[entry.name])}")
        if value is None or "range" not in entry.metadata:
            continue
        pair = value if isinstance(value, (tuple, list)) else (value, value)
        if len(pair) != 2 or not pair[0] <= pair[1] or not all(_inside(number, *entry.metadata["range"]) for number in pair):
            said = f"{pair[0]} to {pair[-1]}; lowest and highest" if pair is value else f"{value}; it"
            raise UserError(f"{key} is {said} must be {_words(entry.metadata['range'])}{entry.metadata['way']}")


def _inside(value: float, least: float | None, above: float | None, most: float | None, below: float | None) -> bool:
    within = (least is None or value >= least) and (most is None or value <= most)
    return within and (above is None or value > above) and (below is None or value < below)


def _words(limits: Limits) -> str:
    """`at least 1 and below 5`."""
    named = [(name, x) for name, x in zip(("at least", "above", "at most", "below"), limits, strict=True) if x is not None]
    said = ["finite" if math.isinf(x) else f"{name} {x:g}" if isinstance(x, float) else f"{name} {x}" for name, x in named]
    return " and ".join(dict.fromkeys(said))


@functools.cache
def _choices(config_type: Any) -> Mapping[str, tuple[Any, ...]]:
    """Values that fields of a dataclass may have, by name, of those that have choices."""
    choices = {}
    for name, hint in typing.get_type_hints(config_type).items():
        for annotation in (hint, *typing.get_args(hint)):
            if typing.get_origin(annotation) is Literal:
                choices[name] = (*typing.get_args(annotation), *((True, False) if bool in typing.get_args(hint) else ()))
    return choices
