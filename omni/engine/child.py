"""The engine's own process, which holds the model and serves its clients' process, and their messages.

main thread     waits for the end: the clients' process has gone, or a signal
reader          takes messages: those that wait for nobody it sees to itself, others are given to a few threads
sender          `Outbox`: the events of answers, and replies; the clients' process has one too, for what it asks

Messages are pickles: both ends belong to the same program.
"""

from __future__ import annotations

import gc
import inspect
import io
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from omni.engine.answer import CodedSound
from omni.engine.conversation import LocalLink
from omni.engine.sound import is_portable
from omni.errors import BusyError, EngineLost, RoomError, SoundWarning, UserError
from omni.generate.results import Event
from omni.generate.speech_lm import SpeechLM
from omni.plugins import load_plugins

Item = tuple[Any, ...]
"""Content of a message: its name first."""

SENT = (EngineLost, BusyError, RoomError, UserError, TypeError, torch.OutOfMemoryError, MemoryError)
"""Exceptions that are the same in the clients' process; others are a RuntimeError there."""


class _Pickler(pickle.Pickler):
    """Writes tensors as arrays, which is quicker; each that is read has memory of its own, and does not keep the message."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.dtype == torch.bfloat16:
            return NotImplemented
        return torch.from_numpy, (value.numpy(force=True),)


def pack(items: Sequence[Item]) -> bytes:
    """One message of items, which `pickle.loads` reads."""
    message = io.BytesIO()
    _Pickler(message, protocol=5).dump(items)
    return message.getvalue()


def pack_error(error: BaseException) -> tuple[type[BaseException], str]:
    """Type and text of an exception, as the clients' process raises it."""
    for known in SENT:
        if isinstance(error, known):
            return known, str(error)
    return RuntimeError, f"in the engine's process: {type(error).__name__}: {error}"


TOGETHER = 1e-3
"""Seconds for which the first event of a step waits for the others."""


class SentAnswer:
    """Sends the events of an answer to its listener in the other process; an `omni.engine.answer.EventOutlet`."""

    decodes = True

    def __init__(self, outbox: Outbox, number: int) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._outbox, self._number = outbox, number
        self._events: list[Event | CodedSound] = []
        self._failure: BaseException | None = None

    def put(self, event: Event | CodedSound, notify: bool = True) -> None:
        self._events.append(event)
        if notify:
            self.notify()

    def fail(self, error: BaseException) -> None:
        self._failure = error
        self.notify()

    def notify(self) -> None:
        self._outbox.send(self)

    def where(self) -> None:
        self._outbox.send(pack([("where", self._number)]))

    def items(self) -> list[Item]:
        """What is to be sent of it."""
        with self.changed:
            events, self._events, error, self._failure = self._events, [], self._failure, None
        items: list[Item] = [("events", self._number, events)] if events else []
        return items if error is None else [*items, ("failed", self._number, *pack_error(error))]


class Outbox:
    """Sends, in a thread of its own, what any thread, finalizer or signal's handler gives it: none of them waits. What a step
    gave its answers is one message. `lost`: set when nobody reads any more."""

    def __init__(self, pipe: Connection) -> None:
        self.lost = threading.Event()
        self._pipe = pipe
        self._waiting: SimpleQueue[bytes | SentAnswer | None] = SimpleQueue()
        self.send = self._waiting.put
        self._thread = threading.Thread(target=self._run, name="omni-send", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Send what is left, and end."""
        self.send(None)
        self._thread.join(5)

    def _run(self) -> None:
        waiting: list[bytes | SentAnswer | None] = []
        while None not in waiting:
            waiting = [self._waiting.get()]
            if isinstance(waiting[0], SentAnswer):
                time.sleep(TOGETHER)
            while not self._waiting.empty():
                waiting.append(self._waiting.get())
            answers = dict.fromkeys(answer for answer in waiting if isinstance(answer, SentAnswer))
            items = [item for answer in answers for item in answer.items()]
            try:
                for message in [*([pack(items)] if items else []), *(m for m in waiting if isinstance(m, bytes))]:
                    self._pipe.send_bytes(message)
            except (OSError, ValueError):  # the other end, or this one, is closed
                self.lost.set()
                return


AT_ONCE = ("taken", "stop", "let_go", "hear", "drop_sound", "abandon")
"""Messages that the reader sees to itself, which wait for nobody; others are given to other threads."""

OWN = ("call", "drain")
"""Messages that are for no conversation."""

NEW = ("session", "listen", "ask")
"""Messages that are refused once it drains."""

LOOK = 0.1
"""Seconds between two looks at whether the other process is there."""

DRAIN = 30.0
"""Seconds for which SIGTERM lets answers under way come to their ends."""


class Child(LocalLink):
    """Serves one clients' process: messages come through a pipe."""

    def __init__(self, pipe: Connection, lm: SpeechLM, threads: int | None) -> None:
        super().__init__(lm)
        self._pipe = pipe
        self._until: float | None = None  # time at which answers under way are cut, once it drains
        self._outbox = Outbox(pipe)
        self._gone = self._outbox.lost  # the other process has ended, or asked for the end
        own = None if threads is None else partial(torch.set_num_threads, threads)  # the engine takes that of who asks
        self._pool = ThreadPoolExecutor(8, "omni-request", own)
        threading.Thread(target=self._read, name="omni-read", daemon=True).start()

    # --- the main thread ----------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Returns when the process is to end."""
        parent = os.getppid()
        signal.signal(signal.SIGTERM, lambda *_: self.drain(DRAIN))
        while not self._gone.wait(LOOK):
            if os.getppid() != parent:
                return  # and nobody reads any more
            idle = not any(conversation.under_way for conversation in [*self.conversations.values()])
            if self._until is not None and (idle or time.monotonic() > self._until):
                break
        self._until = 0.0
        for conversation in list(self.conversations.values()):
            conversation.close()
        self._lm.engine.close()
        self._outbox.send(pack([("bye",)]))
        self._outbox.finish()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # --- messages -----------------------------------------------------------------------------------------------------

    def listener(self, answer: int) -> SentAnswer:
        return SentAnswer(self._outbox, answer)

    def turn(self, sound: int) -> Callable[[int, Tensor], None]:
        return lambda first, new: self._outbox.send(pack([("turn", sound, first, new)]))

    def _read(self) -> None:
        try:
            while True:
                for message in pickle.loads(self._pipe.recv_bytes()):
                    if message[0] in AT_ONCE:
                        self._do(*message)
                    else:
                        self._pool.submit(self._do, *message)
        except (EOFError, OSError, RuntimeError):  # the last: the pool is shut down
            self._gone.set()

    def _do(self, name: str, request: int, *args: Any) -> None:
        """Do what was asked, and reply; request 0 wants no reply."""
        try:
            if name in NEW and self._until is not None:
                raise UserError("this engine is about to end, and takes no new questions; ask another one")
            reply = getattr(self, name)(*args) if name in OWN else self.request(name, *args)
            message = pack([("reply", request, reply)]) if request else None
        except BaseException as error:
            message = pack([("raise", request, *pack_error(error))]) if request else None
        if message is not None:
            self._outbox.send(message)

    def call(self, name: str, args: Sequence[Any], values: Mapping[str, Any]) -> Any:
        """A method or a property of the `SpeechLM`, by its name; `engine.` before it for the engine's."""
        target: Any = reduce(getattr, name.split("."), self._lm)
        return target(*args, **values) if inspect.ismethod(target) else target

    def drain(self, seconds: float) -> None:
        """Refuse new questions, and end once nobody waits for an answer."""
        until = time.monotonic() + seconds
        self._until = until if self._until is None else min(self._until, until)


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
        codec = None if lm.codec is None else lm.codec.name
        facts = lm.config, repr(lm), codec, lm.sample_rate, lm.frame_rate, lm.codec is not None and is_portable(lm.codec)
    except Exception as error:
        pipe.send_bytes(pack([("refused", *pack_error(error))]))
        return
    gc.collect()
    gc.freeze()  # what stays need not be looked through again and again, which takes as long as several frames play
    gc.set_threshold(*(10 * threshold for threshold in gc.get_threshold()))  # nor histories, so often
    pipe.send_bytes(pack([("ready", *facts)]))
    Child(pipe, lm, threads).serve()
