"""Computes figures from the records of one run or two, and writes tables, JSON, pictures, and answers in VoiceBench's form."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from omni.errors import UserError
from omni.files import read_json, write_json, write_whole
from omni.utils.charts import INK, drawn, markdown_table
from train.console.progress import counted
from train.eval.journal import AGAIN, RUN, read_records
from train.eval.measures import MEASURES, RESAMPLES, Figure, difference, figure, interval, pairs_of, plain, shown
from train.scoring.text import NORMALISERS

ANSWERS, TIMINGS, TEXT, TEXT_BEFORE = "answers.jsonl", "timings.jsonl", "text.jsonl", "text_before.jsonl"
OTHERS, AGAINST = "against_answers.jsonl", "against.jsonl"
TURNS = "turns.jsonl"
REPORT, TABLE, VOICEBENCH = "report.json", "report.md", "voicebench.jsonl"
FEW = 4
"""Fewest questions for a verdict."""
GROUPS = 4
"""Most groups that the picture shows by themselves."""
NAMED = 20
"""Broken rows, and mistaken answers, that the table names."""

Record = Mapping[str, Any]
Table = tuple[Sequence[str], Sequence[Sequence[str]]]


@dataclass(frozen=True)
class Run:
    """The contents of an output folder: what was started (`run.json`: model, data, task, settings), and the records by file.
    `by`: the field by which the figures are reported too (`EvalConfig.by`)."""

    folder: Path
    started: Mapping[str, Any]
    records: Mapping[str, Sequence[Record]]
    by: str = "voice"

    @classmethod
    def read(cls, folder: Path, by: str = "voice") -> Run:
        """Reads a folder; UserError where no evaluation was started there."""
        if not (folder / RUN).is_file():
            raise UserError(f"{folder} holds no evaluation (it has no {RUN}); name the --out of one")
        files = (ANSWERS, TIMINGS, TEXT, TEXT_BEFORE, OTHERS, AGAINST, TURNS)
        return cls(folder, read_json(folder / RUN, AGAIN), {name: read_records(folder / name) for name in files}, by)

    @cached_property
    def groups(self) -> dict[str, dict[str, Figure]]:
        """Figures by the values of the field `by`; none where all questions have the same."""
        value = {r["index"]: value_of(r, self.by) for r in self.records[ANSWERS] if "broken" not in r}
        names = sorted(set(value.values()))
        groups = {name: [r for r in self.scored if value.get(r["index"]) == name] for name in names if len(names) > 1}
        return {name: figures_of(records) for name, records in groups.items()}

    @property
    def scored(self) -> list[Record]:
        """Records of the model itself, of all files."""
        return [r for name in (ANSWERS, TIMINGS, AGAINST, TEXT) for r in self.records.get(name, ())]

    @property
    def broken(self) -> list[Record]:
        return [r for r in self.records[ANSWERS] if "broken" in r]

    @property
    def answered(self) -> int:
        return len(self.records[ANSWERS]) - len(self.broken)


@dataclass(frozen=True)
class ScoreChange:
    """A figure of two runs or models (before and after), over the questions that both have a score for, and the difference."""

    before: Figure
    after: Figure
    difference: Figure

    def plain(self, before: str = "before", after: str = "after") -> dict[str, Any]:
        """The change as plain data, with these names for the two sides."""
        return {before: plain(self.before), after: plain(self.after), "difference": plain(self.difference)}


def value_of(record: Record, by: str) -> str:
    """The value of a field of a question's row, "-" where there is none; UserError where rows have no such field."""
    if by == "voice":
        return "synthetic" if ":" in record["speaker"] else "people" if record["speaker"] else "-"
    fields = {name: record[name] for name in ("id", "source", "language", "speaker")} | record.get("given", {})
    if by not in fields:
        raise UserError(f"--by {by}: the rows have no such field; name voice or one of {', '.join(fields)}, and start again")
    return str(fields[by] or "-")


def figures_of(records: Sequence[Record]) -> dict[str, Figure]:
    """All figures that records have pairs for."""
    return {name: figure(name, pairs) for name in MEASURES if len(pairs := pairs_of(records, name))}


def against_of(run: Run) -> dict[str, ScoreChange]:
    """The changes from the model that this one is set against, over the questions that both answered."""
    apart = run.records.get(AGAINST, ())
    theirs = [{"index": r["index"], "scores": r["against"]} for r in apart if "against" in r]
    return compared(run.records.get(OTHERS, ()), run.records[ANSWERS]) | compared(theirs, apart)


def compared(a: Sequence[Record], b: Sequence[Record]) -> dict[str, ScoreChange]:
    """Figures of two lists of records over the items that both have a score for, and B's minus A's."""
    out = {}
    for name in MEASURES:
        of_a = {r["index"]: r for r in a if name in r.get("scores", {})}
        both = [r for r in b if name in r.get("scores", {}) and r["index"] in of_a]
        if both:
            pairs_a, pairs_b = pairs_of([of_a[r["index"]] for r in both], name), pairs_of(both, name)
            out[name] = ScoreChange(figure(name, pairs_a), figure(name, pairs_b), difference(name, pairs_a, pairs_b))
    return out


def write_report(run: Run) -> dict[str, Figure]:
    """Write `report.json`, `report.md` and, of VoiceBench's data, `voicebench.jsonl`; returns the figures."""
    figures = figures_of(run.scored)
    against = against_of(run)
    changes = compared(run.records[TEXT_BEFORE], run.records[TEXT])
    data = {
        **run.started,
        "answered": run.answered,
        "broken": [{"where": r["where"], "why": r["broken"]} for r in run.broken],
        "figures": {name: plain(f) for name, f in figures.items()},
        f"by_{run.by}": {f"{name}/{value}": plain(f) for value, own in run.groups.items() for name, f in own.items()},
        "text_change": {name: c.plain() for name, c in changes.items()},
    }
    if run.records.get(OTHERS):
        data["against_change"] = {name: c.plain("against", "model") for name, c in against.items()}
    if run.records.get(TURNS):
        data["turns"] = [
            {"source": source, "turn": turn, "exact_match": f.value, "low": f.low, "high": f.high, "questions": f.questions}
            for (source, turn), f in figures_of_turns(run.records[TURNS]).items()
        ]
    write_json(run.folder / REPORT, data)
    write_whole(run.folder / TABLE, _markdown(run, figures, changes, against))
    if run.started["format"] == "voicebench":
        answers = [{**r["given"], "response": r["response"]} for r in run.records[ANSWERS] if "broken" not in r]
        lines = [json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers]
        write_whole(run.folder / VOICEBENCH, "".join(lines))
    return figures


def _markdown(
    run: Run, figures: Mapping[str, Figure], changes: Mapping[str, ScoreChange], against: Mapping[str, ScoreChange]
) -> str:
    started = run.started
    lines = [*_heading(run), "", markdown_table(*figure_table(figures))]
    if run.groups:
        lines += ["", f"## By {run.by}", "", markdown_table(*group_table(run))]
        lines += ["", "Synthetic: the speaker's name has a colon, as voices of TTS have."] * (run.by == "voice")
    if against:
        lines += ["", f"## Against {started['against']}", "", *size_lines(run)]
        lines.append(markdown_table(*change_table(against, "against", "model")))
    if changes:
        lines += ["", f"## Text only: before ({started['text_before']}) and after", ""]
        lines.append(markdown_table(*change_table(changes, "before", "after")))
    turns = turn_table(run)
    if turns[1]:
        lines += ["", "## Turns, each after the model's own answers", "", markdown_table(*turns)]
    lines += ["", f"Intervals: percentiles 2.5 and 97.5 of {RESAMPLES:,} bootstrap draws of the questions. The figures:", ""]
    lines += [f"- {MEASURES[name].title}: {MEASURES[name].what}" for name in figures]
    lines += _mistakes(run)
    if run.broken:
        lines += ["", f"## Broken rows ({len(run.broken)})", ""]
        lines += [f"- {location(run, r)}: {r['broken']}" for r in run.broken[:NAMED]]
    if len(run.broken) > NAMED:
        lines.append(f"- and {len(run.broken) - NAMED} more, see {REPORT}")
    return "\n".join(lines) + "\n"


def _heading(run: Run) -> list[str]:
    """Title of a report, and how the questions were asked."""
    started, settings, timed = run.started, run.started["settings"], run.records[TIMINGS]
    normaliser, greedy = settings["normaliser"], settings["temperature"] == 0
    drawing = "greedy" if greedy else f"drawn at temperature {settings['temperature']:g} with seed {settings['seed']}"
    lines = [
        f"# {started['model']} on {started['data']}",
        "",
        f"- data: {started['format']}, {started['items']} questions: {run.answered} answered, {len(run.broken)} broken",
        f"- task: {started['task']}; answers are {drawing}",
        f"- texts are compared after the normaliser {normaliser}: {NORMALISERS[normaliser]}",
    ]
    if started.get("ear"):
        lines.append(f"- spoken answers were transcribed by {started['ear']}, whose own errors count too")
    if timed:
        where, load = f"{started['device']}, {counted(timed[-1]['threads'], 'thread')}", max(r["load"] for r in timed)
        busy = f"load of the machine {load:g} (others' work slows it)"
        lines.append(f"- {len(timed)} questions were streamed one by one on {where}, {busy}")
    return lines


def size_lines(run: Run) -> list[str]:
    """A line with the bytes of both models' weights in memory, where they were noted."""
    sizes = next((r["bytes"] for r in run.records.get(AGAINST, ()) if "bytes" in r), None)
    if sizes is None:
        return []
    other, own = sizes
    return [f"Weights: {other / 1e6:.1f} MB against, {own / 1e6:.1f} MB of this model ({own / other:.1%}).", ""]


def figure_table(figures: Mapping[str, Figure]) -> Table:
    """Columns and rows of a table of figures."""
    rows = [
        (MEASURES[name].title, shown(name, f.value), interval(name, f), str(f.questions), MEASURES[name].better)
        for name, f in figures.items()
    ]
    return ("figure", "value", "95 % interval", "questions", "better"), rows


def group_table(run: Run) -> Table:
    """Columns and rows of a table of the figures by group, figure by figure."""
    names = list(dict.fromkeys(name for own in run.groups.values() for name in own))
    rows = [
        (MEASURES[name].title, value, shown(name, own[name].value), interval(name, own[name]), str(own[name].questions))
        for name in names
        for value, own in run.groups.items()
        if name in own
    ]
    return ("figure", run.by, "value", "95 % interval", "questions"), rows


def change_table(changes: Mapping[str, ScoreChange], a: str, b: str) -> Table:
    """Columns and rows of a table of two sides and their differences."""
    rows = []
    for name, c in changes.items():
        d, sides = c.difference, [shown(name, side.value) for side in (c.before, c.after)]
        span = f"{signed(name, d.low)} to {signed(name, d.high)}"
        rows.append((MEASURES[name].title, *sides, signed(name, d.value), span, str(d.questions), verdict(name, d)))
    return ("figure", a, b, "difference", "95 % interval", "questions", ""), rows


def verdict(name: str, change: Figure) -> str:
    """Better or worse, or "not told apart" where the interval of the difference includes zero; "too few" questions give no
    verdict, since their bootstrap cannot tell how they vary."""
    if change.questions < FEW:
        return "too few"
    if change.low <= 0 <= change.high or change.low != change.low:
        return "not told apart"
    return "better" if (change.value < 0) == (MEASURES[name].better == "lower") else "worse"


def signed(name: str, number: float) -> str:
    """A difference with its sign; of shares in percentage points."""
    sign, points = "+" if number > 0 else "", MEASURES[name].kind == "share" and number == number
    return f"{sign}{100 * number:.2f} points" if points else sign + shown(name, number)


def figures_of_turns(records: Iterable[Record]) -> dict[tuple[str, int], Figure]:
    """Exact match by source and turn, counted from 1."""
    right: dict[tuple[str, int], list[tuple[bool, int]]] = {}
    for record in records:
        for number, turn in enumerate(record.get("turns", ()), 1):
            right.setdefault((record["source"], number), []).append((turn["right"], 1))
    return {key: figure("exact_match", np.array(pairs, dtype=np.float64)) for key, pairs in sorted(right.items())}


def turn_table(run: Run) -> Table:
    """Columns and rows of a table of the turns; no rows where none were asked."""
    name, rows = "exact_match", []
    for (source, turn), f in figures_of_turns(run.records.get(TURNS, ())).items():
        rows.append((source, str(turn), shown(name, f.value), interval(name, f), str(f.questions)))
    return ("source", "turn", "exact match", "95 % interval", "questions"), rows


def _mistakes(run: Run) -> list[str]:
    """The answers with most errors, as a table."""
    wrong = []
    for r in run.records[ANSWERS]:
        scores = r.get("scores", {})
        errors = scores.get("wer", scores.get("cer", scores.get("speech_wer", (0, 0))))[0]
        if errors:
            wrong.append((-errors, r["index"], r))
    if not wrong:
        return []
    columns = {"reference": "reference", "response": "answer"} | ({"heard": "heard"} if run.started.get("ear") else {})
    worst = sorted(wrong)[:NAMED]
    rows = [(cell(location(run, r)), f"{-errors:.0f}", *(cell(r[name]) for name in columns)) for errors, _, r in worst]
    title = f"## Answers with most errors ({len(rows)} of {len(wrong)} with any)"
    return ["", title, "", markdown_table(("where", "errors", *columns.values()), rows)]


def location(run: Run, record: Record) -> str:
    """The place of a record, relative to the data's folder."""
    return str(record["where"]).removeprefix(f"{run.started['data']}/")


def cell(text: Any, length: int = 80) -> str:
    """Text as a cell of a table: one line, and not a long one."""
    flat = " ".join(str(text or "").split())
    return flat if len(flat) <= length else flat[: length - 4] + " ..."


PICTURE, COMPARISON = "report.png", "compare.png"
SHARES = (
    "exact_match", "as_written", "as_written_exact", "as_written_wer", "ended", "code_accuracy",
    "wer", "cer", "speech_text_wer", "speech_wer", "ear_wer", "text_exact_match",
)  # fmt: skip
SPREAD = {
    "wer": "word errors in per cent of the words, per question",
    "cer": "character errors in per cent of the characters, per question",
    "speech_text_wer": "speech against its text in per cent, per question",
    "first_audio": "first audio in ms, per question",
    "first_text": "first text in ms, per question",
    "real_time_factor": "real-time factor, per question",
    "text_perplexity": "text: nats per token, per question",
    "text_perplexity_plain": "text, plain: nats per token, per question",
}
"""Measures whose distribution over the questions is drawn, with the label of the axis."""


def draw_report(run: Run, figures: Mapping[str, Figure]) -> Path:
    """Draw `report.png`: bars of the shares with 95 % intervals, and the share of questions up to each value (ECDF)."""
    sides = {"": figures} | (run.groups if len(run.groups) <= GROUPS else {})
    bars = {f"{MEASURES[n].title}, {side}".strip(", "): (n, f[n]) for n in SHARES for side, f in sides.items() if n in f}
    spreads = [name for name in SPREAD if name in figures]
    lines, height = -(-len(spreads) // 2), 0.9 + 0.42 * len(bars)
    size, ratios = (9, height + 2.5 * lines), [height, *[2.5] * lines]
    with drawn(run.folder / PICTURE, lines + 1, 2, size, height_ratios=ratios) as axes:
        figure, grid = axes[0, 0].figure, axes[0, 0].get_gridspec()
        for axis in (*axes[0], *axes.flat[2 + len(spreads) :]):
            axis.remove()
        _bars(figure.add_subplot(grid[0, :]), bars)
        for name, axis in zip(spreads, axes.flat[2:], strict=False):
            series: list[tuple[str, Sequence[Record]]] = [("", run.scored)]
            if name.startswith("text_") and len(pairs_of(run.records[TEXT_BEFORE], name)):
                series = [("before", run.records[TEXT_BEFORE]), ("after", run.scored)]
            for i, (label, records) in enumerate(series):
                _spread(axis, name, records, f"C{i}", label)
            axis.set(xlabel=SPREAD[name], ylabel="share of questions", ylim=(0, 1.02))
        title = f"{Path(run.started['model']).name}: {run.answered} questions of {Path(run.started['data']).name}"
        figure.suptitle(f"{title}\nbelow: share of the questions up to a value; dotted: the median", fontsize=10)
    return run.folder / PICTURE


def draw_comparison(changes: Mapping[str, ScoreChange], names: tuple[str, str], file: Path) -> Path:
    """Draw both runs' figures with 95 % intervals, a panel each, the difference in its title."""
    columns = min(3, len(changes))
    rows = -(-len(changes) // columns)
    with drawn(file, rows, columns, (3.6 * columns, 2.7 * rows + 0.4)) as axes:
        for axis in axes.flat[len(changes) :]:
            axis.remove()
        for axis, (name, change) in zip(axes.flat, changes.items(), strict=False):
            d, (lengths, errors) = change.difference, bars_of((change.before, change.after), _scale(name))
            axis.bar(range(2), lengths, 0.6, color=["C0", "C1"], yerr=errors, ecolor=INK)
            axis.set_xticks(range(2), [f"{letter}: {label}" for letter, label in zip("AB", names, strict=True)])
            axis.set_ylim(bottom=0)
            title = f"{MEASURES[name].title} ({MEASURES[name].better} is better)"
            interval = f"B - A: {signed(name, d.value)} ({signed(name, d.low)} to {signed(name, d.high)})"
            axis.set_title(f"{title}\n{interval}", fontsize=8)
            axis.set_ylabel("per cent" if MEASURES[name].kind == "share" else MEASURES[name].unit)
    return file


def _bars(axis: Any, bars: Mapping[str, tuple[str, Figure]]) -> None:
    """Draws shares as bars, by label: the measure's name and the figure."""
    names, selected = [name for name, _ in bars.values()], [figure for _, figure in bars.values()]
    positions, (lengths, errors) = np.arange(len(names))[::-1], bars_of(selected, 100.0)
    colors = ["C2" if MEASURES[name].better == "higher" else "C1" for name in names]
    axis.barh(positions, lengths, 0.62, xerr=errors, color=colors, ecolor=INK)
    axis.set_yticks(positions, bars)
    ends = np.maximum(lengths, np.nan_to_num([100 * f.high for f in selected], posinf=0.0))
    axis.set_xlim(0, max([105.0, *1.12 * ends]))
    for position, name, f, end in zip(positions, names, selected, ends, strict=True):
        text = shown(name, f.value)
        axis.annotate(text, (end, position), xytext=(7, 0), textcoords="offset points", va="center", fontsize=8, color=INK)
    axis.set_xlabel("per cent, with 95 % intervals (green: higher is better, orange: lower)")


def _spread(axis: Any, name: str, records: Sequence[Record], color: str, label: str) -> None:
    """Draws the empirical distribution function of a measure's values of single questions, without those that weigh nothing."""
    pairs = pairs_of(records, name)
    pairs = pairs[pairs[:, 1] > 0]
    if not len(pairs):
        return
    x = np.sort(_scale(name) * pairs[:, 0] / pairs[:, 1])
    steps, shares = [min(0.0, x[0]), *x, x[-1] * 1.02 + 1e-9], [0, *np.arange(1, len(x) + 1) / len(x), 1.0]
    axis.step(steps, shares, where="post", color=color, label=label)
    axis.axvline(np.median(x), color=color, linewidth=0.8, linestyle=":")


def bars_of(figures: Sequence[Figure], scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of bars [figures], 0 where there is no figure or an infinite one, and the distances to the ends of their
    intervals [2, figures], 0 where there is none."""
    ends = np.asarray([(f.value - f.low, f.high - f.value) for f in figures]).reshape(-1, 2).T
    errors = np.maximum(0, np.nan_to_num(ends, posinf=0.0, neginf=0.0))
    return scale * np.nan_to_num([f.value for f in figures], posinf=0.0), scale * errors


def _scale(name: str) -> float:
    return 100.0 if MEASURES[name].kind == "share" else 1.0


# --- two runs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Two runs, the changes from A to B, and notes on differences between their data and settings."""

    a: Run
    b: Run
    changes: Mapping[str, ScoreChange]
    common: int
    notes: tuple[str, ...]

    @property
    def names(self) -> tuple[str, str]:
        """Short names of the two."""
        first, second = self.a.folder.resolve(), self.b.folder.resolve()
        return (first.name, second.name) if first.name != second.name else (str(self.a.folder), str(self.b.folder))


def compare(folder_a: Path, folder_b: Path) -> Comparison:
    """Compares two output folders over the questions that both answered; UserError where there are none."""
    a, b = Run.read(folder_a), Run.read(folder_b)
    of_a, of_b = ([r for r in run.records[ANSWERS] if "broken" not in r] for run in (a, b))
    same = _matched(of_a, of_b)
    if not same:
        raise UserError(f"{folder_a} and {folder_b} have no answered question in common: compare two runs over the same data")
    changes: dict[str, ScoreChange] = {}
    for file in (ANSWERS, TIMINGS, TEXT):
        moved = [{**r, "index": same[r["index"]]} for r in b.records[file] if r["index"] in same]
        changes |= compared(a.records[file], moved)
    return Comparison(a, b, changes, len(same), tuple(_notes(a, b, len(of_a), len(of_b), same)))


def write_comparison(comparison: Comparison, out: Path) -> None:
    """Writes `compare.md`, `compare.json` and `compare.png` into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    a, b, names = comparison.a.started, comparison.b.started, comparison.names
    lines = [
        "# Two runs side by side",
        "",
        f"- A, {names[0]}: {a['model']} on {a['data']}",
        f"- B, {names[1]}: {b['model']} on {b['data']}",
        f"- {comparison.common} questions that both answered; differences are B minus A, intervals by a paired bootstrap",
        *(f"- {note}" for note in comparison.notes),
        "",
        markdown_table(*change_table(comparison.changes, "A", "B")),
    ]
    write_whole(out / "compare.md", "\n".join(lines) + "\n")
    changes = {name: c.plain("a", "b") for name, c in comparison.changes.items()}
    data = {"a": dict(a), "b": dict(b), "common": comparison.common, "notes": comparison.notes, "changes": changes}
    write_json(out / "compare.json", data)
    draw_comparison(comparison.changes, names, out / COMPARISON)


def _matched(a: Sequence[Record], b: Sequence[Record]) -> dict[int, int]:
    """Places of B's answered questions that A answered too, with their places in A.

    Questions are the same where id, question and reference are, at the same place or as the only such ones of either run: data
    that have been prepared lack broken rows, so that places differ.
    """
    of_a = {(r["index"], *_asked(r)) for r in a}
    same = {r["index"]: r["index"] for r in b if (r["index"], *_asked(r)) in of_a}
    only_a, only_b = _only(a), _only(b)
    return same | {only_b[asked]: only_a[asked] for asked in only_b if asked in only_a}


def _asked(record: Record) -> tuple[str, ...]:
    return tuple(str(record[name]) for name in ("id", "question", "reference"))


def _only(records: Sequence[Record]) -> dict[tuple[str, ...], int]:
    """Places of questions that were asked only once, by `_asked`; those without a text are left out: an id is not enough."""
    count = Counter(map(_asked, records))
    return {_asked(r): r["index"] for r in records if count[_asked(r)] == 1 and (r["question"] or r["reference"])}


def _notes(a: Run, b: Run, in_a: int, in_b: int, same: Mapping[int, int]) -> list[str]:
    """Notes on differences between the questions, settings and machine loads of two runs."""
    left = {letter: count - len(same) for letter, count in (("A", in_a), ("B", in_b))}
    notes = [f"{count} further questions of {letter} are left out" for letter, count in left.items() if count]
    moved = sum(b_index != a_index for b_index, a_index in same.items())
    if moved:
        notes.append(
            f"{moved} of the questions have another place in B's data than in A's: matched by id, question and reference"
        )
    for name, title in (("task", "task"), ("ear", "ASR")):
        if a.started.get(name) != b.started.get(name):
            notes.append(f"note: {title} is {a.started.get(name)} in A and {b.started.get(name)} in B")
    of_a, of_b = a.started["settings"], b.started["settings"]
    for name, value in of_a.items():
        other = of_b.get(name, value)  # a run from before the setting lacks it
        if value != other and name not in ("batch", "questions", "ear", "ear_words", "ear_longest"):  # `ear` names its words
            notes.append(f"note: {name} is {value} in A and {other} in B")
    for name in ("dtype", "quantize"):  # which only a run that was given them has
        if name in of_b and name not in of_a:
            notes.append(f"note: {name} is {of_b[name]} in B only")
    loads = [max((r["load"] for r in run.records[TIMINGS]), default=0) for run in (a, b)]
    if all(loads):
        notes.append(f"times were taken at a load of {loads[0]:g} in A and {loads[1]:g} in B: others' work slows a machine")
    return notes
