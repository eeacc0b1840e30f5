"""Collects statistics of rows in memory: four bytes for each value of a measure, beyond ten million rows they may not suffice.

Dimensions: A audio streams, F frames.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from omni.audio.io import SAMPLE_RATE
from omni.errors import UserError
from omni.generate.question import read_system
from omni.tasks import Task, Turn, system_message
from train.data.batching.examples import turn_columns
from train.data.inspect.checks import characters
from train.data.inspect.measures import BadCodes, BadSound, Codecs, head, text_digest
from train.data.inspect.options import Target
from train.data.rows.row import Codes, Row, RowTurn, Sound

NAMED = 2000
"""Most distinct words that are listed in a report, such as for `data.words` of a run."""
_WORD = re.compile(r"[\w']+")


class TextCounts:
    """Texts that are not empty, their words, and how many of both are distinct. Case is ignored."""

    def __init__(self) -> None:
        self.words = 0
        self._texts, self._distinct = array("Q"), set[str]()

    @property
    def texts(self) -> int:
        """Number of texts."""
        return len(self._texts)

    def add(self, text: str) -> None:
        """Count a text."""
        words = _WORD.findall(text.lower())
        if words:
            self.words += len(words)
            self._distinct.update(words)
            self._texts.append(text_digest(" ".join(words)))

    def merge(self, other: TextCounts) -> None:
        """Count the texts of other rows too."""
        self.words += other.words
        self._distinct |= other._distinct
        self._texts.extend(other._texts)

    def plain(self) -> dict[str, Any]:
        """Convert to plain data, for a report."""
        texts = len(np.unique(np.array(self._texts, np.uint64)))
        counts = {"distinct_texts": texts, "distinct_words": len(self._distinct)}
        listed = sorted(self._distinct) if len(self._distinct) <= NAMED else []
        return {"texts": self.texts, "words": self.words, **counts, "vocabulary": listed}


FIELDS = ("source", "language", "speaker", "task")
"""Fields of a row by whose values rows are counted."""
MOST_VALUES = 10_000
"""Number of values of a field that are counted separately; rows with further values count as `OTHERS`."""
OTHERS = "(others)"
MOST_CODES = 1 << 20
"""Largest number of codes of a stream that are counted where the codebook's size is not known."""
PERCENTS = (1, 5, 25, 50, 75, 95, 99)


class Sample:
    """Values of a measure, kept in single precision, and their sum."""

    def __init__(self) -> None:
        self.total, self.least, self.most = 0.0, math.inf, -math.inf
        self._values = array("f")

    def add(self, value: float) -> None:
        self.total += value
        self.least, self.most = min(self.least, value), max(self.most, value)
        self._values.append(value)

    def merge(self, other: Sample) -> None:
        """Add the values of other rows."""
        self.total += other.total
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)
        self._values.extend(other._values)

    @property
    def count(self) -> int:
        return len(self._values)

    @property
    def values(self) -> np.ndarray:
        """The values, [n]."""
        return np.array(self._values, np.float32)

    @property
    def mean(self) -> float:
        return self.total / self.count

    def summary(self) -> dict[str, float]:
        """Compute count, mean, extremes and percentiles."""
        at = np.percentile(self.values, PERCENTS)
        percentiles = {f"p{percent}": float(value) for percent, value in zip(PERCENTS, at, strict=True)}
        return {"count": self.count, "mean": self.mean, "min": self.least, **percentiles, "max": self.most}


@dataclass
class Group:
    """Counts of the rows with one value of a field."""

    rows: int = 0
    turns: int = 0
    question_seconds: float = 0.0
    answer_seconds: float = 0.0

    def add(self, other: Group) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def plain(self) -> dict[str, int | float]:
        """Convert to plain data, for a report."""
        return dict(vars(self))


@dataclass
class StreamUse:
    """Usage of a stream's codebook, from the number of times each code occurs: `counts` [codes]."""

    counts: np.ndarray

    @property
    def shares(self) -> np.ndarray:
        """Shares of the codes that occur, largest first."""
        used = np.sort(self.counts[self.counts > 0])[::-1]
        return used / max(1, used.sum())

    @property
    def entropy(self) -> float:
        """Entropy of the codes in bits: -sum p log2 p, at most log2 of the number of codes."""
        return float(-(self.shares * np.log2(self.shares)).sum()) + 0.0

    @property
    def used(self) -> float:
        """Share of the codebook's codes that occur."""
        return float((self.counts > 0).mean())


@dataclass
class Collected:
    """Statistics of rows.

    Attributes:
        codes: by codec, counts [codes] of each stream in the model's order.
        noted: numbers of rows or turns that could not be measured, by reason.
        damaged: files and parts of files that cannot be read, with the reason.
    """

    all: Group = field(default_factory=Group)
    groups: dict[str, dict[str, Group]] = field(default_factory=lambda: {name: {} for name in FIELDS})
    samples: dict[str, Sample] = field(default_factory=dict)
    texts: dict[str, TextCounts] = field(default_factory=lambda: {"question": TextCounts(), "answer": TextCounts()})
    codes: dict[str, list[np.ndarray]] = field(default_factory=dict)
    noted: Counter[str] = field(default_factory=Counter)
    damaged: list[str] = field(default_factory=list)

    def merge(self, other: Collected) -> None:
        """Count other rows too, in the order of the rows."""
        self.all.add(other.all)
        for name, groups in other.groups.items():
            for value, group in groups.items():
                self.add_group(name, value, group)
        for name, sample in other.samples.items():
            self.sample(name).merge(sample)
        for side, texts in other.texts.items():
            self.texts[side].merge(texts)
        for codec, counts in other.codes.items():
            self.add_codes(codec, [stream.copy() for stream in counts])  # what Ray gives cannot be written to
        self.noted.update(other.noted)
        self.damaged += other.damaged

    def sample(self, name: str) -> Sample:
        """The values of a measure."""
        return self.samples.setdefault(name, Sample())

    def add_group(self, name: str, value: str, rows: Group) -> None:
        """Count rows with one value of a field."""
        values = self.groups[name]
        values.setdefault(value if value in values or len(values) < MOST_VALUES else OTHERS, Group()).add(rows)

    def add_codes(self, codec: str, occurrences: Sequence[np.ndarray]) -> None:
        """Count codes by how often each occurs, [codes] of each stream; not where there are other streams than before.

        The arrays are used on."""
        counts = self.codes.setdefault(codec, [np.zeros(0, np.int64) for _ in occurrences])
        if len(counts) != len(occurrences):
            self.noted["codes not counted: of an unknown codec, and unlike those before"] += 1
            return
        for stream, (more, fewer) in enumerate(zip(counts, occurrences, strict=True)):
            if len(more) < len(fewer):
                more, fewer = fewer, more
            more[: len(fewer)] += fewer
            counts[stream] = more

    def use(self, codec: str) -> list[StreamUse]:
        """Codebook usage of each of a codec's streams."""
        return [StreamUse(counts) for counts in self.codes[codec]]


class Collector:
    """Collects statistics of rows, reading only the headers of their recordings.

    Args:
        target: the model whose tokens and columns are counted, None for neither.
        tasks: tasks for which its columns are counted; a row that names its own task is counted for that alone.
    """

    def __init__(self, codecs: Codecs, target: Target | None = None, tasks: tuple[Task, ...] = ()) -> None:
        self.codecs, self.target, self.tasks = codecs, target, tasks
        self.done = Collected()

    def add(self, row: Row) -> None:
        """Count a row."""
        mine = Group(rows=1, turns=len(row.turns))
        self._note("turns a row", len(row.turns))
        lengths = []
        for turn in row.turns:
            asked, spoken = self._seconds(turn.question_audio), self._seconds(turn.answer_audio)
            if spoken is None and turn.answer_codes is not None:
                spoken = self.codecs.seconds(turn.answer_codes)
            lengths.append((asked, spoken))
            mine.question_seconds += asked or 0.0
            mine.answer_seconds += spoken or 0.0
            for side, text, seconds in (("question", turn.question_text, asked), ("answer", turn.answer_text, spoken)):
                self._side(side, text, seconds)
            if turn.answer_codes is not None:
                self._codes(turn.answer_codes)
        self.done.all.add(mine)
        for name in self.done.groups:
            self.done.add_group(name, getattr(row, name), mine)
        for task in self.tasks:
            if row.task in ("", task.name):
                self._columns(row, task, lengths)

    def _note(self, name: str, value: float) -> None:
        self.done.sample(name).add(value)

    def _seconds(self, sound: Sound | None) -> float | None:
        if sound is None:
            return None
        try:
            return head(sound).seconds
        except BadSound as error:
            self.done.noted[f"recordings not counted: {error.kind.replace('_', ' ')}"] += 1
            return None

    def _side(self, side: str, text: str, seconds: float | None) -> None:
        count = characters(text)
        self.done.texts[side].add(text)
        if seconds is not None:
            self._note(f"{side} seconds", seconds)
        if count:
            self._note(f"{side} characters", count)
            if self.target is not None:
                self._note(f"{side} tokens", len(self.target.tokenizer.encode(text)))
            if seconds:
                self._note(f"{side} characters a second", count / seconds)

    def _codes(self, codes: Codes) -> None:
        try:
            frames = self.codecs.streams(codes)
        except BadCodes as error:
            self.done.noted[f"codes not counted: {error.kind.replace('_', ' ')}"] += 1
            return
        self._note("answer frames", frames.shape[1])
        facts = self.codecs.facts(codes.codec)
        sizes = facts.sizes if facts is not None else (0,) * len(frames)
        if facts is None and not 0 <= int(frames.min()) <= int(frames.max()) < MOST_CODES:
            self.done.noted[f"codes not counted: of an unknown codec, and not in 0 to {MOST_CODES - 1}"] += 1
            return
        self.done.add_codes(codes.codec, [np.bincount(row, minlength=n) for row, n in zip(frames.numpy(), sizes, strict=True)])

    def _columns(self, row: Row, task: Task, lengths: list[tuple[float | None, float | None]]) -> None:
        assert self.target is not None
        if any(turn.lacks(task) for turn in row.turns):
            self.done.noted[f"rows that lack what {task.name} needs"] += 1
            return
        try:
            system = read_system(row.system, self.target.tokenizer)
            count = len(system_message(self.target.config.layout, system))
            count += sum(self._turn_columns(turn, task, *times) for turn, times in zip(row.turns, lengths, strict=True))
        except _NotCounted as why:
            self.done.noted[f"rows not counted for {task.name}: {why}"] += 1
            return
        self._note(f"columns {task.name}", count)
        if count > self.target.config.decoder.context:
            self.done.noted[f"rows of more columns than the decoder's context as {task.name}"] += 1

    def _turn_columns(self, turn: RowTurn, task: Task, asked: float | None, spoken: float | None) -> int:
        """Number of columns that `train.data.batching.examples` would make of a turn."""
        assert self.target is not None
        config, tokenizer = self.target.config, self.target.tokenizer
        features = 0
        if task.question == "audio":
            features = sum(-(-frames // config.projector.stack) for frames in self._clip_frames(asked))
        codes = None
        if task.audio:
            codes = torch.zeros(config.layout.n_audio, self._frames(turn, spoken), dtype=torch.long)
        text = turn.written(task)
        made = Turn(
            task,
            features=features,
            question=tokenizer.encode(turn.question_text) if task.question == "text" else (),
            text=tokenizer.encode(text) if task.text else None,
            codes=codes,
        )
        return len(turn_columns(config.layout, made))

    def _clip_frames(self, seconds: float | None) -> Iterator[int]:
        assert self.target is not None
        encoder = self.target.config.encoder
        if not seconds:
            raise _NotCounted("a recording cannot be read")
        try:
            clips = encoder.clips(math.ceil(seconds * SAMPLE_RATE - 1e-6))
        except UserError as error:
            raise _NotCounted("a question is longer than the encoder takes") from error
        return (encoder.frames(clip) for clip in clips)

    def _frames(self, turn: RowTurn, spoken: float | None) -> int:
        assert self.target is not None
        codec = self.target.config.codec
        if turn.answer_codes is not None:
            if turn.answer_codes.codec == codec and turn.answer_codes.frames.ndim == 2:
                return turn.answer_codes.frames.shape[1]
            raise _NotCounted(f"its codes are not of {codec}")
        facts = self.codecs.facts(codec)
        if facts is None or facts.frame_rate is None or spoken is None:
            raise _NotCounted(f"the frames of an answer as {codec} are not known")
        return math.ceil(spoken * facts.frame_rate - 1e-6)


class _NotCounted(Exception):
    """Raised where a row's columns cannot be counted; the message is the reason."""
