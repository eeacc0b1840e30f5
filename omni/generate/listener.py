"""Who reads an answer: takes its events, asks a `stop` function about its text, and makes the whole answer of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from omni.engine.client import Running
from omni.generate.results import Answer, AudioChunk, Ended, Event, Logprobs, Reason, TextDelta, Timings


class Listened(Protocol):
    """An answer as its listener sees it: `omni.engine.client.Running`, or `omni.engine.answers.RemoteAnswer`, which document
    these."""

    settled: bool
    reader: int
    wake: Callable[[], None] | None

    def take(self) -> Event: ...

    def poll(self) -> Event | None: ...

    def stop(self, reason: Reason = "cancelled", error: str | None = None) -> None: ...


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
        except (Exception, SystemExit) as error:  # Ctrl-C is not the function's
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


class DeliveredPart(NamedTuple):
    """The delivered part of an answer: ids of its text, its codes [A, F], and their log-probabilities where they were asked
    for."""

    tokens: tuple[int, ...] = ()
    codes: Tensor | None = None
    logprobs: Logprobs | None = None


def delivered_part(running: Running) -> DeliveredPart:
    """What reached the listener of an answer so far."""
    turn = running.delivered().turn
    tokens, codes = tuple(turn.text or ()), turn.codes
    if not running.start.logprobs:
        return DeliveredPart(tokens, codes)
    return DeliveredPart(tokens, codes, running.reply.logprobs(len(tokens), 0 if codes is None else codes.shape[1]))


def answer_of(said: tuple[str, Tensor, Ended], part: DeliveredPart, sounds: bool, sample_rate: int) -> Answer:
    """The answer of all its events.

    Args:
        said: what `joined` made of them.
        sounds: whether a codec makes its sound.
        sample_rate: of the codec in Hz, 0 without one.
    """
    text, sound, ended = said
    return Answer(
        text=text,
        audio=sound if sounds and part.codes is not None else None,
        sample_rate=sample_rate,
        tokens=part.tokens,
        codes=part.codes,
        timings=ended.timings,
        ended=ended.reason,
        error=ended.error,
        logprobs=part.logprobs,
    )
