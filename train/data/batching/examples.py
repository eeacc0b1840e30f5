"""Makes training examples of rows: features of spoken questions, ids of written questions and of answers, columns of the task.

Dimensions: M values of a feature frame, F feature frames, C columns, A audio streams, S samples.
"""

from __future__ import annotations

import math
import random
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from omni.audio.io import SAMPLE_RATE
from omni.codec.base import AudioCodec
from omni.config import ModelConfig
from omni.errors import UserError
from omni.generate.question import read_system
from omni.layout import IGNORE, Layout
from omni.model.multitask_projector import SHARING
from omni.tasks import TASKS, Columns, Turn, answer, find_task, join, opened, prompt, system_message
from omni.text import Tokenizer
from train.data.augment import augment_audio, augment_mel, speech
from train.data.config import AlignmentKind, AugmentConfig
from train.data.rows.row import Row, RowTurn, Sound
from train.data.seeding import seeded_generator, seeded_rng
from train.data.tts.espeak import check_voice, phonemes

_LETTERS = " 'abcdefghijklmnopqrstuvwxyz"

_TWO_SIGNS = ("tʃ", "dʒ", "eɪ", "aɪ", "oʊ", "aʊ", "ɔɪ")  # noqa: RUF001
_SOUNDS = {sound: i for i, sound in enumerate((*_TWO_SIGNS, *"pbtdkɡfvθðszʃʒhmnŋlɹjwiɪɛæɑɔʊuʌəɚɜɐᵻɾʔ"), 1)}  # noqa: RUF001
"""Ids of the phonemes of American English in espeak-ng's IPA. A vowel before r is two phonemes."""
_SOUND = re.compile("|".join(_SOUNDS))


class Alignment:
    """Spells transcripts as ids.

    Args:
        spelling: `none`: no transcript. `letters`: a to z, space and apostrophe. `words`: the given words. `tokens`: the text
            stream's own, of the text as one would type it, case and stops included: so the language model is asked best.
        words: the vocabulary of `words`; a text with another word has no transcript.
        sounds: spell by the phonemes of English as well, each word as espeak-ng reads it alone. Their ids follow the others',
            in the same list: the objective distinguishes them by their values, which start at `size`.

    Attributes:
        size: number of ids of the first spelling, the blank included, or `tokens`: what `model.ctc` must be.
        sound_size: number of ids of the second, its blank included: what `model.ctc_sounds` must be; 0 without it.
    """

    def __init__(
        self, spelling: AlignmentKind, words: Iterable[str] = (), tokenizer: Tokenizer | None = None, sounds: bool = False
    ) -> None:
        self.spelling, self.tokenizer = spelling, tokenizer
        symbols = sorted(set(words)) if spelling == "words" else _LETTERS if spelling == "letters" else ""
        self._ids = {symbol: i for i, symbol in enumerate(symbols, 1)}
        if spelling == "words" and not self._ids:
            raise UserError("alignment 'words' needs the words that questions are made of; name them, or use 'letters'")
        self.first = 1 + len(self._ids) if self._ids else 0
        self.size: int | Literal["tokens"] = "tokens" if spelling == "tokens" else self.first
        if sounds:
            check_voice("en-us")  # raises where espeak-ng is not installed
        self.sound_size = 1 + len(_SOUNDS) if sounds else 0

    def ids(self, text: str) -> list[int]:
        """Ids of a text in every spelling, without blanks; empty where it cannot be spelt. Phonemes that English does not have
        are left out."""
        plain = text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
        heard = (" ".join(phonemes(word)) for word in re.findall(r"[\w']+", plain) if self.sound_size)
        sounds = [self.first + _SOUNDS[sound] for said in heard for sound in _SOUND.findall(said)]
        if self.spelling == "tokens" and self.tokenizer is not None:
            typed = " ".join(plain.split()) if re.search(r"\w", plain) else ""
            stop = "." if typed[-1:].isalnum() else ""
            return [*(i + 1 for i in self.tokenizer.encode(typed + stop)), *sounds]
        if self.spelling == "words":
            word_ids = [self._ids.get(word, 0) for word in re.findall(r"[\w']+", plain.lower())]
            return [*(word_ids if all(word_ids) else []), *sounds]
        return [*(self._ids[letter] for letter in " ".join(plain.lower().split()) if letter in self._ids), *sounds]


UNSURE = 2
"""Frames after the last with speech that have no label of the end: whether they belong to it is a matter of the threshold."""


def turn_labels(voice: Tensor, frames: int) -> Tensor:
    """Labels (voice, end) of a clip, [frames, 2] int8; 1, 0, or -1 for none. A frame has a voice where one of its feature
    frames has. All frames after the last voice are the end, but for the first `UNSURE`, which have no such label; a clip
    without a voice has none of the end. `voice`: feature frames with speech, [F] bool, as many to each encoder frame; the last
    may lack some."""
    ratio = -(-len(voice) // frames)
    heard = torch.nn.functional.pad(voice, (0, ratio * frames - len(voice))).view(frames, ratio).any(1)
    labels = torch.stack([heard, torch.zeros_like(heard)], dim=1).to(torch.int8)
    spoken = heard.nonzero().flatten()
    if not len(spoken):
        labels[:, 1] = -1
        return labels
    last = int(spoken[-1]) + 1
    labels[last : last + UNSURE, 1] = -1
    labels[last + UNSURE :, 1] = 1
    return labels


@dataclass(frozen=True)
class Clip:
    """One window of the encoder's input: features [M, F], its number of encoder frames, and its transcript's ids, if any. Where
    frames are kept with the rows, `inputs` are these, [D, T].
    `turn`: labels of the turn head, see `turn_labels`; None without such a head, and for a window of a longer sound."""

    inputs: Tensor
    frames: int
    transcript: Sequence[int] = ()
    turn: Tensor | None = None


class ClipFeatures(NamedTuple):
    """A window of a question's sound: features [M, F], its number of encoder frames, and frames with speech [F] bool, None
    where nobody asks for them."""

    mel: Tensor
    frames: int
    voice: Tensor | None = None


@dataclass(frozen=True)
class Example:
    """One conversation, ready to be packed.

    Attributes:
        columns: the sequence, see `omni.tasks.example`.
        task: [C] index into `tuple(TASKS)` of each column's turn.
        clips: its spoken questions, in the order of `columns.features`.
        source: number and name of the source, for counts.
        milliseconds: of sound, heard and spoken: the frames of its clips and of its answers' codes.
    """

    draw: int
    columns: Columns
    task: Tensor
    clips: tuple[Clip, ...]
    where: str
    tasks: tuple[str, ...] = ()
    source: str = ""
    milliseconds: int = 0


TOO_LONG = "too long"


class Unusable(UserError):
    """A row that a task cannot use.

    Attributes:
        reason: the kind of fault, the same for all such rows, such as `too long` or `no answer_text`.
        task: that the row was drawn for, "" where the row could not be read.
        source: number and name, as in `data.sources[0] (rows.parquet)`.
    """

    def __init__(self, message: str, reason: str, task: str = "", source: str = "") -> None:
        super().__init__(message)
        self.reason, self.task, self.source = reason, task, source


class TooLong(Unusable):
    """An example that does not fit: a question beyond the encoder's window, or columns beyond a packed row."""

    def __init__(self, message: str, task: str = "") -> None:
        super().__init__(message, TOO_LONG, task)


@dataclass(eq=False)
class Prepared:
    """A row with the results computed from it, which is cached for rows that are drawn again soon. `kept_as` is its key in the
    cache; None where it is used once."""

    row: Row
    kept_as: tuple[int, int] | None = None
    heard: dict[int, list[ClipFeatures]] = field(default_factory=dict)
    codes: dict[int, Tensor] = field(default_factory=dict)
    ids: dict[str, list[int]] = field(default_factory=dict)


class ExampleMaker:
    """Makes examples for one model.

    UserError: the tokenizer or the alignment does not fit the model, or pauses do not fit the encoder.

    Args:
        model: its layout, encoder and projector determine the number of columns of a question.
        codec: checks and encodes the answers' codes; None where no task answers in speech.
        alignment: how transcripts are spelt for the alignment head.
        augment: augmentation of the questions' sound, of a cached row once for all, and of its features; None for none.
        seed: of the augmentation.
        system: rows' system messages come before their first questions; otherwise they are left out.
        cut: share of the answers, other than a conversation's last, that are cut; see `interrupted`.
        heard_only: nothing but the encoder is trained: examples end with their questions, of which rows need the sound alone.

    Attributes:
        frames: fingerprint of the encoder whose frames, kept with the rows, are the inputs; None for features of the sound.
    """

    frames: int | None = None

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer,
        codec: AudioCodec | None = None,
        alignment: Alignment | None = None,
        augment: AugmentConfig | None = None,
        seed: int = 0,
        system: bool = True,
        cut: float = 0.0,
        heard_only: bool = False,
    ) -> None:
        self.model, self.tokenizer, self.codec = model, tokenizer, codec
        self.alignment, self.augment = alignment or Alignment("none"), augment
        self.seed, self.system, self.cut, self.heard_only = seed, system, cut, heard_only
        if len(tokenizer) > model.layout.text.size:
            raise UserError(
                f"the tokenizer has {len(tokenizer)} ids, the layout's text stream {model.layout.text.size}; "
                "use the model's own tokenizer"
            )
        sizes: list[tuple[str, object, object, str]] = [("ctc", self.alignment.size, model.ctc, "choose another alignment")]
        sizes += [("ctc_sounds", self.alignment.sound_size, model.ctc_sounds, "change data.sounds")]
        for name, size, heads, otherwise in sizes if self.alignment.spelling != "none" else ():  # else no head is trained
            if size != heads:
                raise UserError(
                    f"the alignment {self.alignment.spelling!r} needs {size} as model.{name}, which is {heads}; set it to "
                    f"that, or {otherwise}"
                )
        if augment is not None and augment.pauses is not None and model.encoder.feature_floor is None:
            raise UserError(
                "data.augment.pauses needs features with a fixed floor, which silence has: set encoder.mode to chunked, or "
                "encoder.mel_floor to fixed"
            )

    @property
    def input_size(self) -> int:
        """Values of a feature frame, or of a frame kept with the rows."""
        return self.model.encoder.bands if self.frames is None else self.model.encoder.width

    def make(self, draw: int, prepared: Prepared, tasks: Sequence[str], source: str = "") -> Example:
        """Make the example of a prepared row as draw number `draw`, with one task for each turn.

        Raises:
            UserError: a part that a task needs is missing or broken; the row and turn are named.
            TooLong: a question is longer than the encoder's window.
        """
        turns, clips, projector, where = list[Turn](), list[Clip](), self.model.projector, prepared.row.where
        for name in tasks if projector.kind in SHARING else ():
            if find_task(name).question == "audio" and name not in projector.tasks:
                raise Unusable(
                    f"{where} is of task {name}, but model.projector.tasks are {', '.join(projector.tasks)}; add it there",
                    "a task that the projector has not",
                    name,
                )
        for number, (turn, name) in enumerate(zip(prepared.row.turns, tasks, strict=True)):
            try:
                ids, heard = self._turn(draw, prepared, number, turn, name)
            except UserError as error:
                text = f"{where}, turn {number}: {error}"
                if isinstance(error, TooLong):
                    raise TooLong(text, name) from error
                raise Unusable(text, error.reason if isinstance(error, Unusable) else "broken", name) from error
            turns.append(ids)
            clips += heard
        if self.system and prepared.row.system:
            turns[0] = replace(turns[0], system=read_system(prepared.row.system, self.tokenizer))
        turns[1:] = [replace(turn, system=None) for turn in turns[1:]]
        columns_of = question_columns if self.heard_only else turn_columns
        parts = [columns_of(self.model.layout, turn) for turn in turns]  # turns do not overlap: the example is their join
        task = torch.cat([torch.full((len(part),), list(TASKS).index(name)) for part, name in zip(parts, tasks, strict=True)])
        columns = parts[0] if len(parts) == 1 else join(parts)
        asked = sum(clip.frames for clip in clips) / self.model.encoder.frames_per_second
        frames = sum(turn.codes.shape[1] for turn in turns if turn.codes is not None)
        spoken = frames / self.codec.frame_rate if self.codec is not None else 0.0
        sound = round(1000 * (asked + spoken))
        return Example(draw, columns, task, tuple(clips), where, tuple(dict.fromkeys(tasks)), source, sound)

    def _turn(self, draw: int, prepared: Prepared, number: int, turn: RowTurn, name: str) -> tuple[Turn, list[Clip]]:
        task = find_task(name)
        missing = turn.lacks(task, self.heard_only)
        if missing:
            raise Unusable(
                f"there is no {missing}, which task {task.name} needs: complete or drop the row, or use other tasks for it",
                f"no {missing}",
            )
        with _part("question_audio"):
            clips = self._clips(draw, prepared, number, turn) if task.question == "audio" else []
        features = sum(-(-clip.frames // self.model.projector.stack) for clip in clips)
        if self.heard_only:
            return Turn(task, features=features), clips
        with _part("answer_codes"):
            codes = self._codes(prepared, number, turn) if task.audio else None
        ids = Turn(
            task,
            features=features,
            question=self._ids(prepared, turn.question_text) if task.question == "text" else (),
            text=self._ids(prepared, turn.written(task)) if task.text else None,
            codes=codes,
        )
        if number < len(prepared.row.turns) - 1 and self.cut > 0:
            rng = seeded_rng(self.seed, "cut", draw, number)
            if rng.random() < self.cut:
                ids = interrupted(ids, turn, self.tokenizer, self.codec.frame_rate if self.codec else 1.0, rng)
        return ids, clips

    def _ids(self, prepared: Prepared, text: str) -> list[int]:
        if text not in prepared.ids:
            prepared.ids[text] = self.tokenizer.encode(text)
        return prepared.ids[text]

    def _clips(self, draw: int, prepared: Prepared, number: int, turn: RowTurn) -> list[Clip]:
        """The question's clips, augmented for this draw."""
        if number not in prepared.heard:
            key = ("sound", draw, number) if prepared.kept_as is None else ("kept", *prepared.kept_as, number)
            prepared.heard[number] = self._features(turn, *key) if self.frames is None else self._kept(turn)
            turns = list(prepared.row.turns)
            # The samples are twice as large as the features.
            turns[number] = replace(turn, question_audio=Sound(), question_frames=None)
            prepared.row = replace(prepared.row, turns=tuple(turns))
        heard = prepared.heard[number]
        transcript = self.alignment.ids(turn.question_text) if len(heard) == 1 else []
        clips = []
        for piece, window in enumerate(heard):
            mel, frames, voice = window if self.augment is None else self._vary(window, "features", draw, number, piece)
            clips.append(Clip(mel, frames, transcript, None if voice is None else turn_labels(voice, frames)))
        return clips

    def _kept(self, turn: RowTurn) -> list[ClipFeatures]:
        """The frames [D, T] of each window, as the row keeps them."""
        kept = turn.question_frames
        if kept is None or kept.encoder != self.frames:
            have = "no frames" if kept is None else "frames of another encoder"
            raise UserError(f"it has {have}, and other rows those of the model's: prepare all with --frames MODEL, or none")
        return [ClipFeatures(frames.T, len(frames)) for frames in kept.clips]

    def _features(self, turn: RowTurn, *key: int | str) -> list[ClipFeatures]:
        """Features [M, F] and encoder frames of each window of a question, its sound augmented by the seed `key`."""
        assert turn.question_audio is not None
        audio = turn.question_audio.load(SAMPLE_RATE)
        encoder, stack = self.model.encoder, self.model.projector.stack
        try:
            encoder.clips(len(audio))  # a question that is too long is refused before augmentation changes its length
        except UserError as error:
            raise (TooLong if len(audio) else UserError)(str(error)) from error
        clean = audio
        if self.augment is not None:
            changed = augment_audio(audio, self.augment, seeded_generator(self.seed, *key))
            if len(changed) <= encoder.max_samples or len(audio) > encoder.max_samples:
                audio = changed  # not where only the slower speed makes it too long for the window
        pieces = encoder.split(audio)
        if len(pieces) > 1 and encoder.positions % stack:
            raise UserError(
                f"the question lasts {len(audio) / SAMPLE_RATE:.1f} s and is split into windows of {encoder.positions} frames, "
                f"which projector.stack {stack} does not divide: cut it, or change one of them"
            )
        heard = [ClipFeatures(encoder.features(piece), encoder.clip_frames(len(piece))) for piece in pieces]
        if not self.model.turn or len(heard) > 1:
            return heard
        hidden = self.augment is not None and (self.augment.noise_snr_db or self.augment.echo_probability)
        voice = speech(encoder.features(clean) if hidden else heard[0].mel)
        index = torch.arange(heard[0].mel.shape[1]) * len(voice) // heard[0].mel.shape[1]  # speed may have changed the length
        return [heard[0]._replace(voice=voice[index])]

    def _vary(self, heard: ClipFeatures, *key: int | str) -> ClipFeatures:
        """Augment a clip by the seed `key`."""
        assert self.augment is not None
        encoder, generator, (mel, frames, voice) = self.model.encoder, seeded_generator(self.seed, *key), heard
        if encoder.fixed_length:
            changed, _ = augment_mel(mel, self.augment, generator, frames=min(2 * frames, mel.shape[1]))
            return ClipFeatures(changed, frames)
        floor, rate = encoder.feature_floor, encoder.frames_per_second * encoder.feature_frames(1)
        changed, voice = augment_mel(mel, self.augment, generator, voice=voice, floor=floor, rate=rate)
        if changed.shape[1] > encoder.feature_frames(encoder.positions):  # as in `_features`
            return heard
        return ClipFeatures(changed, encoder.frames_of(changed.shape[1]), voice)

    def _codes(self, prepared: Prepared, number: int, turn: RowTurn) -> Tensor:
        """Codes [A, F] of the answer: the row's own, or encoded from its audio."""
        if number not in prepared.codes:
            if self.codec is None:
                raise UserError("its task answers in speech, but the data has no codec; set one")
            if turn.answer_codes is not None:
                prepared.codes[number] = turn.answer_codes.for_codec(self.codec)
            elif turn.answer_audio is not None:
                prepared.codes[number] = self.codec.encode(turn.answer_audio.load(self.codec.sample_rate))
        return prepared.codes[number]


@contextmanager
def _part(name: str) -> Iterator[None]:
    """Context that names a part of the row in the block's UserErrors."""
    try:
        yield
    except TooLong:
        raise
    except UserError as error:
        raise Unusable(str(error), f"{name} is broken") from error


# --- columns of a turn ------------------------------------------------------------------------------------------

SHORT = 512
"""Longest answer that is cached, in codes and text ids together; also the longest question, in text ids."""


def turn_columns(layout: Layout, turn: Turn) -> Columns:
    """Make the columns of one turn; equals `omni.tasks.example(layout, [turn])`, at a third of the cost where its parts have
    been made before: a spoken question's columns depend on its length alone, and short answers repeat. They must not be
    modified."""
    task = find_task(turn.task)
    asked = question_columns(layout, turn)
    text = tuple(turn.text) if task.text and turn.text is not None else None
    codes = turn.codes if task.audio else None
    if turn.cut or len(text or ()) + (0 if codes is None else codes.numel()) > SHORT:  # a cut answer hardly repeats
        replied = answer(layout, turn)
    else:
        frames = None if codes is None else (codes.to(torch.int32).numpy().tobytes(), *codes.shape)
        replied = _answer(layout, task.name, text, frames)
    begin, end = len(asked), len(asked) + len(replied)
    targets = torch.full((len(layout), end), IGNORE)
    targets[:, begin - 1 : end - 1] = replied.targets  # each column's target is the next column's token
    return Columns(
        tokens=torch.cat([asked.tokens, replied.tokens], dim=1),
        targets=targets,
        feature_index=torch.cat([asked.feature_index, replied.feature_index]),
        features=asked.features,
    )


def question_columns(layout: Layout, turn: Turn) -> Columns:
    """Make the columns of a turn's question and of the system message before it, without targets."""
    task = find_task(turn.task)
    written = tuple(turn.question) if task.question == "text" else ()
    make = _prompt if len(written) <= SHORT else _prompt.__wrapped__
    asked = make(layout, task.name, turn.features, written)
    return opened(layout, turn, asked, _system_prompt)


_system_prompt = lru_cache(maxsize=256)(system_message)  # system messages are few, and each precedes many questions


@lru_cache(maxsize=8192)
def _prompt(layout: Layout, task: str, features: int, question: tuple[int, ...]) -> Columns:
    return prompt(layout, Turn(task, features=features, question=question, system=None))


@lru_cache(maxsize=8192)  # a thousand utterances, each answered as several tasks
def _answer(layout: Layout, task: str, text: tuple[int, ...] | None, frames: tuple[bytes, int, int] | None) -> Columns:
    """The answer's columns; `frames`: codes as bytes of int32, number of streams and of frames."""
    codes = None
    if frames is not None:
        data, streams, count = frames
        codes = torch.from_numpy(np.frombuffer(data, np.int32).reshape(streams, count).astype(np.int64))
    return answer(layout, Turn(task, text=text, codes=codes))


def interrupted(turn: Turn, row: RowTurn, tokenizer: Tokenizer, frame_rate: float, rng: random.Random) -> Turn:
    """Cut the turn's answer at a place drawn from `rng`, as a user who interrupts does: before its last frame, or its last
    token where it has no sound. Only what was played stays, laid out as a whole answer of that part. Where the words' times are
    known, the text keeps the words whose middle was played, as sessions do; otherwise the same share of its tokens as of the
    frames.

    Args:
        row: the same turn as stored.
        frame_rate: of the codes, frames a second.
    """
    text, codes = turn.text, turn.codes
    if codes is None:
        return replace(turn, text=text[: rng.randrange(len(text))] if text else text, cut=True)
    total = codes.shape[1]
    frames = rng.randrange(total) if total else 0
    if text is not None:
        whole, characters = text, heard(row, frames / frame_rate)
        if characters is None:
            kept = math.ceil(len(text) * frames / max(1, total))
        else:  # the fewest tokens whose text has so many characters
            kept = bisect_left(range(len(text)), characters, key=lambda count: len(tokenizer.decode(whole[:count])))
        text = text[:kept]
    return replace(turn, text=text, codes=codes[:, :frames], cut=True)


def heard(row: RowTurn, seconds: float) -> int | None:
    """Number of characters of the answer's text up to the end of the last word whose middle is before `seconds`. None where the
    words' times are not known, or are those of other words."""
    end, said = 0, [word for word in row.words if word.who == "model"]
    for word in said:
        if (word.start + word.end) / 2 > seconds:
            break
        offset = row.answer_text.find(word.text, end)
        if offset < 0:
            return None
        end = offset + len(word.text)
    return end if said else None
