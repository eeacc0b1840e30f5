"""Measures forgetting: asks the questions' texts in writing (T1T2), of this model and of the one before its speech training.

    text_exact_match        the greedy answer equals the reference, normalised
    text_perplexity         per token of the reference answer and its end, asked as T1T2 asks
    text_perplexity_plain   per token of the reference answer after the question and a newline, with no id that a language
                            model does not have, so that a model that has never seen our prompts can be compared

Dimensions: B rows, K streams, T columns, N targets, W width, V vocabulary.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from omni.convert import huggingface
from omni.convert import omni_folder as streamed
from omni.errors import UserError
from omni.generate.speech_lm import SpeechLM
from omni.layout import IGNORE
from omni.model.decoder import Hidden
from omni.stores.tries import StoreError
from omni.tasks import TASKS, Columns, Turn, example
from omni.text import Tokenizer
from train.console.progress import Display
from train.data.readers import Broken
from train.data.rows.row import Row
from train.eval.answers import EvalQuestion, ask, make_item
from train.eval.config import EvalConfig, Progress
from train.eval.journal import Journal
from train.eval.questions import Questions
from train.scoring.text import find_normaliser

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


def check_texts(questions: Questions) -> None:
    """Refuse data without any row whose question and answer are written (UserError)."""
    for _, row in questions.iterate():
        if not isinstance(row, Broken) and _lacks(row) is None:
            return
    raise UserError(
        "the text-only score needs rows with a question's text and a reference answer, and the data have none: name other "
        "data, or leave --text and --text_before out"
    )


def score_texts(lm: SpeechLM, questions: Questions, config: EvalConfig, file: Path, progress: Progress) -> None:
    """Append one record per item to `file`; items without both texts have `broken`."""
    journal = Journal(file, config.batch, len(questions))
    if journal.done == len(questions):
        return
    normaliser = find_normaliser(config.normaliser)
    display = Display(len(questions), journal.done, progress)
    items = questions.iterate(journal.done)
    try:
        while batch := [item for _, item in zip(range(config.batch), items, strict=False)]:
            asked, records = _readable(lm, batch)
            turns = [_turn(lm, one.row) for one in asked]
            answers = ask(lm, asked, config, sound=False)
            asked_so = negative_log_likelihood(lm, [example(lm.layout, [turn]) for turn in turns])
            plain = negative_log_likelihood(lm, [plain_text(lm, turn) for turn in turns], lm.layout.text.size)
            for one, answer, nll, without in zip(asked, answers, asked_so, plain, strict=True):
                exact = normaliser(answer.text) == normaliser(one.row.turns[0].answer_text)
                records[one.index] = {
                    "index": one.index,
                    "where": one.row.where,
                    "response": answer.text,
                    "scores": {
                        "text_exact_match": (float(exact), 1),
                        "text_perplexity": nll,
                        "text_perplexity_plain": without,
                    },
                }
            journal.append([records[index] for index, _ in batch])
            display.tick(len(batch), 0.0)
    finally:
        display.close()


def check_before(path: Path, tokenizer: Tokenizer, questions: Questions, count: int = 50) -> None:
    """Refuse, before any work, a folder that holds no model, or one whose tokenizer cuts the texts differently: perplexities
    per token could not be compared (UserError)."""
    if not (path / "config.json").is_file():
        raise UserError(f"--text_before {path} is no folder of a model: name a model folder, or a language model's")
    before = Tokenizer.from_file(path / "tokenizer.json")
    for _, (_, row) in zip(range(count), questions.iterate(), strict=False):
        if isinstance(row, Broken) or _lacks(row) is not None:
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


def _readable(lm: SpeechLM, batch: Sequence[tuple[int, Row | Broken]]) -> tuple[list[EvalQuestion], dict[int, dict[str, Any]]]:
    """The rows of a batch that can be scored, and records of the others."""
    asked, records = [], {}
    for index, row in batch:
        if isinstance(row, Broken):
            records[index] = {"index": index, "where": row.where, "broken": row.why}
            continue
        try:
            why = _lacks(row)
            if why is None and len(example(lm.layout, [_turn(lm, row)])) > lm.config.decoder.context:
                why = f"question and answer do not fit in the model's context of {lm.config.decoder.context}"
            if why is None:
                asked.append(EvalQuestion(index, row, make_item(row, TASK, lm)))
        except StoreError:
            raise
        except UserError as error:
            why = str(error)
        if why is not None:
            records[index] = {"index": index, "where": row.where, "broken": why}
    return asked, records


def _lacks(row: Row) -> str | None:
    turn = row.turns[0]
    return (
        "has no question text" if not turn.question_text.strip() else None if turn.answer_text.strip() else "has no answer text"
    )


def _turn(lm: SpeechLM, row: Row) -> Turn:
    turn = row.turns[0]
    return Turn(TASK, question=tuple(lm.tokenizer.encode(turn.question_text)), text=lm.tokenizer.encode(turn.answer_text))
