"""The engine: one batch for every conversation with a model on one device.

One thread steps. Between two steps it takes what came meanwhile: new questions get a slot and are prefilled in pieces that fit
the time until a listener needs sound; answers that ended or were cancelled leave. A second thread (`omni.engine.sound`) turns
what was written into text and sound while the next step runs. Questions are encoded by who asks, or between two steps.

    client: encode --> ask --> [waiting] --> slot --> prefill --> [rows: step, step, ...] --> events --> client
                                          between two steps              sound thread

A row's answer does not depend on the other rows: each conversation is what it would be alone.

    engine.py    what conversations call              batch.py           the rows and their slots
    answer.py    an answer, as all threads share it   intake.py          questions on their way into the batch
    stepping.py  the thread that owns those two       prefill_ahead.py   what is fed before a question is asked

    session (listener.py, or from another process process.py, child.py) --> conversation.py: the history --> engine.py
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial

import torch

from omni.codec.base import AudioCodec
from omni.engine.answer import Running, Seat
from omni.engine.batch import EngineBatch
from omni.engine.intake import Intake, encode, unheard
from omni.engine.sound import SoundThread
from omni.engine.stats import MOST, EngineStats, Recorder, StepCosts, measure_steps, measured_of, powers_to
from omni.engine.stepping import Requests, SteppingThread
from omni.errors import BusyError, UserError
from omni.generate.options import check_numbers
from omni.generate.runner import Runner
from omni.model.speech_model import SpeechModel
from omni.utils.hardware import cores, release_threads

WAIT = 0.03
"""Seconds for which one who asks waits while another encodes; after that the question is encoded between two steps."""

SPARE = 0.1
"""Seconds until a listener needs sound, in which somebody may be answered who is in no hurry."""


class Engine:
    """Answers the questions of any number of conversations; `omni.engine.conversation.Conversation` is its client.

    Its methods, and those of its `requests`, may be called from any thread.

    Args:
        slots: rows of the cache; None grows with the conversations.
        context: positions of a row; None for those that its conversations ask for.
        queue: live listeners' questions that may wait; None for any number.
        patience: seconds after which an answer that nobody reads ends; None for never, and for `UNREAD` seconds
            (`omni.engine.answer`) where it is live, so that its events are not kept without end.
        graph, compile: as for `omni.generate.runner.Runner`.
        codec: of its listeners' sound, for `measure` and its kept results.

    Attributes:
        fixed: number of slots, None where it grows.
    """

    def __init__(
        self,
        model: SpeechModel,
        *,
        slots: int | None = None,
        context: int | None = None,
        queue: int | None = None,
        patience: float | None = None,
        graph: bool | None = None,
        compile: bool = False,
        codec: AudioCodec | None = None,
    ) -> None:
        check_numbers(slots=slots, context=context, patience=patience, queue=queue)
        self.model, self.fixed, self.context, self.queue = model, slots, context, queue
        self._draining = False
        self._codec = codec
        self.requests, self.recorder = Requests(), Recorder(partial(measured_of, model, codec))
        self._sound = SoundThread(self.requests.end, self.recorder)
        self._batch = EngineBatch(model, slots, context, self._sound, self.recorder, graph=graph, compile=compile)
        self._intake, self._encoding = Intake(self._batch, self.recorder), threading.Lock()
        self._stepping = SteppingThread(self.requests, self._batch, self._intake, self.recorder, patience)
        release_threads()  # of who loaded the model

    @property
    def runner(self) -> Runner | None:
        """The runner that steps the rows, None before the first question."""
        return self._batch.runner

    # --- conversations ------------------------------------------------------------------------------------------------

    def seat(self, limit: int) -> Seat:
        """A place for a conversation of up to that many positions; it takes a slot with its first question. UserError: the
        engine is closed, or its rows are shorter."""
        self.check()
        if self.context is not None and limit > self.context:
            raise UserError(f"context is {limit}, and the engine's rows have {self.context} positions; give a smaller one")
        seat = Seat(limit)
        with self.requests.lock:
            self.requests.seats.add(seat)
        return seat

    # --- answers ------------------------------------------------------------------------------------------------------

    def ask(self, asked: Sequence[Running]) -> None:
        """Take questions; they are answered in any order, together where they fit. UserError: the engine is closed, or an
        answer takes more slots than there are. BusyError: a live listener's question that is not to wait, or a queue that is
        full."""
        for running in asked:
            rows = 1 if running.fork is None else 2
            if self.fixed is not None and rows > self.fixed:
                raise UserError(f"text assist takes 2 slots, and the engine has {self.fixed}; give it more, or leave it out")
        with self.requests.lock:
            self.check()
            for running in asked:
                if running.pace == "live":
                    self._check_queue(running)
            for running in asked:
                if not running.left.is_set():  # it was not cancelled before
                    running.submitted = True
                    self.requests.asked.append(running)
            self.requests.hand_over()

    def hear(self, running: Running) -> None:
        """Do of a question's encoding, in the thread of who asks, what can be done beside the steps: at least what the encoder
        is given.

        On a CPU with more cores than a step takes threads also the rest, one question at a time: others' share the core with
        all else that is done for listeners. What is left, or was not finite, is found by the stepping thread.
        """
        model = self.model
        for exchange in unheard(running):
            if exchange.clip is not None and exchange.prepared is None and exchange.heard is None:
                exchange.prepared = model.config.encoder.prepare(exchange.clip)
        if model.device.type == "cpu" and torch.get_num_threads() < cores() and self._encoding.acquire(timeout=WAIT):
            try:
                encode(model, [running])
            finally:
                self._encoding.release()

    def _check_queue(self, running: Running) -> None:
        if running.when_full == "wait" and self.queue is None:
            return
        before = self.waiting
        if not (why := self._intake.refusal(running, before)):
            return
        waiting = sum(bool(self._intake.refusal(other, before[:n])) for n, other in enumerate(before))
        if running.when_full == "refuse":
            raise BusyError(f"there is no room for another listener: {why}; ask again later", waiting)
        if self.queue is not None and waiting >= self.queue:
            raise BusyError(f"the queue is full ({waiting} of {self.queue} wait): {why}; ask again later", waiting)

    @property
    def waiting(self) -> list[Running]:
        """Questions without a slot, in their order."""
        with self.requests.lock:
            return [*self._intake.waiting, *self.requests.asked]

    def stop(self, running: Running, wait: bool = True) -> None:
        """Cancel an answer, and wait (or do not) until its rows are free; `running.left` is set then."""
        running.stop()
        with self.requests.lock:
            if not running.submitted:
                running.release()
                running.left.set()
        if not running.left.is_set():
            self.requests.end(running)  # at the next step's boundary
            if wait and not self._stepping.worker.here:
                running.left.wait()

    # --- the whole ----------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Its present state, and its newest measurements."""
        answers, slots = [*self._batch.answers], self._batch.slots
        with self.requests.lock:
            sessions, waiting = len(self.requests.seats), len(self.waiting) + len(self._intake.coming)
        return self.recorder.stats(
            sessions=sessions,
            active=len(answers),
            live=sum(running.pace == "live" for running in answers),
            waiting=waiting,
            slots=len(slots.holders),
            free=slots.holders.count(None),
        )

    @property
    def spare(self) -> bool:
        """Whether it could answer a written or transcribed question without delaying anybody: nobody waits or reads, who is
        heard has enough, what is listened to was heard, and a slot is free or idle."""
        with self.requests.lock:
            coming = self.waiting or self._intake.coming
        slots, answers, slack = self._batch.slots, [*self._batch.answers], self.recorder.slack
        if coming or any(not running.live or not running.exact for running in answers):
            return False
        if any(listen.stream.due for listen in self.requests.listening()):
            return False
        return not answers or bool((None in slots.holders or slots.idle()) and slack is not None and slack >= SPARE)

    def measure(self, rows: Sequence[int] | None = None) -> StepCosts:
        """Measures the cost of steps on this machine and keeps it; admission goes by it until the engine has stepped enough.

        To be called before the first session: takes about a second for a small model, and captures a GPU's steps. `rows`:
        numbers of rows; by default 1, 2, 4 ... to the slots, while step and sound take no longer than a frame plays.
        UserError: a session is open, or the engine is closed."""
        self.check()
        with self.requests.lock:  # nobody asks meanwhile
            if open_sessions := len(self.requests.seats):  # whose rows would be written
                raise UserError(f"{open_sessions} sessions are open; measure before the first, or close them")
            frame = None if rows is not None or self._codec is None else 1 / self._codec.frame_rate
            measured = measure_steps(self._batch.to_measure(), self._codec, rows or powers_to(self.fixed or MOST), frame)
        self.recorder.keep(measured)
        return measured

    def drain(self, seconds: float) -> bool:
        """Refuse new questions, and wait until all answers ended, at most that long; returns whether they have."""
        check_numbers(drain=seconds)
        self._draining = True
        end = time.perf_counter() + seconds
        while (left := self.stats()).active + left.waiting and time.perf_counter() < end:
            time.sleep(0.01)
        return not left.active + left.waiting

    def close(self) -> None:
        """End all answers, wait for the threads to end, and free the cache."""
        with self.requests.lock:
            if self.requests.closed:
                return
            self.requests.closed = True
        self._stepping.close()
        self._sound.stop()

    def check(self) -> None:
        """UserError where the engine is closed."""
        if self.requests.closed or self._draining:
            raise UserError("this engine is closed; load the model again, or start another engine")
