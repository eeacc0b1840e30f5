"""Statistics of stored rows: counts and lengths, by source, language, speaker and task; and their charts. They are collected in
memory, eight bytes for each value of a measure: beyond ten million rows that may not suffice.

Dimensions: A audio streams, F frames.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omni.audio.io import SAMPLE_RATE
from omni.errors import UserError
from omni.generate.question import read_system
from omni.tasks import Task, Turn, system_message
from omni.utils.charts import GRID, INK, drawn
from omni.utils.remote import spelled
from train.console.progress import Display, Progress
from train.data.batching.examples import turn_columns
from train.data.executor import HERE, Processes
from train.data.inspect.checks import BadCodes, BadSound, Codecs, characters, sound_errors, text_digest
from train.data.inspect.scan import Scan, Target, over
from train.data.rows.row import Codes, Row, RowTurn, Sound

STATS = "stats.json"
SHOWN = 12
"""Largest number of a field's values that a table shows."""

COLUMNS = {"mean": "mean", "min": "min", "p5": "5 %", "p50": "50 %", "p95": "95 %", "max": "max"}
"""Columns of the table of lengths: keys of `summary`, and their titles."""

TEXT_COLUMNS = {"texts": "texts", "distinct_texts": "distinct", "words": "words", "distinct_words": "distinct words"}
"""Columns of the table of texts: keys of `TextCounts.plain`, and their titles."""

NAMED = 2000
"""Most distinct words that are listed in a report, such as for `data.words` of a run."""
_WORD = re.compile(r"[\w']+")


class TextCounts:
    """Texts that are not empty, their words, and how many of both are distinct. Case is ignored."""

    def __init__(self) -> None:
        self.words = 0
        self._texts, self._distinct = array("Q"), set[str]()

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
        return {"texts": len(self._texts), "words": self.words, **counts, "vocabulary": listed}


FIELDS = ("source", "language", "speaker", "task")
"""Fields of a row by whose values rows are counted."""
MOST_CODES = 1 << 20
"""Largest number of codes of a stream that are counted where the codebook's size is not known."""
PERCENTS = (1, 5, 25, 50, 75, 95, 99)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Count, mean, extremes and percentiles of a measure."""
    percentiles = zip(PERCENTS, np.percentile(values, PERCENTS).tolist(), strict=True)
    ends = {"mean": float(np.mean(values)), "min": min(values), **{f"p{percent}": value for percent, value in percentiles}}
    return {"count": len(values), **ends, "max": max(values)}


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


def code_shares(counts: np.ndarray) -> np.ndarray:
    """Shares of the codes that occur, largest first, of the number of times that each occurs: `counts` [codes] of a stream."""
    used = np.sort(counts[counts > 0])[::-1]
    return used / max(1, used.sum())


def codebook_use(counts: np.ndarray) -> dict[str, Any]:
    """Number of a stream's codes, share of those that occur, their entropy in bits (-sum p log2 p), and frames."""
    shares = code_shares(counts)
    entropy = float(-(shares * np.log2(shares)).sum()) + 0.0
    return {"codes": len(counts), "used": float((counts > 0).mean()), "entropy": entropy, "frames": int(counts.sum())}


@dataclass
class Collected:
    """Statistics of rows.

    Attributes:
        samples: values of the measures.
        codes: by codec, counts [codes] of each stream in the model's order.
        noted: numbers of rows or turns that could not be measured, by reason.
        damaged: files and parts of files that cannot be read, with the reason.
    """

    all: Group = field(default_factory=Group)
    groups: dict[str, dict[str, Group]] = field(default_factory=lambda: {name: {} for name in FIELDS})
    samples: dict[str, array[float]] = field(default_factory=dict)
    texts: dict[str, TextCounts] = field(default_factory=lambda: {"question": TextCounts(), "answer": TextCounts()})
    codes: dict[str, list[np.ndarray]] = field(default_factory=dict)
    noted: Counter[str] = field(default_factory=Counter)
    damaged: list[str] = field(default_factory=list)

    def merge(self, other: Collected) -> None:
        """Count other rows too, in the order of the rows."""
        self.all.add(other.all)
        for name, groups in other.groups.items():
            for value, group in groups.items():
                self.groups[name].setdefault(value, Group()).add(group)
        for name, values in other.samples.items():
            self.add_values(name, values)
        for side, texts in other.texts.items():
            self.texts[side].merge(texts)
        for codec, counts in other.codes.items():
            self.add_codes(codec, [stream.copy() for stream in counts])  # what Ray gives cannot be written to
        self.noted.update(other.noted)
        self.damaged += other.damaged

    def add_values(self, name: str, values: Sequence[float]) -> None:
        """Add values of a measure, whole numbers or others."""
        self.samples.setdefault(name, array("q" if isinstance(values[0], int) else "d")).extend(values)

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


class Collector:
    """Collects statistics of rows, reading only the headers of their recordings; for a `target` also its tokens, and its
    columns as each of `tasks`. A row that names its own task is counted for that alone."""

    def __init__(self, codecs: Codecs, target: Target | None = None, tasks: tuple[Task, ...] = ()) -> None:
        self.codecs, self.target, self.tasks = codecs, target, tasks
        self.done = Collected()

    def add(self, row: Row) -> None:
        """Count a row."""
        mine = Group(rows=1, turns=len(row.turns))
        self.done.add_values("turns a row", [len(row.turns)])
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
        for name, groups in self.done.groups.items():
            groups.setdefault(getattr(row, name), Group()).add(mine)
        for task in self.tasks:
            if row.task in ("", task.name):
                self._columns(row, task, lengths)

    def _seconds(self, sound: Sound | None) -> float | None:
        if sound is None:
            return None
        try:
            with sound_errors():
                return sound.info().seconds
        except BadSound as error:
            self.done.noted[f"recordings not counted: {error.kind.replace('_', ' ')}"] += 1
            return None

    def _side(self, side: str, text: str, seconds: float | None) -> None:
        count = characters(text)
        self.done.texts[side].add(text)
        if seconds is not None:
            self.done.add_values(f"{side} seconds", [seconds])
        if count:
            self.done.add_values(f"{side} characters", [count])
            if self.target is not None:
                self.done.add_values(f"{side} tokens", [len(self.target.tokenizer.encode(text))])
            if seconds:
                self.done.add_values(f"{side} characters a second", [count / seconds])

    def _codes(self, codes: Codes) -> None:
        try:
            frames = self.codecs.streams(codes)
        except BadCodes as error:
            self.done.noted[f"codes not counted: {error.kind.replace('_', ' ')}"] += 1
            return
        self.done.add_values("answer frames", [frames.shape[1]])
        facts = self.codecs.facts(codes.codec)
        sizes = facts.sizes if facts is not None else (0,) * len(frames)
        if facts is None and not 0 <= int(frames.min()) <= int(frames.max()) < MOST_CODES:
            self.done.noted[f"codes not counted: of an unknown codec, and not in 0 to {MOST_CODES - 1}"] += 1
            return
        self.done.add_codes(codes.codec, [np.bincount(row, minlength=n) for row, n in zip(frames.numpy(), sizes, strict=True)])

    def _columns(self, row: Row, task: Task, lengths: list[tuple[float | None, float | None]]) -> None:
        assert self.target is not None
        config = self.target.config
        if any(turn.lacks(task) for turn in row.turns):
            self.done.noted[f"rows that lack what {task.name} needs"] += 1
            return
        try:
            count = len(system_message(config.layout, read_system(row.system, self.target.tokenizer)))
            for turn, (asked, spoken) in zip(row.turns, lengths, strict=True):
                count += self._turn_columns(self.target, turn, task, asked, spoken)
        except UserError as why:
            self.done.noted[f"rows not counted for {task.name}: {why}"] += 1
            return
        self.done.add_values(f"columns {task.name}", [count])
        if count > config.decoder.context:
            self.done.noted[f"rows of more columns than the decoder's context as {task.name}"] += 1

    def _turn_columns(self, target: Target, turn: RowTurn, task: Task, asked: float | None, spoken: float | None) -> int:
        """Number of columns that `train.data.batching.examples` would make of a turn; UserError where that is not known."""
        config, encode = target.config, target.tokenizer.encode
        features, codes = 0, None
        if task.question == "audio":
            if not asked:
                raise UserError("a recording cannot be read")
            try:
                clips = config.encoder.clips(math.ceil(asked * SAMPLE_RATE - 1e-6))
            except UserError as error:
                raise UserError("a question is longer than the encoder takes") from error
            features = sum(-(-config.encoder.frames(clip) // config.projector.stack) for clip in clips)
        if task.audio:
            frames = self._answer_frames(turn, config.codec, spoken)
            codes = torch.zeros(config.layout.n_audio, frames, dtype=torch.long)
        question = encode(turn.question_text) if task.question == "text" else ()
        text = encode(turn.written(task)) if task.text else None
        return len(turn_columns(config.layout, Turn(task, features=features, question=question, text=text, codes=codes)))

    def _answer_frames(self, turn: RowTurn, codec: str, spoken: float | None) -> int:
        """Number of frames of an answer in a codec; UserError where that is not known."""
        if turn.answer_codes is not None:
            if turn.answer_codes.codec == codec and turn.answer_codes.frames.ndim == 2:
                return turn.answer_codes.frames.shape[1]
            raise UserError(f"its codes are not of {codec}")
        facts = self.codecs.facts(codec)
        if facts is None or facts.frame_rate is None or spoken is None:
            raise UserError(f"the frames of an answer as {codec} are not known")
        return math.ceil(spoken * facts.frame_rate - 1e-6)


def collect(
    scan: Scan,
    codecs: Codecs,
    target: Target | None = None,
    tasks: tuple[Task, ...] = (),
    progress: Progress = "off",
    processes: Processes = HERE,
) -> Collected:
    """Collect statistics of all rows that can be read; the others are counted as noted."""
    done = Collected()
    with closing(Display(len(scan), mode=progress)) as display:
        for part in over(scan, partial(row_counts, scan, codecs, target, tasks), processes, display):
            done.merge(part)
    return done


def row_counts(scan: Scan, codecs: Codecs, target: Target | None, tasks: tuple[Task, ...]) -> Callable[[range], Collected]:
    """Begin a process that collects statistics."""

    def count(rows: range) -> Collected:
        collector = Collector(codecs, target, tasks)
        for item in scan.part(rows):
            if item.plain is None:
                collector.done.noted["rows that cannot be read"] += item.count
                collector.done.noted["files or row groups that are damaged"] += 1
                collector.done.damaged.append(f"{item.where}: {item.why}")
            elif item.row is None:
                collector.done.noted["rows that break the format"] += 1
            else:
                collector.add(item.row)
        return collector.done

    return count


def plain(collected: Collected, data: Path) -> dict[str, Any]:
    """Convert the statistics to plain data, for a report."""
    return {
        "data": spelled(data),
        **vars(collected.all),
        "noted": dict(sorted(collected.noted.items())),
        "by": {
            name: {value: vars(group) for value, group in sorted(groups.items())} for name, groups in collected.groups.items()
        },
        "texts": {side: counts.plain() for side, counts in collected.texts.items()},
        "lengths": {name: summary(values) for name, values in sorted(collected.samples.items())},
        "codes": {codec: [codebook_use(counts) for counts in streams] for codec, streams in collected.codes.items()},
    }


# --- pictures -----------------------------------------------------------------------------------------------------------

PANELS = {
    "durations.png": (("question seconds", "answer seconds"), "seconds", "turns"),
    "texts.png": (("question characters", "answer characters", "question tokens", "answer tokens"), "length", "turns"),
    "rates.png": (("question characters a second", "answer characters a second"), "characters a second", "turns"),
}
"""Charts by file name: the measures, one panel each where there are any, and the labels of the axes."""


def draw_all(collected: Collected, folder: Path, context: int = 0) -> list[Path]:
    """Draw all charts that have data into `folder`; `context` is the model's, marked in the chart of columns."""
    columns = [name for name in collected.samples if name.startswith("columns ")]
    files = []
    for name, (measures, x, y) in {**PANELS, "columns.png": (columns, "time steps of an example", "rows")}.items():
        samples = {measure: np.array(collected.samples[measure]) for measure in measures if measure in collected.samples}
        if samples:
            files.append(_histograms(folder / name, samples, x, y, context if measures is columns else 0))
    return files + [_codes(folder / f"codes-{codec}.png", codec, counts) for codec, counts in collected.codes.items()]


def _histograms(file: Path, samples: dict[str, np.ndarray], x: str, y: str, limit: int) -> Path:
    with drawn(file, len(samples), 1, (8, 2.1 * len(samples) + 0.5)) as axes:
        edges = _edges(list(samples.values()))
        for i, (axis, (name, values)) in enumerate(zip(axes[:, 0], samples.items(), strict=True)):
            axis.hist(np.clip(values, None, edges[-1]), edges, color=f"C{i}")  # larger values count in the last bar
            middle = float(np.median(values))
            axis.axvline(middle, color=INK, linewidth=1, linestyle="--")
            beyond = int((values > edges[-1]).sum())
            rest = f", the last bar holds {beyond} beyond it up to {values.max():.4g}" if beyond else ""
            axis.set_title(f"{name}: {len(values)}, median {middle:.4g}{rest}")
            axis.set(ylabel=y, xlim=(edges[0], edges[-1]))
            if limit and limit <= edges[-1]:
                axis.axvline(limit, color="C3", linewidth=1.4)
        axes[-1, 0].set_xlabel(x + (f" (red: the decoder's context, {limit})" if limit and limit <= edges[-1] else ""))
    return file


def _edges(samples: Sequence[np.ndarray]) -> np.ndarray:
    """Edges of about fifty bars from 0 to the largest value, or to the 99.5th percentile where that value is more than 1.5
    times as large; for whole numbers, every bar covers equally many of them."""
    usual = [(float(values.max()), float(np.percentile(values, 99.5))) for values in samples]
    top = max(most if most <= 1.5 * often else often for most, often in usual) or 1.0
    if not all((values == np.round(values)).all() for values in samples):
        return np.linspace(0, top, 51)
    step = max(1, math.ceil((top + 1) / 50))
    return np.arange(0, math.ceil((top + 1) / step) + 1) * step - 0.5


def _codes(file: Path, codec: str, streams: Sequence[np.ndarray]) -> Path:
    """Draw the frequencies of each stream's codes, and their entropy."""
    with drawn(file, 1, 2, (10, 3.8)) as axes:
        left, right = axes[0]
        for i, shares in enumerate(map(code_shares, streams)):
            if len(shares):
                label = f"audio{i}" if len(streams) <= 16 else None
                left.plot(np.arange(1, len(shares) + 1), shares, color=f"C{i}", label=label)
        left.set(xscale="log", yscale="log", xlabel="code, by frequency", ylabel="share of the frames")
        left.set_title(f"{codec}: how often each code occurs")
        places = np.arange(len(streams))
        most = [math.log2(max(2, len(counts))) for counts in streams]
        right.bar(places, most, color=GRID, label="at most (log2 of the codebook)")
        entropies = [codebook_use(counts)["entropy"] for counts in streams]
        right.bar(places, entropies, color=[f"C{i}" for i in places], width=0.6)
        right.set_xticks(places, [str(i) for i in places])
        right.set(xlabel="audio stream", ylabel="bits", ylim=(0, max(most) * 1.2))
        right.set_title("entropy of a code")
    return file
