"""Evaluates edits in other words and voices, and what else they change (`omni-train edit eval MODEL EDITS FACTS OUT`).

    success                  the facts' questions as they are written down, and recordings
    generalisation/voices    the same, spoken in the voices named here
    generalisation/rephrased in other words, spoken in these voices: those kept for judging, else the taught ones
    portability/written      in the same words, asked in writing
    portability/speech       of answers with the right text, those that also sound nearest to it, among the right answers of
                             all facts and the former ones of other texts, and of the same text where a fact brings its own
                             sound (dynamic time warping, `train.scoring.asr`); none where there is nothing to
                             tell it from
    locality                 untouched questions whose written answer is the same, letter by letter
    locality/speech          those whose codes are the same, or sound nearest to their former answer
    locality/kl              divergence of those answers that the model ends by itself, in nats a position

Shares come with Wilson's interval of 95 %. Source of the measures: Mitchell et al. 2022 (arXiv 2110.11309), section 4.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from omni.checkpoint.folder import check_full_precision
from omni.edit.deltas import Edits, edited
from omni.edit.storage import load_edits
from omni.files import check_replaceable
from omni.generate.results import Answer
from omni.generate.speech_lm import SpeechLM
from omni.utils.charts import INK, drawn
from train.data.build import held_out_of
from train.data.rows.row import Row
from train.edit.apply import draw_untouched
from train.edit.config import EditEvalConfig
from train.edit.facts import Facts, Synthesiser, fact_rows, plain, read_facts, untouched_rows
from train.edit.lessons import EditObjective
from train.eval.measures import Figure
from train.eval.measures import plain as plain_figure
from train.eval.report import bars_of
from train.scoring.asr import describe, nearest
from train.scoring.text import normalise

REPORT, ANSWERS, PLOT = "report.json", "answers.jsonl", "report.png"


def share(hits: Sequence[bool]) -> Figure:
    """The share of hits with Wilson's interval (Wilson 1927), 95 %."""
    n, p, z = len(hits), sum(hits) / len(hits), 1.959964
    middle, half = (
        (p + z * z / (2 * n)) / (1 + z * z / n),
        z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5 / (1 + z * z / n),
    )
    # Where all are right, rounding may put an end of the interval on the wrong side of the share.
    return Figure(p, max(0.0, min(middle - half, p)), min(1.0, max(middle + half, p)), n)


@dataclass(frozen=True)
class JudgedQuestion:
    """One question of the evaluation, and its answers before and after the edits."""

    part: str
    task: str
    question: str
    voice: str
    wanted: str | None
    before: str
    after: str
    right: bool


def judge(model: Path, edits: Path, facts: Path, out: Path, config: EditEvalConfig) -> dict[str, Figure]:
    """Evaluates edits, and writes report, answers and a picture.

    Raises:
        UserError: edits of another model, facts that are none, or an output folder that is taken.
    """
    check_replaceable(out, (REPORT,), overwrite=config.overwrite)
    check_full_precision(model, "editing")
    lm = SpeechLM.from_pretrained(model, config.device, codec_folder=config.codec_folder, kernels="reference")
    parsed, loaded = read_facts(facts, lm.tokenizer), load_edits(edits, lm.model)
    figures, asked = judge_edits(lm, loaded, parsed, config)
    out.mkdir(parents=True, exist_ok=True)
    shown = {name: plain_figure(figure) for name, figure in figures.items()}
    data = {"model": str(model), "edits": str(edits), "facts": str(facts), "figures": shown}
    (out / REPORT).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    (out / ANSWERS).write_text("".join(json.dumps(asdict(a), ensure_ascii=False) + "\n" for a in asked), encoding="utf-8")
    draw(figures, out / PLOT)
    return figures


@torch.no_grad()
def judge_edits(
    lm: SpeechLM, edits: Edits, facts: Facts, config: EditEvalConfig
) -> tuple[dict[str, Figure], list[JudgedQuestion]]:
    """Evaluates edits; returns the figures, and every question with its answers."""
    lessons = EditObjective(lm, edits.deltas)
    speakers = Synthesiser(config.speak, lm.codec, config.seed)
    speaks = lm.codec is not None
    spoken, written = ("A1A2", "T1A2") if speaks else ("A1T2", "T1T2")
    voiced = [row for rows in fact_rows(facts, speakers, config.voices, "own") for row in rows]
    texts = {plain(fact.question_text) for fact in facts.facts}
    other = [row for rows in fact_rows(facts, speakers, config.voices, "judged") for row in rows]
    other = [row for row in other if plain(row.turns[0].question_text) not in texts]
    stay = untouched_rows(facts, speakers) + _held_out(lm, facts, config)
    groups = (
        ("success", spoken, [row for row in voiced if row.source == "facts/recorded"]),
        ("success", written, _once(voiced)),
        ("generalisation/voices", spoken, [row for row in voiced if row.source == "facts"]),
        ("generalisation/rephrased", spoken, other),
        ("portability/written", written, _once(other)),
        ("locality", spoken, stay),
    )
    parts, tasks, rows = zip(*((name, task, row) for name, task, part in groups for row in part), strict=True)
    options = {"max_seconds": config.max_seconds, "batch_size": config.batch}
    before = lessons.answers(rows, tasks, **options)
    with lm.edited(edits):
        after = lessons.answers(rows, tasks, **options)
    asked = [_judged(*entry) for entry in zip(parts, tasks, rows, before, after, strict=True)]
    figures = {name: share([a.right for a in asked if a.part == name]) for name in dict.fromkeys(parts)}
    if speaks:
        figures |= _heard(lm, speakers, facts, asked, before, after)
    answered = lessons.own_answers(stay, [spoken])
    kept = lessons.stay([piece for row in answered for piece in lessons.pieces([row], [spoken])])
    if kept:
        with edited(lm.model, edits):
            kl = sum(float(lessons.divergence(lm.model, [piece])) for piece in kept) / len(kept)
        figures["locality/kl"] = Figure(kl, math.nan, math.nan, len(kept))
    return figures, asked


def _once(rows: Sequence[Row]) -> list[Row]:
    """One row for each question that has a text."""
    return list({row.turns[0].question_text: row for row in rows if row.turns[0].question_text}.values())


def _held_out(lm: SpeechLM, facts: Facts, config: EditEvalConfig) -> list[Row]:
    if config.untouched is None:
        return []
    if not config.untouched.has_held_out:
        return draw_untouched(config.untouched, lm, facts, config.untouched_count, config.seed)
    asked = facts.asked()
    rows = held_out_of(config.untouched, lm.codec, config.untouched_count, seed=config.seed)
    return [row for row in rows if plain(row.turns[0].question_text) not in asked]


def _judged(part: str, task: str, row: Row, before: Answer, after: Answer) -> JudgedQuestion:
    turn = row.turns[0]
    wanted = None if part == "locality" else turn.answer_text
    right = after.text == before.text if wanted is None else normalise(after.text) == normalise(wanted)
    return JudgedQuestion(part, task, turn.question_text, row.speaker, wanted, before.text, after.text, right)


def _heard(
    lm: SpeechLM,
    speakers: Synthesiser,
    facts: Facts,
    asked: Sequence[JudgedQuestion],
    before: Sequence[Answer],
    after: Sequence[Answer],
) -> dict[str, Figure]:
    """Shares of spoken answers that sound as their text: `portability/speech` and `locality/speech` (see the module)."""
    codec = lm.codec
    assert codec is not None

    def portrait(codes: Tensor) -> Tensor:
        return describe(codec.decode(codes), codec.sample_rate)

    known: dict[str, Tensor] = {}
    pronounced: set[str] = set()  # texts that are to sound otherwise than before
    for number, fact in enumerate(facts.facts):
        codes = speakers.answer(fact, facts, facts.where(number))
        assert codes is not None
        text = normalise(fact.answer_text)
        known[text] = portrait(codes.frames)
        if fact.answer_audio is not None or fact.answer_codes is not None:
            pronounced.add(text)
    for question, answer in zip(asked, before, strict=True):
        said = normalise(question.before)
        if question.wanted is None or not said or answer.codes is None or not answer.codes.shape[1]:
            continue
        name = f"{said} (before)" if said in pronounced and said == normalise(question.wanted) else said
        if name not in known:
            known[name] = portrait(answer.codes)

    def sounds_as(answer: Answer, text: str, portraits: Mapping[str, Tensor]) -> bool:
        if answer.codes is None or not answer.codes.shape[1]:
            return False
        return list(portraits)[nearest(portrait(answer.codes), list(portraits.values()))] == text

    spoken: list[bool] = []
    stayed: list[bool] = []
    for question, b, a in zip(asked, before, after, strict=True):
        if question.wanted is not None and question.right and len(known) > 1:
            spoken.append(sounds_as(a, normalise(question.wanted), known))
        elif question.wanted is None and b.codes is not None and b.codes.shape[1]:
            same = a.codes is not None and torch.equal(a.codes, b.codes)
            former = normalise(question.before)
            stayed.append(same or sounds_as(a, former, {**known, former: portrait(b.codes)}))
    parts = {"portability/speech": spoken, "locality/speech": stayed}
    return {name: share(hits) for name, hits in parts.items() if hits}


def draw(figures: Mapping[str, Figure], file: Path) -> None:
    """Draws shares as bars with their intervals."""
    shares = [(name, f) for name, f in figures.items() if not math.isnan(f.low)][::-1]
    lengths, errors = bars_of([f for _, f in shares], 1.0)
    with drawn(file, size=(8, 0.9 + 0.42 * len(shares))) as axes:
        axis = axes[0, 0]
        axis.barh([name for name, _ in shares], lengths, xerr=errors, ecolor=INK, height=0.6)
        for name, f in shares:
            axis.text(0.01, name, f"{100 * f.value:.1f} %  of {f.questions}", va="center", color="white", fontsize=8)
        axis.set_xlim(0, 1)


def table_of(figures: Mapping[str, Figure]) -> list[tuple[str, str, str, str]]:
    """Formats figures as rows of a table: figure, value, interval, questions."""
    rows = []
    for name, f in figures.items():
        if math.isnan(f.low):
            rows.append((name, f"{f.value:.4f} nats", "", str(f.questions)))
        else:
            rows.append((name, f"{100 * f.value:.1f} %", f"{100 * f.low:.1f} to {100 * f.high:.1f} %", str(f.questions)))
    return rows
