"""The balance methods by name, each with what it needs, as `register_method` in the method's own file declares it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from omni.plugins import Registry

LEVELS = ("loss", "features", "parameters")
"""Levels at which tasks can be combined."""

Values = Mapping[str, Any]
"""All settings of a method, defaults included."""


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


def rate(default: float) -> Setting:
    """A setting above 0."""
    return Setting(default, positive=True)


@dataclass(frozen=True)
class Method:
    """Requirements and properties of a method.

    Attributes:
        rule: chooses, given a `train.balance.rows.MethodInput`; for bilevel methods see `train.balance.bilevel`.
        levels: levels at which it can be used; the first is the default. At `loss` it is given losses, at `features` and
            `parameters` one gradient per task.
        batches: number of separate batches that it needs in a step: 1, 2 (one for the step ahead, one for the outer losses) or
            3 (two for the weights, one for the gradients).
        linear: it gives a weight per task; otherwise a direction.
        ahead: its weights are known before the step's losses.
        losses: at level features, whether it needs the step's losses with these settings.
        signs: at level features, its rows are the gradients times the features' signs.
        keeps: its state between steps has a gradient per task.
        after: updates its state by the losses after the optimizer's step, or by those of the next batch before its step.
        again: whether `after` is given the losses of the same batch, by one more forward pass, with these settings.
        bilevel: it judges a step of one micro-batch by a held-out batch; its setting `lr` is that of the weights' logits.
        passes: of a bilevel method: forward and backward passes of a step in those of a plain one, given the number of tasks,
            the passes for losses of no task, and the settings.
    """

    rule: Callable[[Any], Any]
    levels: tuple[str, ...]
    settings: Mapping[str, Setting] = field(default_factory=dict)
    batches: int = 1
    linear: bool = True
    ahead: bool = False
    losses: Callable[[Values], bool] = lambda settings: False
    signs: bool = False
    keeps: bool = False
    after: Callable[[Any], None] | None = None
    again: Callable[[Values], bool] = lambda settings: False
    bilevel: bool = False
    passes: Callable[[int, float, Values], tuple[float, float]] | None = None

    @property
    def parts(self) -> int:
        """Parts into which it takes a step's micro-batches."""
        return 1 if self.bilevel else self.batches


METHODS: Registry[Method] = Registry("balance method")
"""The methods registered so far; those of the package with `train.balance.methods`."""


Rule = TypeVar("Rule", bound=Callable[..., Any])


def register_method(name: str, *levels: str, **needs: Any) -> Callable[[Rule], Rule]:
    """Decorator that makes a function a balance method of that name; see `Method` for the levels and what it may need.

    Raises:
        UserError: another module has a method of that name.
    """

    def register(rule: Rule) -> Rule:
        METHODS.add(name, Method(rule, levels, **needs))
        return rule

    return register
