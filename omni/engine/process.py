"""An engine in a process of its own, with the calls of `omni.generate.speech_lm.SpeechLM` and `omni.generate.session.Session`.

    engine = EngineProcess("runs/nano/model", slots=32)
    with engine.session() as session:
        for event in session.ask("question.wav"): ...
    engine.close()

Questions are read, checked and resampled in the process of the clients, and `stop` functions called there, so that the engine's
process, which has the history, does nothing but answer. The two are joined by one pipe; threads here send, and take what comes
and give it to the listeners. A live listener's time is measured in the engine's process, from when its sound was ready there,
or its codes, where the codec decodes anywhere: that is done here (`omni.engine.sound`).
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch import Tensor

from omni import plugins as plugin_modules
from omni.checkpoint.places import TOKENIZER
from omni.codec.registry import load_codec
from omni.engine.answer import CodedSound
from omni.engine.child import Item, Outbox, pack, run
from omni.engine.listener import Link, Listener
from omni.engine.sound import SoundDecoder, cannot_decode
from omni.errors import EngineLost
from omni.generate.options import check_numbers
from omni.generate.results import AudioChunk, Ended, Timings
from omni.generate.session import Sessions
from omni.pretrained import find_model
from omni.text import Tokenizer
from omni.utils.private import disown

LOG = logging.getLogger(__name__)


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


class PipeLink(Link):
    """To an engine in another process: sends what any thread asks for; a thread of its own takes what comes.

    Args:
        process: the other end's, for words about its end.
        decoder: of sound that comes as codes; None where none does.

    Attributes:
        lost: why nothing is answered any more, None while the process lives.
        decoding: CPU seconds that decoding took here.
    """

    def __init__(self, pipe: Connection, process: Any, decoder: SoundDecoder[int] | None = None) -> None:
        super().__init__()
        self._pipe, self._process = pipe, process
        self._changed = threading.RLock()  # guards the replies and `lost`
        self._replies: dict[int, Future[Any]] = {}
        self._said_bye = False
        self.decoding = 0.0
        self._decoder = decoder
        self._requests = count(1)
        self._outbox = Outbox(pipe)
        self.reader = threading.Thread(target=self._read, name="omni-events", daemon=True)
        self.reader.start()

    # --- what clients ask ---------------------------------------------------------------------------------------------

    def check(self, session: int = 0) -> None:
        if self.lost is not None:
            raise EngineLost(*self.lost.args)

    def request(self, name: str, *args: Any) -> Any:
        self.check()
        number, reply = next(self._requests), Future[Any]()
        message = pack([(name, number, *args)])
        with self._changed:
            self.check()
            self._replies[number] = reply
        self._outbox.send(message)
        try:
            return reply.result()
        finally:
            with self._changed:
                self._replies.pop(number, None)

    def tell(self, name: str, *args: Any) -> None:
        if self.lost is None:
            self._outbox.send(pack([(name, 0, *args)]))

    # --- what comes ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while True:
                items = pickle.loads(self._pipe.recv_bytes())
                if self._decoder is not None:
                    self._decode([item[1:] for item in items if item[0] == "events"], self._decoder)
                for item in items:
                    try:
                        self._take(*item)
                    except Exception:  # of a listener's `wake`: the others have nothing to do with it
                        LOG.exception("a listener of the engine's process failed")
                ends = (event for name, *rest in items if name == "events" for event in rest[1] if isinstance(event, Ended))
                if self._decoder is not None and next(ends, None) is not None:  # not with each message: there are many
                    heard = {answer.number for answer in self._listeners() if not (answer.cancelled or answer.ended)}
                    self._decoder.keep(heard)
        except (EOFError, OSError):
            pass
        finally:
            self._gone()

    def _listeners(self) -> list[Listener]:
        """Answers that anybody has; other threads add some meanwhile."""
        return [answer for reference in self.answers.valuerefs() if (answer := reference()) is not None]

    def _decode(self, coming: Sequence[Any], decoder: SoundDecoder[int]) -> None:
        """Decode the coded sound among the events of answers, in their places."""
        start, coded = time.thread_time(), dict[int, tuple[Listener, list[Any], list[CodedSound]]]()
        for number, events in coming:
            answer, sound = self.answers.get(number), [event for event in events if isinstance(event, CodedSound)]
            if sound and answer is not None and not answer.cancelled:
                coded[number] = answer, events, sound
        sounds = decoder.push({number: [f for event in own for f in event.codes] for number, (_, _, own) in coded.items()})
        self.decoding += time.thread_time() - start if coded else 0.0
        for number, (answer, events, own) in coded.items():
            for event in own:
                answer.decoded(event.start)
            decoded = sounds[number]
            if isinstance(decoded, Exception):
                answer.stop("error", cannot_decode(decoder.codec, decoded))
            events[:] = _with_sound(events, None if isinstance(decoded, Exception) else decoded, decoder.codec.frame_samples)

    def _take(self, name: str, number: int = 0, *rest: Any) -> None:
        if name == "bye":
            self._said_bye = True
        elif name in ("reply", "raise"):
            with self._changed:
                reply = self._replies.pop(number, None)
            if reply is not None and name == "reply":
                reply.set_result(rest[0])
            elif reply is not None:
                reply.set_exception(rest[0](rest[1]))
        elif name == "turn":
            if (turn := self.turns.get(number)) is not None:
                turn.put(*rest)
        elif (answer := self.answers.get(number)) is not None:
            if name == "events":
                for event in rest[0]:
                    answer.put(event, notify=event is rest[0][-1])
            elif name == "failed":
                answer.fail(rest[0](rest[1]))
            else:
                answer.where()

    def _gone(self) -> None:
        """Tell everybody that the process has ended."""
        why = "this engine is closed" if self._said_bye else how_it_ended(self._process)
        lost = EngineLost(f"{why}; start another one")
        with self._changed:
            self.lost = lost
            replies, self._replies = [*self._replies.values()], {}
        self._outbox.finish()
        self._pipe.close()
        for reply in replies:
            reply.set_exception(EngineLost(*lost.args))
        for answer in self._listeners():
            try:
                answer.end(Ended("error", Timings(), str(lost)))
            except Exception:
                LOG.exception("a listener of the engine's process failed")


def _with_sound(events: Sequence[Any], sound: Tensor | None, frame_samples: int) -> list[Any]:
    """Events with chunks of a sound [S] in the places of coded ones; without these where there is none."""
    with_sound, position = [], 0
    for event in events:
        if not isinstance(event, CodedSound):
            with_sound.append(event)
        elif sound is not None:
            end = position + frame_samples * len(event.codes)
            with_sound.append(AudioChunk(sound[position:end], event.start, event.end))
            position = end
    return with_sound


def start_process(arguments: Item) -> tuple[Any, Any]:
    """The process, and this process's end of its pipe. Ctrl-C does not reach it, from its first moment on."""
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


def first_message(pipe: Any, process: Any) -> Item:
    """Waits for what the process says of its model. UserError: it cannot be loaded. EngineLost: the process ended before."""
    try:
        name, *rest = pickle.loads(pipe.recv_bytes())[0]
    except (EOFError, OSError):
        raise EngineLost(
            f"{how_it_ended(process)} before the model was loaded; what it said is above (a script that starts one "
            'needs if __name__ == "__main__":)'
        ) from None
    if name == "refused":
        raise rest[0](rest[1])
    return tuple(rest)


class EngineProcess(Sessions, AbstractContextManager["EngineProcess"]):
    """Starts a process that loads a model and answers the questions of this one. Close it, or use `with`.

    It is started with 'spawn': a script that makes one needs `if __name__ == "__main__":`. UserError: as of
    `SpeechLM.from_pretrained`. EngineLost: the process ended before the model was loaded.

    Args:
        folder, values: as of `SpeechLM.from_pretrained`.
        slots, context, patience, queue: those of `omni.engine.engine.Engine`.
        threads: CPU threads of the process; by default PyTorch's own number.
        plugins: names of modules that register codecs, encoders or tasks; by default those that are loaded here.

    Attributes:
        shown: the model's `repr`.
        codec: the codec's name, None without one.
    """

    _link: PipeLink

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
        folder = find_model(folder)
        engine = {"slots": slots, "context": context, "patience": patience, "queue": queue}
        check_numbers(**engine, threads=threads)
        names = plugin_modules.loaded() if plugins is None else tuple(plugins)
        plugin_modules.load_plugins(names, "plugins")
        arguments = (os.path.abspath(folder), values, engine, threads, names)
        pipe, self._process = start_process(arguments)
        self.pid = self._process.pid
        try:
            config, self.shown, self.codec, sample_rate, frame_rate, portable = first_message(pipe, self._process)
            tokenizer = Tokenizer.from_file(Path(folder) / TOKENIZER)
            decoder = SoundDecoder[int](load_codec(self.codec)) if portable else None
            if decoder is not None:
                decoder.push({0: [[0] * len(decoder.codec.codebook_sizes)]})  # what is loaded and compiled, nobody waits for
                decoder.close(0)
        except BaseException:
            pipe.close()
            self._process.kill()
            self._process.join()
            raise
        self._closing = False
        super().__init__(PipeLink(pipe, self._process, decoder), config, tokenizer, sample_rate, frame_rate)
        atexit.register(self.close)

    @property
    def decoding(self) -> float:
        """CPU seconds that the decoding of sound took in this process."""
        return self._link.decoding

    @property
    def alive(self) -> bool:
        """Whether it answers: it has not ended, nor was it closed."""
        return self.lost is None

    @property
    def lost(self) -> EngineLost | None:
        """Why it answers no more; None while it is alive."""
        return self._link.lost

    def __repr__(self) -> str:
        return f"EngineProcess({self.shown}, {f'process {self.pid}' if self.alive else 'ended'})"

    # --- the calls of SpeechLM ----------------------------------------------------------------------------------------

    def call(self, name: str, /, *args: Any, **values: Any) -> Any:
        """Call a method of the process's `SpeechLM` by its name, or read a property: `call("load_adapter", folder)`,
        `call("adapters")`; `engine.` before the name means the engine's. Arguments and results are copies."""
        return self._link.request("call", name, args, values)

    # --- the end ------------------------------------------------------------------------------------------------------

    def drain(self, seconds: float = 30.0) -> None:
        """Take no new questions, and end once no answer is under way, or after that many seconds; `close` waits for it.
        SIGTERM to the process does the same."""
        check_numbers(drain=seconds)
        with suppress(EngineLost):
            self._link.request("drain", seconds)

    def close(self, drain: float = 0.0) -> None:
        """End the process and wait for that. Answers under way are cancelled, after `drain` seconds in which they may end."""
        if self._closing:
            return
        check_numbers(drain=drain)
        self._closing = True
        self._link.tell("drain", drain)  # a process that has stopped says nothing
        self._process.join(drain + PATIENCE)
        if self._process.exitcode is None:
            LOG.warning("the engine's process %d did not end, and is killed", self.pid)
            self._process.kill()
            self._process.join()
        if threading.current_thread() is not self._link.reader:
            self._link.reader.join()
        self._process.close()
        atexit.unregister(self.close)

    def __exit__(self, *_: object) -> None:
        self.close()
