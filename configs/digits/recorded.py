"""Source of digit strings joined from people's recordings of single digits, with pauses; the model reads them back.

The recordings are a folder such as the Free Spoken Digit Dataset's (Zohar Jackson and others, CC BY-SA 4.0,
https://github.com/Jakobovski/free-spoken-digit-dataset, `recordings/`): files named `{digit}_{speaker}_{index}.wav`. A string
is of one speaker. The answers are spoken by the synthetic voice of `spoken`. Utterance u is a pure function of
(seed, u).

S samples.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from omni.audio.io import read_audio
from omni.audio.resample import resample
from omni.codec.base import AudioCodec
from omni.errors import UserError
from train.console.progress import Progress
from train.data.augment import coloured_noise
from train.data.readers.templates.sentences import NUMBERS
from train.data.rows.row import Codes, Row, RowTurn, Sound
from train.data.seeding import seeded_rng
from train.data.tts.espeak import SAMPLE_RATE, check_voice, synthesise

from .options import RATE, WORDY, RecordedDigitsConfig
from .spoken import SpokenDigits
from .words import keep_words, say_word

NAME = re.compile(r"(?P<digit>\d)_(?P<speaker>[^_]+)_(?P<index>\d+)\.(wav|flac)")


SILENT = 1e-4
"""Peak amplitude up to which a spoken word counts as silent."""

WHERE = "git clone https://github.com/Jakobovski/free-spoken-digit-dataset fetches such a folder, its recordings/"


class RecordedDigits:
    """Source of recorded digit strings; see the module. `row(index)` is a pure function of (seed, index).

    Raises:
        UserError: no folder or no such files in it, a held-out speaker without recordings, or no speaker left to train on.
    """

    size = None
    name = "recorded-digits"

    def __init__(self, config: RecordedDigitsConfig, codec: AudioCodec, seed: int = 0) -> None:
        self.config = config
        self.seed = seed
        self.codec = codec
        self.answers = SpokenDigits(config.answers, codec, seed)
        self.files = find_recordings(config.folder)
        missing = [speaker for speaker in config.held_out if speaker not in self.files]
        if missing:
            known = ", ".join(sorted(self.files))
            raise UserError(f"options.held_out names {missing[0]!r}, but {config.folder} has {known}: name one of them")
        for language in config.accents:
            check_voice(language)
        self.programs = {spec: language for language, specs in config.more_voices.items() for spec in specs}
        self.speakers = tuple(sorted(set(self.files) - set(config.held_out)))
        if not self.speakers:
            raise UserError(f"options.held_out keeps every speaker of {config.folder}: leave at least one to train on")

    @property
    def repeats(self) -> bool:
        """True where utterances are drawn several times, by `options.answers.reuse`."""
        return self.answers.repeats

    def identity(self, index: int) -> int:
        """Number of the utterance that draw `index` uses, see `SpokenDigits.identity`."""
        return self.answers.identity(index)

    def row(self, index: int) -> Row:
        """Make the digit string of draw `index`."""
        utterance = self.identity(index)
        rng = seeded_rng(self.seed, "recorded", utterance)
        c = self.config
        share = rng.random() if c.voices or c.more else 1.0
        wordy = share < c.voices + c.more and c.wordy > 0 and rng.random() < c.wordy
        if share < c.voices:
            speaker = self.answers.choose_voice(rng)
            if c.accented and not wordy and rng.random() < c.accented:
                speaker = rng.choice(sorted(c.accents)) + "+" + speaker.partition("+")[2]
        elif share < c.voices + c.more:
            speaker = rng.choice([spec for spec, language in self.programs.items() if language == "en" or not wordy])
        else:
            speaker = rng.choice(self.speakers)
        where = f"recorded digits, utterance {utterance}"
        return self._wordy_row(rng, speaker, utterance, where) if wordy else self._row(rng, speaker, utterance, where, True)

    def held_out(self, count: int = 200, seed: int = 1) -> list[Row]:
        """Make the evaluation set: strings of the held-out speakers in turn, at own speed. `source` ends in the speaker."""
        if not self.config.held_out:
            raise UserError("options.held_out names no speaker; name those to evaluate on")
        rows = []
        for i in range(count):
            speaker = self.config.held_out[i % len(self.config.held_out)]
            rows.append(self._row(seeded_rng(seed, "recorded-held-out", i), speaker, i, f"held-out string {i}", False))
        return rows

    def _length(self, rng: random.Random) -> int:
        return rng.choices(range(1, len(self.config.lengths) + 1), self.config.lengths)[0]

    def _wordy_row(self, rng: random.Random, voice: str, number: int, where: str) -> Row:
        """Make a row of other words than digits, which the model transcribes."""
        words = rng.choices(self.config.words.split(), k=self._length(rng))
        sound = self._joined(rng, voice, range(len(words)), True, words)
        turn = RowTurn(question_text=" ".join(words), question_audio=sound)
        return Row((turn,), id=str(number), source=f"{self.name}/words", speaker=voice, task=WORDY, where=where)

    def _row(self, rng: random.Random, speaker: str, number: int, where: str, varied: bool) -> Row:
        length = self._length(rng)
        if varied and self.config.digit_weights:
            digits = rng.choices(range(10), self.config.digit_weights, k=length)
        else:
            digits = [rng.randrange(10) for _ in range(length)]
        sound = self._joined(rng, speaker, digits, varied)
        words = " ".join(NUMBERS[d] for d in digits)
        written = words if self.answers.config.answer_text == "words" else "".join(map(str, digits))
        codes = Codes(self.codec.name, self.answers.answer_codes(words))
        turn = RowTurn(question_text=words, question_audio=sound, answer_text=written, answer_codes=codes)
        return Row((turn,), id=str(number), source=f"{self.name}/{speaker}", speaker=speaker, where=where)

    def _joined(
        self, rng: random.Random, speaker: str, digits: Sequence[int], varied: bool, words: Sequence[str] = ()
    ) -> Sound:
        """Join a string [S] of digits, or of other `words`, with pauses and a little noise."""
        c = self.config
        pieces = [torch.zeros(round(rng.uniform(*c.silence) * RATE))]
        say = self._speaker(rng, speaker, words)
        noisy = None
        if varied and c.noise_db is not None and rng.random() < c.noisy:
            noisy = rng.uniform(*c.noise_db), rng.random()
        for position, digit in enumerate(digits):
            if position:
                pieces.append(torch.zeros(round(rng.uniform(*c.pause) * RATE)))
            said = say(digit)
            if not float(said.abs().max()) > SILENT:
                word = (words or NUMBERS)[digit]
                raise UserError(f"recorded digits: {speaker} is silent where {word!r} is to be said: take it out")
            if varied and c.trim_db is not None:
                said = trimmed(said, rng.uniform(*c.trim_db))
            if noisy is not None:
                said = said + self._noise(rng, len(said), *noisy) * said.abs().max()
            level = 10 ** (rng.uniform(*c.level_db) / 20) if varied else 1.0
            pieces.append(said * (level * 0.05 / max(float(said.square().mean().sqrt()), 1e-5)))
        pieces.append(torch.zeros(round(rng.uniform(*c.silence) * RATE)))
        joined = torch.cat(pieces)
        peak = float(joined.abs().max())
        noise = torch.randn(len(joined), generator=torch.Generator().manual_seed(rng.getrandbits(62)))
        joined = joined + noise * (peak * 10 ** (rng.uniform(*c.floor_db) / 20))
        joined = joined * (self.answers.config.peak / float(joined.abs().max()))
        rate = round(100 * rng.uniform(*c.speed)) if varied else 100
        return Sound(joined, RATE * rate // 100)

    def _noise(self, rng: random.Random, samples: int, decibels: float, colour: float) -> Tensor:
        """Draw a recorder's noise [S], at the bandwidth of the recordings."""
        generator = torch.Generator().manual_seed(rng.getrandbits(62))
        rate = self.answers.config.question_rate
        noise = coloured_noise(-(-samples * rate // RATE) + 1, colour, generator)
        return resample(noise, rate, RATE)[:samples] * 10 ** (decibels / 20)

    def _speaker(self, rng: random.Random, speaker: str, words: Sequence[str]) -> Callable[[int], Tensor]:
        """Choose the speaker of a string: a function that says a digit [S], or one of the `words`.

        It uses recordings, or a synthetic voice with the same settings for the whole string.
        """
        if speaker in self.files:
            return lambda digit: _recording(str(rng.choice(self.files[speaker][digit])))
        c = self.answers.config
        if speaker in self.programs:
            spelled = _spelled(self.config, self.programs[speaker], words)
            return lambda digit: self._say(rng, spelled[digit], lambda word: self._said(speaker, word))
        rate, pitch, pitch_range = (rng.randint(*limits) for limits in (c.rate, c.pitch, c.pitch_range))
        spelled = _spelled(self.config, speaker.partition("+")[0], words)

        def read(word: str) -> Tensor:
            said = synthesise(word, speaker, rate, pitch, pitch_range)[0]
            return resample(resample(said, SAMPLE_RATE, c.question_rate), c.question_rate, RATE)

        return lambda digit: self._say(rng, spelled[digit], read)

    def _said(self, voice: str, word: str) -> Tensor:
        """Speak a word [S] in another program's voice, without silence before and after it."""
        return trimmed(say_word(voice, word, self.answers.config.question_rate, self.config.voice_folder), -50.0)

    def _say(self, rng: random.Random, spelled: list[str], read: Callable[[str], Tensor]) -> Tensor:
        """Speak a word [S], perhaps in another pronunciation; in its first one where the voice is silent for the other."""
        usual, *others = spelled
        if others and rng.random() < self.config.otherwise:
            said = read(rng.choice(others))
            if float(said.abs().max()) > SILENT:
                return said
        return read(usual)


def speak_ahead(config: RecordedDigitsConfig, progress: Progress = "auto") -> int:
    """Speak and cache all words that other programs' voices may be asked for; returns the number of new words.

    Raises:
        UserError: a voice cannot say a word.
    """
    if config.voice_folder is None or not config.more:
        return 0
    wanted = {
        voice: [
            *(word for words in _spelled(config, language) for word in words),
            *(config.words.split() if config.wordy and language == "en" else ()),
        ]
        for language, voices in config.more_voices.items()
        for voice in voices
    }
    return keep_words(wanted, config.answers.question_rate, config.voice_folder, progress)


def _spelled(config: RecordedDigitsConfig, language: str, others: Sequence[str] = ()) -> list[list[str]]:
    """Spellings of zero to nine, or of the other words, as voices of a language read them, each with its variants."""
    words = config.accents.get(language, config.english)
    return [word.split("|") for word in others or words.split() or NUMBERS[:10]]


def trimmed(sound: Tensor, decibels: float) -> Tensor:
    """Trim a recording [S] to the first and the last 10 ms that are louder than `decibels` relative to the loudest."""
    frame = RATE // 100
    power = torch.nn.functional.avg_pool1d(sound.square()[None, None], frame, ceil_mode=True)[0, 0]
    loud = (power >= power.max() * 10 ** (decibels / 10)).nonzero()
    return sound[int(loud[0]) * frame : (int(loud[-1]) + 1) * frame]


@lru_cache(maxsize=4096)
def _recording(file: str) -> Tensor:
    """Load a recording [S] at 16 kHz; a few thousand short ones are cached, 60 kB each."""
    return read_audio(file, RATE)


def find_recordings(folder: str) -> dict[str, dict[int, list[Path]]]:
    """Find a folder's recordings by speaker and digit, in the order of their numbers.

    Raises:
        UserError: the folder is missing or holds none, or a speaker lacks a digit.
    """
    if not folder:
        raise UserError(f"options.folder is empty: name the folder of files such as 7_jackson_12.wav ({WHERE})")
    root = Path(folder)
    if not root.is_dir():
        raise UserError(f"options.folder {folder} does not exist: {WHERE}")
    recordings: dict[str, dict[int, list[tuple[int, Path]]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(root.iterdir()):
        if match := NAME.fullmatch(path.name):
            recordings[match["speaker"]][int(match["digit"])].append((int(match["index"]), path))
    if not recordings:
        raise UserError(f"options.folder {folder} holds no files such as 7_jackson_12.wav: {WHERE}")
    for speaker, digits in recordings.items():
        lacking = sorted(set(range(10)) - set(digits))
        if lacking:
            raise UserError(f"options.folder {folder}: {speaker} never says {NUMBERS[lacking[0]]}; add it, or take them out")
    return {
        speaker: {digit: [path for _, path in sorted(paths)] for digit, paths in sorted(digits.items())}
        for speaker, digits in recordings.items()
    }
