"""A session: one conversation of several turns over the rows of one cache.

The history holds only what was delivered: an answer that was cancelled, or interrupted while it played, is kept as the
offline layout of the text and the frames that reached the listener. The last column of an answer, and whatever the cache does
not hold as the history has it, is fed together with the next question.

Text assist (mini-omni's batch-parallel decoding, gpt-omni/mini-omni @ 26c31d5 `litgpt/generate/base.py`) is a coupling of two
rows: row 0 speaks, and its text input is the text of row 1, which was asked for text only and writes better so. Row 1 leaves
as soon as its text has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal, TypeVar

import torch

from omni.audio.codec import AudioCodec
from omni.errors import UserError
from omni.generate.history import Exchange, Key, common_prefix, lay_out, written_key
from omni.generate.prefill import pack, prefill, prefill_fork
from omni.generate.question import SAMPLE_RATE, Question, encode_questions, read_question
from omni.generate.reply import Reply
from omni.generate.results import Answer, AudioChunk, Clock, Ended, Event, Reason, TextDelta, Timings
from omni.generate.sampling import GREEDY, SamplingPlan, per_stream, seed_key
from omni.generate.step import Row, Runner, Start
from omni.model.speech_model import SpeechModel
from omni.tasks import TASKS, Columns, Task, Turn, prompt
from omni.text import Tokenizer

N = TypeVar("N", int, float)


@dataclass(frozen=True)
class Options:
    """How answers are made.

    Attributes:
        sampling: one `Sampling`, or one per stream or kind.
        seed: of the random draws; the turns of a conversation draw differently.
        max_seconds: longest spoken answer.
        max_tokens: longest answer of a task that only writes (and, without a codec, most frames of a spoken one).
        text_assist: let a second row write the text of spoken answers.
        overflow: what a question does that finds no room in the cache. `end`: it is refused with a UserError. `forget`: the
            oldest turns are dropped until a quarter of the cache is free (or only the question is left).
    """

    sampling: SamplingPlan = GREEDY
    seed: int = 0
    max_seconds: float = 30.0
    max_tokens: int = 512
    text_assist: bool = False
    overflow: Literal["end", "forget"] = "end"

    def __post_init__(self) -> None:
        if not 0 < self.max_seconds < float("inf"):
            raise UserError(f"max_seconds is {self.max_seconds}; it must be positive")
        if self.max_tokens < 1:
            raise UserError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if self.overflow not in ("end", "forget"):
            raise UserError(f"overflow {self.overflow!r} is unknown; use 'end' or 'forget'")

    def limits(self, task: Task, codec: AudioCodec | None, max_delay: int) -> tuple[int, int]:
        """Most frames and most columns of an answer; one column is for the end."""
        frames = self.max_tokens if codec is None else max(1, ceil(self.max_seconds * codec.frame_rate - 1e-9))
        return frames, (frames + max_delay if task.audio else self.max_tokens) + 1


@dataclass(eq=False)
class _Turn:
    """A turn that is being answered, or was the last to be."""

    exchange: Exchange
    columns: Columns
    keys: list[Key]
    reply: Reply
    clock: Clock
    key: int
    encode: float
    prefill: float = 0.0
    rows: list[Row] = field(default_factory=list)
    running: bool = False
    cancelled: bool = False
    settled: bool = False
    characters: int = 0  # handed over
    samples: int = 0
    first_text: float | None = None
    first_audio: float | None = None
    played: float | None = None  # seconds that were heard, where an interruption said so
    shown: int | None = None


class Session:
    """One conversation. Made by `SpeechLM.session`; close it (or use `with`) to give its cache back.

    One answer at a time: `ask` gives its events as they come, `cancel` stops it from any thread.
    """

    def __init__(
        self,
        model: SpeechModel,
        tokenizer: Tokenizer,
        codec: AudioCodec | None,
        runner: Runner,
        options: Options,
        release: Callable[[Runner], None] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.codec = model, tokenizer, codec
        self.options = options
        self.settings = per_stream(model.layout, options.sampling)
        self._runner: Runner | None = runner
        self._release = release
        self._past: list[Exchange] = []
        self._asked = 0
        self._turn: _Turn | None = None
        self._lock = threading.Lock()
        self._fed: list[Key] = []  # columns that row 0 of the cache holds
        self._high = 0  # positions ever written there since it was last empty

    # --- what a caller does -------------------------------------------------------------------------------------------

    def ask(
        self,
        question: Question,
        task: Task | str = "A1A2",
        *,
        sample_rate: int = SAMPLE_RATE,
        seed: int | None = None,
    ) -> Iterator[Event]:
        """Ask, and get the answer as events: text and sound as they come, `Ended` last.

        What has been taken from the iterator counts as delivered. Leaving it unread, or closing it, cancels the answer.

        Args:
            question: a text, a waveform [S], or the path of a sound file, as the task asks.
            sample_rate: of a waveform, in Hz.
            seed: of this answer's draws; by default made of the session's seed and the turn's number.

        Raises:
            UserError: a bad question, no room left in the cache (see `Options.overflow`), another answer being made in
                another thread, or a closed session.
        """
        clock = Clock()
        runner = self._open()
        self._settle()
        asked = read_question(question, task, self.model, self.tokenizer, sample_rate)
        (features,) = encode_questions(self.model, [asked])
        exchange = Exchange(asked.turn, features, self._asked)
        columns, keys = self._lay_out(exchange, runner.length)
        frames, most = self.options.limits(asked.task, self.codec, self.model.layout.max_delay)
        reply = Reply(
            self.model.layout, asked.task, self.tokenizer, self.codec, max_frames=frames, max_columns=most
        )
        key = seed_key(self.options.seed, self._asked) if seed is None else seed_key(seed)
        self._asked += 1
        self._turn = _Turn(exchange, columns, keys, reply, clock, key, clock.seconds)
        clock.hold()
        return self._events(self._turn, runner)

    def answer(
        self,
        question: Question,
        task: Task | str = "A1A2",
        *,
        sample_rate: int = SAMPLE_RATE,
        seed: int | None = None,
    ) -> Answer:
        """Ask, and wait for the whole answer."""
        text, sound, reason, timings = [], [], None, Timings()
        for event in self.ask(question, task, sample_rate=sample_rate, seed=seed):
            if isinstance(event, TextDelta):
                text.append(event.text)
            elif isinstance(event, AudioChunk):
                sound.append(event.samples)
            else:
                reason, timings = event.reason, event.timings
        turn, codec = self.history[-1], self.codec
        speaks = codec is not None and turn.codes is not None
        return Answer(
            text="".join(text),
            audio=torch.cat([torch.zeros(0), *sound]) if speaks else None,
            sample_rate=codec.sample_rate if codec is not None else 0,
            tokens=tuple(turn.text or ()),
            codes=turn.codes,
            timings=timings,
            ended=reason or "cancelled",
        )

    def cancel(self, played_seconds: float | None = None, shown_characters: int | None = None) -> None:
        """Stop the answer that is being made, and cut the last answer in the history to what was delivered.

        May be called from any thread, between events, or after the answer has ended (a listener interrupts what is still
        playing). An answer under way ends with `Ended("cancelled")`.

        Args:
            played_seconds: how much of the sound was heard; only its whole frames stay in the history. By default all that
                was handed over.
            shown_characters: how much of the text was shown; by default all that was handed over.
        """
        with self._lock:
            turn = self._turn
            if turn is None:
                return
            turn.played = _least(turn.played, played_seconds)
            turn.shown = _least(turn.shown, shown_characters)
            if not turn.settled:
                turn.cancelled = True
            elif self._past:
                self._past[-1] = replace(turn.exchange, turn=self._delivered(turn))

    @property
    def history(self) -> tuple[Turn, ...]:
        """The turns with what was delivered of their answers; an answer under way is not among them."""
        return tuple(exchange.turn for exchange in self._past)

    def close(self) -> None:
        """End the session and give its cache back."""
        self._settle()
        runner, self._runner = self._runner, None
        if runner is not None and self._release is not None:
            self._release(runner)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one answer ---------------------------------------------------------------------------------------------------

    def _events(self, turn: _Turn, runner: Runner) -> Iterator[Event]:
        reply = turn.reply
        turn.running = True
        turn.clock.go_on()
        try:
            if not turn.cancelled and not turn.settled:
                self._begin(turn, runner)
            while turn.rows and not turn.cancelled:
                room = turn.rows[0].position < runner.length
                for event in self._results(turn, runner, flush=not room):
                    if not turn.cancelled:
                        yield from self._hand_over(turn, event)
                if reply.reason is None and not room:
                    reply.reason = "cache"
                if reply.reason is not None:
                    break
                runner.step()
            for event in [] if turn.cancelled or turn.settled else reply.finish():
                if not turn.cancelled:
                    yield from self._hand_over(turn, event)
            reason: Reason = "cancelled" if turn.cancelled or reply.reason is None else reply.reason
            timings = self._timings(turn)
        finally:
            turn.running = False
            self._settle(turn)
        yield Ended(reason, timings)

    def _begin(self, turn: _Turn, runner: Runner) -> None:
        """Bring the cache to the end of the question and write the answer's first column."""
        model, task = self.model, turn.reply.task
        exchanges = (*self._past, turn.exchange)
        features = [e.features for e in exchanges if e.features is not None]
        keep = self._rewind(common_prefix(self._fed, turn.keys[:-1]), runner)
        columns = pack(model.layout, [turn.columns], features, [keep])
        length = len(turn.keys)
        start = Start(task.text, task.audio, length - 1, self.settings, turn.key)
        if self.options.text_assist and task.text and task.audio:
            writer = find_writer(task)
            other = prompt(model.layout, replace(turn.exchange.turn, task=writer)).tokens[:, -1]
            hidden = prefill_fork(model, runner.cache, columns, other, runner.chunk)
            starts = [replace(start, partner=1), replace(start, audio=False)]
        else:
            hidden = prefill(model, runner.cache, range(1), columns, runner.chunk)
            starts = [start]
        self._fed, self._high = list(turn.keys), max(self._high, length)
        turn.prefill = turn.clock.seconds
        turn.rows = runner.begin(0, hidden, starts)

    def _rewind(self, keep: int, runner: Runner) -> int:
        """Make row 0 hold the first `keep` of its columns and no more; how many it does hold then.

        In a sliding window's ring the slots before them may have been written over: then it is emptied.
        """
        cache = runner.cache
        if keep == 0 or (cache.ring and self._high - keep > cache.chunk):
            cache.reset([0])
            self._high = 0
            return 0
        cache.rewind(0, keep)
        return keep

    def _results(self, turn: _Turn, runner: Runner, flush: bool) -> Iterator[TextDelta | AudioChunk]:
        for row, written in runner.results(flush):
            if row is turn.rows[0] and turn.reply.reason is None:
                yield from turn.reply.write(written)
            elif row.done:
                runner.leave(row)

    def _hand_over(self, turn: _Turn, event: TextDelta | AudioChunk) -> Iterator[Event]:
        if isinstance(event, TextDelta):
            turn.characters += len(event.text)
            turn.first_text = turn.first_text or turn.clock.seconds
        else:
            turn.samples += len(event.samples)
            turn.first_audio = turn.first_audio or turn.clock.seconds
        turn.clock.hold()
        turn.running = False
        yield event
        turn.running = True
        turn.clock.go_on()

    def _timings(self, turn: _Turn) -> Timings:
        turn.clock.hold()
        return Timings(
            encode=turn.encode,
            prefill=turn.prefill,
            first_text=turn.first_text,
            first_audio=turn.first_audio,
            total=turn.clock.seconds,
            steps=len(turn.reply.columns),
            audio=turn.samples / self.codec.sample_rate if self.codec is not None else 0.0,
        )

    # --- the history --------------------------------------------------------------------------------------------------

    def _settle(self, turn: _Turn | None = None) -> None:
        """Put the turn into the history as it was delivered (once), and free its rows."""
        turn = turn or self._turn
        if turn is None or turn.settled:
            return
        if turn.running:
            raise UserError("another answer of this session is being made in another thread; cancel it, or wait for its end")
        with self._lock:
            turn.settled = True
            runner = self._open()
            if turn.rows:
                self._high = max(self._high, turn.rows[0].position)
                self._fed += [written_key(column) for column in turn.reply.columns[:-1]]
            for row in turn.rows:
                runner.leave(row)
            runner.results(flush=True)
            self._past.append(replace(turn.exchange, turn=self._delivered(turn)))

    def _delivered(self, turn: _Turn) -> Turn:
        """The turn with the part of its answer that reached the listener."""
        reply, codec = turn.reply, self.codec
        characters, frames = turn.characters, len(reply.frames)
        if turn.shown is not None:
            characters = min(characters, turn.shown)
        if codec is not None:
            frames = min(frames, turn.samples // codec.frame_samples)
            if turn.played is not None:
                frames = min(frames, int(turn.played * codec.frame_rate + 1e-6))
        text = tuple(reply.text.ids[: reply.text.tokens_of(characters)]) if reply.task.text else None
        return replace(turn.exchange.turn, text=text, codes=reply.codes(frames))

    def _lay_out(self, exchange: Exchange, length: int) -> tuple[Columns, list[Key]]:
        """The conversation's columns with the new question, after forgetting what finds no room."""
        past, forget = list(self._past), self.options.overflow == "forget"
        columns, keys = lay_out(self.model.layout, past, exchange)
        while forget and past and len(keys) > length - length // 4:
            del past[0]
            columns, keys = lay_out(self.model.layout, past, exchange)
        if len(keys) >= length:
            way = "shorten the question" if forget else "use overflow='forget', or start a new session"
            raise UserError(
                f"history and question take {len(keys)} positions, but the session's cache has {length} and an answer "
                f"needs some: {way}, or give a larger context"
            )
        self._past = past
        return columns, keys

    def _open(self) -> Runner:
        if self._runner is None:
            raise UserError("this session is closed; start a new one")
        return self._runner


def find_writer(task: Task) -> Task:
    """The task that asks in the same way for text only: the assisting row's."""
    return next(t for t in TASKS.values() if t.question == task.question and t.text and not t.audio and t.marker == task.marker)


def _least(a: N | None, b: N | None) -> N | None:
    return b if a is None else a if b is None else min(a, b)
