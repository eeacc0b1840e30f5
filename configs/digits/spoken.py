"""The nano model's endless source: spoken questions about digits, synthesised when they are drawn.

Two kinds: adding or subtracting two numbers from 0 to 9, and reading a string of one to four digits back. Within
conversations there are two more, which need the turn before: doubling its result, and saying its answer again (all of it, also
where it was cut: the question is known). espeak-ng asks in many voices, speeds and pitches; one voice answers, through the
codec. Utterance number u is a pure function of (seed, u).
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from omni.audio.resample import resample
from omni.codec.base import AudioCodec
from train.data.readers.templates.sentences import NUMBERS, spoken_number
from train.data.rows.row import Codes, Row, RowTurn, Sound, Word
from train.data.seeding import seeded_rng
from train.data.tts.espeak import SAMPLE_RATE, check_voice, synthesise

from .options import SpokenDigitsConfig

RESULTS = range(-9, 19)
"""Results of sums and differences, which are also the numbers that can be doubled."""


@dataclass(frozen=True)
class Question:
    """A question as text, its answer as spoken and as written in digits, and its numeric result, if any."""

    kind: Literal["arithmetic", "digits", "twice", "again"]
    text: str
    words: str
    digits: str
    number: int | None = None


class SpokenDigits:
    """Source of spoken questions about digits; see the module. `row(index)` is a pure function of (seed, index).

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
        """True where utterances are drawn several times, so that they are worth caching."""
        return self.config.reuse > 1

    def identity(self, index: int) -> int:
        """Number of the utterance that draw `index` uses: draws that share it have equal rows.

        In a block of reuse * distance draws, each of `distance` utterances is drawn again after `distance` draws. Where that is
        a multiple of the number of packers, the same packer draws it again, and so the worker that has it in its cache.
        """
        block, offset = divmod(index, self.config.reuse * self.config.reuse_distance)
        return block * self.config.reuse_distance + offset % self.config.reuse_distance

    def row(self, index: int) -> Row:
        """Make the conversation of draw `index`."""
        utterance = self.identity(index)
        rng = seeded_rng(self.seed, "utterance", utterance)
        config = self.config
        count = rng.choices(range(1, len(config.turns) + 1), config.turns)[0]
        voice = self.choose_voice(rng)
        turns = tuple(self._turn(rng, question, voice, config.hesitant) for question in draw_questions(config, rng, count))
        return Row(turns, id=str(utterance), source=self.name, speaker=voice, where=f"spoken digits, utterance {utterance}")

    def choose_voice(self, rng: random.Random) -> str:
        """Draw a training voice; the share `rare` of them are rare ones."""
        return rng.choice(self.rare_voices if self.rare_voices and rng.random() < self.config.rare else self.voices)

    def held_out(self, count: int = 200, seed: int = 1) -> list[Row]:
        """Make the evaluation set: one question each, arithmetic and digits in turn, in the held-out voices in turn.

        Questions are distinct as far as there are enough. `source` ends in the kind.
        """
        rows, asked = [], set()
        for i in range(count):
            kind: Literal["arithmetic", "digits"] = "digits" if i % 2 else "arithmetic"
            voice = self.config.held_out[i // 2 % len(self.config.held_out)]
            rng = seeded_rng(seed, "held-out", i)
            for _ in range(100):
                question = draw_question(self.config, rng, kind)
                if question.text not in asked:
                    break
            asked.add(question.text)
            turn = self._turn(rng, question, voice)
            rows.append(Row((turn,), id=str(i), source=f"{self.name}/{kind}", speaker=voice, where=f"held-out question {i}"))
        return rows

    def conversations(self, count: int, seed: int = 1) -> list[Row]:
        """Make conversations of four turns, in held-out voices in turn; follow-ups are as frequent as in training."""
        rows = []
        for i in range(count):
            rng, voice = seeded_rng(seed, "conversation", i), self.config.held_out[i // 2 % len(self.config.held_out)]
            asked = tuple(self._turn(rng, question, voice) for question in draw_questions(self.config, rng, 4))
            where = f"held-out conversation {i}"
            rows.append(Row(asked, id=str(i), source=f"{self.name}/conversation", speaker=voice, where=where))
        return rows

    def follows(self, turn: RowTurn) -> bool:
        """True where a turn's question needs the turn before."""
        return turn.question_text in (*self.config.twice_phrases, *self.config.again_phrases)

    def answers(self) -> list[str]:
        """All possible answers, as they are spoken."""
        doubled = (doubled_number(n)[0] for n in RESULTS) if self.config.follow_ups > 0 else ()
        lengths = [n for n, weight in enumerate(self.config.lengths, 1) if weight > 0]
        strings = [" ".join(s) for n in lengths for s in itertools.product(NUMBERS[:10], repeat=n)]
        return list(dict.fromkeys([*map(spoken_number, RESULTS), *strings, *doubled]))

    def answer_codes(self, words: str) -> Tensor:
        """Codes [A, F] of an answer, given as it is spoken ("minus two"), in the answering voice."""
        pieces = words.split() if self.config.answer_speech == "words" else [words]
        return torch.cat([self._encoded(piece) for piece in pieces], dim=1)

    def _encoded(self, words: str) -> Tensor:
        if words not in self._codes:
            c = self.config
            audio, rate = synthesise(words, c.answer_voice, c.answer_rate, c.answer_pitch)
            self._codes[words] = self.codec.encode(resample(audio, rate, self.codec.sample_rate))
        return self._codes[words]

    def _turn(self, rng: random.Random, question: Question, voice: str, hesitant: float = 0.0) -> RowTurn:
        c, parts, pause = self.config, [question.text], 0.0
        rate, pitch, pitch_range = (rng.randint(*limits) for limits in (c.rate, c.pitch, c.pitch_range))
        before, after = (round(rng.uniform(*c.silence) * c.question_rate) for _ in range(2))
        words = question.text.split()
        if hesitant > 0 and len(words) > 1 and rng.random() < hesitant:
            at, pause = rng.randrange(1, len(words)), rng.uniform(*c.hesitation)
            parts = [" ".join(words[:at]), " ".join(words[at:])]
        spoken = in_parts(parts, pause, voice, (rate, pitch, pitch_range), c.question_rate)
        spoken = spoken * (c.peak / float(spoken.abs().max()))
        return RowTurn(
            question_text=question.text,
            question_audio=Sound(torch.nn.functional.pad(spoken, (before, after)), c.question_rate),
            answer_text=question.words if c.answer_text == "words" else question.digits,
            answer_codes=Codes(self.codec.name, self.answer_codes(question.words)),
            words=self._word_times(question.words) if c.answer_speech == c.answer_text == "words" else (),
        )

    def _word_times(self, words: str) -> tuple[Word, ...]:
        """Times of each word of an answer, where words are spoken one by one and joined."""
        out, start = [], 0
        for word in words.split():
            end = start + self._encoded(word).shape[1]
            out.append(Word(word, start / self.codec.frame_rate, end / self.codec.frame_rate, "model"))
            start = end
        return tuple(out)


def whole_question(config: SpokenDigitsConfig, text: str) -> bool:
    """Whether words are a whole question that calculates or reads digits back, as `draw_question` draws them."""
    number = f"(?:{'|'.join(NUMBERS[:10])})"
    most = max(n for n, weight in enumerate(config.lengths, 1) if weight > 0)
    forms = [(config.arithmetic_phrases, f"{number} (?:plus|minus) {number}")]
    forms.append((config.digit_phrases, rf"{number}(?: {number}){{0,{most - 1}}}"))
    patterns = (re.escape(phrase).replace(r"\{\}", asked) for phrases, asked in forms for phrase in phrases)
    return any(re.fullmatch(pattern, text) for pattern in patterns)


def in_parts(parts: Sequence[str], pause: float, voice: str, manner: tuple[int, int, int], rate: int) -> Tensor:
    """A question [S] whose parts are spoken one by one, silence of `pause` seconds between them.

    Args:
        manner: words per minute, pitch and pitch range, see `synthesise`.
        rate: samples per second of the result.
    """
    pieces: list[Tensor] = []
    for part in parts:
        spoken = resample(synthesise(part, voice, *manner)[0], SAMPLE_RATE, rate)
        pieces += [spoken.new_zeros(round(pause * rate)), spoken] if pieces else [spoken]
    return torch.cat(pieces)


def vocabulary(config: SpokenDigitsConfig) -> tuple[str, ...]:
    """All words that questions may have, without punctuation, sorted."""
    follow_ups = (*config.twice_phrases, *config.again_phrases) if config.follow_ups > 0 else ()
    phrases = " ".join((*config.arithmetic_phrases, *config.digit_phrases, *follow_ups)).replace("{}", " ")
    return tuple(sorted({*re.findall(r"[\w']+", phrases), *NUMBERS[:10], "plus", "minus"}))


def doubled_number(number: int) -> tuple[str, str]:
    """The answer that doubles a number, in words and in digits: "twice five is ten", "twice 5 is 10"."""
    return f"twice {spoken_number(number)} is {spoken_number(2 * number)}", f"twice {number} is {2 * number}"


def draw_questions(config: SpokenDigitsConfig, rng: random.Random, count: int) -> list[Question]:
    """Draw the questions of a conversation; each but the first may refer to the one before."""
    questions: list[Question] = []
    for _ in range(count):
        follows = bool(questions) and config.follow_ups > 0 and rng.random() < config.follow_ups
        questions.append(draw_follow_up(config, rng, questions[-1]) if follows else draw_question(config, rng))
    return questions


def draw_follow_up(config: SpokenDigitsConfig, rng: random.Random, before: Question) -> Question:
    """Draw a question that refers to the one before: for it again, or, of a number of `RESULTS`, for twice as much."""
    if before.number not in RESULTS or rng.random() >= 0.5:
        return replace(before, kind="again", text=rng.choice(config.again_phrases))
    assert before.number is not None
    return Question("twice", rng.choice(config.twice_phrases), *doubled_number(before.number), 2 * before.number)


def draw_question(config: SpokenDigitsConfig, rng: random.Random, kind: str | None = None) -> Question:
    """Draw a question from `rng`, of the given kind, or of either."""
    if kind is None:
        kind = "arithmetic" if rng.random() < config.arithmetic else "digits"
    if kind == "arithmetic":
        a, b, plus = rng.randrange(10), rng.randrange(10), rng.random() < 0.5
        result = a + b if plus else a - b
        asked = rng.choice(config.arithmetic_phrases).format(f"{NUMBERS[a]} {'plus' if plus else 'minus'} {NUMBERS[b]}")
        return Question("arithmetic", asked, spoken_number(result), str(result), result)
    length = rng.choices(range(1, len(config.lengths) + 1), config.lengths)[0]
    digits = [rng.randrange(10) for _ in range(length)]
    words = " ".join(NUMBERS[d] for d in digits)
    return Question("digits", rng.choice(config.digit_phrases).format(words), words, "".join(map(str, digits)))
