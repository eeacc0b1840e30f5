"""The nano model's endless source: spoken questions about digits, made as they are drawn.

Two kinds: adding or subtracting two numbers from 0 to 9, and reading a string of one to four digits back. espeak-ng asks in
many voices, speeds and pitches; one voice answers, through the codec. Utterance number u is a pure function of (seed, u).
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from omni.audio.codec import AudioCodec
from omni.audio.io import resample
from train.data.digits_config import NUMBERS as NUMBERS
from train.data.digits_config import RATE as RATE
from train.data.digits_config import SpokenDigitsConfig as SpokenDigitsConfig
from train.data.keys import dice
from train.data.row import Codes, Row, RowTurn, Sound
from train.data.voice import SAMPLE_RATE, check_voice, synthesise


@dataclass(frozen=True)
class Question:
    """A question as text, its answer as it is spoken, and as it is written in digits."""

    kind: Literal["arithmetic", "digits"]
    text: str
    words: str
    digits: str


class SpokenDigits:
    """The source; see the module. `row(index)` is a pure function of (seed, index).

    Args:
        codec: encodes the answers.
    """

    size = None
    name = "spoken-digits"

    def __init__(self, config: SpokenDigitsConfig, codec: AudioCodec, seed: int = 0) -> None:
        self.config = config
        self.codec = codec
        self.seed = seed
        self.voices = tuple(f"{accent}+{variant}" for accent in config.accents for variant in config.variants)
        self.rare_voices = tuple(f"{accent}+{variant}" for accent in config.accents for variant in config.rare_variants)
        for voice in (*self.voices, *self.rare_voices, *config.held_out, config.answer_voice):
            check_voice(voice)
        self._codes: dict[str, Tensor] = {}

    @property
    def repeats(self) -> bool:
        """Whether utterances are drawn several times, so that they are worth keeping."""
        return self.config.reuse > 1

    def identity(self, index: int) -> int:
        """Number of the utterance that draw `index` uses: draws that share it have equal rows.

        In a block of reuse * distance draws, each of `distance` utterances returns after `distance` draws. Where that is a
        multiple of the sub-lanes, an utterance always returns to the same one, and so to the worker that still has it.
        """
        block, place = divmod(index, self.config.reuse * self.config.reuse_distance)
        return block * self.config.reuse_distance + place % self.config.reuse_distance

    def row(self, index: int) -> Row:
        """The conversation of draw `index`."""
        utterance = self.identity(index)
        rng = dice(self.seed, "utterance", utterance)
        config = self.config
        count = rng.choices(range(1, len(config.turns) + 1), config.turns)[0]
        voice = self.choose_voice(rng)
        turns = tuple(self._turn(rng, draw_question(config, rng), voice) for _ in range(count))
        return Row(turns, id=str(utterance), source=self.name, speaker=voice, where=f"spoken digits, utterance {utterance}")

    def choose_voice(self, rng: random.Random) -> str:
        """A voice of training: now and then a rare one."""
        return rng.choice(self.rare_voices if self.rare_voices and rng.random() < self.config.rare else self.voices)

    def held_out(self, count: int = 200, seed: int = 1) -> list[Row]:
        """The evaluation set: one question each, arithmetic and digits in turn, in the held-out voices in turn.

        Questions are distinct as far as there are enough. `source` ends in the kind.
        """
        rows, asked = [], set()
        for i in range(count):
            kind: Literal["arithmetic", "digits"] = "digits" if i % 2 else "arithmetic"
            voice = self.config.held_out[i // 2 % len(self.config.held_out)]
            rng = dice(seed, "held-out", i)
            for _ in range(100):
                question = draw_question(self.config, rng, kind)
                if question.text not in asked:
                    break
            asked.add(question.text)
            turn = self._turn(rng, question, voice)
            rows.append(Row((turn,), id=str(i), source=f"{self.name}/{kind}", speaker=voice, where=f"held-out question {i}"))
        return rows

    def answers(self) -> list[str]:
        """Every answer that there is, as it is spoken."""
        numbers = ["minus " + NUMBERS[n] for n in range(9, 0, -1)] + list(NUMBERS)
        lengths = [n for n, weight in enumerate(self.config.lengths, 1) if weight > 0]
        strings = [" ".join(s) for n in lengths for s in itertools.product(NUMBERS[:10], repeat=n)]
        return list(dict.fromkeys([*numbers, *strings]))

    def answer_codes(self, words: str) -> Tensor:
        """Codes [A, F] of an answer as it is spoken ("minus two"), in the answering voice."""
        pieces = words.split() if self.config.answer_speech == "words" else [words]
        return torch.cat([self._encoded(piece) for piece in pieces], dim=1)

    def _encoded(self, words: str) -> Tensor:
        if words not in self._codes:
            c = self.config
            audio, rate = synthesise(words, c.answer_voice, c.answer_rate, c.answer_pitch)
            self._codes[words] = self.codec.encode(resample(audio, rate, self.codec.sample_rate))
        return self._codes[words]

    def _turn(self, rng: random.Random, question: Question, voice: str) -> RowTurn:
        c = self.config
        rate, pitch, pitch_range = (rng.randint(*limits) for limits in (c.rate, c.pitch, c.pitch_range))
        before, after = (round(rng.uniform(*c.silence) * c.question_rate) for _ in range(2))
        spoken = resample(synthesise(question.text, voice, rate, pitch, pitch_range)[0], SAMPLE_RATE, c.question_rate)
        spoken = spoken * (c.peak / float(spoken.abs().max()))
        return RowTurn(
            question_text=question.text,
            question_audio=Sound(torch.nn.functional.pad(spoken, (before, after)), c.question_rate),
            answer_text=question.words if c.answer_text == "words" else question.digits,
            answer_codes=Codes(self.codec.name, self.answer_codes(question.words)),
        )


def vocabulary(config: SpokenDigitsConfig) -> tuple[str, ...]:
    """Every word that a question may hold, sorted."""
    phrases = " ".join((*config.arithmetic_phrases, *config.digit_phrases)).replace("{}", " ")
    return tuple(sorted({*phrases.split(), *NUMBERS[:10], "plus", "minus"}))


def draw_question(config: SpokenDigitsConfig, rng: random.Random, kind: str | None = None) -> Question:
    """A question drawn from `rng`; of the given kind, or of either."""
    if kind is None:
        kind = "arithmetic" if rng.random() < config.arithmetic else "digits"
    if kind == "arithmetic":
        a, b, plus = rng.randrange(10), rng.randrange(10), rng.random() < 0.5
        result = a + b if plus else a - b
        asked = f"{NUMBERS[a]} {'plus' if plus else 'minus'} {NUMBERS[b]}"
        words = ("minus " if result < 0 else "") + NUMBERS[abs(result)]
        return Question("arithmetic", rng.choice(config.arithmetic_phrases).format(asked), words, str(result))
    length = rng.choices(range(1, len(config.lengths) + 1), config.lengths)[0]
    digits = [rng.randrange(10) for _ in range(length)]
    words = " ".join(NUMBERS[d] for d in digits)
    return Question("digits", rng.choice(config.digit_phrases).format(words), words, "".join(map(str, digits)))
