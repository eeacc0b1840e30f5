"""Makes the examples that edits are trained on, with the features of their spoken questions, and computes losses on them.

An edit of the decoder does not change these features, so encoder and projector run once for each example.

Dimensions: K streams, N positions with a target, V vocabulary, F features of a clip, W width.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni.audio.io import SAMPLE_RATE
from omni.edit.mend import kl_divergence
from omni.errors import UserError
from omni.generate.results import Answer
from omni.generate.speech_lm import SpeechLM
from omni.model.decoder import Hidden
from omni.model.speech_model import SpeechModel
from omni.tasks import find_task
from train.data.batching.batch import Batch, assemble
from train.data.batching.examples import Example, ExampleMaker, Prepared
from train.data.rows.row import Codes, Row
from train.objective.config import check_stream_weights

LISTENING = ("encoder.", "projector.")
"""Names of parts that run before the decoder."""


@dataclass(frozen=True, eq=False)
class EditExample:
    """An example with its features.

    Attributes:
        heard: as of `SpeechModel.read`; None where it is computed each time, or there are no clips.
        before: logits [N, V] of each stream from the model without edit, where they are to stay.
    """

    example: Example
    heard: tuple[Tensor, Tensor | None] | None = None
    before: tuple[Tensor, ...] = ()


class EditObjective:
    """Examples, batches and losses for one model, of which these linears are edited; UserError where there are not as many
    weights (of each stream's mean loss; by default the text's as much as the audio's together) as streams."""

    def __init__(self, lm: SpeechLM, linears: Iterable[str], weights: Sequence[float] | None = None) -> None:
        self.lm, self.model = lm, lm.model
        streams = len(lm.layout)
        spoken = streams - 1
        self.weights = tuple(weights or (*(1 / spoken,) * spoken, 1.0))
        check_stream_weights(self.weights, streams, "stream_weights")
        self.listening = any(name.startswith(LISTENING) for name in linears)
        if self.listening and lm.config.ctc == "tokens":
            raise UserError("ctc is tokens, so no answer's loss reaches encoder and projector: edit linears of the decoder")
        self.maker = ExampleMaker(replace(lm.config, ctc=0, ctc_sounds=0, turn=False), lm.tokenizer, lm.codec)

    def pieces(self, rows: Sequence[Row], tasks: Sequence[str]) -> list[EditExample]:
        """Every row as an example of each task that it has all parts for."""
        out = []
        for row in rows:
            for task in tasks:
                if row.turns[0].lacks(find_task(task)) is None:
                    example = self.maker.make(0, Prepared(replace(row, turns=row.turns[:1])), [task])
                    length, context = len(example.columns), self.lm.config.decoder.context
                    if length > context:
                        raise UserError(
                            f"{row.where}: question and answer take {length} positions as {task}, but the model's context has "
                            f"{context}; shorten them"
                        )
                    out.append(EditExample(example, self._hear(example)))
        return out

    @torch.no_grad()
    def stay(self, pieces: Sequence[EditExample]) -> list[EditExample]:
        """Adds the logits that the model gives now, as `before`."""
        return [replace(piece, before=tuple(self._logits(self.model, [piece], self._batch([piece])))) for piece in pieces]

    def own_answers(self, rows: Sequence[Row], tasks: Sequence[str]) -> list[Row]:
        """Gives rows the model's own answers, asked as the tasks in turn; rows whose answer it does not end are left out."""
        answered, asked_as = [], [tasks[i % len(tasks)] for i in range(len(rows))]
        for row, task, answer in zip(rows, asked_as, self.answers(rows, asked_as), strict=True):
            spoken = answer.codes is not None and answer.codes.shape[1] > 0
            if answer.ended != "end" or not answer.text.strip() or (find_task(task).audio and not spoken):
                continue
            codes = Codes(self.lm.config.codec, answer.codes) if answer.codes is not None else None
            turn = replace(row.turns[0], answer_text=answer.text, answer_codes=codes, answer_audio=None)
            answered.append(replace(row, turns=(turn,), task=task))
        return answered

    def answers(self, rows: Sequence[Row], tasks: Sequence[str], **options: Any) -> list[Answer]:
        """The model's greedy answers."""
        questions: list[str | Tensor] = []
        for row, task in zip(rows, tasks, strict=True):
            turn = row.turns[0]
            spoken = find_task(task).question == "audio"
            if spoken and turn.question_audio is None:
                raise UserError(f"{row.where}: it has no question_audio, which task {task} asks with")
            questions.append(turn.question_audio.load(SAMPLE_RATE) if spoken and turn.question_audio else turn.question_text)
        return self.lm.generate(questions, tasks, **{"max_seconds": 10.0, "sound": False, **options})

    # --- losses -------------------------------------------------------------------------------------------------------

    def loss(self, model: nn.Module, pieces: Sequence[EditExample]) -> Tensor:
        """Mean cross-entropy of the answers, weighted over the streams."""
        batch = self._batch(pieces)
        goals = [batch.targets[:, k].reshape(-1)[at] for k, at in enumerate(batch.supervised)]
        logits = self._logits(model, pieces, batch)
        each = [F.cross_entropy(x.float(), goal) for x, goal in zip(logits, goals, strict=True) if len(goal)]
        return self._mean(each, [len(goal) for goal in goals])

    def divergence(self, model: nn.Module, pieces: Sequence[EditExample]) -> Tensor:
        """KL of the answers before and after, in nats a position, weighted over the streams."""
        after = self._logits(model, pieces, self._batch(pieces))
        before = [torch.cat([piece.before[k] for piece in pieces]) for k in range(len(after))]
        each = [kl_divergence(b, a) for b, a in zip(before, after, strict=True) if len(a)]
        return self._mean(each, [len(a) for a in after])

    def flat_logits(self, model: nn.Module, pieces: Sequence[EditExample]) -> Tensor:
        """Logits of all streams one after another, [sum of N, widest V]; those of ids that a stream lacks are -1e4."""
        each = self._logits(model, pieces, self._batch(pieces))
        widest = max(x.shape[1] for x in each)
        return torch.cat([F.pad(x, (0, widest - x.shape[1]), value=-1e4) for x in each])

    def _mean(self, each: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
        weights = [w for w, n in zip(self.weights, counts, strict=True) if n]
        return sum((w * x for w, x in zip(weights, each, strict=True)), torch.zeros(())) / sum(weights)

    # --- through the model --------------------------------------------------------------------------------------------

    def _batch(self, pieces: Sequence[EditExample]) -> Batch:
        length = max(len(piece.example.columns) for piece in pieces)
        batch = assemble([[piece.example] for piece in pieces], length, self.lm.layout, self.lm.config.encoder.bands, {})
        return batch.to(self.lm.model.device)

    def _logits(self, model: nn.Module, pieces: Sequence[EditExample], batch: Batch) -> list[Tensor]:
        assert isinstance(model, SpeechModel)
        heard = [piece.heard for piece in pieces if piece.heard is not None]
        if self.listening and batch.frames:
            heard = [_read(model, batch.inputs, batch.input_lengths, batch.frames)]
        features = torch.cat([each for each, _ in heard]) if heard else None
        left_out = torch.cat([out for _, out in heard]) if heard and heard[0][1] is not None else None  # type: ignore[misc]
        seen = {"segments": batch.segments, "packed": batch.packed, "left_out": left_out}
        hidden = model(batch.tokens, features, batch.feature_index, **seen)
        text, audio = hidden.text.flatten(0, 1), hidden.audio.flatten(0, 1)
        *spoken, written = batch.supervised
        out, sizes = [], [stream.vocabulary for stream in self.lm.layout.audio]
        used = torch.cat(spoken).unique() if spoken else torch.zeros(0, dtype=torch.long)
        if len(used):
            every = model.decoder.audio_logits(Hidden(text[used], audio[used]))
            out = [x[torch.searchsorted(used, at)] for x, at in zip(every.split(sizes, -1), spoken, strict=True)]
        else:
            out = [text.new_zeros(0, size) for size in sizes]
        return [*out, model.decoder.text_logits(Hidden(text[written], audio[written]))]

    @torch.no_grad()
    def _hear(self, example: Example) -> tuple[Tensor, Tensor | None] | None:
        if self.listening or not example.clips:
            return None
        inputs = torch.zeros(len(example.clips), self.lm.config.encoder.bands, max(c.inputs.shape[1] for c in example.clips))
        for padded, clip in zip(inputs, example.clips, strict=True):
            padded[:, : clip.inputs.shape[1]] = clip.inputs
        lengths, frames = [c.inputs.shape[1] for c in example.clips], [c.frames for c in example.clips]
        return _read(self.model, inputs.to(self.model.device), lengths, frames)


def _read(model: SpeechModel, inputs: Tensor, lengths: Sequence[int], frames: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    return model.read(model.projector(model.encoder.run(inputs, lengths, frames), frames), frames)


def draws(pieces: Sequence[EditExample], count: int, seed: int) -> Iterator[list[EditExample]]:
    """Subsets of `count` pieces, one after another: every piece comes once before any comes again."""
    rng, order, count = random.Random(seed), list[EditExample](), min(count, len(pieces))
    while True:
        while len(order) < count:
            fresh = list(pieces)
            rng.shuffle(fresh)
            order += fresh
        yield order[:count]
        del order[:count]
