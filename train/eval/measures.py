"""Defines the figures of an evaluation, and computes them with bootstrap intervals.

A question's part in a figure is a pair (value, weight), and a figure is made of the pairs [N, 2] of N questions:

    ratio        sum of the values over the sum of the weights, NaN where the weights sum to 0
    share        the same, shown in per cent (errors over words, right ones over all)
    perplexity   the exponential of that (nats over tokens)
    median       of the values

Intervals are by the bootstrap over questions (Efron 1979; percentiles 2.5 and 97.5 of `RESAMPLES` draws with a fixed seed, NaN
left out). Where two models answered the same questions, both are drawn with the same indices (a paired comparison).

Dimensions: N questions, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from omni.errors import UserError
from omni.plugins import Registry
from train.console.progress import percent

if TYPE_CHECKING:
    from omni.generate.results import Answer
    from train.data.rows.row import Row
    from train.eval.held_out import Item

    Score = Callable[[Item, Answer, Row], tuple[float, float] | None]


RESAMPLES = 2000
_CELLS = 4_000_000  # resampled indices that are held at a time


Better = Literal["lower", "higher"]
Kind = Literal["ratio", "share", "perplexity", "median"]


@dataclass(frozen=True)
class Measure:
    """A figure.

    Attributes:
        better: which values are better.
        what: what it means.
        kind: how it is computed from its pairs.
        score: of a metric, the function that scores an answer: of the question with its references, the answer and the row of
            the data, it returns value and weight (see above), or None where it says nothing of this answer.
        sound: whether that function listens, so that the answer is decoded.
    """

    title: str
    better: Better
    what: str
    kind: Kind = "share"
    unit: str = ""
    score: Score | None = None
    sound: bool = False


MEASURES: Registry[Measure] = Registry("measure")
"""Figures by name; `train.eval.measures.register_metric` adds some."""

for _name, _measure in {
    "wer": Measure("word error rate", "lower", "word errors over words of the reference, all answers together (jiwer)"),
    "cer": Measure("character error rate", "lower", "the same by characters, for languages without spaces"),
    "exact_match": Measure("exact match", "higher", "share of the written answers that equal the reference, normalised"),
    "ended": Measure("ended", "higher", "share of the answers that the model ended itself"),
    "code_accuracy": Measure(
        "code accuracy", "higher", "share of the codes that equal the reference's, frame by frame up to the shorter"
    ),
    "speech_text_wer": Measure(
        "speech against its text", "lower", "word (or character) errors of the ASR's transcript, against what the model wrote"
    ),
    "speech_wer": Measure(
        "speech against reference", "lower", "word (or character) errors of the ASR's transcript, against the reference"
    ),
    "ear_wer": Measure(
        "the ASR's own errors", "lower", "the same of the reference's codes, decoded: what the ASR gets wrong by itself"
    ),
    "alignment_wer": Measure(
        "the alignment head's reading", "lower", "word (or character) errors of what the head `tokens` reads of the question"
    ),
    "first_text": Measure(
        "first text", "lower", "from the question to the first text, median of the streamed ones", "median", "ms"
    ),
    "first_audio": Measure(
        "first audio", "lower", "from the question to the first samples, median of the streamed ones", "median", "ms"
    ),
    "real_time_factor": Measure(
        "real-time factor", "lower", "seconds of work over seconds of sound, of the streamed ones", "ratio"
    ),
    "kl": Measure(
        "KL per step",
        "lower",
        "nats from the other model's distribution along its own greedy answers, all streams",
        "ratio",
        "nat",
    ),
    "agreement": Measure(
        "agreement",
        "higher",
        "share of the tokens of the other model's greedy answers at which this model's likeliest id is the same",
    ),
    "same_answer": Measure("same answer", "higher", "share of the greedy answers that are the other model's, token for token"),
    "steps": Measure(
        "steps", "higher", "time steps per second without the codec, one question at a time, both models in turn", "ratio", "/s"
    ),
    "distance": Measure(
        "distance from the teacher",
        "lower",
        "squared distance of the encoder's frames from those of the teacher, which hears whole recordings, over its square",
        "ratio",
    ),
    "as_written": Measure(
        "spoken as written",
        "higher",
        "share of the spoken questions whose answer says the same as that to the written question: token F1 of at least 0.5 "
        "between the first sentences, without the question's and function words",
    ),
    "as_written_exact": Measure(
        "spoken as written, exactly",
        "higher",
        "share of the spoken questions whose answer is that to the written one, normalised",
    ),
    "as_written_wer": Measure(
        "spoken against written",
        "lower",
        "word (or character) errors of the answers to spoken questions, against those to written ones",
    ),
    "text_exact_match": Measure(
        "text: exact match", "higher", "share of the written questions whose answer equals the reference"
    ),
    "text_perplexity": Measure(
        "text: perplexity", "lower", "per token of the reference answers and their end, asked as T1T2", "perplexity"
    ),
    "text_perplexity_plain": Measure(
        "text: perplexity, plain",
        "lower",
        "per token of the reference answers after question and newline, no other ids",
        "perplexity",
    ),
}.items():
    MEASURES.add(_name, _measure)

Pairs = np.ndarray
"""Values and weights of questions, [N, 2] float64."""


@dataclass(frozen=True)
class Figure:
    """A value, its 95 % interval (NaN where there is none), and the questions it is made of."""

    value: float
    low: float
    high: float
    questions: int


def pairs_of(records: Iterable[Mapping[str, Any]], name: str) -> Pairs:
    """The pairs [N, 2] of the records that have some for this measure."""
    pairs = [record["scores"][name] for record in records if name in record.get("scores", {})]
    return np.asarray(pairs, dtype=np.float64).reshape(-1, 2)


def figure(name: str, pairs: Pairs, seed: int = 0) -> Figure:
    """The figure of pairs [N, 2], N at least 1, with its interval; NaN where there is none."""
    return _bootstrap(lambda index: _values(name, pairs, index), len(pairs), seed)


def difference(name: str, a: Pairs, b: Pairs, seed: int = 0) -> Figure:
    """B's figure minus A's, over the same N questions in the same order, with its interval."""
    return _bootstrap(lambda index: _values(name, b, index) - _values(name, a, index), len(a), seed)


def _bootstrap(statistic: Callable[[np.ndarray], np.ndarray], size: int, seed: int) -> Figure:
    """The value and interval of a statistic, which gives values [R] of the questions at `index` [R, N], of `size` questions."""
    rng, step, parts = np.random.default_rng(seed), max(1, _CELLS // size), []
    for start in range(0, RESAMPLES, step):
        parts.append(statistic(rng.integers(size, size=(min(step, RESAMPLES - start), size))))
    values = np.concatenate(parts)
    finite = values[np.isfinite(values)]
    low, high = np.percentile(finite, [2.5, 97.5]).tolist() if len(finite) else (math.nan, math.nan)
    return Figure(float(statistic(np.arange(size)[None])[0]), low, high, size)


def _values(name: str, pairs: Pairs, index: np.ndarray) -> np.ndarray:
    """Figures [R] of the questions at `index` [R, N], NaN where their weights sum to 0."""
    kind = MEASURES[name].kind
    if kind == "median":
        return np.median(pairs[index, 0], axis=1)
    sums, weights = pairs[index, 0].sum(1), pairs[index, 1].sum(1)
    ratio = np.divide(sums, weights, out=np.full(len(sums), np.nan), where=weights > 0)
    if kind == "perplexity":
        with np.errstate(over="ignore"):  # a bad model's is infinite
            return np.exp(ratio)
    return ratio


def plain(figure: Figure) -> dict[str, float | int | None]:
    """A figure as plain data: None for NaN, which JSON does not have."""
    return {name: None if number != number else number for name, number in asdict(figure).items()}


def shown(name: str, number: float) -> str:
    """Formats a value: shares and error rates in per cent, times in their unit."""
    measure = MEASURES[name]
    if number != number:
        return "-"
    if measure.kind == "share":
        return percent(number, 2)
    size = abs(number)
    digits = ".0f" if size >= 1000 else ".1f" if size >= 100 else ".2g" if 0 < size < 0.01 else ".3f"
    return f"{number:{digits}} {measure.unit}".strip()


def interval(name: str, figure: Figure) -> str:
    """Formats a figure's interval; one end where both read the same, as those above 100 % do."""
    return " to ".join(dict.fromkeys((shown(name, figure.low), shown(name, figure.high))))


def register_metric(
    name: str, *, what: str, better: Better, kind: Kind = "ratio", unit: str = "", title: str = "", sound: bool = False
) -> Callable[[Score], Score]:
    """A decorator for a metric's function (`Measure.score`); the other arguments as of `Measure`.

    @register_metric("length", what="words of the answer over words of the reference", better="higher")
    def length(item, answer, row):
        return len(answer.text.split()), len((item.text or "").split())
    """

    def add(score: Score) -> Score:
        MEASURES.add(name, Measure(title or name, better, what, kind, unit, score, sound))
        return score

    return add


def metric_scores(item: Item, answer: Answer, row: Row) -> dict[str, tuple[float, float]]:
    """Value and weight of every registered metric that says something of this answer.

    Raises:
        UserError: a metric failed, or returned no pair of numbers.
    """
    scores = {}
    for name, measure in MEASURES.items():
        try:
            pair = measure.score(item, answer, row) if measure.score is not None else None
            if pair is not None:
                value, weight = (float(number) for number in pair)
                if not (math.isfinite(value) and 0 <= weight < math.inf):
                    raise ValueError(f"it returned {pair}; value and weight must be numbers, the weight at least 0")
                scores[name] = (value, weight)
        except (Exception, SystemExit) as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise UserError(f"metric {name} failed at {row.where} with {text}") from error
    return scores
