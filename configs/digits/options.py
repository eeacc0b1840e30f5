"""Settings of the sources `spoken-digits` and `recorded-digits`."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from omni.errors import UserError
from omni.utils.configuration import Share, configuration, span
from train.data.tts.espeak import SAMPLE_RATE
from train.data.tts.voices import check_spec

RATE = 16000
"""Sample rate of the questions."""
_ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp")
_VARIANTS = ("f1", "f2", "f3", "f4", "f5", "m1", "m2", "m3", "m4", "m5", "m6", "m7", "m8")
_RARE_VARIANTS = (
    *("Alex", "Andy", "Annie", "Denis", "Gene", "Gene2", "Jacky", "Lee", "Michael", "Storm", "adam", "anika", "announcer"),
    *("antonio", "aunty", "belinda", "boris", "caleb", "david", "ed", "grandma", "grandpa", "ian", "iven", "iven2", "john"),
    *("klatt", "klatt2", "klatt3", "max", "norbert", "pablo", "paul", "quincy", "rob", "shelby", "steph", "steph2", "travis"),
    *("victor", "zac"),
)
_HELD_OUT = (  # nor has the model that ships heard them: configs/nano-live/voices-held-out.yaml
    *("en-us+Alicia", "en-us+Andrea", "en-us+Mike", "en-us+Reed"),
    *("en-gb+benjamin", "en-gb+edward", "en-gb+linda", "en-gb+robert"),
)


@configuration
class SpokenDigitsConfig:
    """Settings of the spoken questions and of their answers.

    Attributes:
        arithmetic: share of questions that calculate; the others read digits back.
        lengths: weights of digit strings of one, two, three, ... digits.
        arithmetic_phrases, digit_phrases: how it is asked; `{}` stands for "one plus two", or for the digits.
        accents, variants: training voices are all pairs of them (`en-us+f1`).
        rare_variants, rare: further variants, and the share of questions they ask.
        held_out: voices for evaluation; none of their variants may be one of training.
        rate: words per minute, from and to; drawn evenly, as the next three.
        pitch, pitch_range: espeak-ng's settings, 0 to 100.
        examined: the source has questions for validation, in the voices of `held_out`.
        silence: seconds before and after the question.
        hesitant: share of the training questions that are spoken in two parts, each with an intonation of its own.
        hesitation: seconds of silence between these.
        question_rate: samples per second that questions are recorded at: 8000 takes away what a telephone does.
        peak: largest amplitude of a question.
        answer_text: the answer is written in `words` ("minus two") or `digits` ("-2").
        answer_speech: the answer's `words` are spoken one by one and joined, or the `phrase` is spoken as a whole.
        answer_voice, answer_rate, answer_pitch: the one voice that answers.
        turns: weights of conversations of one, two, ... questions.
        follow_ups: share of a conversation's questions, other than the first, that refer to the turn before: half ask
            for twice its result where it has one (from -9 to 18; "twice five is ten"), the others for the same answer again.
        twice_phrases, again_phrases: how that is asked.
        reuse: how often an utterance is drawn; each time it is augmented again.
        reuse_distance: draws from one use to the next.
    """

    arithmetic: Share = 0.5
    lengths: tuple[float, ...] = (1.0, 1.0, 2.0, 3.0)
    arithmetic_phrases: tuple[str, ...] = ("what is {}", "what is {}", "how much is {}", "tell me {}", "{}")
    digit_phrases: tuple[str, ...] = ("say {}", "say {}", "repeat {}", "read back {}", "please say {}")
    accents: tuple[str, ...] = _ACCENTS
    variants: tuple[str, ...] = _VARIANTS
    rare_variants: tuple[str, ...] = _RARE_VARIANTS
    rare: Share = 0.5
    held_out: tuple[str, ...] = _HELD_OUT
    examined: bool = True
    question_rate: Annotated[int, Field(ge=4000, le=SAMPLE_RATE)] = RATE
    rate: Annotated[tuple[int, int], span(80)] = (130, 200)
    pitch: Annotated[tuple[int, int], span(0)] = (25, 75)
    pitch_range: Annotated[tuple[int, int], span(0)] = (25, 75)
    silence: Annotated[tuple[float, float], span(0)] = (0.0, 0.1)
    hesitant: Share = 0.0
    hesitation: Annotated[tuple[float, float], span(0, 10)] = (0.2, 1.0)
    peak: Annotated[float, Field(gt=0, le=1)] = 0.5
    answer_text: Literal["words", "digits"] = "words"
    answer_speech: Literal["words", "phrase"] = "words"
    answer_voice: str = "en-us+f3"
    answer_rate: int = 230
    answer_pitch: int = 50
    turns: tuple[float, ...] = (1.0,)
    follow_ups: Share = 0.0
    twice_phrases: tuple[str, ...] = ("and twice that", "and twice that?", "twice that")
    again_phrases: tuple[str, ...] = ("say it again", "again please")
    reuse: PositiveInt = 1
    reuse_distance: PositiveInt = 1024

    def __post_init__(self) -> None:
        for name in ("lengths", "turns"):
            weights = getattr(self, name)
            if not weights or min(weights) < 0 or sum(weights) <= 0:
                raise UserError(f"options.{name} {list(weights)}: give weights of at least 0, one of them above")
        for name in ("arithmetic_phrases", "digit_phrases"):
            for phrase in getattr(self, name) or ("",):
                if phrase.count("{}") != 1:
                    raise UserError(f"options.{name}: {phrase!r} must hold {{}} once, in the place of the numbers")
        for name in ("accents", "variants", "held_out", "twice_phrases", "again_phrases"):
            if not getattr(self, name):
                raise UserError(f"options.{name} is empty; name at least one")
        taught = {*self.variants, *self.rare_variants}
        for voice in self.held_out:
            if voice.partition("+")[2] in taught:
                raise UserError(
                    f"options.held_out names {voice!r}, but its variant speaks in training: take it out of one of them"
                )


WORDY = "A1T1"
"""The task of strings of other words."""


@configuration
class RecordedDigitsConfig:
    """Settings of the digit strings that are joined from recordings.

    Attributes:
        folder: where the files `{digit}_{speaker}_{index}.wav` are.
        held_out: speakers who are kept for evaluation; none of their recordings is trained on.
        lengths: weights of strings of one, two, three, ... digits.
        pause: seconds between two digits, from and to.
        silence: seconds before and after the string.
        speed: each string is played that much faster, from and to, its pitch with it: other speakers, as it were.
        level_db: how much louder or softer than the string's mean each digit is, from and to.
        floor_db: level of the noise under everything, relative to the loudest sample, from and to.
        trim_db: what is softer than this at a digit's edges, relative to its loudest moment, is cut off; drawn for each digit,
            from and to; null for nothing. Recordings are cut so, more or less: a "six" may be its vowel alone.
        voices: share of strings that synthetic voices say, digit by digit, with the settings of `answers`.
        noise_db: level of a recorder's noise under the digits of a string, white to pink, relative to its loudest sample,
            from and to; the pauses have none of it. null for none.
        noisy: share of strings that have it.
        digit_weights: how often zero, one, ... nine are said in training, relative to one another; none for equally often.
            Digits that lose most when their edges are cut off ("six", "three", "two") want more examples.
        english: zero to nine as voices that read English must read them; as they are written where it is empty.
        accents: zero to nine as espeak-ng's voices of other languages must read them to speak English with an accent, by
            language: `{es: siro uan tu tri for faif siks seven eit nain}`. Here and in `english`, other pronunciations follow
            a word after bars: `six|icks|ick|seeks`.
        otherwise: share of words that are said as one of their other pronunciations.
        accented: share of the synthetic voices' strings that have such an accent.
        more_voices: voices of other programs, as `data prepare` takes them (`command:flite -voice rms -t {text} -o {out}`), by
            what they read: `en` for English words, or a language of `accents`.
        voice_folder: keeps what these voices say from run to run: before training starts they say all that they may be asked
            for and that it lacks. null: they speak when asked, each word once in every process.
        more: share of strings that they say.
        words: other English words, apart by spaces, that synthetic voices say as well; the model writes them down (task A1T1).
            Training on many words teaches the model sounds rather than ten words, and so to recognise other speakers' digits.
        wordy: share of the synthetic voices' strings that are of such words.
        answers: how they are answered and how often they are drawn, and the synthetic voices that ask.
    """

    folder: str = ""
    held_out: tuple[str, ...] = ()
    lengths: tuple[float, ...] = (1.0, 1.0, 2.0, 3.0)
    pause: Annotated[tuple[float, float], span(0)] = (0.02, 0.35)
    silence: Annotated[tuple[float, float], span(0)] = (0.02, 0.2)
    speed: Annotated[tuple[float, float], span(0.25)] = (0.85, 1.2)
    level_db: Annotated[tuple[float, float], span(-60)] = (-3.0, 3.0)
    floor_db: Annotated[tuple[float, float], span(-200)] = (-70.0, -45.0)
    trim_db: Annotated[tuple[float, float] | None, span(-120, 0)] = None
    noise_db: Annotated[tuple[float, float] | None, span(-120, 0)] = None
    noisy: Share = 1.0
    digit_weights: tuple[float, ...] = ()
    voices: Share = 0.0
    english: str = ""
    accents: dict[str, str] = field(default_factory=dict)
    otherwise: Share = 0.0
    accented: Share = 0.0
    more_voices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    more: Share = 0.0
    voice_folder: str | None = None
    words: str = ""
    wordy: Share = 0.0
    answers: SpokenDigitsConfig = field(default_factory=SpokenDigitsConfig)

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 0 or sum(self.lengths) <= 0:
            raise UserError(f"options.lengths {list(self.lengths)}: give weights of at least 0, one of them above")
        weights = self.digit_weights
        if weights and not (len(weights) == 10 and min(weights) >= 0 and 0 < sum(weights) < float("inf")):
            raise UserError(f"options.digit_weights {list(weights)}: give ten weights of at least 0, one of them above")
        if self.voices + self.more > 1:
            raise UserError(f"options.voices {self.voices} and options.more {self.more} are shares of one whole: lower one")
        if self.more and not any(self.more_voices.values()):
            raise UserError(f"options.more is {self.more}, but options.more_voices names no voice: name one or more")
        if self.accented and not self.accents:
            raise UserError(f"options.accented is {self.accented}, but options.accents has no language: give at least one")
        for word in self.words.split():
            if "|" in word or not re.search(r"[^\W\d_]", word):
                raise UserError(f"options.words has {word!r}: write words of letters, apart by spaces, without bars")
        if self.wordy and self.voices + self.more == 0:
            raise UserError(f"options.wordy is {self.wordy}, but synthetic voices say nothing: raise options.voices or more")
        if self.wordy and not self.words.split():
            raise UserError(f"options.wordy is {self.wordy}, but options.words has none: write some, apart by spaces")
        if self.wordy and self.more and not self.more_voices.get("en"):
            raise UserError(f"options.wordy is {self.wordy}, but options.more_voices.en names no voice: name one or more")
        spelled = {f"accents.{language}": words for language, words in self.accents.items()}
        for name, words in {**spelled, **({"english": self.english} if self.english else {})}.items():
            if len(words.split()) != 10:
                raise UserError(f"options.{name} has {len(words.split())} words: write zero to nine, apart by spaces")
            for word in words.split():
                if not all(word.split("|")):
                    raise UserError(f"options.{name} has {word!r}: write a word before, between and behind bars")
        known: set[str] = set()
        for language, specs in self.more_voices.items():
            if language != "en" and language not in self.accents:
                raise UserError(
                    f"options.more_voices.{language}: write zero to nine as these voices must read them as "
                    f"options.accents.{language}"
                )
            for spec in specs:
                check_spec(spec)
                if spec in known:
                    raise UserError(f"options.more_voices.{language} names {spec!r}, which is there already: name it once")
                known.add(spec)
