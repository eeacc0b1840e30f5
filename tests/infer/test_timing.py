"""Underruns, against a player that really counts samples; the meter, on a clock that the test sets."""

from __future__ import annotations

import random

import pytest

from infer import timing as playback
from infer.timing import AnswerMeter, Player


def slow_player(arrivals: list[tuple[int, int]], rate: int) -> int:
    """Underruns by playing tick for tick: `rate` samples a tick, chunks as (tick, samples)."""
    buffer, state, underruns = 0, "waiting", 0
    for tick in range(arrivals[-1][0] + 1):
        arrived = sum(samples for when, samples in arrivals if when == tick)
        if arrived:
            underruns += state == "dry"
            state = "playing"
        buffer += arrived
        if state == "playing" and buffer == 0:
            state = "dry"
        elif state == "playing":
            buffer -= rate
    return underruns


@pytest.mark.parametrize("rate", [1, 4])
def test_underruns_are_those_of_a_player_that_counts_samples(rate):
    draw = random.Random(rate)
    counts = set()
    for _ in range(300):
        tick, arrivals = 0, []
        for _ in range(draw.randrange(1, 9)):
            arrivals.append((tick, rate * draw.randrange(1, 5)))
            tick += draw.randrange(1, 6)
        player = Player(rate)
        lates = [player.receive(samples, float(when)) for when, samples in arrivals]
        assert lates[0] is None and sum(late > 0 for late in lates[1:] if late is not None) == player.underruns
        assert player.underruns == slow_player(arrivals, rate)
        counts.add(player.underruns)
    assert {0, 1, 2, 3} <= counts


class FakeClock:
    seconds = 0.0


def test_the_meter_takes_first_times_and_the_whole(monkeypatch):
    monkeypatch.setattr(playback, "Clock", FakeClock)
    meter = AnswerMeter(8000)
    for now, samples in ((0.2, 0), (0.3, 4000), (0.5, 0), (0.9, 4000), (1.2, 8000)):
        meter.clock.seconds = now
        if samples:
            meter.add_sound(samples)
        else:
            meter.add_text()
    meter.clock.seconds = 1.5
    meter.stop()
    assert (meter.first_text, meter.first_audio, meter.total, meter.sound) == (0.2, 0.3, 1.5, 2.0)
    assert meter.line() == "first audio 300 ms, real-time factor 0.75, 1 underrun"
