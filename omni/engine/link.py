"""The clients' end of the pipe to an engine's process: its start, requests and their results, and the answers as their
listeners see them.

Events come in one reader thread and wait with their answer until its listener takes them. What was taken is what was delivered:
its number goes to the engine's process now and then, so that rows whose listener is behind rest, and with each cancel, so that
the history is cut there.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import torch

from omni.engine.client import Pace
from omni.engine.wire import (
    CodedSound,
    EngineLost,
    Item,
    ModelFacts,
    Sender,
    SoundDecoder,
    cannot_decode,
    pack_request,
    unpack,
    unpack_error,
)
from omni.generate.question import Asked
from omni.generate.results import AudioChunk, Clock, Ended, Event, Reason, TextDelta, Timings
from omni.generate.turn_end import TurnFrames
from omni.utils.private import disown

PATIENCE = 10.0
"""Seconds that a process has to end once it was told to, or its pipe is closed."""


def start_process(arguments: Item) -> tuple[Any, Any]:
    """The process, and this process's end of its pipe. Ctrl-C does not reach it, from its first moment on."""
    from omni.engine.child import run

    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=run, args=(other, *arguments), name="omni-engine")
    held = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        process.start()
    except BaseException:
        pipe.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        other.close()
    disown(process)  # `omni.engine.process` ends it at exit
    return pipe, process


def first_message(pipe: Any, process: Any) -> ModelFacts:
    """Waits for the facts of the process's model. UserError: the model cannot be loaded. EngineLost: the process ended
    before."""
    try:
        name, *rest = unpack(pipe.recv_bytes())[0]
    except (EOFError, OSError):
        raise EngineLost(
            f"{how_it_ended(process)} before the model was loaded; what it said is above (a script that starts one "
            'needs if __name__ == "__main__":)'
        ) from None
    if name == "refused":
        raise unpack_error(*rest)
    facts: ModelFacts = rest[0]
    return facts


def how_it_ended(process: Any) -> str:
    """How the process ended, in words."""
    process.join(PATIENCE)
    code = process.exitcode
    if code is None:
        return f"the engine's process {process.pid} does not answer any more"
    if code >= 0:
        return f"the engine's process {process.pid} ended with code {code}"
    name = signal.Signals(-code).name
    memory = ", as where memory runs out" if -code == signal.SIGKILL else ""
    return f"the engine's process {process.pid} was ended by {name}{memory}"


EVERY = 16
"""Events after which their number is told to the engine's process; a quarter of what a row is written ahead."""


class RemoteAnswer:
    """An answer under way; `take`, `poll`, `stop` and `wake` are those of `omni.engine.client.Running`.

    Args:
        number: its number among all answers of the process.
        rate: of its sound in Hz, 0 where it makes none.

    Attributes:
        taken: number of events that were taken; `acknowledged`, of which the engine's process knows.
        started: whether it was asked for; cancelled: is to stop; settled: is in the history.
        reader: thread that waits for an event, 0 for none; -1 for a task.
    """

    def __init__(self, link: Link, number: int, asked: Asked, seed: int | None, clock: Clock, pace: Pace, rate: int) -> None:
        self.number, self.asked, self.seed, self.clock, self.pace, self.rate = number, asked, seed, clock, pace, rate
        self.taken = self.acknowledged = self.samples = self.reader = 0
        self._plays: float | None = None  # when a live listener's sound began, less the time in which it waited
        self._late: list[float] = []  # seconds by which newest chunks were decoded after they were due
        self.cancelled = self.settled = self.started = False
        self.wake: Callable[[], None] | None = None
        self.changed = threading.Condition(threading.RLock())
        self._link = link
        self._eager = self._over = False
        self._events: deque[Event] = deque()
        self._failure: BaseException | None = None
        self._ended: Ended | None = None
        self._known = Timings()  # by its events, for an end that the engine's process does not bring
        self._awaited: tuple[str, ...] = ()  # reasons of the end that `stop` brings

    def start(self) -> bool:
        """Note that it is asked for; False where it was let go before."""
        with self.changed:
            self.started = not self.settled
            return self.started

    # --- the reader thread --------------------------------------------------------------------------------------------

    def put(self, events: list[Event]) -> None:
        """Take events; of an answer that was stopped only the end that this brought, for others may have been on their way."""
        with self.changed:
            for event in events:
                if not isinstance(event, Ended):
                    self._events += [] if self.cancelled else [event]
                    if isinstance(event, TextDelta) and self._known.first_text is None:
                        self._known = replace(self._known, first_text=self.clock.seconds)
                    elif isinstance(event, AudioChunk) and self._known.first_audio is None:
                        self._known = replace(self._known, first_audio=self.clock.seconds)
                elif not self.cancelled or event.reason in self._awaited:
                    self.end(event)
            self._notify()

    def decoded(self, start: float, now: float) -> None:
        """Note that the chunk at `start` was decoded here at the time `now`."""
        if self.pace != "live":
            return
        with self.changed:
            if self._plays is None:
                self._plays = now
                return
            late = now - (self._plays + start)
            self._plays += max(late, 0.0)
            self._late.append(late)

    def fail(self, error: BaseException) -> None:
        """Raise an exception for the listener, after the events that have come."""
        with self.changed:
            self._failure = error
            self._notify()

    def end(self, ended: Ended) -> None:
        """Give the listener an end, where it has none."""
        with self.changed:
            if self._ended is None:
                if ended.timings == Timings():
                    ended = replace(ended, timings=replace(self._known, total=self.clock.seconds))
                self._ended = ended
                self._notify()

    def where(self) -> None:
        """Tell how far the listener has taken events; its row rests until it has taken more."""
        with self.changed:
            self._eager = True
            self._tell()

    def _notify(self) -> None:
        self.changed.notify_all()
        if self.wake is not None:
            self.wake()

    # --- the listener -------------------------------------------------------------------------------------------------

    def take(self) -> Event:
        """Wait for the next event and take it; it counts as delivered. After a cancel there is only the end."""
        with self.changed:
            self.reader = threading.get_ident()
            try:
                while (event := self.poll()) is None:
                    self.changed.wait()
                return event
            finally:
                self.reader = 0

    def poll(self) -> Event | None:
        """The next event, where there is one; whoever asks again after the end gets it again."""
        with self.changed:
            if self._events:
                event = self._events.popleft()
                if isinstance(event, AudioChunk):
                    self.samples += len(event.samples)
                self._count()
                return event
            if self._ended is not None:
                if not self._over:
                    self._over = True
                    self._count()
                return replace(self._ended, timings=self.timings())
            if self._failure is not None:
                raise self._failure
            return None

    def timings(self) -> Timings:
        """Timings of its end, with the length of the sound that was taken."""
        timings = self._known if self._ended is None else self._ended.timings
        return replace(timings, audio=self.samples / self.rate if self.rate else 0.0)

    def _count(self) -> None:
        if not self.cancelled:
            self.taken += 1
            if self.taken - self.acknowledged >= EVERY or self._eager:
                self._tell()

    def _tell(self) -> None:
        if self.taken > self.acknowledged:
            self.acknowledged = self.taken
            late, self._late = self._late, []
            self._link.tell("taken", self.number, self.taken, late)
        self._eager = self._eager and bool(self._events)

    def stop(self, reason: Reason = "cancelled", error: str | None = None) -> None:
        """Have it stopped: its listener gets nothing more of it but an end for this reason, which comes from the engine."""
        with self.changed:
            if self.quiet():
                self._ended = None
                self._awaited, lost = (reason, "cancelled", "error"), self._link.lost
                self._link.tell("stop", self.number, self.taken, reason, error)
                if lost is not None:
                    self.end(Ended("error", Timings(), str(lost)))

    def quiet(self) -> bool:
        """Drop the events that were not taken; another end is to come. Returns whether this is the first time."""
        with self.changed:
            first, self.cancelled = not self.cancelled, True
            self._events.clear()
            if not self._over:
                self._ended = None
            return first


LOG = logging.getLogger(__name__)

OFTEN = 256
"""Messages between two looks for answers that nobody has any more."""


class Link:
    """Sends what any thread asks for; a thread of its own takes what comes.

    Args:
        process: the other end's, for words about its end.
        decoder: of sound that comes as codes; None where none does.

    Attributes:
        lost: why nothing is answered any more, None while the process lives.
    """

    def __init__(self, pipe: Connection, process: Any, decoder: SoundDecoder | None = None) -> None:
        self._pipe, self._process = pipe, process
        self._changed = threading.Lock()  # guards the replies, the answers and `lost`
        self._replies: dict[int, Future[Any]] = {}
        self._answers: weakref.WeakValueDictionary[int, RemoteAnswer] = weakref.WeakValueDictionary()
        self._turns: weakref.WeakValueDictionary[int, TurnFrames] = weakref.WeakValueDictionary()
        self.lost: EngineLost | None = None
        self._said_bye = False
        self._messages = 0
        self._decoder = decoder
        self._requests, self._numbers = count(1), count(1)
        self._sender = Sender(pipe)
        self.reader = threading.Thread(target=self._read, name="omni-events", daemon=True)
        self.reader.start()

    def number(self) -> int:
        """A number that no session and no answer of the process has."""
        return next(self._numbers)

    # --- what clients ask ---------------------------------------------------------------------------------------------

    @property
    def decoding(self) -> float:
        """CPU seconds that decoding took here."""
        return 0.0 if self._decoder is None else self._decoder.seconds

    def check(self) -> None:
        """EngineLost where the engine's process has ended."""
        if self.lost is not None:
            raise EngineLost(*self.lost.args)

    def register(self, answer: RemoteAnswer) -> None:
        """Give an answer the events that come for it."""
        with self._changed:
            self._answers[answer.number] = answer

    def follow(self, sound: int, turn: TurnFrames) -> None:
        """Give it what the turn head there says of a sound."""
        with self._changed:
            self._turns[sound] = turn

    def request(self, name: str, *args: Any) -> Any:
        """Have something done there, and wait for the result; within a `send` of this thread nothing is waited for."""
        self.check()
        number, reply = next(self._requests), Future[Any]()
        message = pack_request(f"what {name!r} was given", (name, number, *args))
        if self._sender.here:
            return self.tell(name, 0, *args)
        with self._changed:
            if self.lost is not None:
                raise EngineLost(*self.lost.args)
            self._replies[number] = reply
        self._sender.send(message)
        try:
            return reply.result()
        finally:
            with self._changed:
                self._replies.pop(number, None)

    def tell(self, name: str, *args: Any) -> None:
        """Send something that has no result."""
        if self.lost is None:
            self._sender.send(pack_request(name, (name, *args)))

    # --- what comes ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while True:
                items = unpack(self._pipe.recv_bytes())
                if self._decoder is not None:
                    self._decode([item[1:] for item in items if item[0] == "events"], self._decoder)
                for item in items:
                    try:
                        self._take(*item)
                    except Exception:  # of a listener's `wake`: the others have nothing to do with it
                        LOG.exception("a listener of the engine's process failed")
        except (EOFError, OSError):
            pass
        finally:
            self._gone()

    def _decode(self, coming: Sequence[Any], decoder: SoundDecoder) -> None:
        """Decode the coded sound among the events of answers, in their places."""
        with self._changed:
            answers = {number: self._answers.get(number) for number, _ in coming}
        starts, wanted = list[tuple[RemoteAnswer, float]](), list[Any]()
        for number, events in coming:
            answer = answers[number]
            if answer is None or answer.cancelled:
                decoder.close(number)
                continue
            wanted.append((number, events))
            starts += [(answer, event.start) for event in events if isinstance(event, CodedSound)]
        failed = decoder(wanted)
        now = time.perf_counter()
        for answer, start in starts:
            answer.decoded(start, now)
        for number, error in failed.items():
            if (answer := answers[number]) is not None:
                answer.stop("error", cannot_decode(decoder.codec, error))
        self._messages += 1
        if self._messages % OFTEN == 0:  # of answers that were dropped, nothing comes any more
            with self._changed:
                decoder.keep(set(self._answers))

    def _take(self, name: str, number: int = 0, *rest: Any) -> None:
        if name == "bye":
            self._said_bye = True
        elif name in ("reply", "raise"):
            with self._changed:
                reply = self._replies.pop(number, None)
            if reply is not None and name == "reply":
                reply.set_result(rest[0])
            elif reply is not None:
                reply.set_exception(unpack_error(*rest))
        elif name == "turn":
            with self._changed:
                turn = self._turns.get(number)
            if turn is not None:
                turn.put(rest[0], torch.from_numpy(rest[1]))
        else:
            with self._changed:
                answer = self._answers.get(number)
            if answer is None:
                return
            if name == "events":
                answer.put(rest[0])
            elif name == "failed":
                answer.fail(unpack_error(*rest))
            else:
                answer.where()

    def _gone(self) -> None:
        """Tell everybody that the process has ended."""
        if self._said_bye:
            lost = EngineLost("this engine is closed; start another one")
        else:
            lost = EngineLost(f"{how_it_ended(self._process)}; start another one")
        with self._changed:
            self.lost = lost
            replies, answers, self._replies = [*self._replies.values()], [*self._answers.values()], {}
        self._sender.close()
        for reply in replies:
            reply.set_exception(EngineLost(*lost.args))
        for answer in answers:
            try:
                answer.end(Ended("error", Timings(), str(lost)))
            except Exception:
                LOG.exception("a listener of the engine's process failed")
