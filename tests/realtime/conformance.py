"""`omni-infer conformance`: plays traces of events of the Realtime API against a server and tells which points it keeps."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from infer.options import ConformanceOptions
from infer.progress import WorkBar
from infer.tls import trusting
from omni.errors import UserError, closest
from tests.realtime.connection import address_of
from tests.realtime.kit import CheckedPoint, Kit
from tests.realtime.points import Point, PointFailed
from tests.realtime.points_answers import ANSWERS
from tests.realtime.points_asking import ASKING
from tests.realtime.points_errors import ERRORS
from tests.realtime.points_items import ITEMS
from tests.realtime.points_session import SESSION
from tests.realtime.points_sound import SOUND
from tests.realtime.points_turns import TURNS
from tests.realtime.points_wire import WIRE
from tests.realtime.report import plain, show
from tests.realtime.sounds import read_question

POINTS = {
    point.name: point for topic in (SESSION, ERRORS, ITEMS, ANSWERS, ASKING, SOUND, TURNS, WIRE) for point in topic.points
}
"""All points by their names, in their order; the last look at what the others brought."""


def conformance(options: ConformanceOptions) -> bool:
    """Examine a server; returns whether it keeps every point that was looked at.

    Raises:
        UserError: an unknown point, a bad address, key file or sound file, or a server that is not there.
    """
    points = chosen(options.only)
    kit = Kit(
        address_of(options.url, options.model),
        options.key if options.key_file is None else read_key(options.key_file),
        None if options.sound is None else read_question(options.sound),
        options.timeout,
        None if options.certificate is None else trusting(options.certificate),
    )
    findings = asyncio.run(examined(kit, points))
    if options.json:
        print(json.dumps(plain(kit.address, findings), ensure_ascii=False))
    else:
        show(kit.address, findings)
    return all(one.result != "fail" for one in findings)


def chosen(only: str | None) -> list[Point]:
    """The points of these names, with commas between them, or all; UserError for an unknown one."""
    names = list(POINTS) if only is None else [name.strip() for name in only.split(",")]
    for name in names:
        if name not in POINTS:
            raise UserError(f"--only {only!r}: there is no point {name!r}; {closest(name, POINTS)}")
    return [point for name, point in POINTS.items() if name in names]


def read_key(path: str) -> str:
    """The first key of a file, which has one a line; UserError where there is none."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UserError(f"--key_file {path!r} cannot be read: {reason}") from error
    for line in lines:
        if line.strip() and not line.startswith("#"):
            return line.strip()
    raise UserError(f"--key_file {path!r} has no key; write one into it")


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
    with WorkBar("conformance", unit="s") as bar:
        return await kit.examine(points, lambda number, name: bar(number, len(points), name))
