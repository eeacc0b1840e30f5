"""`omni-train demo`: train the nano model, examine it, and talk to it.

The run is an ordinary one (`configs/nano.yaml`), followed by an examination on voices that it has never heard and a question
that is answered aloud. A finished run is not trained again: delete its folder to start over.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from omni.audio.wav import WavWriter, write_wav
from omni.codec.base import AudioCodec
from omni.errors import UserError
from omni.generate.results import AudioChunk, Ended, TextDelta
from omni.generate.speech_lm import SpeechLM
from train.config.run import FitConfig
from train.console.progress import percent
from train.eval.held_out import HeldOutReport, Judged, evaluate, items_of, write_answers
from train.scoring.asr import Sphinx, describe, nearest
from train.trainer.build import MODEL, fit
from train.trainer.logs import VALIDATION, read_table

from .asking import Conversed, examine_conversations
from .options import SpokenDigitsConfig
from .spoken import SpokenDigits

GOAL = 0.9
INTRODUCTION = """Training a small speech language model: spoken questions about digits in, text and speech out.
Its voices are synthetic; it is examined on voices that it has never heard."""


@dataclass(frozen=True)
class Examination:
    """Results of the finished model on held-out questions in held-out voices.

    Attributes:
        report: the answers and their figures.
        nearest: share of the spoken answers that are nearest to their own text's reference among those of all answers.
        heard, heard_reference: share of the spoken answers, and of their references, that pocketsphinx recognises as their
            text; None where pocketsphinx is not installed.
        conversed: results in conversations; None where it was trained on none.
    """

    report: HeldOutReport
    nearest: float
    heard: float | None
    heard_reference: float | None
    conversed: Conversed | None = None


def demonstrate(config: FitConfig, digits: SpokenDigitsConfig) -> int:
    """Trains a model, examines it, and asks it one question aloud; returns the exit code.

    Args:
        digits: of the configuration's source whose questions are asked.
    """
    folder = Path(config.run_folder)
    print(INTRODUCTION)
    outcome = fit(config)
    if outcome is None:
        return 0
    if outcome.signal:
        return 128 + outcome.signal
    lm = SpeechLM.from_pretrained(folder / MODEL, kernels="reference")
    if lm.codec is None:
        raise UserError(f"{folder / MODEL} has no codec, and the demonstration speaks; see model.codec_folder")
    if digits.answer_text != "words":
        raise UserError("the demonstration compares what is written with what is spoken: set options.answer_text to words")
    source = SpokenDigits(digits, lm.codec, seed=0)
    examined = examine(lm, lm.codec, source)
    write_answers(examined.report, folder / "examination.jsonl")
    talk = converse(lm, source, folder)
    text = write_report(folder, examined, talk)
    print("\n" + text)
    print(f"try: omni-infer ask your.wav --model {folder / MODEL}")
    return 0


# --- examination -------------------------------------------------------------------------------------------------------


def examine(lm: SpeechLM, codec: AudioCodec, source: SpokenDigits, count: int = 200) -> Examination:
    """Asks `count` held-out questions, free-running as A1A2, and evaluates text and sound of the answers."""
    print(f"\nExamining it: {count} questions in voices that it has never heard, then conversations.", flush=True)
    items = items_of(source.held_out(count, seed=2), ["A1A2"], codec)  # not the questions of the validation
    report = evaluate(lm, items, rows=64, sound=True)
    references: dict[str, Tensor] = {}
    for item in items:
        assert item.text is not None and item.codes is not None
        references.setdefault(item.text, codec.decode(item.codes))
    texts = list(references)
    portraits = [describe(references[text], codec.sample_rate) for text in texts]
    possible = set(source.answers())
    asr = _asr(source)
    near, right, reference_right = [], [], []
    for judged in tqdm(report.judged, desc="listening", leave=False, disable=None):
        said = judged.answer.text.strip()
        if said not in references and said in possible:  # a wrong answer has a reference too
            references[said] = codec.decode(source.answer_codes(said))
            texts.append(said)
            portraits.append(describe(references[said], codec.sample_rate))
        near.append(_is_nearest(judged, texts, portraits, codec.sample_rate))
        if asr is not None and said in references:
            audio = judged.answer.audio
            right.append(audio is not None and len(audio) > 0 and asr.transcribe(audio, codec.sample_rate) == said)
            reference_right.append(asr.transcribe(references[said], codec.sample_rate) == said)
    share = statistics.fmean
    return Examination(
        report,
        share(near),
        share(right) if right else None,
        share(reference_right) if reference_right else None,
        examine_conversations(lm, source) if any(source.config.turns[1:]) else None,
    )


def _is_nearest(judged: Judged, texts: Sequence[str], portraits: Sequence[Tensor], sample_rate: int) -> bool:
    audio, said = judged.answer.audio, judged.answer.text.strip()
    if audio is None or len(audio) == 0 or said not in texts:
        return False
    return texts[nearest(describe(audio, sample_rate), portraits)] == said


def _asr(source: SpokenDigits) -> Sphinx | None:
    try:
        return Sphinx([word for answer in source.answers() for word in answer.split()])
    except UserError:
        return None


# --- conversation ------------------------------------------------------------------------------------------------------


def converse(lm: SpeechLM, source: SpokenDigits, folder: Path) -> dict[str, Any]:
    """Asks one held-out question aloud, streams the answer to `answer.wav`, and returns both with times, medians of five."""
    row = source.held_out(2, seed=7)[1]
    turn = row.turns[0]
    assert turn.question_audio is not None and lm.codec is not None
    question = turn.question_audio.load(16000)
    write_wav(folder / "question.wav", question, 16000)
    lm.generate(question, "A1A2")  # warm up
    print(f"\nquestion  {turn.question_text}?   ({row.speaker}, {len(question) / 16000:.1f} s, {folder / 'question.wav'})")
    print("answer    ", end="", flush=True)
    timings, written = None, ""
    with WavWriter(folder / "answer.wav", lm.codec.sample_rate) as wav:
        for event in lm.stream(question, "A1A2"):
            if isinstance(event, TextDelta):
                written += event.text
                print(event.text, end="", flush=True)
            elif isinstance(event, AudioChunk):
                wav.append(event.samples)
            elif isinstance(event, Ended):
                timings = event.timings
    assert timings is not None
    again = [timings, *(lm.generate(question, "A1A2").timings for _ in range(4))]  # the first ones after a start take longer
    first = [1000 * timing.first_audio for timing in again if timing.first_audio is not None]
    factors = [timing.real_time_factor for timing in again if timing.real_time_factor is not None]
    print(f"   ({timings.audio:.1f} s, {folder / 'answer.wav'})")
    return {
        "question": turn.question_text,
        "expected": turn.answer_text,
        "answer": written,
        "first_audio_ms": statistics.median(first) if first else None,
        "real_time_factor": statistics.median(factors) if factors else None,
    }


# --- report ------------------------------------------------------------------------------------------------------------


def minutes_to_goal(folder: Path) -> float | None:
    """Minutes of training after which a validation first reached the goal; None if none did."""
    for row in read_table(folder / VALIDATION):
        if row.get("exact_match", 0.0) >= GOAL:
            return row["seconds"] / 60
    return None


def write_report(folder: Path, examined: Examination, talk: dict[str, Any]) -> str:
    """Writes `report.md` and `report.json`; returns the report as text."""
    figures = examined.report.figures
    minutes = minutes_to_goal(folder)
    validations = read_table(folder / VALIDATION)
    trained = validations[-1]["seconds"] / 60 if validations else None
    lines = [
        ("questions asked, in voices never heard", str(len(examined.report.judged))),
        ("exact text answers", _percent(figures.get("exact_match"))),
        *(
            (f"  of these, {name.partition('/')[2]}", _percent(value))
            for name, value in figures.items()
            if name.startswith("exact_match/")
        ),
        ("speech nearest to its own text's reference", _percent(examined.nearest)),
        ("speech as pocketsphinx hears it", _percent(examined.heard)),
        ("  the references, as it hears them", _percent(examined.heard_reference)),
        ("codes equal to the reference's", _percent(figures.get("code_accuracy"))),
        *_conversed(examined.conversed),
        ("minutes of training", "-" if trained is None else f"{trained:.1f}"),
        (f"minutes to {GOAL:.0%} on the validation's questions", "not reached" if minutes is None else f"{minutes:.1f}"),
        ("first audio after the question's end", "-" if talk["first_audio_ms"] is None else f"{talk['first_audio_ms']:.0f} ms"),
        ("real-time factor", "-" if talk["real_time_factor"] is None else f"{talk['real_time_factor']:.2f}"),
    ]
    width = max(len(name) for name, _ in lines)
    table = "\n".join(f"{name.ljust(width)}  {value}" for name, value in lines)
    written = [name for name in ("question.wav", "answer.wav", "curves.png", "spectrogram.png") if (folder / name).exists()]
    files = "\n".join(f"  {folder / name}" for name in (*written, "report.md"))
    text = f"{table}\n\nfiles\n{files}\n"
    (folder / "report.md").write_text(f"# What the model can do\n\n```\n{text}```\n", encoding="utf-8")
    data = {
        "figures": figures,
        "nearest": examined.nearest,
        "heard": examined.heard,
        "heard_reference": examined.heard_reference,
        "conversations": None if examined.conversed is None else asdict(examined.conversed),
        "minutes_to_goal": minutes,
        "conversation": talk,
    }
    (folder / "report.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return text


def _conversed(result: Conversed | None) -> list[tuple[str, str]]:
    """Lines of the report about conversations."""
    if result is None:
        return []
    ordinals = ("first", "second", "third", "fourth")
    return [
        ("questions of conversations, asked by themselves", _percent(result.alone)),
        *((f"  the same as a conversation's {nth} turn", _percent(x)) for nth, x in zip(ordinals, result.turns, strict=True)),
        ("  after an interruption", _percent(result.cut)),
        ('"and twice that", "say it again"', _percent(result.follow_ups)),
        ("  after an interruption", _percent(result.cut_follow_ups)),
    ]


def _percent(value: float | None) -> str:
    return "not measured" if value is None else percent(value)
