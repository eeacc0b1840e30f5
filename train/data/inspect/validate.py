"""Validates stored rows: single rows, duplicates among them, and overlaps with other splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omni.errors import UserError
from omni.remote import spelled
from train.console.progress import Display, Kind
from train.data.inspect.checks import MISMATCH, OTHER_RATES, PAUSE_SECONDS, SPEECH_RATES, Bounds, Checked, check_row
from train.data.inspect.digests import Digests, FirstRows
from train.data.inspect.display import display_of, watched
from train.data.inspect.findings import Findings
from train.data.inspect.measures import CLIPPED_LEVEL, CLIPPED_RUN, SILENT_DB, BadSound, measure, text_digest
from train.data.inspect.scan import FoundRow, Scan, UnreadableRows
from train.data.prepare.codecs import Codecs
from train.data.prepare.report import REPORT
from train.data.prepare.shards import checksum
from train.data.rows.row import ROW_VERSION


@dataclass
class Summary:
    """Result of a validation: readable rows, all rows, hours of sound measured, findings, and the report of the preparation."""

    rows: int
    total: int
    hours: float
    findings: Findings
    prepared: dict[str, Any] = field(default_factory=dict)


@dataclass
class Seen:
    """What is kept of the rows that were looked at: digests, to find duplicates and what other data have too, and counts."""

    audio: Digests = field(default_factory=Digests)
    texts: Digests = field(default_factory=Digests)
    said: Digests = field(default_factory=Digests)
    whole: Digests = field(default_factory=Digests)
    speakers: FirstRows = field(default_factory=FirstRows)
    rows: int = 0
    microseconds: int = 0

    def add(self, row: int, checked: Checked) -> None:
        for digests, values in ((self.audio, checked.audio), (self.texts, checked.texts), (self.said, checked.said)):
            for value in values:
                digests.add(value, row)
        if checked.whole is not None:
            self.whole.add(checked.whole, row)
        self.rows += 1
        self.microseconds += round(1e6 * checked.seconds)


def validate(
    data: Path, against: Sequence[Path], bounds: Bounds, codecs: Codecs, findings: Findings, progress: Kind = "off"
) -> Summary:
    """Check all rows of `data` singly, against each other, and against those of `against`.

    Memory holds a few rows, a bit for each row where there are duplicates, and at most 50 MiB for each of five kinds of digests
    and three of other data, with 60 MiB more while they are looked up. A temporary file (in `TMPDIR`) has 16 bytes for each
    digest beyond a million; see `train.data.inspect.digests`.

    Raises:
        UserError: there are no such data, the codec's weights do not fit, or there is no room for the file.
    """
    scan, others = open_scans(data, against, progress)
    display = display_of(progress, scan, *others)
    try:
        check_sums(scan, findings)
        seen = look_at(scan, bounds, codecs, findings, display)
        find_duplicates(scan, seen, findings)
        for other in others:
            find_leaks(scan, seen, other, look_at_other(other, findings, display), findings)
    finally:
        display.close()
    return Summary(seen.rows, len(scan), seen.microseconds / 3.6e9, findings, scan.report())


def open_scans(data: Path, against: Sequence[Path], progress: Kind = "off") -> tuple[Scan, list[Scan]]:
    """Open the rows, and those that they are compared with; UserError where there are none, or they are the same."""
    scan, others = Scan(data, progress), [Scan(other, progress) for other in against]
    for other in others:
        if other.same(scan):
            raise UserError(f"{other.path} is compared with itself: name another split with --against")
    return scan, others


def look_at(scan: Scan, bounds: Bounds, codecs: Codecs, findings: Findings, display: Display) -> Seen:
    """Check rows singly."""
    seen = Seen()
    for item in watched(scan, display):
        if isinstance(item, UnreadableRows):
            whole = item.where in {str(file) for file in scan.files}
            findings.add("unreadable_file" if whole else "damaged_pages", item.where, item.why, max(1, item.count))
        elif item.row is None:
            findings.add("bad_row", item.where, item.why)
        else:
            checked = check_row(item.row, bounds, codecs)
            for kind, text in checked.problems:
                findings.add(kind, item.where, text)
            seen.add(item.index, checked)
            seen.speakers.add(item.row.speaker, item.index)
    return seen


def check_sums(scan: Scan, findings: Findings) -> None:
    """Compare the files' checksums with those in their preparation's report, where there is one."""
    try:
        noted = {shard["file"]: shard["crc32"] for shard in scan.report()["shards"]}
    except (KeyError, TypeError):
        return
    for number, file in enumerate(scan.files):
        if scan.begins(number) and file.name in noted and checksum(file) != noted[file.name]:
            findings.add("changed_file", str(file), f"its CRC-32 is not that in {REPORT}: copy or prepare it again")


def find_duplicates(scan: Scan, seen: Seen, findings: Findings) -> None:
    """Find rows, recordings and texts that came before."""
    whole = bytearray(len(scan) // 8 + 1)
    for row, first in seen.whole.repeats():
        whole[row // 8] |= 1 << row % 8
        findings.add("duplicate_row", scan.where(row), f"equals {scan.where(first)}")
    for kind, digests in (("duplicate_audio", seen.audio), ("duplicate_text", seen.said)):
        for row, first in digests.repeats():
            if not whole[row // 8] >> row % 8 & 1:
                findings.add(kind, scan.where(row), f"is also in {scan.where(first)}")


def look_at_other(other: Scan, findings: Findings, display: Display) -> Seen:
    """Digests of the questions and speakers of another split."""
    seen = Seen()
    for item in watched(other, display):
        if not isinstance(item, FoundRow) or item.row is None:
            where, why = item.where, item.why
            findings.add("unreadable_file" if isinstance(item, UnreadableRows) else "bad_row", where, f"{why} (not compared)")
            continue
        seen.speakers.add(item.row.speaker, item.index)
        for turn in item.row.turns:
            if turn.question_text.strip():
                seen.texts.add(text_digest(turn.question_text), item.index)
            if turn.question_audio is not None:
                try:
                    seen.audio.add(measure(turn.question_audio).digest, item.index)
                except BadSound as error:
                    findings.add(error.kind, item.where, f"question_audio: {error} (not compared)")
    return seen


def find_leaks(scan: Scan, seen: Seen, other: Scan, theirs: Seen, findings: Findings) -> None:
    """Find questions and speakers of another split that these rows have too."""
    pairs = (("leaked_audio", seen.audio, theirs.audio), ("leaked_text", seen.texts, theirs.texts))
    for kind, our, their in pairs:
        for row, place in our.shared(their):
            findings.add(kind, scan.where(row), f"is also in {other.where(place)}")
    told = set[str]()
    for row, place in seen.speakers.digests.shared(theirs.speakers.digests):
        found = scan.at(row).row
        if found is not None and found.speaker not in told:
            told.add(found.speaker)
            findings.add("leaked_speaker", scan.where(row), f"speaker {found.speaker!r} is also in {other.where(place)}")


def report(summary: Summary, data: Path, against: Sequence[Path], bounds: Bounds) -> dict[str, object]:
    """Convert the result to plain data, the bounds included."""
    return {
        "data": spelled(data),
        "against": [spelled(other) for other in against],
        "version": ROW_VERSION,
        "rows": summary.total,
        "rows_read": summary.rows,
        "prepared": {name: summary.prepared[name] for name in ("items", "rows", "broken", "note") if name in summary.prepared},
        "hours": round(summary.hours, 4),
        "errors": summary.findings.of("error"),
        "warnings": summary.findings.of("warning"),
        "findings": summary.findings.plain(),
        "bounds": {
            **asdict(bounds),
            "speech_rates": {**SPEECH_RATES, "others": OTHER_RATES},
            "pause_seconds": PAUSE_SECONDS,
            "codes_length": {"seconds": MISMATCH[0], "share": MISMATCH[1]},
            "silent_below_db": SILENT_DB,
            "clipped": {"level": CLIPPED_LEVEL, "samples_in_a_row": CLIPPED_RUN},
        },
    }
