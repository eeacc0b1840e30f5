"""Configuration of a balance method: its level and settings, checked against the table of methods."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NamedTuple

from omni.errors import UserError

LEVELS = ("loss", "features", "parameters")

MAX_TASKS = 10
"""Largest number of balanced tasks: the solvers enumerate all their subsets."""


class Setting(NamedTuple):
    """A setting of a method: a number between bounds, or one of several words.

    Attributes:
        low, high: bounds, both included.
        positive: 0 is not allowed.
    """

    default: float | int | str
    low: float = 0.0
    high: float = float("inf")
    positive: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Method:
    """Requirements and properties of a method.

    Attributes:
        levels: levels at which it can be used; the first is the default.
        batches: number of separate batches that it needs in a step: 1, 2 (one for the step ahead, one for the outer losses) or
            3 (two for the weights, one for the gradients).
        linear: it gives a weight per task; otherwise a direction.
        ahead: its weights are known before the step's losses.
    """

    levels: tuple[str, ...]
    settings: Mapping[str, Setting] = field(default_factory=dict)
    batches: int = 1
    linear: bool = True
    ahead: bool = False


_LOSS, _BOTH, _PARAMETERS = ("loss",), ("features", "parameters"), ("parameters",)
_SHARE = Setting(0.5, high=1.0)


def _rate(default: float) -> Setting:
    return Setting(default, positive=True)


METHODS: dict[str, Method] = {
    "equal": Method(_LOSS, ahead=True),
    "uncertainty": Method(_LOSS, {"lr": _rate(1e-3), "initial": Setting(-0.5, low=-20.0, high=20.0)}, ahead=True),
    "dwa": Method(_LOSS, {"temperature": _rate(2.0), "window": Setting(100, low=1)}, ahead=True),
    "random": Method(_LOSS, ahead=True),
    "geometric": Method(_LOSS),
    "stch": Method(_LOSS, {"mu": _rate(1.0), "warmup": Setting(100, low=1)}),
    "famo": Method(
        _LOSS, {"lr": _rate(0.025), "weight_decay": Setting(1e-3), "look": Setting("next", choices=("next", "same"))}
    ),
    "gradnorm": Method(_BOTH, {"alpha": Setting(1.5), "lr": _rate(1e-3)}),
    "excessmtl": Method(_BOTH, {"step_size": _rate(1e-2)}),
    "dbmtl": Method(_PARAMETERS, {"beta": Setting(0.9, high=1.0), "sigma": Setting(0.0)}, linear=False),
    "mgda": Method(_BOTH, {"normalize": Setting("none", choices=("none", "l2", "loss", "loss+"))}),
    "pcgrad": Method(_BOTH),
    "gradvac": Method(_BOTH, {"beta": _SHARE}),
    "graddrop": Method(("features",), {"leak": Setting(0.0, high=1.0)}, linear=False),
    "cagrad": Method(_BOTH, {"c": Setting(0.5), "rescale": Setting(1, high=2)}),
    "nashmtl": Method(_BOTH, {"max_norm": Setting(1.0)}),
    "imtlg": Method(_BOTH),
    "alignedmtl": Method(_BOTH, {"scale": Setting("min", choices=("min", "median", "rmse"))}),
    "fairgrad": Method(_BOTH, {"alpha": _rate(1.0)}),
    "sdmgrad": Method(
        _PARAMETERS, {"preference": Setting(0.3), "lr": _rate(5.0), "steps": Setting(20, low=1)}, batches=3
    ),
    "modo": Method(_PARAMETERS, {"gamma": _rate(1e-3), "rho": Setting(0.1)}, batches=3),
    "moco": Method(
        _PARAMETERS,
        {
            "beta": Setting(0.5, high=1.0), "beta_sigma": Setting(0.5), "gamma": _rate(0.1), "gamma_sigma": Setting(0.5),
            "rho": Setting(0.0),
        },
        linear=False,
    ),
    "upgrad": Method(_BOTH, {"norm_eps": _rate(1e-20), "reg_eps": _rate(1e-4)}),
    "autolambda": Method(_LOSS, {"lr": _rate(1e-3)}, batches=2, ahead=True),
    "moml": Method(_LOSS, {"lr": _rate(1e-3), "inner_lr": _rate(0.1)}, batches=2, ahead=True),
    "forum": Method(
        _PARAMETERS,
        {
            "lr": _rate(1e-3), "phi": _rate(0.1), "inner_lr": _rate(0.1), "inner_steps": Setting(5, low=1),
            "decay": Setting(0.75, high=1.0),
        },
        batches=2, linear=False,
    ),
}  # fmt: skip
"""All balance methods by name."""


@dataclass(frozen=True)
class BalanceConfig:
    """Configuration of the balance of a step's tasks.

    Attributes:
        method: see `METHODS`.
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
        if self.method not in METHODS:
            raise UserError(f"balance.method {self.method!r} is unknown; {_near(self.method, METHODS)}")
        method = METHODS[self.method]
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
