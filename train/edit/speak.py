"""Makes rows of facts and untouched questions: spoken by TTS, with answers encoded by the codec.

Dimensions: S samples, A audio streams, F frames.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from omni.audio.resample import resample
from omni.codec.base import AudioCodec
from omni.errors import UserError
from train.data.rows.row import Codes, Row, RowTurn, Sound
from train.data.seeding import key, seeded_rng
from train.data.tts.voices import make_voice
from train.edit.config import SpeakConfig
from train.edit.facts import Fact, Facts, codes_of


class Synthesiser:
    """TTS of questions and answers; every sound is a pure function of its text, number and the seed."""

    def __init__(self, config: SpeakConfig, codec: AudioCodec | None, seed: int = 0) -> None:
        self.config, self.codec, self.seed = config, codec, seed
        self._said: dict[str, Tensor] = {}

    def ask(self, text: str, number: int) -> tuple[Sound, str]:
        """Speaks a question in the voice of that number; returns the sound and the name of the voice."""
        c, rng = self.config, seeded_rng(self.seed, "ask", text, number)
        spec = c.voices[number % len(c.voices)]
        kind, _, name = spec.partition(":")
        if kind == "espeak" and name and not name.startswith("+"):
            from train.data.tts.espeak import synthesise

            rate, pitch, pitch_range = (rng.randint(*limits) for limits in (c.rate, c.pitch, c.pitch_range))
            samples, sample_rate = synthesise(text, name, rate, pitch, pitch_range)
        else:
            sound = make_voice(spec).say(text, c.language, key(self.seed, "voice", text, number))
            assert sound.samples is not None
            samples, sample_rate = sound.samples, sound.sample_rate
        samples = resample(samples, sample_rate, c.question_rate)
        samples = samples * (c.peak / float(samples.abs().max().clamp_min(1e-9)))
        before, after = (round(rng.uniform(*c.silence) * c.question_rate) for _ in range(2))
        return Sound(torch.nn.functional.pad(samples, (before, after)), c.question_rate), spec

    def answer(self, fact: Fact, facts: Facts, where: str) -> Codes | None:
        """Codes of a fact's answer; None without a codec. UserError where what is given does not fit it."""
        if self.codec is None:
            return None
        try:
            given = codes_of(fact)
            if given is not None:
                return Codes(self.codec.name, self.codec.check(given))
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
            kind, _, name = c.answer_voice.partition(":")
            if kind == "espeak" and name and not name.startswith("+"):
                from train.data.tts.espeak import synthesise

                samples, rate = synthesise(text, name, c.answer_rate)
            else:
                sound = make_voice(c.answer_voice).say(text, c.language, key(self.seed, "answer"))
                assert sound.samples is not None
                samples, rate = sound.samples, sound.sample_rate
            self._said[text] = self.codec.encode(resample(samples, rate, self.codec.sample_rate))
        return self._said[text]


def fact_rows(
    facts: Facts, speakers: Synthesiser, each: int, wording: Literal["own", "taught", "judged"] = "taught"
) -> list[list[Row]]:
    """Makes rows of every fact, `each` spoken forms of it.

    Args:
        wording: `own`: in its own words, and its recording. `taught`: by turns in those and in others. `judged`: in those kept
            for judging, or else in the other taught ones.
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
        where = f"{facts.place}, untouched question {text!r}"
        rows.append(Row((RowTurn(text, sound),), id=f"u{number}", source="facts/untouched", speaker=voice, where=where))
    return rows
