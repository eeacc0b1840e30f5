"""The engine's own process: holds the model, and serves its clients' process.

main thread     waits for the end: the clients' process has gone, or a signal
reader          takes messages; counts what was taken, lets answers go, and hands requests to a few threads
sender          `Outbox`: the events of answers, as their listeners take them, and replies

An event waits with its answer (`omni.engine.client.Running`) until its listener in the other process has taken it, so that the
row rests, and the history is cut, as for a listener of this process.
"""

from __future__ import annotations

import gc
import inspect
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from omni.encoder.config import PreparedSound
from omni.engine.client import Running
from omni.engine.wire import Item, ModelFacts, is_portable, pack, pack_error, unpack
from omni.errors import SoundWarning, UserError
from omni.generate.answer_stream import DeliveredPart, delivered_part
from omni.generate.feature_stream import FeatureStream, KnownFeatures
from omni.generate.question import Asked
from omni.generate.results import Clock, Ended, Reason
from omni.generate.session import Session
from omni.generate.speech_lm import SpeechLM
from omni.generate.turn_end import TurnFrames
from omni.plugins import load_plugins
from omni.tasks import Turn, find_task

TOGETHER = 1e-3
"""Seconds for which the first event of a step waits for the others."""

LOOK = 0.1
"""Seconds between two looks at rows that rest."""


@dataclass(eq=False)
class SentAnswer:
    """An answer: the number of its events that were sent and not taken, and that were taken; `over` once its end was sent;
    `asked`, whether its listener was asked how far it is."""

    running: Running
    sent: int = 0
    taken: int = 0
    asked: bool = False
    over: bool = False


class Outbox:
    """Sends, in a thread of its own: one message for all that a step gave, and for all replies.

    Args:
        lost: set when nobody reads any more.

    Attributes:
        answers: those whose events are sent, by their numbers.
    """

    def __init__(self, pipe: Connection, lost: threading.Event) -> None:
        self.answers: dict[int, SentAnswer] = {}
        self._pipe, self._lost = pipe, lost
        self._replies: deque[Item] = deque()
        self._noted: deque[int] = deque()
        self._news = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._send, name="omni-send", daemon=True)
        self._thread.start()

    # --- from any thread ----------------------------------------------------------------------------------------------

    def open(self, number: int, running: Running) -> None:
        """Send an answer's events from now on."""
        running.wake = lambda: self.note(number)
        self.answers[number] = SentAnswer(running)

    def note(self, number: int) -> None:
        """An answer has an event, or its end."""
        self._noted.append(number)
        self._news.set()

    def reply(self, item: Item) -> None:
        self._replies.append(item)
        self._news.set()

    def taken(self, number: int, taken: int) -> None:
        """Count events as delivered, up to the number `taken`."""
        answer = self.answers.get(number)
        if answer is None:
            return
        answer.asked = False
        with answer.running.changed:
            while answer.taken < taken and not answer.running.cancelled:
                answer.running.poll()
                answer.taken += 1
                answer.sent -= 1

    def again(self, number: int) -> None:
        """Send an answer's end once more: it has become another."""
        if (answer := self.answers.get(number)) is not None:
            answer.over = False
            self.note(number)

    def finish(self) -> None:
        """Send what is left, and `bye`."""
        for number in list(self.answers):
            self.note(number)
        self._replies.append(("bye",))
        self._stopped = True
        self._news.set()
        self._thread.join(5)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        looked = 0.0
        while True:
            self._news.wait(LOOK if self.answers else None)
            self._news.clear()
            last = self._stopped
            if self._noted and not self._replies:
                time.sleep(TOGETHER)
            items: list[Item] = [self._noted_items(number) for number in dict.fromkeys(_all(self._noted))]
            if (now := time.monotonic()) >= looked + LOOK:
                looked = now
                items += [("where", number) for number, answer in list(self.answers.items()) if _rests(answer)]
            items = [item for item in items if item[-1] != []] + _all(self._replies)
            try:
                if items:
                    self._pipe.send_bytes(pack(items))
            except OSError:
                self._lost.set()
                return
            if last:
                return

    def _noted_items(self, number: int) -> Item:
        """The events of an answer that were not sent yet, or its failure."""
        answer = self.answers.get(number)
        if answer is None or answer.over:
            return ("events", number, [])
        running = answer.running
        with running.changed:
            if running.cancelled:  # by something else than its listener's cancel
                answer.over = True
                return ("events", number, [end_of(running)])
            events = running.coming(answer.sent)
            answer.sent += len(events)
            if not events and running.failure is not None:
                answer.over = True
                return ("failed", number, *pack_error(running.failure))
            if running.failure is not None:
                self.note(number)
            return ("events", number, [_timed(event, running) for event in events])


def end_of(running: Running) -> Ended:
    """The end of an answer that was stopped."""
    error = running.reply.error
    return Ended(running.ending if error is None else "error", running.timings(), error)


def _rests(answer: SentAnswer) -> bool:
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


AT_ONCE = ("taken", "stop", "let_go", "hear", "drop_sound")
"""Messages that the reader sees to itself; requests are given to other threads."""

DRAIN = 30.0
"""Seconds for which SIGTERM lets answers under way come to their ends."""


class SentTurn(TurnFrames):
    """Sends the turn head's probabilities of a sound to the other process."""

    def __init__(self, outbox: Outbox, sound: int) -> None:
        self._outbox, self._sound = outbox, sound

    def put(self, first: int, new: torch.Tensor) -> None:
        self._outbox.reply(("turn", self._sound, first, new.numpy()))


class Child:
    """Serves one clients' process."""

    def __init__(self, pipe: Connection, lm: SpeechLM, threads: int | None) -> None:
        self._pipe, self._lm, self._threads = pipe, lm, threads
        self._sessions: dict[int, Session] = {}
        self._last: dict[int, int] = {}  # number of each session's last answer
        self._sounds: dict[int, tuple[int, FeatureStream]] = {}  # of each session, what it listens to, and its number
        self._early: set[int] = set()  # answers that were let go before they were asked: their requests overtook each other
        self._gone = threading.Event()  # the other process has ended, or asked for the end
        self._until: float | None = None  # time at which answers under way are cut, once it drains
        self._outbox = Outbox(pipe, self._gone)
        self._pool = ThreadPoolExecutor(8, "omni-request", self._prepare)
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
            if self._until is not None and (not self._outbox.answers or time.monotonic() > self._until):
                break
        self._until = 0.0
        for session in list(self._sessions.values()):
            session.close()
        self._lm.engine.close()
        self._outbox.finish()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _drain(self, seconds: float) -> None:
        """Refuse new questions, and end once nobody waits for an answer."""
        until = time.monotonic() + seconds
        self._until = until if self._until is None else min(self._until, until)

    # --- the reader ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while True:
                for name, *rest in unpack(self._pipe.recv_bytes()):
                    if name in AT_ONCE:
                        getattr(self, f"_{name}")(*rest)
                    else:
                        self._pool.submit(self._do, name, *rest)
        except (EOFError, OSError, RuntimeError):  # the last: the pool is shut down
            self._gone.set()

    def _taken(self, answer: int, taken: int, late: Sequence[float]) -> None:
        """Count events as delivered, and note how late sound was that was decoded there."""
        self._outbox.taken(answer, taken)
        self._lm.engine.heard(late)

    def _stop(self, answer: int, taken: int, reason: Reason, error: str | None) -> None:
        """End an answer whose listener waits for its end."""
        self._outbox.taken(answer, taken)
        if (sent := self._outbox.answers.get(answer)) is not None:
            sent.running.stop(reason, error)
            self._outbox.again(answer)

    def _let_go(self, number: int, answer: int, taken: int) -> None:
        """Settle an answer that nobody listens to, without waiting."""
        self._outbox.taken(answer, taken)
        sent, session = self._outbox.answers.pop(answer, None), self._sessions.get(number)
        if sent is None:
            self._early.add(answer)
        elif session is not None:
            session.let_go(sent.running)

    def _hear(self, number: int, sound: int, samples: Any, peek: bool) -> None:
        """Take more of a question whose sound is still coming, or (`peek`) sound after that, which may not belong to it."""
        session, stream = self._sessions.get(number), self._sound(number, sound)
        if session is not None and stream is not None:
            (session.peek if peek else session.hear)(stream, torch.from_numpy(samples))

    def _drop_sound(self, number: int, sound: int) -> None:
        session, stream = self._sessions.get(number), self._sound(number, sound)
        if session is not None and stream is not None:
            self._sounds.pop(number, None)
            session.drop_sound(stream)

    def _known(self, number: int, sound: int) -> KnownFeatures:
        """Features so far of a sound that a session listens to."""
        stream = self._sound(number, sound)
        if stream is None:
            raise UserError("this sound is listened to no more; ask the question that it became")
        return stream.so_far()

    def _sound(self, number: int, sound: int | None) -> FeatureStream | None:
        """The sound that a session listens to, where it has that number; else None."""
        known, stream = self._sounds.get(number, (None, None))
        return stream if sound is not None and known == sound else None

    # --- requests -----------------------------------------------------------------------------------------------------

    def _do(self, name: str, request: int, *args: Any) -> None:
        """Do what was asked, and reply; request 0 wants no reply."""
        try:
            item: Item = ("reply", request, getattr(self, f"do_{name}")(*args))
            pack([item])
        except BaseException as error:
            item = ("raise", request, *pack_error(error))
        if request:
            self._outbox.reply(item)

    def do_session(self, number: int, values: Mapping[str, Any]) -> None:
        self._admit()
        self._sessions[number] = self._lm.session(**values)

    def do_listen(self, number: int, sound: int, task: str, turn: bool) -> None:
        self._admit()
        stream = self._session(number).open_sound(find_task(task), SentTurn(self._outbox, sound) if turn else None)
        assert stream is not None
        self._sounds[number] = sound, stream

    def do_ask(
        self,
        number: int,
        answer: int,
        turn: Turn,
        clip: Any,
        prepared: Any,
        seed: int | None,
        waited: float,
        heard: int | tuple[int, int] | None,
    ) -> None:
        self._admit()
        known = self._known(*heard) if isinstance(heard, tuple) else None
        heard = None if isinstance(heard, tuple) else heard
        session, stream = self._session(number), self._sound(number, heard)
        sound = None if clip is None else torch.from_numpy(clip)
        if heard is not None:
            assert stream is not None
            sound = stream.sound
        ready = None if prepared is None else PreparedSound([torch.from_numpy(part) for part in prepared[0]], *prepared[1:])
        running = session.lay_out(Asked(turn, sound, ready, known or stream), seed, Clock(waited))
        codec = running.codec
        portable = codec is not None and is_portable(codec)
        running.coded = portable and running.task.audio and running.reply.limits.silence is None
        self._outbox.open(answer, running)
        self._last[number] = answer
        try:
            session.begin(running)
        except BaseException:
            del self._outbox.answers[answer], self._last[number]
            raise
        if answer in self._early:
            self._early.discard(answer)
            self._let_go(number, answer, 0)
        if stream is not None and self._sound(number, heard) is stream:
            self._sounds.pop(number, None)

    def do_settle(self, number: int, answer: int, taken: int) -> Ended | None:
        """Put an answer into the history as far as it was taken."""
        running, session = self._closed(answer, taken), self._sessions.get(number)
        if running is None or session is None:
            return None
        with session._lock:
            session._settle(running)
            session._make_room()
        return end_of(running)

    def do_interrupt(self, number: int, answer: int, taken: int, played: float | None, shown: int | None) -> Ended | None:
        """Settle an answer, and cut it where it was interrupted."""
        running = self._closed(answer, taken)
        if self._last.get(number) == answer:
            self._session(number).cancel(played, shown)
        return None if running is None else end_of(running)

    def do_withdraw(self, number: int, answer: int, taken: int) -> Ended | None:
        """Go on as if a question had not been asked."""
        closed = self._closed(answer, taken)
        session = self._sessions.get(number)
        if session is not None and self._last.get(number) == answer:
            running = session._last
            assert running is not None
            session.withdraw(running)
            del self._last[number]
        return None if closed is None else end_of(closed)

    def _closed(self, answer: int, taken: int) -> Running | None:
        """An answer whose events are sent no more; None where it was closed before."""
        self._outbox.taken(answer, taken)
        sent = self._outbox.answers.pop(answer, None)
        return None if sent is None else sent.running

    def do_delivered(self, number: int, answer: int) -> DeliveredPart:
        session = self._session(number)
        if self._last.get(number) != answer or session._last is None:
            return DeliveredPart()
        return delivered_part(session._last)

    def do_read(self, number: int, name: str) -> Any:
        """A property of a session."""
        return getattr(self._session(number), name)

    def do_save(self, number: int, path: Any) -> None:
        self._session(number).save(path)

    def do_close(self, number: int) -> None:
        session = self._sessions.pop(number, None)
        self._sounds.pop(number, None)
        if session is not None:
            session.close()
            self._outbox.answers.pop(self._last.pop(number, 0), None)

    def do_call(self, name: str, args: Sequence[Any], values: Mapping[str, Any]) -> Any:
        """A method or a property of the `SpeechLM`, by its name; `engine.` before it for the engine's."""
        target: Any = self._lm
        for part in name.split("."):
            if part.startswith("_") or not hasattr(target, part):
                raise UserError(f"{type(target).__name__} has nothing called {part!r} to call by {name!r}")
            target = getattr(target, part)
        return target(*args, **values) if inspect.ismethod(target) else target

    def do_drain(self, seconds: float) -> None:
        self._drain(seconds)

    def _session(self, number: int) -> Session:
        if number not in self._sessions:
            raise UserError("this session is closed; start a new one")
        return self._sessions[number]

    def _admit(self) -> None:
        if self._until is not None:
            raise UserError("this engine is about to end, and takes no new questions; ask another one")


def run(
    pipe: Connection,
    folder: Any,
    values: Mapping[str, Any],
    engine: Mapping[str, Any],
    threads: int | None,
    plugins: Sequence[str],
) -> None:
    """The process, from its start to its end. Ctrl-C of a terminal reaches it too, and is left to the clients' process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    warnings.simplefilter("ignore", SoundWarning)  # of histories, to nobody who could do anything, and with their texts
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        load_plugins(plugins, "plugins")
        lm = SpeechLM.from_pretrained(folder, **values)
        lm.start_engine(**engine)
        codec = lm.codec
        facts = ModelFacts(lm.config, repr(lm))
        if codec is not None:
            facts = ModelFacts(lm.config, repr(lm), codec.name, codec.sample_rate, codec.frame_rate, is_portable(codec))
    except Exception as error:
        pipe.send_bytes(pack([("refused", *pack_error(error))]))
        return
    gc.collect()
    gc.freeze()  # what stays need not be looked through again and again, which takes as long as several frames play
    gc.set_threshold(*(10 * threshold for threshold in gc.get_threshold()))  # nor histories, so often
    pipe.send_bytes(pack([("ready", facts)]))
    Child(pipe, lm, threads).serve()
