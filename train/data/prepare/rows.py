"""Makes stored rows of a source's items, as configured: speaks missing sides, encodes answers, embeds recordings, in blocks.

Dimensions: S samples, A audio streams, F frames.
"""

from __future__ import annotations

import errno
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from omni.audio.io import SAMPLE_RATE
from omni.codec.registry import load_codec
from omni.errors import UserError
from omni.stores.cache import check_cache
from omni.stores.drivers import join
from omni.stores.tries import StoreError
from omni.utils.configuration import configuration
from omni.utils.hardware import multiplies_bf16
from omni.utils.remote import shown
from train.data.config import SoundAugmentConfig
from train.data.readers import Broken, OpenedSource, ReaderOptions, data_path
from train.data.readers.codes import codes_seconds
from train.data.readers.files import Files
from train.data.readers.source import one_line
from train.data.rows.reference import Reference
from train.data.rows.row import Codes, Frames, Row, RowTurn, Sound, checked, inside, to_plain
from train.data.seeding import key, seeded_generator
from train.data.tts.voices import SpeakingConfig, SpeakingVoice, Voice, check_spec, make_voice

if TYPE_CHECKING:
    import pyarrow as pa

    from omni.codec.base import AudioCodec
    from omni.encoder.base import Encoder


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
        augment: changes of questions' sound (`data.augment` of a run, less those of features), once for all, before it is
            stored and encoded: speakers, rooms, noise and telephones, one for all of a row.
        seed: of the choice of voices and changes, together with the row's id.
        codec: encode spoken answers by this audio codec (`codec2`, `snac`, ...); empty leaves codes and sound as they are.
        codec_folder: its weights.
        frames: also keep what the encoder of this model folder makes of questions, in bfloat16 (computed in it where the device
            multiplies it faster): a run in which it is frozen takes these frames, and decodes and encodes nothing.
        device: where codec and encoder compute.
        keep_answer_audio: store an answer's sound beside its codes.
        question_rate: samples per second that questions are stored with, as FLAC; 0 leaves files as they are (but WAV
            becomes FLAC).
        answer_rate: the same for the sound of answers.
        recordings: `copy` stores them in the rows; `reference` stores where they are, with size and checksum, and leaves files
            and objects of stores as they are, at their own rate. What is spoken, changed, or held by a table, is stored.
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
    augment: SoundAugmentConfig | None = None
    seed: int = 0
    codec: str = ""
    codec_folder: str = ""
    frames: str = ""
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


_KEPT_FORMATS = ("FLAC", "OGG", "MP3", "MPEG")


def stored(sound: Sound, rate: int) -> tuple[Sound, float]:
    """Convert a sound for storage in its row, at `rate` (0: its own); returns it and its duration in seconds. It is decoded in
    any case: sound that cannot be decoded is not stored. Compressed files are kept as they are where the rate allows; all else
    becomes FLAC of 16 bits."""
    info = sound.info()
    own, file_format, channels = info.sample_rate, info.format.split()[0], info.channels
    samples = checked(sound.load(rate or own))
    length = len(samples) / (rate or own)
    if file_format in _KEPT_FORMATS and (rate == 0 or (rate == own and file_format == "FLAC" and channels == 1)):
        named = sound.reference
        if named is None:
            return Sound(data=sound.data or sound.file().read_bytes()), length
        if named.part is None:
            return Sound(data=named.content()), length
    return Sound(samples, rate or own), length


def referenced(sound: Sound, origin: tuple[Path, str] | None = None) -> tuple[Sound, float]:
    """Name the file of a sound in its place, or the object that it was brought from; returns the name and the duration in
    seconds. It is decoded in any case. UserError where the sound is none, or the file changes meanwhile."""
    named = sound.reference
    if named is None:
        file = Path(sound.path or "") if sound.part is not None else inside(sound.folder, sound.path or "")
        if sound.folder is not None and not file.is_relative_to(sound.folder.resolve()):
            file = sound.folder / (sound.path or "")  # of a Hugging Face cache
        if origin is not None and (real := file.resolve()).is_relative_to(top := origin[0].resolve()):
            named = Reference.of(join(origin[1], real.relative_to(top).as_posix()), sound.part)
        else:
            named = Reference.of(str(file), sound.part)
    rate = named.info().sample_rate
    return Sound(path=str(named)), len(checked(named.load(rate))) / rate


@dataclass
class PrepareTally:
    """Counts of a preparation or a part of it.

    Attributes:
        broken: items that made no row.
        turns: turns in the stored rows.
        codes_taken: answers whose codes the source had.
        left_out: recordings that the source names and rows came without (`--read.audio optional`).
        question_seconds, answer_seconds: seconds of sound in the stored rows (of an answer with codes only: of its frames).
    """

    items: int = 0
    rows: int = 0
    broken: int = 0
    turns: int = 0
    spoken_questions: int = 0
    spoken_answers: int = 0
    encoded: int = 0
    codes_taken: int = 0
    left_out: int = 0
    question_seconds: float = 0.0
    answer_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of sound of both sides."""
        return self.question_seconds + self.answer_seconds

    def add(self, other: PrepareTally) -> None:
        """Add the counts of another part."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    def plain(self) -> dict[str, Any]:
        """Convert to plain data, for a report."""
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}


_BAD = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError)  # a UserError is a ValueError
_FATAL = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@dataclass(frozen=True)
class BrokenItem:
    """An item that made no row: its number in the source, its file and row, and why."""

    item: int
    where: str
    why: str


@dataclass
class PreparedBlock:
    """Result of items `start` to `stop`: their rows, counts, and broken items."""

    start: int
    stop: int
    rows: pa.Table
    tally: PrepareTally = field(default_factory=PrepareTally)
    broken: list[BrokenItem] = field(default_factory=list)


class BlockMaker:
    """Makes blocks of a source, as work of `train.data.executor`; a process has one, with a codec and voices of its own.
    `schema` is that of the rows, passed because making it takes `datasets`, a second to import. UserError: the cache that data
    were brought to is another folder on this machine than where the command was started."""

    def __init__(self, source: OpenedSource, config: PrepareConfig, schema: pa.Schema) -> None:
        if source.brought is not None:
            path, address = source.brought
            if not path.exists() and (here := data_path(address)) != path:
                raise UserError(
                    f"{shown(address)} is at {here} in the cache of {platform.node()}, and at {path} where the command was "
                    "started: set OMNI_CACHE to the same folder on all machines of the cluster"
                )
            check_cache(path)
        self.source, self.schema = source, schema
        self.config, self.codec = config, codec_of(config)
        self.voices = {side: voice_of(config, side) for side in config.sides}
        self.encoder = encoder_of(config)
        self.fingerprint = None if self.encoder is None else self.encoder.to(config.device).fingerprint()

    def __call__(self, items: range) -> PreparedBlock:
        """Make the block of these items; UserError where the source cannot be read at all."""
        import pyarrow as pa

        tables = [self.schema.empty_table()]
        block, before = PreparedBlock(items.start, items.stop, tables[0]), Files.left_out
        for index, item in zip(items, self._items(items.start, items.stop), strict=True):
            try:
                why = self._add(item, index, tables, block.tally)
            except StoreError:
                raise
            except _BAD as error:
                if isinstance(error, OSError) and error.errno in _FATAL:
                    raise
                why = one_line(error)
            if why:  # characters that cannot be stored, such as half a surrogate pair, become Python escapes
                texts = (self.source.named(text).encode("utf-8", "backslashreplace").decode() for text in (item.where, why))
                block.broken.append(BrokenItem(index, *texts))
        block.rows = pa.concat_tables(tables).combine_chunks()
        block.tally.items, block.tally.broken = len(items), len(block.broken)
        block.tally.left_out = Files.left_out - before
        return block

    def _add(self, item: Row | Broken, index: int, tables: list[pa.Table], tally: PrepareTally) -> str:
        """Add the row of an item and the counts of the work for it; returns why an item is broken, or ""."""
        import pyarrow as pa

        if isinstance(item, Broken):
            return item.why
        plain, done = self._row(item, f"{item.source or self.source.format}-{index:08d}")
        try:
            tables.append(pa.Table.from_pylist([plain], schema=self.schema))
        except _BAD as error:  # it has a value that a column cannot hold
            return f"holds a value that cannot be stored ({one_line(error)}): fix or drop it"
        tally.add(done)
        return ""

    def _items(self, start: int, stop: int) -> Iterator[Row | Broken]:
        count = 0
        try:
            for count, item in enumerate(self.source.iterate(start, stop), 1):  # noqa: B007  (used after the loop)
                yield item
        except (UserError, OSError, MemoryError):
            raise
        except (Exception, SystemExit) as error:
            failure = f"reader {self.source.format} failed at item {start + count}"
            raise UserError(f"{failure} with {type(error).__name__}: {' '.join(str(error).split())}") from error
        if count != stop - start:
            raise UserError(
                f"the source ends at item {start + count} of {len(self.source)}: it changed; remove what is half made"
            )

    def _row(self, row: Row, name: str) -> tuple[dict[str, Any], PrepareTally]:
        """Make the plain data to store, and count the work for it; `name` is the row's id where it has none. UserError: sound
        that cannot be read or is not finite, codes that do not fit, a text that cannot be spoken."""
        done = PrepareTally(items=1, rows=1, turns=len(row.turns))
        row = replace(row, id=row.id or name)
        turns = []
        for number, turn in enumerate(row.turns):
            try:
                turns.append(self._turn(row, number, turn, done))
            except StoreError:
                raise
            except UserError as error:
                raise UserError(f"turn {number}: {error}" if len(row.turns) > 1 else str(error)) from error
        speaker = row.speaker
        if done.spoken_questions and not speaker:
            speaker = self.voices["question"].speaker(row.language, key(self.config.seed, "question", row.id))
        return to_plain(replace(row, turns=tuple(turns), speaker=speaker)), done

    def _turn(self, row: Row, number: int, turn: RowTurn, done: PrepareTally) -> RowTurn:
        question = turn.question_audio
        if question is None and "question" in self.voices and turn.question_text.strip():
            question = self._say("question", turn.question_text, row, number)
            done.spoken_questions += 1
        if question is not None and self.config.augment is not None:
            question, turn = self._augmented(question, row.id, turn)
        if question is not None:
            question, seconds = self._stored(question, self.config.question_rate)
            done.question_seconds += seconds
        audio, codes = self._answer(row, number, turn, done)
        frames = turn.question_frames
        if question is not None and self.encoder is not None and self.fingerprint is not None:
            ready = self.encoder.config.prepare(question.load(SAMPLE_RATE))
            frames = Frames.of(self.fingerprint, self.encoder.encode([ready])[0].split(ready.clip_frames))
        return replace(turn, question_audio=question, answer_audio=audio, answer_codes=codes, question_frames=frames)

    def _augmented(self, sound: Sound, row_id: str, turn: RowTurn) -> tuple[Sound, RowTurn]:
        """Change a question's sound; as its voice, this depends on the row's id and the seed alone. The turn's words keep step,
        and frames of the sound before are dropped."""
        from train.data.augment import augment_audio

        assert self.config.augment is not None
        before = checked(sound.load(SAMPLE_RATE))
        after = augment_audio(before, self.config.augment, seeded_generator(self.config.seed, "augment", row_id))
        after = after / after.abs().max().clamp(min=1.0)  # FLAC would clip it
        ratio = len(after) / len(before)
        words = [w._replace(start=w.start * ratio, end=w.end * ratio) if w.who == "user" else w for w in turn.words]
        return Sound(after, SAMPLE_RATE), replace(turn, words=tuple(words), question_frames=None)

    def _answer(self, row: Row, number: int, turn: RowTurn, done: PrepareTally) -> tuple[Sound | None, Codes | None]:
        """Sound and codes of the answer; None for each that is not stored."""
        audio, codes = turn.answer_audio, turn.answer_codes
        fitting = codes is not None and (self.codec is None or codes.codec == self.codec.name)
        if audio is None and not fitting and "answer" in self.voices and turn.answer_text.strip():
            audio = self._say("answer", turn.answer_text, row, number)
            done.spoken_answers += 1
        if codes is not None and codes.frames.numel() == 0:
            raise UserError("its answer_codes are empty: drop the row, or encode its sound again")
        if self.codec is None:
            if codes is not None and int(codes.frames.min()) < 0:
                raise UserError(f"its answer_codes hold {int(codes.frames.min())}: codes start at 0")
            done.codes_taken += codes is not None
            if audio is not None:
                audio, seconds = self._stored(audio, self.config.answer_rate)
                done.answer_seconds += seconds
            elif codes is not None:
                done.answer_seconds += codes_seconds(codes) or 0.0
            return audio, codes
        if codes is not None and fitting:
            frames = codes.for_codec(self.codec)
            done.codes_taken += 1
        elif audio is not None:
            frames = self.codec.check(self.codec.encode(checked(audio.load(self.codec.sample_rate))))
            done.encoded += 1
        elif codes is not None:
            said = "speak its answer_text with --speak answer" if turn.answer_text.strip() else "it has no answer_text to speak"
            raise UserError(
                f"its answer_codes are of the codec {codes.codec!r}, not {self.codec.name!r}, and it has no answer_audio to "
                f"encode: {said}, or take the codes as they are, without --codec"
            )
        else:
            return None, None
        done.answer_seconds += frames.shape[1] / self.codec.frame_rate
        kept = self._stored(audio, self.config.answer_rate)[0] if audio is not None and self.config.keep_answer_audio else None
        return kept, Codes(self.codec.name, frames.cpu())

    def _stored(self, sound: Sound, rate: int) -> tuple[Sound, float]:
        if self.config.recordings == "copy" or sound.data or not sound.path:
            return stored(sound, rate)
        return referenced(sound, self.source.origin)

    def _say(self, side: str, text: str, row: Row, number: int) -> Sound:
        """Speak a side in its voice. A row's voice depends on its id and the seed alone, so all its turns have the same."""
        return self.voices[side].say(text, row.language, key(self.config.seed, side, row.id))


def codec_of(config: PrepareConfig) -> AudioCodec | None:
    """Load the codec that encodes answers, None where none is set; UserError where it cannot be loaded."""
    return load_codec(config.codec, config.codec_folder or None, config.device) if config.codec else None


def encoder_of(config: PrepareConfig) -> Encoder | None:
    """Load the encoder whose frames are kept, on the CPU; None where none are. UserError: no model folder."""
    if not config.frames:
        return None
    from omni.convert.omni_folder import read
    from omni.convert.parts import load_encoder
    from omni.stores.reading import local_path

    encoder = load_encoder(read(local_path(config.frames)))
    return encoder.bfloat16() if multiplies_bf16(config.device) else encoder


def voice_of(config: PrepareConfig, side: str) -> Voice:
    """Make the voice that speaks a side; UserError where it cannot be made."""
    if side == "answer":
        return make_voice(config.answering)
    voice, speaking = make_voice(config.voice, config.speaking), config.speaking
    return SpeakingVoice(voice, speaking) if speaking.pause or speaking.hesitant or speaking.silence[1] else voice
