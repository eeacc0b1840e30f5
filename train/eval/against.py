"""Sets a model beside another: one of the same layout, such as the original in full precision of one in int8, or the one before
its speech training. The figures are those of `measures`.

Both answer all questions, so that every figure has a paired difference; for some questions the logits are compared too, column
by column along the other's own greedy answer. What was forgotten is measured on the questions' texts, asked in writing (T1T2),
and as plain text with no id that a language model does not have, for a model that has never seen our prompts.

Dimensions: B rows, K streams, C or T columns, N supervised columns of a stream, W width, V vocabulary.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from omni.convert import huggingface
from omni.convert import omni_folder as streamed
from omni.errors import UserError
from omni.generate.question import encode_questions, read_question, read_system
from omni.generate.results import Answer
from omni.generate.speech_lm import SpeechLM
from omni.layout import IGNORE
from omni.model.decoder import Hidden
from omni.tasks import TASKS, Columns, Task, Turn, example, prompt
from omni.text import Tokenizer
from train.console.progress import Progress
from train.data.readers import Broken
from train.data.rows.row import Row
from train.eval.answers import EvalQuestion, ask, make_question, stream_timings
from train.eval.config import EvalConfig
from train.eval.held_out import Item
from train.eval.journal import record_all
from train.eval.questions import Questions
from train.scoring.text import find_normaliser, says_the_same, text_errors


def check_alike(lm: SpeechLM, other: SpeechLM, where: Path) -> None:
    """Refuse a model whose answers cannot be set beside this one's: of another layout or tokenizer (UserError)."""
    for noun, same in (
        ("layout", lm.layout == other.layout),
        ("tokenizer", lm.tokenizer.inner.to_str() == other.tokenizer.inner.to_str()),
    ):
        if not same:
            raise UserError(f"--against {where} has another {noun}, so its answers cannot be compared: name the original model")


def compare_some(
    lm: SpeechLM, other: SpeechLM, questions: Questions, answered: Sequence[int], task: Task, config: EvalConfig, file: Path,
    progress: Progress,
) -> None:  # fmt: skip
    """Compares the models on `config.against_limit` of the questions at `answered`, spread evenly, and writes a record of each.

    `scores` of a record are this model's, `against` the other's.
    """
    sample = questions.sample(answered, config.against_limit)
    silent = [SpeechLM(model.model, model.tokenizer, speech_time=model.speech_time) for model in (other, lm)]
    # Weights in memory, scales included, without what is packed for the products.
    weights = ({id(t): t.nbytes for t in (*of.model.parameters(), *of.model.buffers())} for of in (other, lm))
    sizes = [sum(each.values()) for each in weights]
    timed, greedy = set(sample.chosen[: config.timed]), replace(config, temperature=0.0, top_k=0)

    def score(asked: list[EvalQuestion]) -> Iterator[dict[str, Any]]:
        theirs, ours = (ask(model, asked, greedy, sound=False) for model in (other, lm))
        for question, their, our in zip(asked, theirs, ours, strict=True):
            scores = distance(lm, other, question.item, their) | {"same_answer": (float(same(their, our)), 1)}
            record: dict[str, Any] = {"bytes": sizes, "scores": scores}
            if question.index in timed:
                before, after = (stream_timings(model, question.item, greedy) for model in silent)
                scores["steps"] = after.steps, after.total - after.prefill
                record["against"] = {"steps": (before.steps, before.total - before.prefill)}
            yield record

    record_all(file, sample, config, progress, partial(make_question, lm, task), score)


def same(a: Answer, b: Answer) -> bool:
    """Whether two answers have the same tokens, frames and end."""
    frames = (a.codes is None and b.codes is None) or (a.codes is not None and b.codes is not None and a.codes.equal(b.codes))
    return a.tokens == b.tokens and frames and a.ended == b.ended


@torch.no_grad()
def distance(lm: SpeechLM, other: SpeechLM, item: Item, answer: Answer) -> dict[str, tuple[float, float]]:
    """How far `lm` is from `other` along an answer of `other`, whose columns both see: the pairs of `kl`, over the time steps
    with a supervised token, and `agreement`, over these tokens."""
    kl, agreed, tokens, steps = 0.0, 0, 0, set[int]()
    columns, hidden = _follow(lm, item, answer)
    _, other_hidden = _follow(other, item, answer)
    for stream, targets in enumerate(columns.targets):
        positions = torch.nonzero(targets != IGNORE).flatten()  # [N]
        if not len(positions):
            continue
        ours = _log_probabilities(lm, hidden, stream, positions)
        theirs = _log_probabilities(other, other_hidden, stream, positions)
        kl += float((theirs.exp() * (theirs - ours)).sum())
        agreed += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        steps |= set(positions.tolist())
        tokens += len(positions)
    return {"kl": (kl, len(steps)), "agreement": (agreed, tokens)}


def _follow(lm: SpeechLM, item: Item, answer: Answer) -> tuple[Columns, Hidden]:
    """The columns of a question and an answer, and their hidden states [C, W]. Of an answer that was cut, its ends are no
    targets, nor is what was written beside frames that were not kept."""
    question = read_question(item.question, item.task, lm.config, lm.tokenizer)
    asked = question.after(read_system(item.system, lm.tokenizer))
    features = encode_questions(lm.model, [question])[0]
    turn = replace(
        asked.turn,
        features=0 if features is None else len(features),
        text=answer.tokens if asked.task.text else None,
        codes=answer.codes if asked.task.audio else None,
        cut=answer.ended != "end",
    )
    columns, device = example(lm.layout, [turn]), lm.model.device
    if turn.cut and answer.codes is not None:
        known = len(prompt(lm.layout, turn)) + answer.codes.shape[1] + min(s.delay for s in lm.layout.audio)
        columns.targets[:, known:] = IGNORE
    index = columns.feature_index[None].to(device) if features is not None else None
    hidden = lm.model(columns.tokens[None].to(device), features, index)
    return columns, Hidden(hidden.text[0], hidden.audio[0])


def _log_probabilities(lm: SpeechLM, hidden: Hidden, stream: int, positions: Tensor) -> Tensor:
    """Log-probabilities [N, V] of the ids of a stream that may be drawn (`_allowed`), at some columns; float64."""
    decoder, positions = lm.model.decoder, positions.to(hidden.text.device)
    chosen = Hidden(hidden.text[positions], hidden.audio[positions])
    if stream == lm.layout.n_audio:
        logits = decoder.text_logits(chosen)
    else:
        logits = decoder.audio_logits(chosen)[:, decoder.audio_offsets[stream] : decoder.audio_offsets[stream + 1]]
    return logits[:, _allowed(lm, stream).to(logits.device)].double().log_softmax(-1)


def _allowed(lm: SpeechLM, stream: int) -> Tensor:
    """The ids of a stream that may be drawn, [V]."""
    size = lm.layout.streams[stream].vocabulary
    return torch.nonzero(lm.layout.allowed()[stream, :size]).flatten()


TASK = TASKS["T1T2"]
_LOGITS = 1 << 26  # logits that are held at a time


def load_before(path: Path, device: str) -> SpeechLM:
    """Loads the model before speech training: a model folder, or a language model's Hugging Face folder (converted as by
    `train convert --keep_text`); UserError where it is neither."""
    if path.is_dir() and not streamed.recognise(path) and huggingface.recognise(path):
        from train.convert.convert import convert
        from train.convert.options import ConvertOptions

        with tempfile.TemporaryDirectory() as folder:
            convert(path, Path(folder) / "model", ConvertOptions(keep_text=True))
            return SpeechLM.from_pretrained(Path(folder) / "model", device=device, kernels="reference")
    return SpeechLM.from_pretrained(path, device=device, kernels="reference")


def check_texts(questions: Questions, answered: bool) -> None:
    """Refuse data without any row whose question, and answer where `answered`, is written (UserError)."""
    if all(isinstance(row, Broken) or _lacks(row, answered) for _, row in questions.iterate()):
        raise UserError(
            f"the text-only score needs rows with a question's text{' and a reference answer' * answered}, and the data have "
            "none: name other data, or leave --text and --text_before out"
        )


def score_texts(
    lm: SpeechLM, questions: Questions, config: EvalConfig, file: Path, progress: Progress, spoken: Mapping[int, str] = {}
) -> None:
    """Appends one record per item to `file`; items without both texts have `broken`. `spoken`: the answers to spoken questions
    by index, with which those to the written ones are compared; these need no reference answer."""
    context = lm.config.decoder.context

    def prepare(index: int, row: Row) -> EvalQuestion:
        if why := _lacks(row, index not in spoken):
            raise UserError(why)
        if len(example(lm.layout, [_turn(lm, row)])) > context:
            raise UserError(f"question and answer do not fit in the model's context of {context}")
        return make_question(lm, TASK, index, row)

    def score(asked: list[EvalQuestion]) -> Iterator[dict[str, Any]]:
        turns = [_turn(lm, question.row) for question in asked]
        answers = ask(lm, asked, config, sound=False)
        asked_so = negative_log_likelihood(lm, [example(lm.layout, [turn]) for turn in turns])
        plain = negative_log_likelihood(lm, [plain_text(lm, turn) for turn in turns], lm.layout.text.size)
        for question, answer, nll, without in zip(asked, answers, asked_so, plain, strict=True):
            turn, normaliser = question.row.turns[0], find_normaliser(config.normaliser, question.row.language)
            written, scores = normaliser(answer.text), dict[str, tuple[float, float]]()
            if turn.answer_text.strip():
                exact = float(written == normaliser(turn.answer_text))
                scores = {"text_exact_match": (exact, 1), "text_perplexity": nll, "text_perplexity_plain": without}
            if (heard := spoken.get(question.index)) is not None:
                said = normaliser(heard)
                scores["as_written"] = (float(says_the_same(turn.question_text, answer.text, heard, normaliser)), 1)
                scores["as_written_exact"] = (float(said == written != ""), 1)
                scores["as_written_wer"] = text_errors(written, said, question.row.language)[1:]
            yield {"response": answer.text, "scores": scores}

    record_all(file, questions, config, progress, prepare, score)


def check_before(path: Path, tokenizer: Tokenizer, questions: Questions, count: int = 50) -> None:
    """Refuse, before any work, a folder that holds no model, or one whose tokenizer cuts the texts differently: perplexities
    per token could not be compared (UserError)."""
    if not (path / "config.json").is_file():
        raise UserError(f"--text_before {path} is no folder of a model: name a model folder, or a language model's")
    before = Tokenizer.from_file(path / "tokenizer.json")
    for _, (_, row) in zip(range(count), questions.iterate(), strict=False):
        if isinstance(row, Broken) or _lacks(row, answered=True):
            continue
        for text in (row.turns[0].question_text, row.turns[0].answer_text):
            if tokenizer.encode(text) != before.encode(text):
                raise UserError(
                    f"--text_before has another tokenizer (it cuts {text[:40]!r} differently), so perplexities per "
                    "token cannot be compared: name the model that this one was trained from"
                )


@torch.no_grad()
def negative_log_likelihood(lm: SpeechLM, examples: Sequence[Columns], ids: int | None = None) -> list[tuple[float, int]]:
    """Nats and number of the supervised text tokens of each example, among the first `ids` ids (all by default).

    Examples are padded at the end, which no earlier position attends to. Logits are made of the supervised columns only, [N, V]
    for a few N at a time.
    """
    if not examples:
        return []
    layout, device = lm.layout, lm.model.device
    time = max(len(e) for e in examples)
    tokens = layout.ids("pad")[:, None].repeat(len(examples), 1, time)
    targets = torch.full((len(examples), time), IGNORE)
    for i, e in enumerate(examples):
        tokens[i, :, : len(e)] = e.tokens
        targets[i, : len(e)] = e.targets[layout.n_audio]
    hidden = lm.model(tokens.to(device)).text  # [B, T, W]
    row, column = torch.nonzero(targets != IGNORE, as_tuple=True)
    chosen, wanted = hidden[row, column], targets[row, column].to(device)  # [N, W], [N]
    step = max(1, _LOGITS // layout.text.size)
    losses = [
        F.cross_entropy(lm.model.decoder.text_logits(Hidden(h, h))[:, :ids].float(), t, reduction="none")
        for h, t in zip(chosen.split(step), wanted.split(step), strict=True)
    ]
    each = torch.cat(losses).double().cpu() if losses else torch.zeros(0)
    return [(float(each[row == i].sum()), int((row == i).sum())) for i in range(len(examples))]


def plain_text(lm: SpeechLM, turn: Turn) -> Columns:
    """Question, newline and answer on the text stream alone, the audio streams at pad; only the answer is trained."""
    layout = lm.layout
    before = [*turn.question, *lm.tokenizer.encode("\n")]
    ids = torch.tensor([*before, *(turn.text or ())])
    tokens = layout.ids("pad")[:, None].repeat(1, len(ids))
    tokens[layout.n_audio] = ids
    targets = torch.full_like(tokens, IGNORE)
    targets[layout.n_audio, len(before) - 1 : -1] = ids[len(before) :]
    return Columns(tokens, targets, torch.full((len(ids),), -1))


def _lacks(row: Row, answered: bool) -> str:
    """Why a row has no text-only score, for which it needs an answer where `answered`; "" where it has one."""
    turn = row.turns[0]
    if not turn.question_text.strip():
        return "has no question text"
    return "has no answer text" if answered and not turn.answer_text.strip() else ""


def _turn(lm: SpeechLM, row: Row) -> Turn:
    turn = row.turns[0]
    return Turn(TASK, question=tuple(lm.tokenizer.encode(turn.question_text)), text=lm.tokenizer.encode(turn.answer_text))
