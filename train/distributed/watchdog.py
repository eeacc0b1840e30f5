"""Watches the processes of a run: says which one holds the others up, or was lost, and ends what does not go on.

Each process notes what it is doing (`Activity`). A thread sends the note to the run's key-value store once a second. Where this
process has been in one phase for too long, it reads the notes of the others, and a second thread judges them: the process that
is furthest behind in the program, which all processes run alike, or that sends no notes, holds up the others.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from omni.errors import LostError
from omni.process import say
from train.config.sections import FabricConfig
from train.distributed.activity import Activity, Identity, Note, Standstill, judge, listed, named
from train.distributed.collectives import last_collective
from train.distributed.store import connect, outlives

BEAT = 1.0
"""Seconds between two notes of a process."""
SILENT, LEAST = 10, 0.8
"""Beats, and at least seconds, without a note after which a process counts as silent."""
ENDING = 3, 0.5
"""Beats, and at least seconds, that a process waits with its end, so that the others come to the same verdict; the one that
holds them up waits twice as long."""
LEAVING = 30.0
"""Seconds in which the process group has to end when a process was lost."""

AGAIN = "the same command goes on from the last checkpoint, if there is one"
FOLLOWING = "as it lost another"
"""Why a process has ended that was not the first to be lost."""
LOST = ("Connection closed by peer", "gloo/transport", "Connection reset by peer", "Timed out waiting", "NCCL communicator")
"""Parts of the messages of errors that mean that another process cannot be reached."""


class Watched(Protocol):
    """A process group, as far as it is watched."""

    rank: int
    world: int
    activity: Activity

    def gather(self, value: Any) -> list[Any]: ...

    def broadcast(self, value: Any) -> Any: ...


class Watchdog:
    """Sends this process's notes, reads those of the others, and judges them; two threads, from `start` to `stop`.

    Args:
        patience: seconds of waiting after which a line says for whom; again after twice as many.
        limit: seconds after which the run ends, None for never.
    """

    def __init__(self, group: Watched, patience: float, limit: float | None) -> None:
        self.group, self.patience, self.limit = group, patience, limit
        self.beat = min(BEAT, patience / (4 * SILENT))
        self.silence = max(SILENT * self.beat, LEAST)
        self.store = connect(group.broadcast(f"watchdog/{os.urandom(8).hex()}"), timedelta(seconds=30))
        self.notes: list[Note | None] = [None] * group.world
        self.ended: str | None = None
        self.sent = 0
        self.urgent = threading.Event()  # a process is lost: all notes are read at once
        self.reads = 0
        self.answered = time.monotonic()
        self.told: tuple[float, float] = (0.0, 0.0)  # beginning of the phase that was told of, and after how many seconds
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._send, self._judge)]
        self._note()
        self.who = [Identity(*one) for one in group.gather(tuple(Identity.own()))]  # all have sent a note from here on

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def stop(self, ended: str = "") -> None:
        """Ends the threads; the last note says why the process has ended, "" for as it should."""
        self.ended = ended
        self.stopped.set()
        self.urgent.set()
        for thread in self.threads:
            thread.join(2 * BEAT)

    # --- notes --------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        going = True
        with suppress(dist.DistError, RuntimeError):  # whoever keeps the store is gone
            while going:
                if self.urgent.wait(self.beat):
                    time.sleep(self.beat / 20)
                going = not self.stopped.is_set()
                self._note()
                self._read()

    def _note(self) -> None:
        self.sent, own = self.sent + 1, self.group.activity
        age = time.monotonic() - own.since
        self.store.set(str(self.group.rank), json.dumps([self.sent, time.time(), own, age, self.ended]))

    def _read(self) -> None:
        """Reads the first process's note, as it may keep the store; all of them where they are needed."""
        own = self.group.activity
        late = time.monotonic() - own.since > self.patience / 2 and (own.waiting or not own.long)
        wanted = range(self.group.world if self.urgent.is_set() or late else 1)
        for other, text in zip(wanted, self.store.multi_get([str(other) for other in wanted]), strict=True):
            beat, sent, activity, age, ended = json.loads(text)
            note, came = self.notes[other], time.monotonic()
            if note is None:
                came -= max(0.0, time.time() - sent)  # it may be an old one
            if note is None or note.beat != beat:
                self.notes[other] = Note(beat, Activity(*activity), age, ended, came)
        self.answered = time.monotonic()
        self.reads += len(wanted) > 1

    # --- verdicts -----------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        before = after = time.monotonic()
        while not self.stopped.wait(self.beat):
            own, now = self.group.activity, time.monotonic()
            if now - before > self.silence:  # it was this process that was stopped: what it knows of the others is old
                after = now + self.silence
            before, waited = now, now - own.since
            if now >= after and waited >= self.patience and (own.waiting or not own.long):
                self._tell(own, now, waited)

    def _verdict(self, own: Activity, now: float) -> Standstill:
        if now - self.answered <= self.silence:
            return judge(self.group.rank, own, self.notes, self.who, now, self.silence)
        waited = f'step {own.step}: waiting {round(now - own.since)} s in "{own.phase}" for '
        if outlives(os.environ) or self.group.rank == 0:
            place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            return Standstill(
                [], f"{waited}others, of which nothing is known: torchrun's store at {place} does not answer", True
            )
        return Standstill([0], waited + named(0, self.notes[0], self.who[0], now, True), True)

    def _tell(self, own: Activity, now: float, waited: float) -> None:
        verdict = self._verdict(own, now)
        others = [r for r in range(self.group.world) if r not in verdict.culprits] or [min(verdict.culprits)]
        speaks = self.group.rank == others[0]
        since, after = self.told
        if speaks and (since != own.since or waited >= 2 * after):
            self.told = own.since, waited
            collective = last_collective()
            say(f"{verdict.line}; process {self.group.rank} is in {collective}" if collective else verdict.line)
        if self.limit is not None and waited >= self.limit and verdict.final and self.group.activity.since == own.since:
            self._end(verdict, speaks)

    def _end(self, verdict: Standstill, speaks: bool) -> None:
        """Ends this process, whose main thread may never come back from where it waits."""
        if speaks:
            say(f"error: {verdict.line}; the run ends (fabric.give_up_seconds): {AGAIN}")
        if self.group.rank in verdict.culprits:
            say(f"process {self.group.rank} (pid {os.getpid()}) is here:")
            with suppress(OSError, ValueError):
                faulthandler.dump_traceback(sys.stderr)
        self.ended = "it gave up waiting"
        self.stopped.wait(max(ENDING[0] * self.beat, ENDING[1]) * (1 + (self.group.rank in verdict.culprits)))
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(LostError.code)

    # --- lost processes -----------------------------------------------------------------------------------------------

    def lost(self, error: Exception) -> LostError:
        """The error that names the processes which have died, of which `error` tells; the first of the others says it."""
        rank, until = self.group.rank, time.monotonic() + self.silence + 2 * self.beat
        gone, first, reads = list[int](), list[int](), self.reads
        self.urgent.set()
        while not first and time.monotonic() < until:
            time.sleep(self.beat / 4)
            gone = [r for r in range(self.group.world) if r != rank and self._is_gone(r, self.reads > reads)]
            first = [r for r in gone if (note := self.notes[r]) is None or note.ended != FOLLOWING]
        until = max(until, time.monotonic() + self.beat)
        while self.reads < reads + 2 and self.threads[0].is_alive() and time.monotonic() < until:
            time.sleep(self.beat / 20)  # its last note is read
        step = self.group.activity.step
        if not gone:
            text = " ".join(str(error).split())[:200]
            return LostError(f"step {step}: another process cannot be reached, it is not known which ({text}); {AGAIN}")
        texts = [self._gone(r) for r in first or gone]
        living = [r for r in range(self.group.world) if r not in gone]
        return LostError(f"step {step}: {listed(texts)}; {AGAIN}", quiet=rank != living[0])

    def _is_gone(self, rank: int, read: bool) -> bool:
        """True where a process has ended, as far as is known; `read`: its note has been read since another was lost."""
        note, now = self.notes[rank], time.monotonic()
        if self.who[rank].dead or (note is not None and note.ended is not None):
            return True
        if not self.threads[0].is_alive() and not outlives(os.environ):  # the store is gone, and with it the first process
            return rank == 0
        return read and note is not None and now - note.came > self.silence

    def _gone(self, rank: int) -> str:
        note, who = self.notes[rank], self.who[rank]
        phase = f' in "{note.activity.phase}"' if note is not None else ""
        why = f" ({note.ended})" if note is not None and note.ended else ""
        return f"process {rank} has {'ended' if why else 'died'}{phase}{why} (host {who.host}, pid {who.pid})"


def is_lost(error: BaseException | None) -> bool:
    """True where an error, or one that led to it, says that another process cannot be reached."""
    while error is not None:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        if "DistError" in kinds or ("RuntimeError" in kinds and any(part in str(error) for part in LOST)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _end_what_hangs() -> None:
    """Ends a process whose process group does not: NCCL may wait for a process that is lost."""
    time.sleep(LEAVING)
    if dist.is_initialized():
        os._exit(LostError.code)


@contextmanager
def watched(group: Watched, config: FabricConfig) -> Iterator[None]:
    """A context in which the processes of a run are watched. All of them must enter it.

    Raises:
        LostError: another process cannot be reached any more; it is named.
    """
    if group.world == 1:
        yield
        return
    watchdog = Watchdog(group, config.patience_seconds, config.give_up_seconds)
    watchdog.start()
    ended = ""
    try:
        yield
    except Exception as error:
        if is_lost(error):
            lost = watchdog.lost(error)
            ended = FOLLOWING
            threading.Thread(target=_end_what_hangs, daemon=True).start()
            raise lost from error
        ended = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise
    except BaseException as error:
        ended = type(error).__name__
        raise
    finally:
        watchdog.stop(ended)
