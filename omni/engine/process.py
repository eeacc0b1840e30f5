"""An engine in a process of its own, with the calls of `omni.generate.speech_lm.SpeechLM` and `omni.generate.session.Session`.

    engine = EngineProcess("runs/nano/model", slots=32)
    with engine.session() as session:
        for event in session.ask("question.wav"): ...
    engine.close()

Questions are read, checked and resampled in the process of the clients, and `stop` functions called there, so that the engine's
process, which has the history, does nothing but answer. The two are joined by one pipe; a thread here takes what comes and
gives it to the listeners. A live listener's time is measured in the engine's process, from when its sound was ready there, or
its codes, where the codec decodes anywhere: that is done here (`omni.engine.wire`).
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from omni import plugins as plugin_modules
from omni.checkpoint.places import TOKENIZER
from omni.codec.registry import load_codec
from omni.config import ModelConfig
from omni.engine.client import Pace, WhenFull, check_pace
from omni.engine.link import PATIENCE, Link, RemoteAnswer, first_message, start_process
from omni.engine.slots import check_limits
from omni.engine.wire import EngineLost, ModelFacts, SoundDecoder, pack_request
from omni.errors import UserError
from omni.generate.answer_stream import DeliveredPart, answer_of, joined
from omni.generate.conversation import Conversation, Sessions
from omni.generate.messages import History, Message
from omni.generate.options import check_number, make_options
from omni.generate.question import Asked, Coming, Question, read_question
from omni.generate.results import Answer, Clock, Ended, Event, Timings
from omni.generate.speech_lm import SpeechLM
from omni.generate.turn_end import TurnFrames
from omni.pretrained import find_model
from omni.tasks import Task, Turn, find_task
from omni.text import Tokenizer

if TYPE_CHECKING:
    from omni.layout import Layout


class RemoteSession(Conversation[RemoteAnswer]):
    """One conversation. Made by `EngineProcess.session`; close it (or use `with`) to free its slot.

    Args:
        number: its number in the process.
        stop: ends an answer, see `omni.generate.answer_stream.AnswerReader`.
    """

    def __init__(
        self,
        link: Link,
        number: int,
        facts: ModelFacts,
        tokenizer: Tokenizer,
        pace: Pace,
        stop: Callable[[str], bool] | None,
    ) -> None:
        super().__init__(stop)
        self._link, self._number, self._facts, self._tokenizer, self._pace = link, number, facts, tokenizer, pace
        self._closed = False
        self._sound: int | None = None  # that is listened to there
        self._dropped = weakref.finalize(self, link.tell, "close", 0, number)
        self._dropped.atexit = False

    # --- the question -------------------------------------------------------------------------------------------------

    @property
    def config(self) -> ModelConfig:
        return self._facts.config

    @property
    def sample_rate(self) -> int:
        return self._facts.sample_rate

    def check(self) -> None:
        self._open()
        self._link.check()

    def _open(self) -> None:
        if self._closed:
            raise UserError("this session is closed; start a new one")

    def _read_question(self, question: Question | Coming, task: Task | str, sample_rate: int) -> Asked:
        model: Any = SimpleNamespace(config=self.config, layout=self.config.layout)
        return read_question(question, task, model, self._tokenizer, sample_rate)

    def lay_out(self, asked: Asked, seed: int | None = None, clock: Clock | None = None) -> RemoteAnswer:
        rate = self.sample_rate if asked.task.audio else 0
        with self._lock:
            self._open()
            self.commit()  # once more: another thread may have asked meanwhile
            answer = RemoteAnswer(self._link, self._link.number(), asked, seed, clock or Clock(), self._pace, rate)
            self._last = answer
        return answer

    def begin(self, answer: RemoteAnswer) -> None:
        asked, turn = answer.asked, replace(answer.asked.turn, task=answer.asked.task.name)
        known = asked.heard if isinstance(asked.heard, tuple) else None
        heard = self._sound if asked.heard == self._sound else None
        clip = None if asked.clip is None or heard is not None else asked.clip.numpy()
        with self._lock:
            if not answer.start():  # it was cancelled meanwhile
                return
            self._link.register(answer)
            try:
                prepared = None if asked.clip is None or heard is not None else self._prepared(asked.clip)
                values = answer.seed, answer.clock.seconds, known or heard
                self._link.request("ask", self._number, answer.number, turn, clip, prepared, *values)
                if heard is not None:
                    self._sound = None
            except Exception:  # it was refused, and nothing is left of it there
                answer.settled = True
                answer.end(Ended("cancelled", Timings()))
                raise
            except BaseException:  # Ctrl-C: it is perhaps about to be answered
                self._sound = None
                self.let_go(answer)
                raise

    def open_sound(self, task: Task, turn: TurnFrames | None = None) -> int | None:
        if self.config.encoder.chunk_samples is None:
            return None
        number = self._link.number()
        if turn is not None:
            self._link.follow(number, turn)
        self._link.request("listen", self._number, number, task.name, turn is not None)
        self._sound = number
        return number

    def hear(self, sound: int, samples: Tensor) -> None:
        if self._sound == sound:
            self._link.tell("hear", self._number, sound, samples.numpy(), False)

    def peek(self, sound: int, samples: Tensor) -> None:
        if self._sound == sound:
            self._link.tell("hear", self._number, sound, samples.numpy(), True)

    def sound_so_far(self, sound: int) -> tuple[int, int]:
        return self._number, sound

    def drop_sound(self, sound: int | None) -> None:
        if sound is not None and self._sound == sound:
            self._sound = None
            self._link.tell("drop_sound", self._number, sound)

    def _prepared(self, clip: Tensor) -> tuple[Any, ...]:
        """The clip's features, made here, where that delays nobody else's sound; as arrays, which are quicker to send."""
        features, *counts = self.config.encoder.prepare(clip)
        return ([part.numpy(force=True) for part in features], *counts)

    # --- its answer ---------------------------------------------------------------------------------------------------

    def whole(self, events: Iterable[Event], answer: RemoteAnswer | None) -> Answer:
        said, part = joined(events), DeliveredPart()
        if answer is not None:
            with suppress(EngineLost):
                part = self._link.request("delivered", self._number, answer.number)
        return answer_of(said, part, answer is not None and answer.rate > 0, self.sample_rate)

    async def aside(self, call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.to_thread(call, *args)

    def withdraw(self, answer: RemoteAnswer) -> None:
        with self._lock:
            self._end(answer, "withdraw")

    def let_go(self, answer: RemoteAnswer) -> None:
        with answer.changed:
            if answer.settled:
                return
            answer.quiet()
            answer.settled = True
            if answer.started:
                self._link.tell("let_go", self._number, answer.number, answer.taken)
            answer.end(Ended("cancelled", Timings()))

    def _settle(self, answer: RemoteAnswer) -> None:
        if not answer.settled:
            self._end(answer, "settle")

    def _interrupt(self, answer: RemoteAnswer, played: float | None, shown: int | None) -> None:
        self._end(answer, "interrupt", played, shown)

    def _end(self, answer: RemoteAnswer, request: str, *interrupted: Any) -> None:
        """Have an answer settled, interrupted or withdrawn there."""
        answer.quiet()
        try:
            ended = self._link.request(request, self._number, answer.number, answer.taken, *interrupted)
        except EngineLost as error:
            if answer.settled:
                raise
            ended = Ended("error", Timings(), str(error))
        answer.end(ended or Ended("cancelled", Timings()))
        answer.settled = True

    # --- the conversation ---------------------------------------------------------------------------------------------

    @property
    def place(self) -> int:
        """See `Session.place`."""
        position: int = self._link.request("read", self._number, "place")
        return position

    @property
    def history(self) -> list[Message]:
        """See `Session.history`."""
        messages: list[Message] = self._link.request("read", self._number, "history")
        return messages

    @property
    def last_answer(self) -> Message | None:
        message: Message | None = self._link.request("read", self._number, "last_answer")
        return message

    @property
    def turns(self) -> tuple[Turn, ...]:
        """See `Session.turns`."""
        turns: tuple[Turn, ...] = self._link.request("read", self._number, "turns")
        return tuple(replace(turn, task=find_task(turn.task)) for turn in turns)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """See `Session.save`."""
        with self._lock:
            self._link.request("save", self._number, os.path.abspath(path) if isinstance(path, (str, os.PathLike)) else path)
        return Path(path)

    def close(self) -> None:
        """End the session and free its slot; from any thread. An answer under way is cancelled."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._dropped.detach()
            if self._incoming is not None:
                self._incoming.withdraw()
            if self._last is not None:
                self._settle(self._last)
            with suppress(EngineLost):  # its slot went with it
                self._link.request("close", self._number)


LOG = logging.getLogger(__name__)


class EngineProcess(Sessions[RemoteSession]):
    """Starts a process that loads a model and answers the questions of this one. Close it, or use `with`.

    It is started with 'spawn': a script that makes one needs `if __name__ == "__main__":`. UserError: as of
    `SpeechLM.from_pretrained`. EngineLost: the process ended before the model was loaded.

    Args:
        folder, values: as of `SpeechLM.from_pretrained`.
        slots, context, patience, queue: those of `omni.engine.engine.Engine`.
        threads: CPU threads of the process; by default PyTorch's own number.
        plugins: names of modules that register codecs, encoders or tasks; by default those that are loaded here.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        slots: int | None = None,
        context: int | None = None,
        patience: float | None = None,
        queue: int | None = None,
        threads: int | None = None,
        plugins: Sequence[str] | None = None,
        **values: Any,
    ) -> None:
        inspect.signature(SpeechLM.from_pretrained).bind(folder, **values)  # before a process is started for them
        folder = find_model(folder)
        engine = {"slots": slots, "context": context, "patience": patience, "queue": queue}
        check_limits(**engine, threads=threads)
        names = plugin_modules.loaded() if plugins is None else tuple(plugins)
        plugin_modules.load_plugins(names, "plugins")
        arguments = (os.path.abspath(folder), values, engine, threads, names)
        pack_request("the arguments of the engine's process", arguments)
        pipe, self._process = start_process(arguments)
        self.pid = self._process.pid
        try:
            self.facts = first_message(pipe, self._process)
            self._tokenizer = Tokenizer.from_file(Path(folder) / TOKENIZER)
            decoder = _decoder(self.facts)
        except BaseException:
            pipe.close()
            self._process.kill()
            self._process.join()
            raise
        self._closing = False
        self._link = Link(pipe, self._process, decoder)
        _OPEN.add(self)

    @property
    def config(self) -> ModelConfig:
        return self.facts.config

    @property
    def codec(self) -> str | None:
        return self.facts.codec

    @property
    def sample_rate(self) -> int:
        return self.facts.sample_rate

    @property
    def frame_rate(self) -> float:
        return self.facts.frame_rate

    @property
    def decoding(self) -> float:
        """CPU seconds that the decoding of sound took in this process."""
        return self._link.decoding

    @property
    def layout(self) -> Layout:
        return self.config.layout

    @property
    def alive(self) -> bool:
        """Whether it answers: it has not ended, nor was it closed."""
        return self.lost is None

    @property
    def lost(self) -> EngineLost | None:
        """Why it answers no more; None while it is alive."""
        return self._link.lost

    def __repr__(self) -> str:
        return f"EngineProcess({self.facts.shown}, {f'process {self.pid}' if self.alive else 'ended'})"

    # --- the calls of SpeechLM ----------------------------------------------------------------------------------------

    def _session_of(
        self, values: Any, context: int | None, history: History | None, pace: Pace, when_full: WhenFull
    ) -> RemoteSession:
        check_pace(pace, when_full)
        stop = make_options(values).stop_when
        if stop is not None:  # it is called here
            values = {name: value for name, value in values.items() if name != "stop"}
        if isinstance(history, (str, os.PathLike)):
            history = os.path.abspath(history)
        number = self._link.number()
        own = {"context": context, "history": history, "pace": pace, "when_full": when_full}
        self._link.request("session", number, own | values)
        return RemoteSession(self._link, number, self.facts, self._tokenizer, pace, stop)

    def call(self, name: str, /, *args: Any, **values: Any) -> Any:
        """Call a method of the process's `SpeechLM` by its name, or read a property: `call("load_adapter", folder)`,
        `call("adapters")`; `engine.` before the name means the engine's. Arguments and results are copies."""
        if not isinstance(name, str):
            raise UserError(f"call was given {repr(name)[:80]}; give the name of a method or a property")
        return self._link.request("call", name, args, values)

    # --- the end ------------------------------------------------------------------------------------------------------

    def drain(self, seconds: float = 30.0) -> None:
        """Take no new questions, and end once no answer is under way, or after that many seconds; `close` waits for it.
        SIGTERM to the process does the same."""
        check_number("drain", seconds)
        with suppress(EngineLost):
            self._link.request("drain", seconds)

    def close(self, drain: float = 0.0) -> None:
        """End the process and wait for that. Answers under way are cancelled, after `drain` seconds in which they may end."""
        if self._closing:
            return
        check_number("drain", drain)
        self._closing = True
        self._link.tell("drain", 0, drain)  # a process that has stopped says nothing
        self._process.join(drain + PATIENCE)
        if self._process.exitcode is None:
            LOG.warning("the engine's process %d did not end, and is killed", self.pid)
            self._process.kill()
            self._process.join()
        if threading.current_thread() is not self._link.reader:
            self._link.reader.join()
        self._process.close()
        _OPEN.discard(self)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _decoder(facts: ModelFacts) -> SoundDecoder | None:
    """The decoder of coded sound in this process; None where sound comes decoded."""
    if facts.codec is None or not facts.portable:
        return None
    try:
        return SoundDecoder(load_codec(facts.codec))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"codec {facts.codec} cannot decode in this process ({type(error).__name__}: {error})") from error


_OPEN: set[EngineProcess] = set()


def _close_forked() -> None:
    """In a process that was forked: the pipe and its reader belong to the one that started the engine."""
    for engine in _OPEN:
        engine._closing, engine._link.lost = True, EngineLost("this engine is another process's; start one here")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_forked)


@atexit.register
def _close_all() -> None:
    """Ends all processes at exit."""
    for engine in list(_OPEN):
        engine.close()
