"""Plays traces of events of the Realtime API against a server and tells which points it keeps.

    python -m tests.realtime ws://127.0.0.1:8000/v1 --sound question.wav

Exit codes: 0; 1 where a point is broken; 2 for a mistake of the user's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from infer.serve.keys import read_keys
from omni.errors import UserError, closest
from tests.realtime.answer_points import ANSWERS, ASKING, WIRE
from tests.realtime.client import address_of, read_question
from tests.realtime.item_points import ITEMS, SOUND, TURNS
from tests.realtime.kit import CheckedPoint, Kit, trusting
from tests.realtime.points import NEEDS_SPEECH, Point, PointFailed, shortened
from tests.realtime.session_points import ERRORS, SESSION

POINTS = {
    point.name: point for topic in (SESSION, ERRORS, ITEMS, ANSWERS, ASKING, SOUND, TURNS, WIRE) for point in topic.points
}
"""All points by their names, in their order; the last look at what the others brought."""

SHOWN = {"pass": ("kept", "green"), "fail": ("BROKEN", "bold red"), "skipped": ("skipped", "yellow"), "note": ("note", "cyan")}
"""Word and colour of each result."""

WIDTH = 140
"""Characters of a line where there is no terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Examine a server as a command line says; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        points = chosen(args.only)
        kit = Kit(
            address_of(args.url, args.model),
            args.key if args.key_file is None else read_keys(args.key_file)[0],
            None if args.sound is None else read_question(args.sound),
            args.timeout,
            None if args.certificate is None else trusting(args.certificate),
        )
        findings = asyncio.run(examined(kit, points))
    except UserError as error:
        parser.error(str(error))
    if args.json:
        print(json.dumps(plain(kit.address, findings), ensure_ascii=False))
    else:
        show(kit.address, findings)
    return int(any(one.result == "fail" for one in findings))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.realtime", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", help="address of the server, such as ws://127.0.0.1:8000/v1")
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument("--key", help="key to connect with")
    keys.add_argument("--key_file", help="file with the key instead, one a line, the first counts")
    parser.add_argument("--certificate", help="certificate of a wss server to trust, where it is no public one (PEM)")
    parser.add_argument("--sound", help="sound file with a spoken question")
    parser.add_argument("--only", help="names of points to look at, with commas between them")
    parser.add_argument("--model", default="gpt-realtime", help="name of the model to ask for")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds that an event is waited for")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output instead of the table")
    return parser


def chosen(only: str | None) -> list[Point]:
    """The points of these names, with commas between them, or all; UserError for an unknown one."""
    names = list(POINTS) if only is None else [name.strip() for name in only.split(",")]
    for name in names:
        if name not in POINTS:
            raise UserError(f"--only {only!r}: there is no point {name!r}; {closest(name, POINTS)}")
    return [point for name, point in POINTS.items() if name in names]


async def examined(kit: Kit, points: list[Point]) -> list[CheckedPoint]:
    """What the points' checks found, with progress on standard error; UserError where the server takes none."""
    try:
        async with kit.connected() as client:
            await client.expect("session.created")
    except PointFailed as failed:
        if not kit.clients:
            raise UserError(f"{kit.address} cannot be reached ({failed}); start the server, or check the address") from None
        error = failed.event.get("error") if failed.event is not None else None
        if isinstance(error, dict):
            raise UserError(f"{kit.address} takes no session ({error.get('message')}); check --key and --model") from None
    kit.clients.clear()
    with tqdm(desc="conformance", total=len(points), leave=False, disable=None) as bar:
        return await kit.examine(points, lambda number, name: bar.update(number - bar.n))


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


if __name__ == "__main__":
    sys.exit(main())
