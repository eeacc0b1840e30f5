"""Answers many questions in batches: rows start together and leave one by one.

Questions are sorted by length, so that a batch's prompts need little padding; a row that has ended leaves,
and the rows behind it move up, so that the steps get cheaper towards the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from omni.codec.base import AudioCodec
from omni.errors import UserError
from omni.generate.options import AnswerOptions
from omni.generate.prefill import pack, prefill
from omni.generate.question import FEATURES_NOT_FINITE, Asked, encode_questions, is_finite
from omni.generate.results import Answer, AudioChunk, Clock, TextDelta, Timings
from omni.generate.rows import RunnerRow, Start
from omni.generate.runner import Runner
from omni.generate.sampling import per_stream, seed_key
from omni.generate.turn import Reply
from omni.hardware import synchronize
from omni.lora.attach import selection_of
from omni.lora.selection import RowSelection, using
from omni.model.speech_model import SpeechModel
from omni.tasks import Columns, prompt
from omni.text import Tokenizer


def one_each(what: str, given: Any, count: int) -> list[Any]:
    """Expands a value given once for all questions, or one per question, to a list; UserError for another number of values."""
    each = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given] * count
    if len(each) != count:
        raise UserError(f"{len(each)} {what} for {count} questions; give one for all, or one each")
    return each


@dataclass(eq=False)
class _Member:
    """A question of the batch and its answer so far."""

    reply: Reply
    events: list[TextDelta | AudioChunk]
    timings: Timings | None = None


class BatchRunner:
    """Answers questions in batches of rows.

    Args:
        sound: decode the answers' codes, where there is a codec.
        take: returns a runner with a number of rows and positions; `give` returns it to the pool.
    """

    def __init__(
        self,
        model: SpeechModel,
        tokenizer: Tokenizer,
        codec: AudioCodec | None,
        sound: bool,
        options: AnswerOptions,
        take: Callable[[int, int], Runner],
        give: Callable[[Runner], None],
    ) -> None:
        if options.text_assist:
            raise UserError("text_assist couples the rows of one conversation; a batch of questions goes without")
        self.model, self.tokenizer, self.codec, self.options = model, tokenizer, codec, options
        self.sound = sound
        self.settings = per_stream(model.layout, options.sampling)
        self._take, self._give = take, give

    def answer(
        self, asked: Sequence[Asked], seeds: Sequence[int], batch_size: int, selection: Sequence[RowSelection]
    ) -> list[Answer]:
        """One answer per question, in their order."""
        selection_of(self.model, selection)  # checks every name before any question is answered
        prompts = [prompt(self.model.layout, a.turn) for a in asked]
        order = sorted(range(len(asked)), key=lambda i: len(prompts[i]))
        longest = max((len(p) for p in prompts), default=0)
        most = max((self._limits(a)[1] for a in asked), default=0)
        self._check_room([len(p) for p in prompts])
        answers: dict[int, Answer] = {}
        runner = self._take(min(batch_size, len(asked)), longest + most) if asked else None
        for low in range(0, len(order), batch_size):
            chosen = order[low : low + batch_size]
            assert runner is not None
            own = ([given[i] for i in chosen] for given in (asked, prompts, seeds, selection))
            group = self._group(runner, *own)  # type: ignore[arg-type]
            answers.update(zip(chosen, group, strict=True))
        if runner is not None:
            self._give(runner)
        return [answers[i] for i in range(len(asked))]

    def _check_room(self, lengths: Sequence[int]) -> None:
        """Refuse a question that leaves no room for an answer, before any other is answered."""
        context = self.model.config.decoder.context
        for number, length in enumerate(lengths, 1):
            if length >= context:
                raise UserError(
                    f"question {number} of {len(lengths)} takes {length} positions, but the model's context has {context} "
                    "and an answer needs some; shorten it, or leave it out"
                )

    def _limits(self, asked: Asked) -> tuple[int, int]:
        return self.options.limits(asked.task, self.codec, self.model.layout.max_delay)

    def _encode(self, asked: Sequence[Asked], selection: Sequence[RowSelection]) -> list[Tensor | None]:
        """Features of each question; clips with the same selection go through the encoder together."""
        features: list[Tensor | None] = [None] * len(asked)
        for one in dict.fromkeys(selection):
            own = [i for i, other in enumerate(selection) if other == one]
            with using(selection_of(self.model, [one])):
                found = encode_questions(self.model, [asked[i] for i in own])
            for i, feature in zip(own, found, strict=True):
                features[i] = feature
        return features

    def _group(
        self,
        runner: Runner,
        asked: Sequence[Asked],
        prompts: Sequence[Columns],
        seeds: Sequence[int],
        selection: Sequence[RowSelection],
    ) -> list[Answer]:
        clock, layout = Clock(), self.model.layout
        features = self._encode(asked, selection)
        synchronize(self.model.device)
        encoded = clock.seconds
        heard = [is_finite(f) for f in features]
        packed = pack(
            layout, prompts, [f if h else torch.zeros_like(f) for f, h in zip(features, heard, strict=True) if f is not None]
        )
        runner.cache.reset()
        with using(selection_of(self.model, selection, self.model.device)):
            hidden = prefill(self.model, runner.cache, range(len(asked)), packed, runner.chunk)
        starts = [
            Start(a.task.text, a.task.audio, len(p) - 1, self.settings, seed_key(seed), selection=one)
            for a, p, seed, one in zip(asked, prompts, seeds, selection, strict=True)
        ]
        synchronize(self.model.device)
        filled = clock.seconds
        members = {}
        for row, a, whole in zip(runner.begin(0, hidden, starts), asked, heard, strict=True):
            frames, columns = self._limits(a)
            stop = self.options.stops
            reply = Reply(layout, a.task, self.tokenizer, None, max_frames=frames, max_columns=columns, stop=stop)
            if not whole:
                reply.fail(FEATURES_NOT_FINITE)
            members[row] = _Member(reply, [])
        everyone = list(members.values())
        while members:
            flush = any(row.position >= runner.length for row in members)
            for row, written in runner.results(flush):
                if row in members:
                    members[row].events += members[row].reply.write(written)
            for row in [row for row in members if self._ended(row, members[row].reply, runner)]:
                steps = len(members[row].reply.columns)
                members[row].timings = Timings(encode=encoded, prefill=filled, total=clock.seconds, steps=steps)
                runner.leave(row)
                del members[row]
            runner.compact()
            runner.step()
        runner.results(flush=True)
        return [self._answer(member) for member in everyone]

    @staticmethod
    def _ended(row: RunnerRow, reply: Reply, runner: Runner) -> bool:
        if reply.reason is None and row.position >= runner.length:
            reply.reason = "cache"
        return reply.reason is not None

    def _answer(self, member: _Member) -> Answer:
        reply, codec = member.reply, self.codec
        last = reply.finish() if reply.error is None else []
        text = "".join(e.text for e in [*member.events, *last] if isinstance(e, TextDelta))
        codes = reply.codes()
        sound: Tensor | None = None
        if self.sound and codec is not None and codes is not None:
            with reply.decoding(codec):
                sound = codec.decode(codes).cpu() if codes.shape[1] else torch.zeros(0)
        assert member.timings is not None and reply.reason is not None
        audio = len(sound) / codec.sample_rate if codec is not None and sound is not None else 0.0
        return Answer(
            text=text,
            audio=sound,
            sample_rate=codec.sample_rate if codec is not None else 0,
            tokens=tuple(reply.text.ids),
            codes=codes,
            timings=replace(member.timings, audio=audio),
            ended=reply.reason,
            error=reply.error,
        )
