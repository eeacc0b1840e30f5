"""What an examination found, as a table and as JSON."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from tests.realtime.kit import CheckedPoint
from tests.realtime.points import NEEDS_SPEECH, shortened

SHOWN = {"pass": ("kept", "green"), "fail": ("BROKEN", "bold red"), "skipped": ("skipped", "yellow"), "note": ("note", "cyan")}
"""Word and colour of each result."""

WIDTH = 140
"""Characters of a line where there is no terminal."""


def plain(address: str, findings: Sequence[CheckedPoint]) -> dict[str, object]:
    """The object that `--json` prints."""
    points = [
        {
            "point": one.point.name,
            "topic": one.point.topic,
            "title": one.point.title,
            "why": one.point.why,
            "result": one.result,
            "reason": one.reason or None,
            "event": one.event,
            "seconds": round(one.seconds, 2),
        }
        for one in findings
    ]
    return {
        "address": address,
        "counts": {name: sum(one.result == name for one in findings) for name in SHOWN},
        "points": points,
    }


def show(address: str, findings: Sequence[CheckedPoint]) -> None:
    """Print the table, and what is broken with its reason and event."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    table = Table(title=f"conformance of {address}", title_justify="left", title_style="bold", box=box.SIMPLE)
    table.add_column("point", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what it keeps")
    topic = None
    for one in findings:
        if one.point.topic != topic:
            topic = one.point.topic
            table.add_row(Text(topic, "bold"), "", "")
        word, style = SHOWN[one.result]
        title = Text(one.point.title)
        if one.result in ("skipped", "note"):
            title.append(f"\n{one.reason}", "dim")
        table.add_row(f"  {one.point.name}", Text(word, style), title)
    console.print(table)
    for one in findings:
        if one.result == "fail":
            console.print(Text.assemble((one.point.name, "bold red"), f": {one.reason}"))
            console.print(Text(f"  why it matters: {one.point.why}"))
            if one.event is not None:
                console.print(Text(f"  event: {shortened(one.event)}", "dim"))
    console.print(Text(summary(findings)))


def summary(findings: Sequence[CheckedPoint]) -> str:
    """One line that counts."""
    counted = Counter(one.result for one in findings)
    words = [f"{counted['pass']} kept", f"{counted['fail']} broken"]
    if counted["note"]:
        words.append(f"{counted['note']} noted")
    if speechless := sum(one.reason == NEEDS_SPEECH for one in findings):
        words.append(f"{speechless} skipped: {NEEDS_SPEECH}")
    if others := counted["skipped"] - speechless:
        words.append(f"{others} skipped for other reasons")
    return f"{len(findings)} points: {', '.join(words)}"
