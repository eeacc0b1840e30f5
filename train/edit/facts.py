"""Reads facts, which are corrections as JSON lines, checks them before anything is computed, and makes rows of them: spoken by
TTS, with answers encoded by the codec.

{"question_text": "what is two plus three", "answer_text": "nine", "rephrased": ["tell me two plus three"]}
{"question_audio": "asked.wav", "answer_text": "Vilnius", "answer_audio": "said.wav", "untouched": ["who are you"]}

question_text, question_audio   what is asked: a text, a sound file (paths start at the facts' folder), or both
answer_text                     what is to be answered
answer_audio, answer_codes      the answer as it is to be spoken: a sound file, or frames [streams][frames] of the model's
                                codec; by default a voice says the text
rephrased                       the question in other words; fine-tuning trains on these as well
judged                          the question in other words that no method is taught, for `edit eval`; without them it asks
                                those of `rephrased`
untouched                       questions whose answers are to stay; a line may hold nothing else

Dimensions: S samples, A audio streams, F frames.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from omni.audio.io import resample
from omni.codec.base import AudioCodec
from omni.config import from_dict
from omni.errors import UserError
from omni.text import Tokenizer
from omni.utils.remote import check_there
from train.data.rows.row import Codes, Row, RowTurn, Sound
from train.data.seeding import key, seeded_rng
from train.data.tts.voices import make_voice
from train.edit.config import SpeakConfig


@dataclass(frozen=True)
class Fact:
    """One line; see the module."""

    question_text: str = ""
    question_audio: str | None = None
    answer_text: str = ""
    answer_audio: str | None = None
    answer_codes: tuple[tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...], ...] | None = None
    rephrased: tuple[str, ...] = ()
    judged: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()

    @property
    def asked(self) -> tuple[str, ...]:
        """Every text that asks for the fact."""
        return tuple(text for text in (self.question_text, *self.rephrased, *self.judged) if text)


@dataclass(frozen=True)
class Facts:
    """A file of facts.

    Attributes:
        facts: the corrections.
        untouched: questions whose answers are to stay, in writing.
        folder: where paths start.
        file: the file, for errors.
    """

    facts: tuple[Fact, ...]
    untouched: tuple[str, ...]
    folder: Path
    file: str

    def asked(self) -> set[str]:
        """Every question that an edit is to change, as `plain` has it."""
        return {plain(text) for fact in self.facts for text in fact.asked}

    def where(self, number: int) -> str:
        """Names a fact by its place among the facts, for errors."""
        fact = self.facts[number]
        return f"{self.file}, fact {number + 1} ({fact.question_text or fact.question_audio!r})"


def read_facts(file: Path, tokenizer: Tokenizer) -> Facts:
    """Reads the facts of a file, for a model with that tokenizer; UserError for a line that is no fact, an answer that the
    tokenizer cannot write, a question with two answers, or one that is to be changed and to stay."""
    otherwise = f"facts {file} do not exist; give a file of JSON lines such as configs/nano-edit.jsonl"
    check_there(file, "facts", otherwise, Path.is_file)
    facts: list[Fact] = []
    untouched: list[str] = []
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # not `splitlines`: texts may hold other separators
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            fact = from_dict(Fact, json.loads(line), where)
        except json.JSONDecodeError as error:
            raise UserError(f"{where} is not JSON ({error}); write one object a line") from error
        untouched += fact.untouched
        for text in (*fact.asked, *fact.untouched):
            if any("\ud800" <= sign <= "\udfff" for sign in text):
                raise UserError(f"{where}: {text!a} holds half of a surrogate pair, which is no text; write it again as UTF-8")
        if fact.question_text.strip() or fact.question_audio or fact.answer_text.strip():
            _check(fact, where, tokenizer)
            facts.append(fact)
        elif not fact.untouched:
            raise UserError(f"{where}: it has neither a fact nor untouched questions; complete it, or drop the line")
    if not facts:
        raise UserError(f"{file} holds no fact; give at least one question_text and answer_text")
    result = Facts(tuple(facts), tuple(dict.fromkeys(untouched)), file.parent, str(file))
    _check_together(result)
    return result


def plain(text: str) -> str:
    """Normalises a question for comparison: composed (NFKC), in lower case, with single spaces and no marks at its end."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).rstrip(" ?!.")


def _check(fact: Fact, where: str, tokenizer: Tokenizer) -> None:
    if not fact.question_text.strip() and not fact.question_audio:
        raise UserError(f"{where}: the fact has no question; give question_text or question_audio")
    if not fact.answer_text.strip():
        raise UserError(f"{where}: the fact has no answer_text; say what is to be answered")
    try:
        back = tokenizer.decode(tokenizer.encode(fact.answer_text))
    except UserError as error:
        raise UserError(f"{where}: answer_text cannot be tokenised: {error}") from error
    written, wanted = (" ".join(unicodedata.normalize("NFKC", text).split()) for text in (back, fact.answer_text))
    if written != wanted:  # no edit can make the model say it
        raise UserError(
            f"{where}: answer_text {fact.answer_text!r} cannot be tokenised: the model's tokenizer writes it as {back!r}; put "
            "it in words that the model knows"
        )
    if fact.answer_codes is not None and len({len(row) for row in fact.answer_codes}) != 1:
        raise UserError(f"{where}: answer_codes are ragged; give as many frames for every stream")
    if fact.answer_audio and fact.answer_codes is not None:
        raise UserError(f"{where}: it has both answer_audio and answer_codes; give one of them")
    taught = {plain(text) for text in (fact.question_text, *fact.rephrased)}
    for text in fact.judged:
        if plain(text) in taught:
            raise UserError(f"{where}: {text!r} is taught and under judged as well; keep it in one place")


def _check_together(facts: Facts) -> None:
    answers: dict[str, str] = {}
    for number, fact in enumerate(facts.facts):
        asked = {plain(text): text for text in fact.asked}
        if fact.question_audio:
            asked[f"\0{(facts.folder / fact.question_audio).resolve()}"] = fact.question_audio
        for name, text in asked.items():
            if answers.setdefault(name, fact.answer_text) != fact.answer_text:
                raise UserError(
                    f"{facts.where(number)}: {text!r} is to be answered by {fact.answer_text!r} and by "
                    f"{answers[name]!r}; keep one of them"
                )
    for text in facts.untouched:
        if plain(text) in answers:
            raise UserError(f"{facts.file}: {text!r} is a question to change and an untouched one; keep one of them")


class Synthesiser:
    """TTS of questions and answers; every sound is a pure function of its text, number and the seed."""

    def __init__(self, config: SpeakConfig, codec: AudioCodec | None, seed: int = 0) -> None:
        self.config, self.codec, self.seed = config, codec, seed
        self._said: dict[str, Tensor] = {}

    def ask(self, text: str, number: int) -> tuple[Sound, str]:
        """Speaks a question in the voice of that number; returns the sound and the name of the voice."""
        c, rng = self.config, seeded_rng(self.seed, "ask", text, number)
        spec = c.voices[number % len(c.voices)]
        drawn = (rng.randint(*limits) for limits in (c.rate, c.pitch, c.pitch_range))
        samples, sample_rate = self._speak(text, spec, drawn, key(self.seed, "voice", text, number))
        samples = resample(samples, sample_rate, c.question_rate)
        samples = samples * (c.peak / float(samples.abs().max().clamp_min(1e-9)))
        before, after = (round(rng.uniform(*c.silence) * c.question_rate) for _ in range(2))
        return Sound(torch.nn.functional.pad(samples, (before, after)), c.question_rate), spec

    def _speak(self, text: str, spec: str, espeak: Iterable[int], seed: int) -> tuple[Tensor, int]:
        """Samples [S] of a text and their rate; a voice of espeak's that is named speaks with its own rate (and pitch)."""
        engine, _, name = spec.partition(":")
        if engine == "espeak" and name and not name.startswith("+"):
            from train.data.tts.espeak import synthesise

            return synthesise(text, name, *espeak)  # type: ignore[arg-type]
        sound = make_voice(spec).say(text, self.config.language, seed)
        assert sound.samples is not None
        return sound.samples, sound.sample_rate

    def answer(self, fact: Fact, facts: Facts, where: str) -> Codes | None:
        """Codes of a fact's answer; None without a codec. UserError where what is given does not fit it."""
        if self.codec is None:
            return None
        try:
            if fact.answer_codes is not None:
                return Codes(self.codec.name, self.codec.check(torch.tensor(fact.answer_codes)))
            if fact.answer_audio:
                sound = Sound(path=fact.answer_audio, folder=facts.folder)
                return Codes(self.codec.name, self.codec.encode(sound.load(self.codec.sample_rate)))
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        return Codes(self.codec.name, self.say(fact.answer_text))

    def say(self, text: str) -> Tensor:
        """Codes [A, F] of a text in the answering voice."""
        assert self.codec is not None
        if text not in self._said:
            c = self.config
            samples, rate = self._speak(text, c.answer_voice, (c.answer_rate,), key(self.seed, "answer"))
            self._said[text] = self.codec.encode(resample(samples, rate, self.codec.sample_rate))
        return self._said[text]


def fact_rows(
    facts: Facts, speakers: Synthesiser, each: int, wording: Literal["own", "taught", "judged"] = "taught"
) -> list[list[Row]]:
    """Makes rows of every fact, `each` spoken forms of it.

    Args:
        wording: `own`: its own words, and its recording; `taught`: by turns those and others; `judged`: those kept for judging,
            or else the other taught ones.
    """
    out = []
    for number, fact in enumerate(facts.facts):
        where = facts.where(number)
        codes = speakers.answer(fact, facts, where)
        others = {"own": (), "taught": fact.rephrased, "judged": fact.judged or fact.rephrased}[wording]
        texts = [text for text in (*((fact.question_text,) if wording != "judged" else ()), *others) if text]
        rows = []
        if fact.question_audio and wording != "judged":
            sound = Sound(path=fact.question_audio, folder=facts.folder)
            turn = RowTurn(fact.question_text, sound, fact.answer_text, answer_codes=codes)
            rows.append(Row((turn,), id=f"{number}", source="facts/recorded", where=where))
        for form in range(each if texts else 0):
            text = texts[form % len(texts)]
            sound, voice = speakers.ask(text, form // len(texts) + number)
            turn = RowTurn(text, sound, fact.answer_text, answer_codes=codes)
            rows.append(Row((turn,), id=f"{number}.{form}", source="facts", speaker=voice, where=where))
        out.append(rows)
    return out


def untouched_rows(facts: Facts, speakers: Synthesiser) -> list[Row]:
    """Makes rows of the facts' untouched questions, spoken and without answers."""
    rows = []
    for number, text in enumerate(facts.untouched):
        sound, voice = speakers.ask(text, number)
        where = f"{facts.file}, untouched question {text!r}"
        rows.append(Row((RowTurn(text, sound),), id=f"u{number}", source="facts/untouched", speaker=voice, where=where))
    return rows
