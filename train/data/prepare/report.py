"""Reports of a preparation: `report.json`, and `broken.csv` with the items that made no row."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from omni.files import part_of, publish, read_json, write_json, writing
from train.console.progress import counted, duration
from train.data.prepare.rows import PrepareTally
from train.data.prepare.shards import AGAIN, notes
from train.data.readers.source import UNTAKEN

REPORT, BROKEN = "report.json", "broken.csv"
_KINDS = 20
_SHOWN = 3
MISSING = "recording (or another file that the row names) is missing"
_MISSING = re.compile(r"' is not there: |No such file or directory|is not in the data's folder|' is not on this machine")


def reason_of(why: str) -> str:
    """Kind of a fault, for counts: missing files are of one kind, whatever their names."""
    return MISSING if _MISSING.search(why) else why


def write_report(folder: Path, settings: dict[str, Any], note: str) -> None:
    """Write both files, from the notes of the shards; the report is written last.

    The report holds no times, so that it depends on the source and the settings alone.
    """
    total, shards = PrepareTally(), []
    kinds: Counter[str] = Counter()
    missing: list[str] = []
    with writing(folder / BROKEN):
        with open(part_of(folder / BROKEN), "w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["item", "where", "why"])
            for shard in notes(folder):
                total.add(PrepareTally.from_plain(shard["tally"]))
                shards.append({name: shard[name] for name in ("file", "rows", "bytes", "crc32", "items")})
                for item in shard["broken"]:
                    table.writerow([item["item"], item["where"], item["why"]])
                    reason = reason_of(item["why"])
                    if reason in kinds or len(kinds) < 10_000:
                        kinds[reason] += 1
                    if reason == MISSING and len(missing) < _SHOWN:
                        missing.append(f"{item['where']}: {item['why']}")
        publish(folder / BROKEN)
    report = {
        "source": settings["source"],
        "source_format": settings["source_format"],
        "note": note,
        **total.plain(),
        "reasons": dict(kinds.most_common(_KINDS)),
        "missing": missing,
        "shards": [shard for shard in shards if shard["file"]],
    }
    write_json(folder / REPORT, report)


def read_report(folder: Path) -> PrepareTally:
    """Read the counts of a finished output."""
    data = read_json(folder / REPORT, AGAIN)
    return PrepareTally.from_plain({one.name: data[one.name] for one in fields(PrepareTally) if one.name in data})


def summary(tally: PrepareTally, folder: Path) -> str:
    """Summarise a preparation in a few lines, for the terminal."""
    out = io.StringIO()
    print(f"{counted(tally.rows, 'row')} of {counted(tally.items, 'item')} in {folder}", file=out)
    made = [
        (tally.spoken_questions, "questions spoken"),
        (tally.spoken_answers, "answers spoken"),
        (tally.encoded, "answers encoded"),
        (tally.codes_taken, "answers with codes of the source"),
    ]
    print(", ".join(f"{count} {what}" for count, what in made if count) or "nothing was to be spoken or encoded", file=out)
    print(
        f"{duration(tally.question_seconds)} of spoken questions, {duration(tally.answer_seconds)} of spoken answers", file=out
    )
    if tally.left_out:
        print(f"{counted(tally.left_out, 'recording')} missing or damaged, and left out (--read.audio optional)", file=out)
    report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    if tally.broken:
        print(f"{counted(tally.broken, 'item')} made no row: see {folder / BROKEN}", file=out)
        for why, count in list(report["reasons"].items())[:5]:
            print(f"  {count:>6}  {why}", file=out)
            for one in report.get("missing", ()) if why == MISSING else ():
                print(f"          {one}", file=out)
    print(untaken(report), file=out)
    return out.getvalue().rstrip()


def untaken(report: Mapping[str, Any]) -> str:
    """What a report says of columns that no row has; "" where there are none."""
    return "".join(str(report.get("note", "")).partition(UNTAKEN)[1:])
