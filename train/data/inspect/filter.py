"""Filters rows by rules from a YAML file: writes the kept ones to shards, and a log of why the others were dropped."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from omni.audio.io import SAMPLE_RATE
from omni.audio.resample import resample
from omni.errors import UserError
from omni.files import LOCK, locked, write_json
from omni.utils.configuration import read_yaml, validate
from train.console.progress import Display, Progress, percent
from train.data.executor import HERE, Processes
from train.data.inspect.checks import (
    KINDS,
    BadCodes,
    BadSound,
    Bounds,
    Checked,
    CheckedTurn,
    Codecs,
    characters,
    check_row,
    load,
    sound_errors,
)
from train.data.inspect.scan import FoundRow, Scan, over
from train.data.prepare.prepare import occupied, place_for
from train.data.prepare.rows import BLOCK, PreparedBlock, PrepareTally
from train.data.prepare.shards import REPORT, ShardWriter, listed
from train.data.rows.row import Codes, Row, RowTurn, Sound

if TYPE_CHECKING:
    import pyarrow as pa

    from train.scoring.asr import WhisperASR


@dataclass(frozen=True)
class Range:
    """Lowest and highest allowed value, both included; null for none."""

    min: float | None = None
    max: float | None = None

    def __post_init__(self) -> None:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise UserError(f"a rule asks for at least {self.min:g} and at most {self.max:g}: nothing is both")

    def outside(self, value: float) -> str:
        """The reason why a value is not allowed; empty where it is."""
        if self.min is not None and value < self.min:
            return f"is {value:.4g}, the least is {self.min:g}"
        if self.max is not None and value > self.max:
            return f"is {value:.4g}, the most is {self.max:g}"
        return ""


@dataclass(frozen=True)
class WerRule:
    """Highest word error rate of each side's recording against its text; null for no limit."""

    question: float | None = None
    answer: float | None = None


@dataclass(frozen=True)
class Rules:
    """Rules of a filter; a row that breaks one of them is dropped. Rules apply to the parts that a turn has: see `require`.

    Attributes:
        turns: number of turns of a row.
        question_seconds, answer_seconds: length of the recordings (of an answer with codes only: of its frames).
        question_chars, answer_chars: characters of the texts, without spaces.
        chars_per_second: the same over the seconds, of each side.
        silence_share: share of silent windows of each recording.
        clipping: share of clipped samples of each recording.
        languages, sources, speakers, tasks: allowed values of a row's field; null for any.
        without_speakers: speakers who are left out.
        require: parts that every turn must have.
        drop_errors: drop what `data validate` calls an error of the row: broken sound, codes out of range, no fitting task.
        drop_duplicates: drop rows that equal an earlier row that is kept: as a whole (`row`), in a question's recording
            (`question_audio`) or in all words of a question and its answer (`text`).
        max_wer: highest word error rate of a Whisper's transcript, of rows that no other rule but `drop_duplicates` drops.
    """

    turns: Range | None = None
    question_seconds: Range | None = None
    answer_seconds: Range | None = None
    question_chars: Range | None = None
    answer_chars: Range | None = None
    chars_per_second: Range | None = None
    silence_share: Range | None = None
    clipping: Range | None = None
    languages: tuple[str, ...] | None = None
    sources: tuple[str, ...] | None = None
    speakers: tuple[str, ...] | None = None
    tasks: tuple[str, ...] | None = None
    without_speakers: tuple[str, ...] = ()
    require: tuple[Literal["question_text", "question_audio", "answer_text", "answer_audio", "answer_codes"], ...] = ()
    drop_errors: bool = True
    drop_duplicates: tuple[Literal["row", "question_audio", "text"], ...] = ()
    max_wer: WerRule | None = None


def read_rules(file: Path) -> Rules:
    """Read rules from a YAML file; UserError for an unknown key (naming the closest), or a value of another type."""
    if not file.exists():
        raise UserError(f"rules {file} do not exist: name a YAML file, such as one with 'question_seconds: {{max: 30}}'")
    data = read_yaml(file, "rules")
    try:
        return validate(Rules, data)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error


_FIELDS = {"languages": "language", "sources": "source", "speakers": "speaker", "tasks": "task"}


def broken_rules(rules: Rules, row: Row, checked: Checked) -> Iterator[tuple[str, str]]:
    """Name and reason of each rule that a row breaks, except `drop_duplicates` and `max_wer`, which need more than the row."""
    for name, attribute in _FIELDS.items():
        allowed, value = getattr(rules, name), getattr(row, attribute)
        if allowed is not None and value not in allowed:
            yield name, f"{attribute} {value!r} is not among those of the rule"
    if row.speaker in rules.without_speakers:
        yield "without_speakers", f"speaker {row.speaker!r} is left out"
    if rules.turns is not None and (why := rules.turns.outside(len(row.turns))):
        yield "turns", f"number of turns {why}"
    for number, (turn, heard) in enumerate(zip(row.turns, checked.turns, strict=True)):
        prefix = f"turn {number}: " if len(row.turns) > 1 else ""
        for needed in rules.require:
            part = getattr(turn, needed)
            if part is None or (isinstance(part, str) and not part.strip()):
                yield "require", f"{prefix}there is no {needed}"
        for name, quantity, value in _values(turn, heard):
            bounds: Range | None = getattr(rules, name)
            if bounds is not None and value is not None and (why := bounds.outside(value)):
                yield name, f"{prefix}{quantity} {why}"


def _values(turn: RowTurn, heard: CheckedTurn) -> Iterator[tuple[str, str, float | None]]:
    """Iterate over rule, name and value of every measure of a turn; the value is None where the turn has none."""
    asked = heard.question.seconds if heard.question else None
    for side, text, seconds in (("question", turn.question_text, asked), ("answer", turn.answer_text, heard.spoken)):
        count = characters(text)
        yield f"{side}_seconds", f"length of the {side} in seconds", seconds
        yield f"{side}_chars", f"number of characters of the {side}", count or None
        yield "chars_per_second", f"characters a second of the {side}", count / seconds if count and seconds else None
    for side, sound in (("question", heard.question), ("answer", heard.answer)):
        yield "silence_share", f"silent share of {side}_audio", sound.silence if sound else None
        yield "clipping", f"clipped share of {side}_audio", sound.clipping if sound else None


DROPPED = "dropped.jsonl"
UNREADABLE = "unreadable"

Reason = tuple[str, str]


@dataclass(frozen=True)
class JudgedRow:
    """The result of the rules that need no other row than the item's own.

    Attributes:
        item: its number as `row`, `where`, and its `id`, or the `count` of rows that cannot be read: for the log.
        reasons, heard: why it is dropped, by all rules but `max_wer`, and by that one.
        digests: by rule of `drop_duplicates`.
        tally: its counts, where it is kept.
    """

    item: dict[str, Any]
    reasons: list[Reason]
    digests: dict[str, list[int]] = field(default_factory=dict)
    heard: list[Reason] = field(default_factory=list)
    tally: PrepareTally = field(default_factory=PrepareTally)


JudgedBlock = tuple[list[JudgedRow], "pa.Table"]
"""Some items, and the rows to store of those that have no reason to be dropped but as duplicates."""


def reasons_to_drop(judged: JudgedRow, kept: dict[str, set[int]]) -> list[Reason]:
    """Reasons to drop the next item: its own, as a duplicate of one that is kept, or as it is heard; none where it is kept.
    `kept`: digests of those, by rule of `drop_duplicates`; beyond ten million rows memory may not suffice."""
    if judged.reasons:
        return judged.reasons
    for name, digests in kept.items():
        if not digests.isdisjoint(judged.digests[name]):
            return [("drop_duplicates", f"an earlier row has the same {name.replace('_', ' ')}")]
    if not judged.heard:
        for name, digests in kept.items():
            digests.update(judged.digests[name])
    return judged.heard


class RowFilter:
    """Judges rows singly; `asr` hears for the rule `max_wer`."""

    def __init__(self, rules: Rules, codecs: Codecs | None = None, asr: WhisperASR | None = None) -> None:
        self.rules, self.codecs, self.asr = rules, codecs or Codecs(), asr

    def judge(self, item: FoundRow) -> JudgedRow:
        """Judge an item by itself, and embed its sound; UserError where an answer cannot be decoded."""
        of: dict[str, Any] = {"row": item.index, "where": item.where}
        if item.plain is None:
            return JudgedRow({**of, "count": item.count}, [(UNREADABLE, item.why)])
        of["id"] = item.plain.get("id", "")
        if item.row is None:
            return JudgedRow(of, [(UNREADABLE, item.why)])
        checked = check_row(item.row, Bounds(), self.codecs)
        reasons = [problem for problem in checked.problems if self.rules.drop_errors and KINDS[problem[0]].severity == "error"]
        reasons += broken_rules(self.rules, item.row, checked)
        heard = [] if reasons else self.heard(item.row)
        reasons = reasons or ([] if heard else _embed(item, item.row))
        names = {"row": "whole", "question_audio": "audio", "text": "pairs"}
        digests = {rule: checked.digests[name] for rule, name in names.items()}
        asked = sum(turn.question.seconds for turn in checked.turns if turn.question)
        spoken = sum(turn.spoken or 0.0 for turn in checked.turns)
        tally = PrepareTally(rows=1, turns=len(checked.turns), question_seconds=asked, answer_seconds=spoken)
        return JudgedRow(of, reasons, digests, heard, tally)

    def heard(self, row: Row) -> list[Reason]:
        """Reasons of the rule `max_wer`. UserError where an answer cannot be decoded."""
        if (rule := self.rules.max_wer) is None:
            return []
        from train.scoring.asr import error_rate

        out = list[Reason]()
        for number, turn in enumerate(row.turns):
            for side, most in (("question", rule.question), ("answer", rule.answer)):
                text = getattr(turn, f"{side}_text")
                if most is None or not text.strip():
                    continue
                codes = turn.answer_codes if side == "answer" and turn.answer_audio is None else None
                if codes is not None and self.codecs.foreign(codes.codec):
                    out.append(("max_wer", f"answer {number}: its codes are of {codes.codec!r}, which cannot be decoded here"))
                    continue
                audio = self._audio(getattr(turn, f"{side}_audio"), codes)
                if audio is None:
                    continue
                assert self.asr is not None
                heard = self.asr.transcribe(audio, SAMPLE_RATE, row.language)
                rate = error_rate(text, heard, row.language)
                if rate > most:
                    said = f"word error rate {percent(rate)}, the most is {100 * most:g} %"
                    out.append(("max_wer", f"{side} {number}: {said}; heard {heard!r}"))
        return out

    def _audio(self, sound: Sound | None, codes: Codes | None) -> Any:
        """The samples [S] at 16 kHz of a recording, or else of codes; None where there is neither, or it cannot be read, in a
        row that `drop_errors: false` keeps."""
        try:
            if sound is not None:
                return load(sound, SAMPLE_RATE)[0]
            if codes is None:
                return None
            codec = self.codecs.load(codes.codec)
            return resample(codec.decode(self.codecs.streams(codes)).cpu(), codec.sample_rate, SAMPLE_RATE)
        except (BadSound, BadCodes):
            return None


def row_judge(
    scan: Scan, rules: Rules, codecs: Codecs, whisper: Callable[[], WhisperASR] | None
) -> Callable[[range], list[JudgedBlock]]:
    """Begin a process that judges rows, in blocks of `BLOCK` items."""
    import pyarrow as pa

    judge = RowFilter(rules, codecs, whisper() if whisper else None).judge

    def blocks(rows: range) -> list[JudgedBlock]:
        done, items = list[JudgedBlock](), iter(scan.part(rows))
        while chunk := list(islice(items, BLOCK)):
            judged = [judge(item) for item in chunk]
            plain = [item.plain for item, row in zip(chunk, judged, strict=True) if not (row.reasons or row.heard)]
            done.append((judged, pa.Table.from_pylist(plain, schema=scan.schema)))
        return done

    return blocks


def filter_rows(
    data: Path,
    out: Path,
    rules: Rules,
    codecs: Codecs | None = None,
    whisper: Callable[[], WhisperASR] | None = None,
    shard_mb: int = 256,
    progress: Progress = "off",
    processes: Processes = HERE,
) -> dict[str, Any]:
    """Write the rows that rules allow, in their order, to Parquet shards in the folder `out`; returns the report. Recordings in
    the folder of the rows are embedded; those elsewhere (`Reference`) stay there. `whisper` loads what hears for the rule
    `max_wer`, in each process. UserError: no such data, `out` is there already or made by another process, no row is kept, no
    space left; see also `imap`."""
    scan = Scan(data)
    if occupied(out):
        raise UserError(f"output {out} exists: choose another, or remove it")
    out = place_for(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.with_name(f"{out.name}.filtering")
    with locked(work):
        for left in work.iterdir():  # left by a process that was killed
            if left.name != LOCK:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        start = partial(row_judge, scan, rules, codecs or Codecs(), whisper)
        try:
            with (
                closing(Display(len(scan), mode=progress)) as display,
                closing(over(scan, start, processes, display, BLOCK)) as judged,
            ):
                report = _fill(scan, work, chain.from_iterable(judged), rules, shard_mb)
            shutil.rmtree(work / "notes")
            (work / LOCK).unlink()
            os.rename(work, out)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    return report


def _fill(scan: Scan, work: Path, blocks: Iterable[JudgedBlock], rules: Rules, shard_mb: int) -> dict[str, Any]:
    import pyarrow as pa

    kept: dict[str, set[int]] = {name: set() for name in rules.drop_duplicates}
    shards, counts, dropped, lost = ShardWriter(work, shard_mb << 20), Counter[str](), 0, list[str]()
    try:
        with open(work / DROPPED, "w", encoding="utf-8") as log:
            for judged, table in blocks:
                tally, taken = PrepareTally(), list[bool]()
                for row in judged:
                    reasons, rows = reasons_to_drop(row, kept), row.item.get("count", 1)
                    tally.items += rows
                    if not (row.reasons or row.heard):
                        taken.append(not reasons)
                    if not reasons:
                        tally.add(row.tally)
                        continue
                    if not rows:
                        lost.append(f"{row.item['where']} {reasons[0][1]}")
                    counts.update({name: rows for name in dict(reasons)})
                    dropped += rows
                    line = {**row.item, "reasons": [{"rule": name, "text": text} for name, text in reasons]}
                    log.write(json.dumps(line, ensure_ascii=False) + "\n")
                table = table.filter(pa.array(taken, pa.bool_()))
                shards.add(PreparedBlock(shards.last, shards.last + tally.items, table, tally))
        shards.finish()
    finally:
        shards.abandon()
    if not shards.done.rows:
        if not dropped and lost:
            raise UserError(lost[0])
        (most, drops), *_ = counts.most_common(1) or [("", 0)]
        ruled = not most or most in {rule.name for rule in fields(Rules)}
        raise UserError(
            f"none of the {len(scan)} rows of {scan.path} is kept{f': {most} drops {drops}' if most else ''}; "
            + ("loosen the rules" if ruled else "`omni-train data validate` names what is wrong with them")
        )
    report = {
        "source": scan.path,
        "source_format": "rows",
        **shards.done.plain(),
        "dropped": dropped,
        "rules": dict(counts.most_common()),
        **({"unreadable_files": lost} if lost else {}),
        "asked": asdict(rules),
        "shards": listed(work),
    }
    write_json(work / REPORT, report)
    return report


def _embed(item: FoundRow, row: Row) -> list[Reason]:
    """Replace paths in the rows' folder by the files' bytes, as from another they would not resolve; or why that cannot be."""
    try:
        for stored, turn in zip((item.plain or {})["turns"], row.turns, strict=True):
            for name in ("question_audio", "answer_audio"):
                sound = getattr(turn, name)
                if sound is not None and not sound.data and sound.reference is None:
                    with sound_errors():
                        stored[name] = {"bytes": sound.file().read_bytes(), "path": None}
    except BadSound as error:
        return [(error.kind, str(error))]
    return []
