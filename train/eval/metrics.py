"""Metrics of plug-ins: functions that score one answer, beside the figures that every evaluation has."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from omni.errors import UserError
from omni.plugins import Registry
from train.eval.measures import MEASURES, Measure

if TYPE_CHECKING:
    from omni.generate.results import Answer
    from train.data.rows.row import Row
    from train.eval.held_out import Item

    Score = Callable[[Item, Answer, Row], tuple[float, float] | None]


@dataclass(frozen=True)
class Metric:
    """A function that scores an answer.

    Attributes:
        score: takes the question with its references, the answer, and the row of the data; returns value and weight (see
            `train.eval.measures`), or None where it says nothing of this answer.
        sound: the answer's sound is decoded for it (`answer.audio`).
    """

    score: Score
    sound: bool = False


METRICS: Registry[Metric] = Registry("metric", "a function of item, answer and row", lambda metric: callable(metric.score))
"""Metrics by name: an evaluation takes all of them."""


def register_metric(
    name: str,
    *,
    what: str,
    better: Literal["lower", "higher"],
    kind: Literal["ratio", "share", "perplexity", "median"] = "ratio",
    unit: str = "",
    title: str = "",
    sound: bool = False,
) -> Callable[[Score], Score]:
    """A decorator for a metric's function (`Metric.score`); the other arguments as of `Measure`.

    @register_metric("length", what="words of the answer over words of the reference", better="higher")
    def length(item, answer, row):
        return len(answer.text.split()), len((item.text or "").split())
    """

    def add(score: Score) -> Score:
        MEASURES.add(name, Measure(title or name, better, what, kind, unit))
        METRICS.add(name, Metric(score, sound))
        return score

    return add


def scores(item: Item, answer: Answer, row: Row) -> dict[str, tuple[float, float]]:
    """Value and weight of every registered metric that says something of this answer.

    Raises:
        UserError: a metric failed, or returned no pair of numbers.
    """
    found = {}
    for name, metric in METRICS.items():
        try:
            pair = metric.score(item, answer, row)
            if pair is not None:
                value, weight = (float(number) for number in pair)
                if not (math.isfinite(value) and 0 <= weight < math.inf):
                    raise ValueError(f"it returned {pair}; value and weight must be numbers, the weight at least 0")
                found[name] = (value, weight)
        except (Exception, SystemExit) as error:
            text = " ".join(str(error).split())
            raise UserError(f"metric {name} failed at {row.where} with {type(error).__name__}: {text}") from error
    return found
