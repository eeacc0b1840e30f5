"""Who reads an answer: takes its events, asks a `stop` function about its text, and makes the whole answer of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from omni.engine.client import Pace, Running
from omni.generate.results import Answer, AudioChunk, Ended, Event, Reason, TextDelta, Timings


class Listened(Protocol):
    """An answer as its listener sees it: `omni.engine.client.Running`, or `omni.engine.answers.RemoteAnswer`, which document
    these."""

    pace: Pace
    settled: bool
    reader: int
    wake: Callable[[], None] | None

    def take(self) -> Event: ...

    def poll(self) -> Event | None: ...

    def stop(self, reason: Reason = "cancelled", error: str | None = None) -> None: ...

    def timings(self) -> Timings: ...


class AnswerReader:
    """Takes the events of one answer, in any one thread at a time.

    Args:
        stop: asked about the text so far, after each piece of it; true ends the answer.
    """

    def __init__(self, running: Listened, stop: Callable[[str], bool] | None = None) -> None:
        self.running, self.stop = running, stop
        self._text = ""

    def take(self) -> Event:
        """Wait for the next event."""
        event = self.running.take()
        self._judge(event)
        return event

    def poll(self) -> Event | None:
        """The next event, where there is one."""
        event = self.running.poll()
        self._judge(event)
        return event

    def _judge(self, event: Event | None) -> None:
        if self.stop is None or not isinstance(event, TextDelta):
            return
        self._text += event.text
        try:
            if self.stop(self._text):
                self.running.stop("stop")
        except Exception as error:
            self.running.stop("error", f"the function `stop` raised {type(error).__name__}: {error}")


def joined(events: Iterable[Event]) -> tuple[str, Tensor, Ended]:
    """Text and sound [S] of all events of an answer, and its end."""
    text, sound = [], [torch.zeros(0)]
    ended = Ended("cancelled", Timings())
    for event in events:
        if isinstance(event, TextDelta):
            text.append(event.text)
        elif isinstance(event, AudioChunk):
            sound.append(event.samples)
        else:
            ended = event
    return "".join(text), torch.cat(sound), ended


def whole_answer(events: Iterable[Event], running: Running | None, sample_rate: int) -> Answer:
    """The answer of all its events.

    Args:
        running: None where it was cancelled before its question was whole.
        sample_rate: of the codec in Hz, 0 without one.
    """
    text, sound, ended = joined(events)
    turn = None if running is None else running.delivered().turn
    tokens, codes = (() if turn is None else tuple(turn.text or ())), None if turn is None else turn.codes
    logprobs = None
    if running is not None and running.start.logprobs:
        logprobs = running.reply.logprobs(len(tokens), 0 if codes is None else codes.shape[1])
    return Answer(
        text=text,
        audio=sound if running is not None and running.codec is not None and codes is not None else None,
        sample_rate=sample_rate,
        tokens=tokens,
        codes=codes,
        timings=ended.timings,
        ended=ended.reason,
        error=ended.error,
        logprobs=logprobs,
    )
