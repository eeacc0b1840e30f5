"""The server keeps every point of the Realtime API that the kit of `tests/realtime` knows."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.infer.serve.test_server import serve
from tests.infer.turns.test_turns import at24, say
from tests.realtime.__main__ import POINTS
from tests.realtime.answer_points import WIRE
from tests.realtime.client import address_of, pcm16
from tests.realtime.kit import CheckedPoint, Kit
from tests.realtime.points import Point, shortened

__all__ = ["serve"]


async def test_every_point_is_kept(serve: Any) -> None:
    place, _ = serve()
    topics: dict[str, list[Point]] = {}
    for point in POINTS.values():
        topics.setdefault(point.topic, []).append(point)
    of_all = topics.pop(WIRE.name)  # alone: openai's types take seconds to import
    speech = pcm16(at24(say("what is two plus three")))

    async def examined(points: list[Point]) -> list[CheckedPoint]:
        kit = Kit(address_of(f"ws://{place}/v1", "omni"), None, speech, 5.0)
        return await kit.examine(points, lambda number, name: None)

    by_topic = await asyncio.gather(*map(examined, topics.values()))
    found = [point for points in (*by_topic, await examined(of_all)) for point in points]
    assert [one.point.name for one in found] == list(POINTS)
    broken = [(one.point.name, one.reason, shortened(one.event)) for one in found if one.result == "fail"]
    assert broken == []
    assert {one.point.name for one in found if one.result == "skipped"} <= {"truncate"}  # an untrained model says few words
