"""Validates stored rows: single rows, duplicates among them, and overlaps with other splits."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from omni.errors import UserError
from omni.utils.remote import spelled
from train.console.progress import Display, Progress
from train.data.executor import HERE, Processes
from train.data.inspect.checks import (
    CLIPPED_LEVEL,
    CLIPPED_RUN,
    DIGESTS,
    MISMATCH,
    OTHER_RATES,
    PAUSE_SECONDS,
    SILENT_DB,
    SPEECH_RATES,
    BadSound,
    Bounds,
    Codecs,
    Findings,
    check_row,
    measure,
    text_digest,
)
from train.data.inspect.scan import Scan, over
from train.data.prepare.shards import REPORT, checksum
from train.data.rows.row import ROW_VERSION


def repeats(digests: array[int]) -> Iterator[tuple[int, int]]:
    """Iterate over rows with a digest of an earlier row, with the first such row, in order. `digests`: 64 bits each, with the
    numbers of their rows, in turn and in the order of the rows."""
    import numpy as np

    values, rows = np.array(digests).reshape(-1, 2).T
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    firsts = rows[first][inverse]
    again = rows != firsts
    yield from zip(rows[again].tolist(), firsts[again].tolist(), strict=True)


def shared(digests: array[int], others: array[int]) -> Iterator[tuple[int, int]]:
    """Iterate over rows with a digest that other data have too, with the first such row there, in order; see `repeats`."""
    import numpy as np

    (values, rows), (known, firsts) = (np.array(each).reshape(-1, 2).T for each in (digests, others))
    if not len(known):
        return
    known, first = np.unique(known, return_index=True)
    at = np.minimum(np.searchsorted(known, values), len(known) - 1)
    in_both = known[at] == values
    yield from zip(rows[in_both].tolist(), firsts[first][at[in_both]].tolist(), strict=True)


@dataclass
class Summary:
    """Readable rows, all rows, hours of sound measured, findings, and the report of the preparation."""

    rows: int
    total: int
    hours: float
    findings: Findings
    prepared: dict[str, Any] = field(default_factory=dict)


@dataclass
class Seen:
    """Counts of the rows that were read, and what tells duplicates among them and with other data.

    Attributes:
        digests: by name (`Checked.digests`), digests and their rows, see `repeats`.
        speakers: the first row of each.
    """

    digests: dict[str, array[int]] = field(default_factory=lambda: {name: array("Q") for name in DIGESTS})
    speakers: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    seconds: float = 0.0

    def merge(self, other: Seen) -> None:
        """Add later rows."""
        for name, digests in other.digests.items():
            self.digests[name].extend(digests)
        self.speakers = other.speakers | self.speakers
        self.rows, self.seconds = self.rows + other.rows, self.seconds + other.seconds


Noted = list[tuple[str, str, str, int]]
"""Findings: kind, place, text and number of rows."""


def validate(
    data: Path,
    against: Sequence[Path],
    bounds: Bounds,
    codecs: Codecs,
    findings: Findings,
    progress: Progress = "off",
    processes: Processes = HERE,
) -> Summary:
    """Check all rows of `data` singly, against each other, and against those of `against`. UserError: there are no such data,
    or the codec's weights do not fit; see also `executor.imap`."""
    scan, others = Scan(data), [Scan(other) for other in against]
    for other in others:
        if Path(other.path).resolve() == Path(scan.path).resolve():
            raise UserError(f"{other.path} is compared with itself: name another split with --against")
    with closing(Display(sum(map(len, (scan, *others))), mode=progress)) as display:

        def look(scanned: Scan, start: Callable[[], Callable[[range], tuple[Noted, Seen]]]) -> Seen:
            seen = Seen()
            for noted, more in over(scanned, start, processes, display):
                for finding in noted:
                    findings.add(*finding)
                seen.merge(more)
            return seen

        seen = look(scan, partial(row_checks, scan, bounds, codecs))
        find_duplicates(scan, seen, findings)
        for other in others:
            find_leaks(scan, seen, other, look(other, partial(other_rows, other)), findings)
    return Summary(seen.rows, len(scan), seen.seconds / 3600, findings, scan.report())


def row_checks(scan: Scan, bounds: Bounds, codecs: Codecs) -> Callable[[range], tuple[Noted, Seen]]:
    """Begin a process that checks rows singly."""
    try:
        sums = {shard["file"]: shard["crc32"] for shard in scan.report()["shards"]}
    except (KeyError, TypeError):  # there is no such report
        sums = {}

    def check(rows: range) -> tuple[Noted, Seen]:
        part, seen = scan.part(rows), Seen()
        noted: Noted = []
        for file in (scan.files[number] for number in part.numbers() if part.begins(number)):
            if file.name in sums and checksum(file) != sums[file.name]:
                noted.append(("changed_file", str(file), f"its CRC-32 is not that in {REPORT}: copy or prepare it again", 1))
        for item in part:
            if item.plain is None:
                whole = item.where in {str(file) for file in scan.files}
                noted.append(("unreadable_file" if whole else "damaged_pages", item.where, item.why, max(1, item.count)))
            elif item.row is None:
                noted.append(("bad_row", item.where, item.why, 1))
            else:
                checked = check_row(item.row, bounds, codecs)
                noted += [(kind, item.where, text, 1) for kind, text in checked.problems]
                for name, digests in checked.digests.items():
                    for digest in digests:
                        seen.digests[name].extend((digest, item.index))
                seen.rows += 1
                sounds = [sound for turn in checked.turns for sound in (turn.question, turn.answer) if sound is not None]
                seen.seconds += sum(sound.seconds for sound in sounds)
                if item.row.speaker:
                    seen.speakers.setdefault(item.row.speaker, item.index)
        return noted, seen

    return check


def find_duplicates(scan: Scan, seen: Seen, findings: Findings) -> None:
    """Find rows, recordings and texts that came before."""
    whole = dict(repeats(seen.digests["whole"]))
    for row, first in whole.items():
        findings.add("duplicate_row", scan.where(row), f"equals {scan.where(first)}")
    for kind, name in (("duplicate_audio", "audio"), ("duplicate_text", "said")):
        for row, first in repeats(seen.digests[name]):
            if row not in whole:
                findings.add(kind, scan.where(row), f"is also in {scan.where(first)}")


def other_rows(other: Scan) -> Callable[[range], tuple[Noted, Seen]]:
    """Begin a process that takes digests of the questions and speakers of another split."""

    def look(rows: range) -> tuple[Noted, Seen]:
        noted: Noted = []
        seen = Seen()
        for item in other.part(rows):
            if item.row is None:
                kind = "unreadable_file" if item.plain is None else "bad_row"
                noted.append((kind, item.where, f"{item.why} (not compared)", 1))
                continue
            if item.row.speaker:
                seen.speakers.setdefault(item.row.speaker, item.index)
            for turn in item.row.turns:
                if turn.question_text.strip():
                    seen.digests["texts"].extend((text_digest(turn.question_text), item.index))
                if turn.question_audio is not None:
                    try:
                        seen.digests["audio"].extend((measure(turn.question_audio).digest, item.index))
                    except BadSound as error:
                        noted.append((error.kind, item.where, f"question_audio: {error} (not compared)", 1))
        return noted, seen

    return look


def find_leaks(scan: Scan, seen: Seen, other: Scan, theirs: Seen, findings: Findings) -> None:
    """Find questions and speakers of another split that these rows have too."""
    for kind, name in (("leaked_audio", "audio"), ("leaked_text", "texts")):
        for row, first in shared(seen.digests[name], theirs.digests[name]):
            findings.add(kind, scan.where(row), f"is also in {other.where(first)}")
    for speaker, row in seen.speakers.items():
        if speaker in theirs.speakers:
            location = other.where(theirs.speakers[speaker])
            findings.add("leaked_speaker", scan.where(row), f"speaker {speaker!r} is also in {location}")


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
