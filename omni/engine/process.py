"""An engine in a process of its own, with the faces of `omni.generate.speech_lm.SpeechLM`.

    engine = EngineProcess("runs/nano/model", slots=32)
    with engine.session() as session:
        for event in session.ask("question.wav"): ...
    engine.close()

Questions are read, checked and resampled in the process of the clients, so that the engine's process does nothing but answer.
The two are joined by one pipe; a thread here takes what comes and gives it to the listeners. A live listener's time is measured
in the engine's process, from when its sound was ready there.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from omni import plugins as plugin_modules
from omni.audio.io import SAMPLE_RATE
from omni.checkpoint.places import TOKENIZER
from omni.engine.client import Pace, WhenFull, check_pace
from omni.engine.launch import PATIENCE, how_it_ended, start
from omni.engine.remote import RemoteAnswer, RemoteSession
from omni.engine.slots import check_slots
from omni.engine.wire import EngineLost, Sender, pack_request, unpack, unpack_error
from omni.errors import UserError
from omni.files import check_path
from omni.generate.bounds import Bound, check_number
from omni.generate.messages import History
from omni.generate.options import Keywords, SessionOptions, make_options
from omni.generate.question import Asked, Question, read_question
from omni.generate.results import Answer, Ended, Event, Timings
from omni.tasks import Task
from omni.text import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from omni.config import ModelConfig
    from omni.layout import Layout

LOG = logging.getLogger(__name__)


class _Reply:
    """What a request waits for."""

    def __init__(self) -> None:
        self.there = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None


class EngineProcess:
    """Starts a process that loads a model and answers the questions of this one. Close it, or use `with`.

    It is started with 'spawn': a script that makes one needs `if __name__ == "__main__":`.

    Args:
        folder: the model folder.
        slots, context: those of `omni.engine.engine.Engine`.
        threads: CPU threads of the process; by default PyTorch's own number.
        plugins: names of modules that register codecs, encoders or tasks; by default those that are loaded here.
        values: keywords of `SpeechLM.from_pretrained`.

    Attributes:
        config: the model's.
        codec: the codec's name, None without one; sample_rate: in Hz, and frame_rate: frames a second (0 without one).
        pid: id of the process.

    Raises:
        UserError: as of `SpeechLM.from_pretrained`.
        EngineLost: the process ended before the model was loaded.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        slots: int | None = None,
        context: int | None = None,
        threads: int | None = None,
        plugins: Sequence[str] | None = None,
        **values: Any,
    ) -> None:
        check_path(folder, "the model folder")
        check_slots(slots)
        if context is not None:
            check_number("context", context)
        if threads is not None:
            check_number("threads", threads, Bound(1, 1024, "by default PyTorch's own number"))
        names = plugin_modules.loaded() if plugins is None else tuple(plugins)
        plugin_modules.load_plugins(names, "plugins")
        arguments = (os.path.abspath(folder), values, slots, context, threads, names)
        pack_request("the arguments of the engine's process", arguments)
        self._owner = os.getpid()
        self._replies: dict[int, _Reply] = {}
        self._answers: weakref.WeakValueDictionary[int, RemoteAnswer] = weakref.WeakValueDictionary()
        self._changed = threading.Lock()  # guards the replies, the answers and `_lost`
        self._requests, self._numbers, self._sessions = count(1), count(1), count(1)
        self._lost: EngineLost | None = None
        self._closing = self._said_bye = False
        self._pipe, self._process = start(arguments)
        self.pid = self._process.pid
        try:
            self._take_facts()
            self._tokenizer = Tokenizer.from_file(Path(folder) / TOKENIZER)
        except BaseException:
            self._pipe.close()
            self._process.kill()
            self._process.join()
            raise
        self._sender = Sender(self._pipe)
        self._reader = threading.Thread(target=self._read, name="omni-events", daemon=True)
        self._reader.start()
        _OPEN.add(self)

    def _take_facts(self) -> None:
        try:
            kind, *rest = unpack(self._pipe.recv_bytes())[0]
        except (EOFError, OSError):
            raise EngineLost(
                f"{how_it_ended(self._process)} before the model was loaded; what it said is above (a script that starts one "
                'needs if __name__ == "__main__":)'
            ) from None
        if kind == "refused":
            raise unpack_error(*rest)
        facts = rest[0]
        self.config: ModelConfig = facts["config"]
        self.codec: str | None = facts["codec"]
        self.sample_rate: int = facts["sample_rate"]
        self.frame_rate: float = facts["frame_rate"]
        self._shown: str = facts["shown"]

    @property
    def layout(self) -> Layout:
        return self.config.layout

    @property
    def alive(self) -> bool:
        """Whether it answers: it has not ended, nor was it closed."""
        return self._lost is None

    def __repr__(self) -> str:
        return f"EngineProcess({self._shown}, {f'process {self.pid}' if self.alive else 'ended'})"

    # --- the faces of SpeechLM ----------------------------------------------------------------------------------------

    def session(
        self,
        *,
        context: int | None = None,
        history: History | None = None,
        pace: Pace = "read",
        when_full: WhenFull = "wait",
        **values: Unpack[Keywords],
    ) -> RemoteSession:
        """Start a conversation; arguments as for `SpeechLM.session`.

        Args:
            pace: `read` for a program that reads, `live` for sound that plays from its first sample on, so that its row is
                written ahead of it.
        """
        check_pace(pace, when_full)
        make_options(dict(values), "session", ("context", "history", "pace", "when_full"))
        if isinstance(history, (str, os.PathLike)):
            history = os.path.abspath(history)
        number = next(self._sessions)
        self.request("session", number, {"context": context, "history": history, "when_full": when_full, **values})
        return RemoteSession(self, number, pace, self._numbers, self.codec is not None)

    def stream(
        self,
        question: Question,
        task: Task | str = "A1A2",
        *,
        sample_rate: int = SAMPLE_RATE,
        **options: Unpack[SessionOptions],
    ) -> Iterator[Event]:
        """Answer one question with events; see `SpeechLM.stream`."""
        session = self.session(**options)
        try:
            events = session.ask(question, task, sample_rate=sample_rate)
        except BaseException:
            session.close()
            raise
        return _closing(session, events)

    def generate(
        self,
        question: Question,
        task: Task | str = "A1A2",
        *,
        sample_rate: int = SAMPLE_RATE,
        **options: Unpack[SessionOptions],
    ) -> Answer:
        """Answer one question and return when the answer is whole; see `SpeechLM.generate`."""
        with self.session(**options) as session:
            return session.answer(question, task, sample_rate=sample_rate)

    def call(self, name: str, *args: Any, **values: Any) -> Any:
        """Call a method of the process's `SpeechLM` by its name, or read a property: `call("load_adapter", folder)`,
        `call("adapters")`; `engine.` before the name means the engine's. Arguments and results are copies."""
        return self.request("call", name, args, values)

    # --- the end ------------------------------------------------------------------------------------------------------

    def drain(self, seconds: float = 30.0) -> None:
        """Take no new questions, and end once no answer is under way, or after that many seconds; `close` waits for it.
        SIGTERM to the process does the same."""
        with suppress(EngineLost):
            self.request("drain", seconds)

    def close(self, drain: float = 0.0) -> None:
        """End the process and wait for that. Answers under way are cancelled, after `drain` seconds in which they may end."""
        if os.getpid() != self._owner or self._closing:
            return
        self._closing = True
        self.drain(drain)
        self._process.join(drain + PATIENCE)
        if self._process.exitcode is None:
            LOG.warning("the engine's process %d did not end, and is killed", self.pid)
            self._process.kill()
            self._process.join()
        if threading.current_thread() is not self._reader:
            self._reader.join()
        self._process.close()
        _OPEN.discard(self)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- messages (`omni.engine.remote.Host`) -------------------------------------------------------------------------

    def read(self, question: Question, task: Task | str, sample_rate: int) -> Asked:
        """Read and check a question."""
        model: Any = SimpleNamespace(config=self.config, layout=self.layout)
        return read_question(question, task, model, self._tokenizer, sample_rate)

    def register(self, answer: RemoteAnswer) -> None:
        """Give an answer the events that come for it."""
        with self._changed:
            self._answers[answer.number] = answer

    def request(self, name: str, *args: Any) -> Any:
        """Have something done there, and wait for the result; within a `send` of this thread nothing is waited for."""
        self._check()
        number, reply = next(self._requests), _Reply()
        message = pack_request(f"what {name!r} was given", (name, number, *args))
        if self._sender.here:
            return self.tell(name, 0, *args)
        with self._changed:
            if self._lost is not None:
                raise EngineLost(*self._lost.args)
            self._replies[number] = reply
        self._sender.send(message)
        try:
            reply.there.wait()
        finally:
            with self._changed:
                self._replies.pop(number, None)
        if reply.error is not None:
            raise reply.error
        return reply.value

    def tell(self, name: str, *args: Any) -> None:
        """Send something that has no result."""
        if self._lost is None and os.getpid() == self._owner:
            self._sender.send(pack_request(name, (name, *args)))

    def _check(self) -> None:
        if os.getpid() != self._owner:
            raise UserError(
                f"this engine was started by process {self._owner}, and process {os.getpid()} was forked from it; start another"
            )
        if self._lost is not None:
            raise EngineLost(*self._lost.args)

    def _read(self) -> None:
        try:
            while True:
                for item in unpack(self._pipe.recv_bytes()):
                    try:
                        self._take(*item)
                    except Exception:  # of a listener's `wake`: the others have nothing to do with it
                        LOG.exception("a listener of the engine's process failed")
        except (EOFError, OSError):
            self._gone()

    def _take(self, kind: str, number: int = 0, *rest: Any) -> None:
        if kind == "bye":
            self._said_bye = True
        elif kind in ("reply", "raise"):
            with self._changed:
                reply = self._replies.get(number)
            if reply is not None:
                if kind == "reply":
                    reply.value = rest[0]
                else:
                    reply.error = unpack_error(*rest)
                reply.there.set()
        else:
            with self._changed:
                answer = self._answers.get(number)
            if answer is None:
                return
            if kind == "events":
                answer.put(rest[0])
            elif kind == "failed":
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
            self._lost = lost
            replies, answers = list(self._replies.values()), list(self._answers.values())
        self._sender.close()
        for reply in replies:
            reply.error = EngineLost(*lost.args)
            reply.there.set()
        for answer in answers:
            try:
                answer.end(Ended("error", Timings(), str(lost)))
            except Exception:
                LOG.exception("a listener of the engine's process failed")


def _closing(session: RemoteSession, events: Iterator[Event]) -> Iterator[Event]:
    """Passes events on and closes the session when they end, even if none of them is ever taken."""

    def run() -> Iterator[Any]:
        with session:
            yield None  # taken at once: from now on, closing or dropping the iterator ends the session
            yield from events

    running = run()
    next(running)
    return running


_OPEN: weakref.WeakSet[EngineProcess] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Ends all processes at exit."""
    for engine in list(_OPEN):
        engine.close()
