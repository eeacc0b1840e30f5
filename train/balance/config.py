"""Configuration of a balance method: its level and settings, checked against what the method declares.

Methods are imported where a configuration names one: their libraries take a second.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from omni.errors import UserError
from train.balance.registry import LEVELS, Method, Setting

MAX_TASKS = 10
"""Largest number of balanced tasks: the solvers enumerate all their subsets."""


@dataclass(frozen=True)
class BalanceConfig:
    """Configuration of the balance of a step's tasks.

    Attributes:
        method: see `train.balance.methods.METHODS`.
        level: `loss` (weights for one backward), `features` (by gradients of what encoder and decoder share) or `parameters`
            (by gradients of the shared parameters); the method's first where absent.
        settings: of the method; the others keep their defaults.
        own: how parameters that are not shared are trained: `plain`, by the sum of the losses, or `weighted`, by the same
            weights as the shared ones.
        seed: of the random draws; the same on all processes.
    """

    method: str = "equal"
    level: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    own: str = "plain"
    seed: int = 0

    def __post_init__(self) -> None:
        method = self.kind
        if self.level is not None and self.level not in LEVELS:
            raise UserError(f"balance.level {self.level!r} is unknown; {_near(self.level, LEVELS)}")
        if self.level is not None and self.level not in method.levels:
            raise UserError(
                f"balance.level is {self.level!r}, which method {self.method} does not have; use "
                f"{' or '.join(method.levels)}, or another method: {', '.join(of_level(self.level))}"
            )
        if self.own not in ("plain", "weighted"):
            raise UserError(f"balance.own is {self.own!r}; use plain or weighted")
        if self.own == "weighted" and not method.linear:
            raise UserError(f"balance.own is weighted, but method {self.method} gives a direction and no weights; use plain")
        if not isinstance(self.settings, Mapping):
            raise UserError(f"balance.settings is {self.settings!r}; it must be a mapping of the method's settings")
        for name, value in self.settings.items():
            if name not in method.settings:
                raise UserError(f"balance.settings.{name} is unknown to method {self.method}; {_near(name, method.settings)}")
            _check(f"balance.settings.{name}", value, method.settings[name])

    @classmethod
    def of(cls, method: str, level: str | None = None, *, own: str = "plain", seed: int = 0, **settings: Any) -> BalanceConfig:
        """Make a configuration with the method's settings as keywords."""
        return cls(method, level, settings, own, seed)

    @property
    def kind(self) -> Method:
        """What the method needs."""
        from train.balance.methods import METHODS

        if self.method not in METHODS:
            raise UserError(f"balance.method {self.method!r} is unknown; {_near(self.method, METHODS)}")
        return METHODS[self.method]

    @property
    def at(self) -> str:
        """The configured level, or else the method's default."""
        return self.level or self.kind.levels[0]

    @property
    def values(self) -> dict[str, Any]:
        """All settings of the method, defaults included."""
        return {**{name: setting.default for name, setting in self.kind.settings.items()}, **self.settings}


def of_level(level: str) -> list[str]:
    """Names of the methods that can be used at a level."""
    from train.balance.methods import METHODS

    return [name for name, method in METHODS.items() if level in method.levels]


def _near(name: Any, known: Iterable[str]) -> str:
    known = list(known)
    if not known:
        return "it has no settings"
    close = get_close_matches(str(name).lower().replace("_", "").replace("-", ""), known, n=3, cutoff=0.4)
    hint = f"the closest names are {', '.join(close)}; " if close else ""
    return f"{hint}known: {', '.join(known)}"


def _check(where: str, value: Any, setting: Setting) -> None:
    if setting.choices:
        if value not in setting.choices:
            raise UserError(f"{where} is {value!r}; use {' or '.join(setting.choices)}")
        return
    whole = isinstance(setting.default, int)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise UserError(f"{where} is {value!r}; it must be a {'whole ' if whole else ''}number")
    if not abs(value) <= sys.float_info.max:
        raise UserError(f"{where} is {value}; it must be a finite number")
    if not setting.low <= value <= setting.high or (setting.positive and value <= 0):
        least = "above 0" if setting.positive else f"at least {setting.low:g}"
        most = "" if setting.high == float("inf") else f" and at most {setting.high:g}"
        raise UserError(f"{where} is {value}; it must be {least}{most}")
