"""Ways from sessions to their engine, in this process or through a pipe to another's.

Events come in one reader thread of a pipe and wait with their answer until its listener takes them. How many were taken goes to
the engine now and then, so that rows whose listener is behind rest, and with each cancel, so that the history is cut there.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor

from omni.engine.handler import MessageHandler
from omni.engine.listener import Link, Listener
from omni.engine.wire import CodedSound, EngineLost, SoundDecoder, cannot_decode, pack_request, unpack, unpack_error
from omni.generate.results import Ended, Timings


class LocalLink(Link):
    """To an engine in this process, whose `handler` is called."""

    every, remote = 1, False

    def __init__(self) -> None:
        super().__init__()
        self.handler = MessageHandler(self)

    def listener(self, answer: int) -> Listener:
        return self._answers[answer]

    def turn(self, sound: int) -> Callable[[int, Tensor], None]:
        return self._turns[sound].put

    def check(self, session: int) -> None:
        self.handler.check(session)

    def request(self, name: str, *args: Any) -> Any:
        return getattr(self.handler, name)(*args)

    def tell(self, name: str, *args: Any) -> None:
        getattr(self.handler, name)(*args)


class Sender:
    """Sends messages of many threads in their order.

    A thread that finds another one sending leaves its message to that one, so that a finalizer, which may run in the middle
    of a `send`, never waits and never writes into another message.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._waiting: deque[bytes] = deque()
        self._writing = threading.Lock()
        self._writer = 0

    @property
    def here(self) -> bool:
        """Whether the caller runs within a `send` of its own thread, as a finalizer may."""
        return self._writer == threading.get_ident()

    def send(self, message: bytes) -> None:
        """Send a message. Where the other process has ended, nothing happens: who reads the pipe notices it."""
        self._waiting.append(message)
        while self._waiting and self._writing.acquire(blocking=False):
            self._writer = threading.get_ident()
            try:
                while self._waiting:
                    self._pipe.send_bytes(self._waiting.popleft())
            except (OSError, ValueError):  # the other end, or this one, is closed
                self._waiting.clear()
            finally:
                self._writer = 0
                self._writing.release()

    def close(self) -> None:
        """Close the pipe, once nobody writes into it."""
        with self._writing:
            self._pipe.close()


PATIENCE = 10.0
"""Seconds that a process has to end once it was told to, or its pipe is closed."""


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


LOG = logging.getLogger(__name__)

OFTEN = 256
"""Messages between two looks for answers that nobody has any more."""


class PipeLink(Link):
    """To an engine in another process: sends what any thread asks for; a thread of its own takes what comes.

    Args:
        process: the other end's, for words about its end.
        decoder: of sound that comes as codes; None where none does.

    Attributes:
        lost: why nothing is answered any more, None while the process lives.
    """

    def __init__(self, pipe: Connection, process: Any, decoder: SoundDecoder | None = None) -> None:
        super().__init__()
        self._pipe, self._process = pipe, process
        self._changed = threading.RLock()  # guards the replies and `lost`
        self._replies: dict[int, Future[Any]] = {}
        self._said_bye = False
        self._messages = 0
        self._decoder = decoder
        self._requests = count(1)
        self._sender = Sender(pipe)
        self.reader = threading.Thread(target=self._read, name="omni-events", daemon=True)
        self.reader.start()

    # --- what clients ask ---------------------------------------------------------------------------------------------

    @property
    def decoding(self) -> float:
        """CPU seconds that decoding took here."""
        return 0.0 if self._decoder is None else self._decoder.seconds

    def check(self, session: int) -> None:
        self._check()

    def _check(self) -> None:
        if self.lost is not None:
            raise EngineLost(*self.lost.args)

    def request(self, name: str, *args: Any) -> Any:
        """See `Link`; within a `send` of this thread nothing is waited for."""
        self._check()
        number, reply = next(self._requests), Future[Any]()
        message = pack_request(f"what {name!r} was given", (name, number, *args))
        if self._sender.here:
            return self.tell(name, *args)
        with self._changed:
            self._check()
            self._replies[number] = reply
        self._sender.send(message)
        try:
            return reply.result()
        finally:
            with self._changed:
                self._replies.pop(number, None)

    def tell(self, name: str, *args: Any) -> None:
        if self.lost is None:
            self._sender.send(pack_request(name, (name, 0, *args)))

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
        answers = {number: self._answers.get(number) for number, _ in coming}
        starts, wanted = list[tuple[Listener, float]](), list[Any]()
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
            decoder.keep(self._answers)

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
            if (turn := self._turns.get(number)) is not None:
                turn.put(*rest)
        elif (answer := self._answers.get(number)) is not None:
            if name == "events":
                for event in rest[0]:
                    answer.put(event, notify=event is rest[0][-1])
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
            replies, self._replies = [*self._replies.values()], {}
        self._sender.close()
        for reply in replies:
            reply.set_exception(EngineLost(*lost.args))
        for answer in filter(None, (reference() for reference in self._answers.valuerefs())):
            try:
                answer.end(Ended("error", Timings(), str(lost)))
            except Exception:
                LOG.exception("a listener of the engine's process failed")
