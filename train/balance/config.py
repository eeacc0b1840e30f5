"""The section `balance:` of a run's configuration: method, level and settings, checked against what the method declares, and
against the other sections."""

from __future__ import annotations

import sys
from dataclasses import field
from typing import Any, Literal

from omni.errors import UserError, closest
from omni.plugins import Registry
from omni.tasks import TASKS, find_task
from omni.utils.configuration import configuration
from train.balance.registry import METHODS, Method, Setting
from train.data.config import DataConfig

MAX_TASKS = 10
"""Largest number of balanced tasks: the solvers enumerate all their subsets."""


@configuration
class BalanceConfig:
    """How a step combines its tasks, see docs/balance.md.

    Attributes:
        method: `equal`, `uncertainty`, `dwa`, `upgrad`, ...: see docs/balance.md.
        level: `loss` (weights for one backward pass), `features` (by gradients between encoder and decoder, within one
            backward pass) or `parameters` (by a gradient of each task); the method's first where absent.
        settings: of the method; the others keep their defaults.
        own: how parameters that tasks do not share are trained, at level parameters: `plain`, by the sum of the losses, or
            `weighted`, by the same weights as the shared ones.
        tasks: what is balanced: the `tasks` of the data, or the `streams` of the layout.
        names: tasks that are balanced, the others count with weight 1; by default all that the data's sources name (at level
            features those with spoken questions).
        losses: a task's loss is its `share` of the plain objective, or the `mean` over its own targets by stream.
        separate: names of parameters that tasks do not share, at level parameters: patterns as in `trainable`. `forum`
            takes all parameters as shared.
    """

    method: str = "equal"
    level: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    own: Literal["plain", "weighted"] = "plain"
    tasks: Literal["tasks", "streams"] = "tasks"
    names: tuple[str, ...] = ()
    losses: Literal["share", "mean"] = "share"
    separate: tuple[str, ...] = ("*_head.*",)

    def __post_init__(self) -> None:
        method = self.spec
        if self.level is not None and self.level not in method.levels:
            others = ", ".join(of_level(self.level))
            raise UserError(
                f"balance.level is {self.level!r}, which method {self.method} does not have; use {' or '.join(method.levels)}"
                f"{others and f', or another method: {others}'}"
            )
        if self.own == "weighted" and not method.linear:
            raise UserError(f"balance.own is weighted, but method {self.method} gives a direction and no weights; use plain")
        for name, value in self.settings.items():
            if name not in method.settings:
                raise UserError(f"balance.settings.{name} is unknown to method {self.method}; {closest(name, method.settings)}")
            _check(f"balance.settings.{name}", value, method.settings[name])
        self._check_names()
        if self.own == "weighted" and self.at != "parameters":
            raise UserError(f"balance.own is weighted, which is for level parameters, but the level is {self.at}; leave it out")
        if tuple(self.separate) != BalanceConfig.separate and not self.separates:
            raise UserError(
                f"balance.separate is {list(self.separate)}, which is for methods that take a gradient of each task at level "
                f"parameters, but {self.method} at level {self.at} does not; leave it out"
            )

    def _check_names(self) -> None:
        for name in self.names:
            find_task(name, "balance.names")
        if len(set(self.names)) < len(self.names):
            raise UserError(f"balance.names is {list(self.names)}; name each task once")
        if self.names and self.tasks == "streams":
            raise UserError("balance.names are of tasks, but balance.tasks is streams, which are all balanced; leave one out")
        if self.tasks == "streams" and self.at == "features":
            raise UserError(
                "balance.tasks is streams, but at level features each position belongs to a task and none to a stream; use "
                "tasks, or another level"
            )

    @property
    def spec(self) -> Method:
        """The registered method, which says what it needs."""
        known = methods()
        if self.method not in known:
            raise UserError(f"balance.method {self.method!r} is unknown; {closest(self.method, known)}")
        return known[self.method]

    @property
    def at(self) -> str:
        """The configured level, or else the method's default."""
        return self.level or self.spec.levels[0]

    @property
    def values(self) -> dict[str, Any]:
        """All settings of the method, defaults included."""
        return {**{name: setting.default for name, setting in self.spec.settings.items()}, **self.settings}

    @property
    def separates(self) -> bool:
        """True where parameters that tasks do not share are trained differently from the shared ones."""
        return self.at == "parameters" and not self.spec.bilevel

    def passes(self, data: DataConfig, by_heads: bool, streams: int, world: int = 1) -> tuple[float, float]:
        """Forward and backward passes of a step on each of `world` processes, in those of a plain one (docs/balance.md);
        `by_heads` where losses on the encoder, which belong to no task, are trained."""
        names = balanced_tasks(self, data)
        m, rest = len(names) or streams, float(by_heads or (self.tasks == "tasks" and not data.drawn <= set(names)))
        if self.spec.passes is not None:
            return self.spec.passes(m, rest, self.values)
        if self.at == "parameters":
            return m + rest, m + rest
        if self.at == "features" or self.spec.ahead:
            return 1.0, 1.0
        again = 1.0 if data.micro_batches > world else 0.0  # a pass without gradients first
        return 1.0 + again + (1.0 if self.spec.after is not None and self.spec.again(self.values) else 0.0), 1.0


def of_level(level: str) -> list[str]:
    """Names of the methods that can be used at a level."""
    return [name for name, method in methods().items() if level in method.levels]


def methods() -> Registry[Method]:
    """All methods by name; the package's own are imported where they are asked for: their libraries take a second."""
    import train.balance.methods  # noqa: F401

    return METHODS


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


def balanced_tasks(section: BalanceConfig, data: DataConfig) -> list[str]:
    """Names of the balanced tasks in the table's order (of streams: none); UserError for fewer than two, more than can be
    balanced, or ones that the data do not have."""
    if section.tasks == "streams":
        return []
    drawn = data.drawn
    stored = any(s.path is not None for s in data.sources)  # whose rows may name their own task
    for name in section.names:
        if name not in drawn and not stored:
            raise UserError(
                f"balance.names has {name}, but no source has that task; the data's are {', '.join(sorted(drawn)) or 'none'}"
            )
    chosen, noun = [name for name in TASKS if name in (section.names or drawn)], "task(s)"
    if section.at == "features":
        mute = [name for name in section.names if TASKS[name].question != "audio"]
        if mute:
            raise UserError(
                f"balance.names has {mute[0]}, which asks in writing: at level features only tasks that ask by speech meet"
            )
        chosen, noun = [name for name in chosen if TASKS[name].question == "audio"], "task(s) that ask by speech"
    if not 2 <= len(chosen) <= MAX_TASKS:
        listed = ", ".join(sorted(chosen)) or "none"
        raise UserError(
            f"balance.method {section.method} at level {section.at} has {len(chosen)} {noun} to balance ({listed}); it needs 2 "
            f"to {MAX_TASKS}: give data.sources more of them"
        )
    return chosen


def check_balance(
    section: BalanceConfig, data: DataConfig, precision: str, processes: int | None, streams: int | None = None
) -> None:
    """Check the section against data, precision, number of processes and streams of the layout (None where the configuration
    does not say); UserError for settings that do not fit together, with one line that says what to change."""
    balanced_tasks(section, data)
    spec, method = section.spec, section.method
    if section.tasks == "streams" and streams is not None and not 2 <= streams <= MAX_TASKS:
        raise UserError(
            f"balance.tasks is streams, but the model's layout has {streams} of them, and 2 to {MAX_TASKS} can be "
            "balanced; use tasks"
        )
    if precision == "16-mixed" and (section.at != "loss" or spec.bilevel):
        raise UserError(
            f"balance.method {method} looks at gradients, which may overflow under fabric.precision 16-mixed; use bf16-mixed"
        )
    if data.micro_batches % spec.parts:
        raise UserError(
            f"balance.method {method} takes {spec.parts} batches a step apart, but data.micro_batches is "
            f"{data.micro_batches}; make it {spec.parts} for each process"
        )
    if spec.bilevel and processes is not None and data.micro_batches > processes:
        raise UserError(
            f"balance.method {method} takes one micro-batch a step in each process, but data.micro_batches is "
            f"{data.micro_batches} and fabric has {processes} process(es); make data.micro_batches {processes}"
        )
