"""The engine's own process: holds the model, and serves its clients' process.

main thread     waits for the end: the clients' process has gone, or a signal
reader          takes messages: those that wait for nobody it sees to itself, others are given to a few threads
sender          `Outbox`: the events of answers, and replies
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from omni.engine.conversation import MessageHandler
from omni.engine.wire import CodedSound, Item, is_portable, pack, pack_error, unpack
from omni.errors import SoundWarning, UserError
from omni.generate.results import Event
from omni.generate.speech_lm import SpeechLM
from omni.plugins import load_plugins

TOGETHER = 1e-3
"""Seconds for which the first event of a step waits for the others."""

LOOK = 0.1
"""Seconds between two looks at whether the other process is there."""


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
        self._outbox.note(self)

    def where(self) -> None:
        self._outbox.send(("where", self._number))

    def items(self) -> list[Item]:
        """What is to be sent of it."""
        with self.changed:
            events, self._events, error, self._failure = self._events, [], self._failure, None
        items: list[Item] = [("events", self._number, events)] if events else []
        return items if error is None else [*items, ("failed", self._number, *pack_error(error))]


class Outbox:
    """Sends, in a thread of its own: one message for all that a step gave, and for all replies. `lost`: set when nobody reads
    any more."""

    def __init__(self, pipe: Connection, lost: threading.Event) -> None:
        self._pipe, self._lost = pipe, lost
        self._items: deque[Item] = deque()
        self._noted: deque[SentAnswer] = deque()
        self._news = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="omni-send", daemon=True)
        self._thread.start()

    def note(self, answer: SentAnswer) -> None:
        """Note that an answer has something to send; from any thread, as `send`."""
        self._noted.append(answer)
        self._news.set()

    def send(self, item: Item) -> None:
        self._items.append(item)
        self._news.set()

    def finish(self) -> None:
        """Send what is left, and `bye`."""
        self._stopped = True
        self.send(("bye",))
        self._thread.join(5)

    def _run(self) -> None:
        last = False
        while not last:
            self._news.wait()
            self._news.clear()
            last = self._stopped
            if self._noted and not self._items:
                time.sleep(TOGETHER)
            items = [item for answer in dict.fromkeys(_all(self._noted)) for item in answer.items()] + _all(self._items)
            try:
                if items:
                    self._pipe.send_bytes(pack(items))
            except OSError:
                self._lost.set()
                return


def _all(waiting: deque[Any]) -> list[Any]:
    return [waiting.popleft() for _ in range(len(waiting))]


AT_ONCE = ("taken", "stop", "let_go", "hear", "drop_sound", "abandon")
"""Messages that the reader sees to itself, which wait for nobody; others are given to other threads."""

OWN = ("session", "call", "drain")
"""Messages that are for no conversation."""

NEW = ("session", "listen", "ask")
"""Messages that are refused once it drains."""

DRAIN = 30.0
"""Seconds for which SIGTERM lets answers under way come to their ends."""


class Child(MessageHandler):
    """Serves one clients' process: messages come through a pipe."""

    def __init__(self, pipe: Connection, lm: SpeechLM, threads: int | None) -> None:
        self._pipe, self._lm, self._threads = pipe, lm, threads
        self._gone = threading.Event()  # the other process has ended, or asked for the end
        self._until: float | None = None  # time at which answers under way are cut, once it drains
        self._outbox = Outbox(pipe, self._gone)
        super().__init__()
        self._pool = ThreadPoolExecutor(8, "omni-request", self._prepare)
        threading.Thread(target=self._read, name="omni-read", daemon=True).start()

    def _prepare(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)  # the engine takes the number of the thread that asks

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
        self._outbox.finish()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # --- messages -----------------------------------------------------------------------------------------------------

    def listener(self, answer: int) -> SentAnswer:
        return SentAnswer(self._outbox, answer)

    def turn(self, sound: int) -> Callable[[int, Tensor], None]:
        return lambda first, new: self._outbox.send(("turn", sound, first, new))

    def _read(self) -> None:
        try:
            while True:
                for message in unpack(self._pipe.recv_bytes()):
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
            item: Item = ("reply", request, getattr(self, name)(*args) if name in OWN else self.request(name, *args))
            if request:
                pack([item])
        except BaseException as error:
            item = ("raise", request, *pack_error(error))
        if request:
            self._outbox.send(item)

    def session(self, number: int, values: Mapping[str, Any]) -> None:
        """Start a conversation."""
        self.add(number, self._lm.conversation(**values))

    def call(self, name: str, args: Sequence[Any], values: Mapping[str, Any]) -> Any:
        """A method or a property of the `SpeechLM`, by its name; `engine.` before it for the engine's."""
        target: Any = self._lm
        for part in name.split("."):
            if part.startswith("_") or not hasattr(target, part):
                raise UserError(f"{type(target).__name__} has nothing called {part!r} to call by {name!r}")
            target = getattr(target, part)
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
