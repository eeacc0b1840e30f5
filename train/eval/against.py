"""Sets a model beside another of the same layout, such as one in int8 beside its original in full precision.

Both answer all questions, so that every figure has a paired difference; for some questions the logits are compared too, column
by column along the other's own greedy answer:

    kl            nats from the other's distribution to this model's, summed over the streams, per time step of the answer
    agreement     share of the answers' tokens (of all streams, ends included) at which the likeliest id is the same
    same_answer   share of the answers that are the same, token for token, when each model follows its own
    steps         time steps per second without the codec, one question at a time, both models in turn

Dimensions: K streams, C columns, N supervised columns of a stream, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omni.errors import UserError
from omni.generate.question import encode_questions, read_question, read_system
from omni.generate.results import Answer, Ended, Timings
from omni.generate.speech_lm import SpeechLM
from omni.layout import IGNORE
from omni.model.decoder import Hidden
from omni.tasks import Columns, Task, example, prompt
from train.console.progress import Display
from train.data.readers import Broken
from train.eval.answers import EvalQuestion, ask, make_item
from train.eval.config import EvalConfig, Progress
from train.eval.held_out import Item
from train.eval.journal import Journal
from train.eval.questions import Questions


@dataclass(frozen=True)
class Distance:
    """How far a model's distributions are from another's along one answer.

    Attributes:
        kl: nats, summed over streams and steps.
        steps: time steps with a supervised token.
        agreed: supervised tokens at which both models hold the same id for the likeliest.
        own: those that are the other's likeliest, as all are where the columns are just those that it answered.
        tokens: all of them.
    """

    kl: float
    steps: int
    agreed: int
    own: int
    tokens: int


def check_alike(lm: SpeechLM, other: SpeechLM, where: Path) -> None:
    """Refuse a model whose answers cannot be set beside this one's: of another layout or tokenizer (UserError)."""
    if lm.layout != other.layout:
        raise UserError(f"--against {where} has another layout, so its answers cannot be compared: name the original model")
    if lm.tokenizer.inner.to_str() != other.tokenizer.inner.to_str():
        raise UserError(f"--against {where} has another tokenizer, so its answers cannot be compared: name the original model")


def compare_some(
    lm: SpeechLM,
    other: SpeechLM,
    questions: Questions,
    answered: Sequence[int],
    task: Task,
    config: EvalConfig,
    file: Path,
    progress: Progress,
) -> None:
    """Compares the models on `config.against_limit` of the questions at `answered`, spread evenly, and writes a record of each.

    `scores` of a record are this model's, `against` the other's.
    """
    count = min(config.against_limit, len(answered))
    sample = Questions(questions.source, [answered[i * len(answered) // count] for i in range(count)])
    journal = Journal(file, config.batch, count)
    if journal.done == count:
        return
    silent = [SpeechLM(one.model, one.tokenizer, speech_time=one.speech_time) for one in (other, lm)]
    display = Display(count, journal.done, progress)
    items = sample.iterate(journal.done)
    try:
        while batch := [item for _, item in zip(range(config.batch), items, strict=False)]:
            asked = [EvalQuestion(i, row, make_item(row, task, lm)) for i, row in batch if not isinstance(row, Broken)]
            greedy = replace(config, temperature=0.0, top_k=0)
            theirs, ours = (ask(one, asked, greedy, sound=False) for one in (other, lm))
            records = []
            for number, (one, their, our) in enumerate(zip(asked, theirs, ours, strict=True), journal.done):
                found = distance(lm, other, one.item, their)
                record: dict[str, Any] = {
                    "index": one.index,
                    "where": one.row.where,
                    "bytes": [bytes_of(other), bytes_of(lm)],
                    "scores": {
                        "kl": (found.kl, found.steps),
                        "agreement": (found.agreed, found.tokens),
                        "same_answer": (float(same(their, our)), 1),
                    },
                }
                if number < config.timed:
                    before, after = (_steps(model, one.item, greedy) for model in silent)
                    record["scores"]["steps"], record["against"] = after, {"steps": before}
                records.append(record)
            journal.append(records)
            display.tick(len(records), 0.0)
    finally:
        display.close()


def bytes_of(lm: SpeechLM) -> int:
    """Bytes of a model's weights in memory, scales included, without what is packed for the products."""
    tensors = {id(t): t for t in (*lm.model.parameters(), *lm.model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def same(a: Answer, b: Answer) -> bool:
    """Whether two answers have the same tokens, frames and end."""
    frames = (a.codes is None and b.codes is None) or (a.codes is not None and b.codes is not None and a.codes.equal(b.codes))
    return a.tokens == b.tokens and frames and a.ended == b.ended


@torch.no_grad()
def distance(lm: SpeechLM, other: SpeechLM, item: Item, answer: Answer) -> Distance:
    """The distance from `other` to `lm` along an answer of `other`; both see its columns, whatever they would have said."""
    kl, agreed, own, tokens, steps = 0.0, 0, 0, 0, set[int]()
    columns = [_columns(one, item, answer) for one in (lm, other)]
    hidden = [_hidden(one, item, whole) for one, whole in zip((lm, other), columns, strict=True)]
    for stream, targets in enumerate(columns[0].targets):
        place = torch.nonzero(targets != IGNORE).flatten()  # [N]
        if not len(place):
            continue
        ours, theirs = (_log_probabilities(one, h, stream, place) for one, h in zip((lm, other), hidden, strict=True))
        ids = _allowed(lm, stream)
        kl += float((theirs.exp() * (theirs - ours)).sum())
        likeliest = theirs.argmax(-1)
        agreed += int((ours.argmax(-1) == likeliest).sum())
        own += int((ids[likeliest.cpu()] == targets[place]).sum())
        steps |= set(place.tolist())
        tokens += len(place)
    return Distance(kl, len(steps), agreed, own, tokens)


def _columns(lm: SpeechLM, item: Item, answer: Answer) -> Columns:
    """The columns of a question and an answer. Of one that was cut, its ends are no targets, nor is what was written beside
    frames that were not kept."""
    asked = read_question(item.question, item.task, lm.model, lm.tokenizer).after(read_system(item.system, lm.tokenizer))
    task = asked.task
    turn = replace(
        asked.turn,
        text=answer.tokens if task.text else None,
        codes=answer.codes if task.audio else None,
        cut=answer.ended != "end",
    )
    columns = example(lm.layout, [turn])
    if turn.cut and answer.codes is not None:
        known = len(prompt(lm.layout, asked.turn)) + answer.codes.shape[1] + min(s.delay for s in lm.layout.audio)
        columns.targets[:, known:] = IGNORE
    return columns


def _hidden(lm: SpeechLM, item: Item, columns: Columns) -> Hidden:
    """Hidden states [C, W] of all columns."""
    asked = read_question(item.question, item.task, lm.model, lm.tokenizer)
    features, device = encode_questions(lm.model, [asked])[0], lm.model.device
    index = columns.feature_index[None].to(device) if features is not None else None
    found = lm.model(columns.tokens[None].to(device), features, index)
    return Hidden(found.text[0], found.audio[0])


def _log_probabilities(lm: SpeechLM, hidden: Hidden, stream: int, place: Tensor) -> Tensor:
    """Log-probabilities [N, V] of the ids of a stream that may be drawn (`_allowed`), at some columns; float64."""
    decoder, layout = lm.model.decoder, lm.layout
    place = place.to(hidden.text.device)
    if stream == layout.n_audio:
        logits = decoder.text_logits(Hidden(hidden.text[place], hidden.audio[place]))
    else:
        part = decoder.audio_logits(Hidden(hidden.text[place], hidden.audio[place]))
        logits = part[:, decoder.audio_offsets[stream] : decoder.audio_offsets[stream + 1]]
    return logits[:, _allowed(lm, stream).to(logits.device)].double().log_softmax(-1)


def _allowed(lm: SpeechLM, stream: int) -> Tensor:
    """The ids of a stream that may be drawn, [V]."""
    size = lm.layout.streams[stream].vocabulary
    return torch.nonzero(lm.layout.allowed()[stream, :size]).flatten()


def _steps(lm: SpeechLM, item: Item, config: EvalConfig) -> tuple[float, float]:
    """Time steps of one answer, and their seconds without the question's."""
    timings = Timings()
    for event in lm.stream(
        item.question, item.task, max_seconds=config.max_seconds, max_tokens=config.max_tokens, system=item.system
    ):
        if isinstance(event, Ended):
            timings = event.timings
    return timings.steps, timings.total - timings.prefill
