"""Configuration of a preparation."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from omni.audio.io import SAMPLE_RATE
from omni.errors import UserError
from omni.utils.configuration import configuration
from train.data.readers import ReaderOptions
from train.data.tts.voices import SpeakingConfig, check_spec

SIDES = ("question", "answer")
ONE = "espeak:+f3"
"""The voice of answers where questions are asked in many."""
BLOCK = 32
"""Number of items of a block. Shards end between blocks, so another number makes other shards."""

LOWEST_RATE, HIGHEST_RATE = 4000, 192_000


@configuration
class PrepareConfig:
    """How rows are read, completed and stored.

    Attributes:
        read: about the data set and its format.
        limit: prepare the first so many items only; by default all.
        speak: sides that are spoken where a row has them as text only: `question`, `answer` or `question,answer`.
        voice: who speaks. `espeak`: espeak-ng in many voices of the row's language, one for each row. `espeak:en-us+f3`: in
            this one; `espeak:+f3`: in this variant of the row's language. `flite`, `flite:slt`: the same by the program flite.
            `command:prog {text} {out}`: a program that writes a sound file to `{out}`, with no shell between (also
            `{language}`, `{seed}`). `module:name`: a Python callable that takes a text (and `language`, `seed` where it names
            them) and returns samples and their rate. `{espeak: 3, flite: 1}`: one of these for each row, by weight.
        answer_voice: who answers; empty for `voice`, or one voice (`espeak:+f3`) where that is espeak-ng in many, or
            several.
        speaking: how questions are spoken.
        seed: of the choice of voices, together with the row's id.
        codec: encode spoken answers by this audio codec (`codec2`, `snac`, ...); empty leaves codes and sound as they are.
        codec_folder: its weights.
        device: where the codec computes.
        keep_answer_audio: store an answer's sound beside its codes.
        question_rate: samples per second that questions are stored with, as FLAC; 0 leaves files as they are (but WAV
            becomes FLAC).
        answer_rate: the same for the sound of answers.
        recordings: `copy` stores them in the rows; `reference` stores where they are, with size and checksum, and leaves files
            and objects of stores as they are, at their own rate. What is spoken, or held by a table, is stored in any case.
        shard_mb: most MiB of a Parquet file, before compression; but a file ends between blocks of 32 items and holds one at
            least, which is larger where their sound is (compression leaves that as it is).
        workers: processes; 0 works in this one, null takes one for every core (and `threads`). The rows do not depend on it.
        threads: of each process. Sums of a neural codec may round differently with another number.
        shard: prepare a part of the items, such as `3/16`: part 3 of 16, counted from 0. Each is made into a folder of its own,
            on any machine; a source of a run takes the list of them.
        ray: address of a Ray cluster whose processes prepare: `auto` for that of this machine or of `RAY_ADDRESS`, `local` to
            start one here, or `ray://host:10001`. All of its machines see data and codec by the same paths.
    """

    read: ReaderOptions = field(default_factory=ReaderOptions)
    limit: PositiveInt | None = None
    speak: str = ""
    voice: str | dict[str, float] = "espeak"
    answer_voice: str = ""
    speaking: SpeakingConfig = field(default_factory=SpeakingConfig)
    seed: int = 0
    codec: str = ""
    codec_folder: str = ""
    device: str = "cpu"
    keep_answer_audio: bool = False
    question_rate: NonNegativeInt = SAMPLE_RATE
    answer_rate: NonNegativeInt = 0
    recordings: Literal["copy", "reference"] = "copy"
    shard_mb: PositiveInt = 256
    workers: NonNegativeInt | None = None
    threads: PositiveInt = 1
    shard: str = ""
    ray: str = ""

    def __post_init__(self) -> None:
        for side in self.sides:
            if side not in SIDES:
                raise UserError(f"speak {self.speak!r}: {side!r} is no side of a row; use question, answer or question,answer")
        for name in ("question_rate", "answer_rate"):
            rate = getattr(self, name)
            if rate and not LOWEST_RATE <= rate <= HIGHEST_RATE:
                raise UserError(
                    f"{name} is {rate}: give {LOWEST_RATE} to {HIGHEST_RATE} samples a second, or 0 to leave files as they are"
                )
        match = re.fullmatch(r"(\d+)/(\d+)", self.shard)
        if self.shard and (match is None or int(match[1]) >= int(match[2])):
            raise UserError(f"shard {self.shard!r} is not as 3/16: the number of a part, from 0 on, and how many there are")
        if self.codec_folder and not self.codec:
            raise UserError(f"codec_folder {self.codec_folder!r} is given without a codec; name one, such as --codec snac")
        if self.sides:
            for spec in (self.voice, self.answering):
                check_spec(spec)

    @property
    def sides(self) -> tuple[str, ...]:
        """Sides that are spoken by TTS."""
        return tuple(part.strip() for part in self.speak.split(",") if part.strip())

    @property
    def answering(self) -> str:
        """The voice of the answers."""
        if self.answer_voice or not isinstance(self.voice, str):
            return self.answer_voice or ONE
        return ONE if self.voice == "espeak" else self.voice

    def items(self, count: int) -> range:
        """The items to prepare of a source of so many: those of the part, whole blocks of `BLOCK`, or all of them."""
        total = min(count, self.limit or count)
        number, parts = map(int, (self.shard or "0/1").split("/"))
        blocks = -(-total // BLOCK)
        first, stop = (min(total, blocks * n // parts * BLOCK) for n in (number, number + 1))
        return range(first, stop)
