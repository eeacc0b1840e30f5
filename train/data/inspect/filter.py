"""Filters rows by rules: writes the kept ones to shards, and a log of why the others were dropped."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from omni.audio.io import SAMPLE_RATE, resample
from omni.errors import UserError
from omni.files import LOCK, locked, write_json
from omni.remote import refuse_remote
from train.console.progress import Kind, percent
from train.data.inspect.checks import Bounds, Checked, check_row
from train.data.inspect.digests import KnownDigests
from train.data.inspect.display import display_of, make_folder, watched
from train.data.inspect.findings import KINDS
from train.data.inspect.measures import BadSound, load, stored_bytes
from train.data.inspect.rules import Rules, WerRule, broken_rules
from train.data.inspect.scan import FoundRow, Scan, UnreadableRows
from train.data.prepare.codecs import BadCodes, Codecs
from train.data.prepare.report import REPORT
from train.data.prepare.rows import PrepareTally
from train.data.prepare.shards import ShardWriter, notes
from train.data.prepare.worker import BLOCK, PreparedBlock
from train.data.rows.row import Row, Sound, features

if TYPE_CHECKING:
    from train.scoring.asr import WhisperTranscriber

DROPPED = "dropped.jsonl"
UNREADABLE = "unreadable"

Reason = tuple[str, str]

RowDigests = dict[str, list[int]]
"""Digests of a row by rule of `drop_duplicates`."""


class RowLengths(NamedTuple):
    """Turns of a row, and seconds of its questions and answers."""

    turns: int
    question_seconds: float
    answer_seconds: float

    @classmethod
    def of(cls, checked: Checked) -> RowLengths:
        asked = sum(turn.question.seconds for turn in checked.turns if turn.question)
        return cls(len(checked.turns), asked, sum(turn.spoken or 0.0 for turn in checked.turns))


class RowVerdict(NamedTuple):
    """Reasons to drop an item, or the lengths of a row that is kept."""

    reasons: list[Reason]
    lengths: RowLengths | None = None


Judge = Callable[[FoundRow | UnreadableRows], RowVerdict]
"""Decides on items, which it is given in their order."""


class KeptDigests:
    """Digests of the kept rows, by which later ones are duplicates: exact, in memory that does not grow with the rows."""

    def __init__(self, rules: Rules) -> None:
        self._kept = {name: KnownDigests() for name in rules.drop_duplicates}

    def reasons(self, digests: RowDigests, heard: Callable[[], list[Reason]]) -> list[Reason]:
        """Reasons to drop the next row that other rules keep: a duplicate, or else what `heard` gives. None: it is kept."""
        for name, kept in self._kept.items():
            if any(value in kept for value in digests[name]):
                return [("drop_duplicates", f"an earlier row has the same {name.replace('_', ' ')}")]
        if reasons := heard():
            return reasons
        for name, kept in self._kept.items():
            for value in digests[name]:
                kept.add(value)
        return []


class RowFilter:
    """Decides row by row whether it is kept.

    Args:
        asr: for the rule `max_wer`.
    """

    def __init__(self, rules: Rules, codecs: Codecs | None = None, asr: WhisperTranscriber | None = None) -> None:
        self.rules, self.codecs, self.asr = rules, codecs or Codecs(), asr
        self._kept = KeptDigests(rules)

    def reasons(self, row: Row) -> tuple[list[Reason], Checked]:
        """Reasons to drop a row, by name of the rule; none where it is kept. UserError where an answer cannot be decoded."""
        reasons, checked = self.own_reasons(row)
        return reasons or self._kept.reasons(self.digests(checked), lambda: self.heard(row)), checked

    def own_reasons(self, row: Row) -> tuple[list[Reason], Checked]:
        """Reasons of the rules that need no other row, but `max_wer`."""
        checked = check_row(row, Bounds(), self.codecs)
        reasons = [problem for problem in checked.problems if self.rules.drop_errors and KINDS[problem[0]].severity == "error"]
        return [*reasons, *broken_rules(self.rules, row, checked)], checked

    def digests(self, checked: Checked) -> RowDigests:
        """Digests of a row for the rule `drop_duplicates`."""
        every: dict[str, Sequence[int | None]] = {
            "row": [checked.whole],
            "question_audio": checked.audio,
            "text": checked.pairs,
        }
        return {name: [value for value in every[name] if value is not None] for name in self.rules.drop_duplicates}

    def heard(self, row: Row) -> list[Reason]:
        """Reasons of the rule `max_wer`. UserError where an answer cannot be decoded."""
        return [] if self.rules.max_wer is None else self._heard(row, self.rules.max_wer)

    def judged(self, item: FoundRow | UnreadableRows) -> RowVerdict:
        """Decide on the next item."""
        if isinstance(item, UnreadableRows) or item.row is None:
            return RowVerdict([(UNREADABLE, item.why)])
        reasons, checked = self.reasons(item.row)
        return RowVerdict(reasons) if reasons else RowVerdict([], RowLengths.of(checked))

    def _heard(self, row: Row, rule: WerRule) -> list[Reason]:
        from train.scoring.asr import error_rate

        assert self.asr is not None
        out = []
        for number, turn in enumerate(row.turns):
            for side, most in (("question", rule.question), ("answer", rule.answer)):
                text = getattr(turn, f"{side}_text")
                if most is None or not text.strip():
                    continue
                codes = turn.answer_codes if side == "answer" and turn.answer_audio is None else None
                if codes is not None and self.codecs.foreign(codes.codec):
                    out.append(("max_wer", f"answer {number}: its codes are of {codes.codec!r}, which cannot be decoded here"))
                    continue
                try:
                    audio = self._audio(row, number, side)
                except UserError as error:
                    raise UserError(f"{row.where}: {error}") from error
                if audio is None:
                    continue
                heard = self.asr.transcribe(audio, row.language)
                rate = error_rate(text, heard, row.language)
                if rate > most:
                    said = f"word error rate {percent(rate)}, the most is {100 * most:g} %"
                    out.append(("max_wer", f"{side} {number}: {said}; heard {heard!r}"))
        return out

    def _audio(self, row: Row, number: int, side: str) -> Any:
        """Load a side's sound [S] at 16 kHz, from its recording or its codes; None where it has neither."""
        turn = row.turns[number]
        sound: Sound | None = getattr(turn, f"{side}_audio")
        try:
            if sound is not None:
                return load(sound, SAMPLE_RATE)[0]
            if side == "answer" and turn.answer_codes is not None:
                codec = self.codecs.load(turn.answer_codes.codec)
                decoded = codec.decode(self.codecs.streams(turn.answer_codes)).cpu()
                return resample(decoded, codec.sample_rate, SAMPLE_RATE)
        except (BadSound, BadCodes):
            return None  # an unreadable recording in a row that drop_errors: false keeps
        return None


def filter_rows(data: Path, out: Path, judge: RowFilter, shard_mb: int = 256, progress: Kind = "off") -> dict[str, Any]:
    """Filter rows as `write_kept`, by rules."""
    return write_kept(Scan(data, progress), out, judge.judged, asdict(judge.rules), shard_mb, progress)


def write_kept(
    scan: Scan, out: Path, judge: Judge, rules: Mapping[str, Any], shard_mb: int = 256, progress: Kind = "off"
) -> dict[str, Any]:
    """Write the kept rows, in their order, to Parquet shards in the folder `out`; returns the report.

    Recordings in the folder of the rows are embedded; those elsewhere (`reference.Reference`) stay there.

    Raises:
        UserError: no such data, `out` is there already, the working folder, or being made by another process, no row is kept,
            no space left.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"output {out} exists: choose another, or remove it")
    out = _place(out)
    make_folder(out.parent)
    work = out.with_name(f"{out.name}.filtering")
    with locked(work):
        for left in work.iterdir():  # left by a process that was killed
            if left.name != LOCK:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            report = _fill(scan, work, judge, rules, shard_mb, progress)
            shutil.rmtree(work / "notes")
            (work / LOCK).unlink()
            os.rename(work, out)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    return report


def _place(out: Path) -> Path:
    """Path of the finished folder, links resolved; UserError where it would replace the working folder."""
    refuse_remote(out, "output", write=True)
    place = Path(os.path.realpath(out))
    if place == Path.cwd():
        raise UserError(f"output {out} is the folder that this runs in, which a new one would replace: name another")
    return place


def _fill(
    scan: Scan, work: Path, judge: Judge, rules: Mapping[str, Any], shard_mb: int, progress: Kind
) -> dict[str, Any]:  # fmt: skip
    shards, counts, dropped, lost = ShardWriter(work, shard_mb << 20), Counter[str](), 0, list[str]()
    writer = _Writer(shards)
    display = display_of(progress, scan)
    try:
        with open(work / DROPPED, "w", encoding="utf-8") as log:
            for item in watched(scan, display):
                reasons, lengths = judge(item)
                plain = None
                if not reasons:
                    reasons, plain = _stored(item)
                writer.take(item, plain, lengths)
                if reasons:
                    rows = item.count if isinstance(item, UnreadableRows) else 1
                    if not rows:
                        lost.append(f"{item.where} {reasons[0][1]}")
                    counts.update({name: rows for name in dict(reasons)})
                    dropped += rows
                    _log(log, item, reasons)
        writer.finish()
    finally:
        shards.abandon()
        display.close()
    if not shards.done.rows:
        if not dropped and lost:
            raise UserError(lost[0])
        (most, drops), *_ = counts.most_common(1) or [("", 0)]
        ruled = not most or most in {one.name for one in fields(Rules)}
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
        "asked": rules,
        "shards": [
            {name: note[name] for name in ("file", "rows", "bytes", "crc32", "items")} for note in notes(work) if note["file"]
        ],
    }
    write_json(work / REPORT, report)
    return report


def _stored(item: FoundRow | UnreadableRows) -> tuple[list[Reason], dict[str, Any] | None]:
    """The row to store, or the reason why it cannot be."""
    assert isinstance(item, FoundRow)
    try:
        return [], _embedded(item)
    except BadSound as error:
        return [(error.kind, str(error))], None


def _embedded(item: FoundRow) -> dict[str, Any]:
    """The row as stored, with paths in the rows' folder replaced by the files' bytes: from another they would not resolve."""
    assert item.row is not None
    for stored, turn in zip(item.plain["turns"], item.row.turns, strict=True):
        for name in ("question_audio", "answer_audio"):
            sound = getattr(turn, name)
            if sound is not None and not sound.data and sound.reference is None:
                stored[name] = {"bytes": stored_bytes(sound), "path": None}
    return item.plain


def _log(log: TextIO, item: FoundRow | UnreadableRows, reasons: list[Reason]) -> None:
    line = {
        "row": item.index,
        "where": item.where,
        **({"count": item.count} if isinstance(item, UnreadableRows) else {"id": item.plain.get("id", "")}),
        "reasons": [{"rule": name, "text": text} for name, text in reasons],
    }
    log.write(json.dumps(line, ensure_ascii=False) + "\n")


class _Writer:
    """Passes rows to the shards in blocks."""

    def __init__(self, shards: ShardWriter) -> None:
        self.shards = shards
        self.schema = features().arrow_schema
        self._begin(0)

    def _begin(self, start: int) -> None:
        self._start = self._stop = start
        self._plain: list[dict[str, Any]] = []
        self._tally = PrepareTally()

    def take(self, item: FoundRow | UnreadableRows, plain: dict[str, Any] | None, lengths: RowLengths | None) -> None:
        """Add the next item, with its row where it is kept."""
        count = item.count if isinstance(item, UnreadableRows) else 1
        self._stop += count
        self._tally.items += count
        if plain is not None and lengths is not None:
            self._plain.append(plain)
            self._tally.rows += 1
            self._tally.turns += lengths.turns
            self._tally.question_seconds += lengths.question_seconds
            self._tally.answer_seconds += lengths.answer_seconds
        if len(self._plain) >= BLOCK:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.schema) as writer:
            writer.write_table(pa.Table.from_pylist(self._plain, schema=self.schema))
        self.shards.add(PreparedBlock(self._start, self._stop, sink.getvalue().to_pybytes(), self._tally))
        self._begin(self._stop)

    def finish(self) -> None:
        """Write the last block, and finish the shards."""
        if self._stop > self._start:
            self._flush()
        self.shards.finish()
