"""The engine's own process: holds the model, and does what its clients' process asks.

    main thread     waits for the end: the clients' process has gone, or a signal
    reader          takes messages; counts what was taken, and hands requests to a few threads
    sender          one message for all that a step gave, and for all replies

An event waits with its answer (`omni.engine.client.Running`) until its listener in the other process has taken it, so that the
row rests, and the history is cut, as for a listener of this process.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from omni.engine.client import Pace, Running
from omni.engine.engine import Engine
from omni.engine.wire import Item, pack, pack_error, unpack
from omni.errors import UserError
from omni.generate.question import Asked
from omni.generate.results import Clock, Ended
from omni.generate.session import Session
from omni.generate.speech_lm import SpeechLM
from omni.plugins import load_plugins
from omni.tasks import Turn

TOGETHER = 1e-3
"""Seconds for which the first event of a step waits for the others."""

LOOK = 0.1
"""Seconds between two looks at rows that rest."""

DRAIN = 30.0
"""Seconds for which SIGTERM lets answers under way come to their ends."""


@dataclass(eq=False)
class _Sent:
    """An answer: the number of its events that were sent and not taken, and that were taken; `over` once its end was sent."""

    running: Running
    sent: int = 0
    taken: int = 0
    asked: bool = False
    over: bool = False


class Child:
    """Serves one clients' process."""

    def __init__(self, pipe: Connection, lm: SpeechLM, threads: int | None) -> None:
        self._pipe, self._lm, self._threads = pipe, lm, threads
        self._sessions: dict[int, Session] = {}
        self._answers: dict[int, _Sent] = {}
        self._replies: deque[Item] = deque()
        self._noted: deque[int] = deque()
        self._news = threading.Event()
        self._gone = threading.Event()  # the other process has ended, or asked for the end
        self._stopped = False
        self._until: float | None = None  # time at which answers under way are cut, once it drains
        self._pool = ThreadPoolExecutor(8, "omni-request", self._prepare)
        self._sending = threading.Thread(target=self._send, name="omni-send", daemon=True)
        self._sending.start()
        threading.Thread(target=self._read, name="omni-read", daemon=True).start()

    def _prepare(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)  # the engine takes the number of the thread that asks

    # --- the main thread ----------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Returns when the process is to end."""
        parent = os.getppid()
        signal.signal(signal.SIGTERM, lambda *_: self._drain(DRAIN))
        while not self._gone.wait(LOOK):
            if os.getppid() != parent:
                return  # and nobody reads any more
            if self._until is not None and (not self._answers or time.monotonic() > self._until):
                break
        self._until = 0.0
        for session in list(self._sessions.values()):
            session.close()
        self._lm.engine.close()
        for number in list(self._answers):
            self._note(number)
        self._replies.append(("bye",))
        self._stopped = True
        self._news.set()
        self._sending.join(5)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _drain(self, seconds: float) -> None:
        """Refuse new questions, and end once nobody waits for an answer."""
        until = time.monotonic() + seconds
        self._until = until if self._until is None else min(self._until, until)

    # --- the reader ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while True:
                for kind, *rest in unpack(self._pipe.recv_bytes()):
                    if kind == "taken":
                        self._taken(*rest)
                    else:
                        self._pool.submit(self._do, kind, *rest)
        except (EOFError, OSError, RuntimeError):  # the last: the pool is shut down
            self._gone.set()

    def _taken(self, number: int, taken: int) -> None:
        """Count events as delivered, up to the number `taken`."""
        answer = self._answers.get(number)
        if answer is None:
            return
        answer.asked = False
        with answer.running.changed:
            while answer.taken < taken and not answer.running.cancelled:
                answer.running.poll()
                answer.taken += 1
                answer.sent -= 1

    # --- requests -----------------------------------------------------------------------------------------------------

    def _do(self, name: str, request: int, *args: Any) -> None:
        """Do what was asked, and reply; request 0 wants no reply."""
        try:
            item: Item = ("reply", request, getattr(self, f"do_{name}")(*args))
            pack([item])
        except BaseException as error:
            item = ("raise", request, *pack_error(error))
        if request:
            self._replies.append(item)
            self._news.set()

    def do_session(self, number: int, values: Mapping[str, Any]) -> None:
        self._admit()
        self._sessions[number] = self._lm.session(**values)

    def do_ask(self, number: int, answer: int, turn: Turn, clip: Any, seed: int | None, pace: Pace, waited: float) -> None:
        self._admit()
        session = self._session(number)
        asked = Asked(turn, None if clip is None else torch.from_numpy(clip))
        running = session.lay_out(asked, seed, Clock(waited))
        running.pace = pace
        running.wake = lambda: self._note(answer)
        self._answers[answer] = _Sent(running)
        try:
            self._lm.engine.ask([running])
        except BaseException:
            del self._answers[answer]
            raise

    def do_settle(self, number: int, answer: int, taken: int, *interrupted: Any) -> Ended | None:
        """Put an answer into the history as far as it was taken; cut it where it was interrupted."""
        self._taken(answer, taken)
        session, found = self._sessions.get(number), self._answers.pop(answer, None)
        ended = None
        if session is None:
            return None
        if found is not None:
            running = found.running
            if interrupted:
                running.interrupt(*interrupted)
            with session._lock:
                session._settle(running)
            error = running.reply.error
            ended = Ended("cancelled" if error is None else "error", running.timings(), error)
        elif interrupted:
            session.cancel(*interrupted)
        return ended

    def do_delivered(self, number: int) -> tuple[Any, Any]:
        running = self._session(number)._last
        assert running is not None
        turn = running.delivered().turn
        return turn.text, turn.codes

    def do_history(self, number: int) -> Any:
        return self._session(number).history

    def do_turns(self, number: int) -> Any:
        return self._session(number).turns

    def do_save(self, number: int, path: Any) -> None:
        self._session(number).save(path)

    def do_close(self, number: int) -> None:
        session = self._sessions.pop(number, None)
        if session is None:
            return
        running = session._last
        session.close()
        for key, answer in list(self._answers.items()):
            if answer.running is running:
                del self._answers[key]

    def do_call(self, name: str, args: Sequence[Any], values: Mapping[str, Any]) -> Any:
        """A method or a property of the `SpeechLM`, by its name; `engine.` before it for the engine's."""
        place: Any = self._lm
        for part in name.split("."):
            if part.startswith("_") or not hasattr(place, part):
                raise UserError(f"{type(place).__name__} has nothing called {part!r} to call by {name!r}")
            place = getattr(place, part)
        return place(*args, **values) if callable(place) else place

    def do_drain(self, seconds: float) -> None:
        self._drain(seconds)

    def _session(self, number: int) -> Session:
        if number not in self._sessions:
            raise UserError("this session is closed; start a new one")
        return self._sessions[number]

    def _admit(self) -> None:
        if self._until is not None:
            raise UserError("this engine is about to end, and takes no new questions; ask another one")

    # --- the sender ---------------------------------------------------------------------------------------------------

    def _note(self, answer: int) -> None:
        self._noted.append(answer)
        self._news.set()

    def _send(self) -> None:
        while True:
            self._news.wait(LOOK if self._answers else None)
            self._news.clear()
            last = self._stopped
            if self._noted and not self._replies:
                time.sleep(TOGETHER)
            items: list[Item] = [self._noted_items(number) for number in dict.fromkeys(_all(self._noted))]
            items += [("where", number) for number, answer in list(self._answers.items()) if self._rests(answer)]
            items = [item for item in items if item[-1] != []] + _all(self._replies)
            try:
                if items:
                    self._pipe.send_bytes(pack(items))
            except OSError:
                self._gone.set()
                return
            if last:
                return

    def _noted_items(self, number: int) -> Item:
        """The events of an answer that were not sent yet, or its failure."""
        answer = self._answers.get(number)
        if answer is None or answer.over:
            return ("events", number, [])
        running = answer.running
        with running.changed:
            if running.cancelled:  # by something else than its listener
                answer.over, error = True, running.reply.error
                return ("events", number, [Ended("cancelled" if error is None else "error", running.timings(), error)])
            events = running.coming(answer.sent)
            answer.sent += len(events)
            if not events and running.failure is not None:
                answer.over = True
                return ("failed", number, *pack_error(running.failure))
            if running.failure is not None:
                self._note(number)
            return ("events", number, [_timed(event, running) for event in events])

    @staticmethod
    def _rests(answer: _Sent) -> bool:
        """Whether a row rests whose listener was not asked yet how far it is."""
        rests = answer.running.resting and not answer.asked
        answer.asked |= rests
        return rests


def _timed(event: Any, running: Running) -> Any:
    return Ended(event.reason, running.timings(), event.error) if isinstance(event, Ended) else event


def _all(waiting: deque[Any]) -> list[Any]:
    out = []
    while waiting:
        out.append(waiting.popleft())
    return out


def run(
    pipe: Connection,
    folder: Any,
    values: Mapping[str, Any],
    slots: int | None,
    context: int | None,
    threads: int | None,
    plugins: Sequence[str],
) -> None:
    """The process, from its start to its end. Ctrl-C of a terminal reaches it too, and is left to the clients' process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        load_plugins(plugins, "plugins")
        lm = SpeechLM.from_pretrained(folder, **values)
        lm._engine = Engine(lm.model, slots=slots, context=context, graph=lm._graph, compile=lm._compile)
        codec = lm.codec
        facts = {
            "config": lm.config,
            "codec": None if codec is None else codec.name,
            "sample_rate": 0 if codec is None else codec.sample_rate,
            "frame_rate": 0.0 if codec is None else codec.frame_rate,
            "shown": repr(lm),
        }
    except Exception as error:
        pipe.send_bytes(pack([("refused", *pack_error(error))]))
        return
    pipe.send_bytes(pack([("ready", facts)]))
    Child(pipe, lm, threads).serve()
