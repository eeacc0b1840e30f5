"""The clients' end of the pipe to an engine's process: requests and their results, and the events of answers."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Sequence
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import torch

from omni.engine.answers import RemoteAnswer
from omni.engine.coded import CodedSound, SoundDecoder, cannot_decode
from omni.engine.launch import how_it_ended
from omni.engine.wire import EngineLost, Sender, pack_request, unpack, unpack_error
from omni.generate.results import Ended, Timings
from omni.generate.turn_end import TurnFrames

LOG = logging.getLogger(__name__)

OFTEN = 256
"""Messages between two looks for answers that nobody has any more."""


class _Reply:
    """What a request waits for."""

    def __init__(self) -> None:
        self.there = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None


class Link:
    """Sends what any thread asks for; a thread of its own takes what comes.

    Args:
        process: the other end's, for words about its end.
        decoder: of what comes as codes; None where nothing does.

    Attributes:
        lost: why nothing is answered any more, None while the process lives.
        reader: the thread.
    """

    def __init__(self, pipe: Connection, process: Any, decoder: SoundDecoder | None = None) -> None:
        self._pipe, self._process = pipe, process
        self._changed = threading.Lock()  # guards the replies, the answers and `lost`
        self._replies: dict[int, _Reply] = {}
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
        number, reply = next(self._requests), _Reply()
        message = pack_request(f"what {name!r} was given", (name, number, *args))
        if self._sender.here:
            return self.tell(name, 0, *args)
        with self._changed:
            if self.lost is not None:
                raise EngineLost(*self.lost.args)
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
        elif kind == "turn":
            with self._changed:
                turn = self._turns.get(number)
            if turn is not None:
                turn.put(rest[0], torch.from_numpy(rest[1]))
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
            self.lost = lost
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
