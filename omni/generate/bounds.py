"""Bounds of the numeric options of an answer, shared by the Python interface and the command line.

Nothing heavy is imported here, so that a bad number is refused before a model is read.
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, NamedTuple

from omni.errors import UserError


class Bound(NamedTuple):
    """Least and greatest value; `way` is the error's advice on what to give instead."""

    least: float
    most: float
    way: str
    whole: bool = True


BOUNDS = {
    "temperature": Bound(0, 1000, "0 is greedy, 1 draws as the model was trained", whole=False),
    "top_k": Bound(0, 2**31 - 1, "0 is no limit"),
    "top_p": Bound(1e-6, 1, "1 is no limit", whole=False),
    "repetition_penalty": Bound(1e-3, 1000, "1 is off", whole=False),
    "seed": Bound(-(2**63), 2**64 - 1, "a seed has 64 bits"),
    "max_seconds": Bound(1e-3, 86_400, "a day is the longest answer", whole=False),
    "max_tokens": Bound(1, 2**20, "512 is the default"),
    "max_new_tokens": Bound(1, 2**20, "each is a time step"),
    "max_silence": Bound(1e-2, 86_400, "seconds of silence after which an answer ends", whole=False),
    "drain": Bound(0, 1e9, "seconds in which answers under way may end", whole=False),
    "context": Bound(1, 2**31 - 1, "more positions than the model's are never taken"),
    "batch_size": Bound(1, 2**31 - 1, "64 is the default"),
    "played_seconds": Bound(0, 1e9, "by default all that was handed over was heard", whole=False),
    "shown_characters": Bound(0, 2**63 - 1, "by default all that was handed over was shown"),
    "input_rate": Bound(1, 768_000, "samples per second, such as 16000"),
    "channel": Bound(0, 1023, "channels are counted from 0"),
}
"""Bounds by name of the option."""


def check_number(name: str, value: Any, bound: Bound | None = None, as_what: str | None = None) -> None:
    """Refuse a value that is no number within the option's bound (nan is within none).

    Args:
        bound: by default the one of `name`.
        as_what: name of the option in the error, by default `name`.

    Raises:
        UserError: naming the option, the value and the bound.
    """
    bound = bound or BOUNDS[name]
    what, kind = as_what or name, "a whole number" if bound.whole else "a number"
    types = Integral if bound.whole else Real
    span = f"from {bound.least} to {bound.most}"
    if isinstance(value, bool) or not isinstance(value, types):
        raise UserError(f"{what} is {repr(value)[:80]}; give {kind} {span}")
    number: Any = value
    if not bound.least <= number <= bound.most:
        long = isinstance(number, Integral) and abs(number) >= 10**30  # type: ignore[operator]
        raise UserError(f"{what} is {'of more than 30 digits' if long else value}; it must be {span} ({bound.way})")


def check_switch(name: str, value: Any) -> None:
    """Refuse a value that is neither True nor False (UserError)."""
    if not isinstance(value, bool):
        raise UserError(f"{name} is {repr(value)[:80]}; give True or False")
