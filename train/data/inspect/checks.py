"""Measures of recordings and codes; checks of single rows by them, and of texts, word times and speech rates.

Dimensions: S samples, A audio streams, F frames.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TextIO

from pydantic import PositiveFloat

from omni.codec.registry import CODECS, code_orders, load_codec
from omni.errors import UserError
from omni.stores.tries import StoreError
from omni.tasks import TASKS, find_task
from omni.utils.configuration import Share, configuration, span
from train.data.readers.codes import CodesKind, codes_kinds
from train.data.rows.reference import UnfitReference
from train.data.rows.row import Codes, Row, RowTurn, Sound
from train.scoring.text import primary

if TYPE_CHECKING:
    from torch import Tensor

    from omni.codec.base import AudioCodec


SILENT_DB = -50.0
"""A window whose root mean square is below this, relative to full scale, is silent."""
WINDOW_SECONDS = 0.02
"""Length of the windows of which the silent ones are counted."""
CLIPPED_LEVEL, CLIPPED_RUN = 0.995, 3
"""Share of full scale, and the number of consecutive samples beyond it, on one side, that are clipping; fewer are a peak."""


class BadSound(UnfitReference):
    """A recording that cannot be read; `kind` is one of `checks.KINDS`: `missing_reference`, `broken_sound`, ..."""


@dataclass(frozen=True)
class Measured:
    """Measures of a recording: its length, the shares of silent windows and of clipped samples, and a digest of samples and
    rate, equal for a WAV and the FLAC made of it."""

    seconds: float
    silence: float
    clipping: float
    digest: int


def measure(sound: Sound) -> Measured:
    """Measure a recording at its own rate; `BadSound` where it cannot be read."""
    import torch

    samples, rate = load(sound)
    pcm = samples.mul(32768).round().clamp(-32768, 32767).to(torch.int16)
    return Measured(
        seconds=len(samples) / rate,
        silence=silence_share(samples, rate),
        clipping=clipped_share(samples),
        digest=digest(str(rate).encode(), pcm.numpy().tobytes()),
    )


def load(sound: Sound, sample_rate: int = 0) -> tuple[Tensor, int]:
    """Load samples [S] and their rate: `sample_rate`, or the recording's own for 0; `BadSound` where it cannot be read."""
    with sound_errors():
        rate = sample_rate or sound.info().sample_rate
        return sound.load(rate), rate


@contextmanager
def sound_errors() -> Iterator[None]:
    """A context in which errors of a recording are `BadSound`; a store that cannot be read is none of these."""
    try:
        yield
    except StoreError:
        raise
    except (UserError, OSError) as error:
        raise BadSound(error.kind if isinstance(error, UnfitReference) else "broken_sound", str(error)) from error


def silence_share(samples: Tensor, rate: int) -> float:
    """Share of the windows of a sound [S] that are silent; the last one may be shorter."""
    import torch

    size = max(1, round(WINDOW_SECONDS * rate))
    padding = -len(samples) % size
    power = torch.nn.functional.pad(samples, (0, padding)).view(-1, size).square().sum(1)
    counts = torch.full((len(power),), float(size))
    counts[-1] -= padding
    return float((power / counts < 10 ** (SILENT_DB / 10)).float().mean())


def clipped_share(samples: Tensor) -> float:
    """Share of the samples of a sound [S] that are clipped."""
    import torch

    if len(samples) < CLIPPED_RUN:
        return 0.0
    clipped = torch.zeros(len(samples), dtype=torch.bool)
    for side in (samples >= CLIPPED_LEVEL, samples <= -CLIPPED_LEVEL):
        runs = side.unfold(0, CLIPPED_RUN, 1).all(1)  # true where a run starts
        for offset in range(CLIPPED_RUN):
            clipped[offset : offset + len(runs)] |= runs
    return float(clipped.float().mean())


def digest(*parts: bytes) -> int:
    """Hash bytes to 64 bits: among ten million different inputs, the probability that any two agree is three in a million."""
    state = blake2b(digest_size=8)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return int.from_bytes(state.digest(), "little")


def text_digest(*texts: str) -> int:
    """Hash texts to 64 bits, regardless of case and whitespace."""
    return digest(*(" ".join(text.casefold().split()).encode() for text in texts))


class BadCodes(UnfitReference):
    """Codes that no model can use; `kind` is `codes_order`, `codes_shape` or `codes_range`."""


class Codecs:
    """Looks up codecs' sizes and rates, and loads the codecs themselves where their weights are given. `folder`: weights of the
    data's codec; None to use `codes_kinds`, which is also used for all other codecs."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._loaded: dict[str, AudioCodec] = {}
        self._foreign: dict[str, bool] = {}

    def load(self, name: str) -> AudioCodec:
        """Load a codec; UserError where it is unknown or its weights do not fit."""
        if name not in self._loaded:
            self._loaded[name] = load_codec(name, self.folder if CODECS.find(name).weights else None)
        return self._loaded[name]

    def facts(self, name: str) -> CodesKind | None:
        """Sizes and rate of a codec; None for an unknown one. UserError where the weights are of no codec at all."""
        if self.folder is None or self.foreign(name) or not CODECS[name].weights:
            return codes_kinds().get(name)
        codec = self.load(name)
        return CodesKind(tuple(codec.codebook_sizes), codec.frame_rate)

    def foreign(self, name: str) -> bool:
        """True where a codec can never be loaded here: there is none of that name, or the weights are another codec's."""
        if name not in self._foreign:
            with_weights = [known for known in sorted(CODECS) if CODECS[known].weights]
            own = self.folder is not None and name in with_weights
            unfit = own and not self._fits(name) and any(self._fits(other) for other in with_weights if other != name)
            self._foreign[name] = name not in CODECS or unfit
        return self._foreign[name]

    def _fits(self, name: str) -> bool:
        with suppress(UserError):
            self.load(name)
        return name in self._loaded

    def seconds(self, codes: Codes) -> float | None:
        """Duration of codes in seconds; None where the codec's rate is not known."""
        facts = self.facts(codes.codec)
        if facts is None or facts.frame_rate is None or codes.frames.ndim != 2:
            return None
        return codes.frames.shape[1] / facts.frame_rate

    def streams(self, codes: Codes) -> Tensor:
        """Check codes, and return their frames [A, F] in the model's order of streams; `BadCodes` where they do not fit."""
        import torch

        frames, orders = codes.frames, code_orders(codes.codec)
        if codes.order != "streams" and codes.order not in orders:
            known = ", ".join(["streams", *orders])
            raise BadCodes("codes_order", f"order {codes.order!r} is unknown for {codes.codec}; known: {known}")
        facts = self.facts(codes.codec)
        if frames.ndim != 2 or frames.shape[1] == 0:
            raise BadCodes("codes_shape", f"codes of shape {list(frames.shape)} hold no frames: drop them or encode again")
        if facts is not None and frames.shape[0] != len(facts.sizes):
            wanted = f"{codes.codec} has {len(facts.sizes)} streams"
            other = " (transposed?)" if frames.shape[1] == len(facts.sizes) else ""
            raise BadCodes("codes_shape", f"codes of shape {list(frames.shape)}, but {wanted}{other}: encode again")
        if codes.order != "streams":
            frames = frames[list(orders[codes.order])]
        if facts is not None:
            sizes = torch.tensor(facts.sizes)[:, None]
            bad = (frames < 0) | (frames >= sizes)
            if bool(bad.any()):
                frame, stream = bad.t().nonzero()[0].tolist()
                raise BadCodes(
                    "codes_range",
                    f"code {int(frames[stream, frame])} of stream {stream}, frame {frame}, is not in {codes.codec}'s 0 to "
                    f"{facts.sizes[stream] - 1} ({int(bad.sum())} such codes): special ids, an offset, or another order",
                )
        return frames


# --- single rows --------------------------------------------------------------------------------------------------------

Severity = Literal["error", "warning"]


class FindingKind(NamedTuple):
    """A kind of finding: an error makes the data unfit for training, a warning asks for a look at it."""

    severity: Severity
    description: str


KINDS: dict[str, FindingKind] = {
    "unreadable_file": FindingKind("error", "a file that is no Parquet, or of another format"),
    "damaged_pages": FindingKind("error", "rows of a row group whose pages are damaged"),
    "changed_file": FindingKind("error", "a file that is not as its preparation left it"),
    "bad_row": FindingKind("error", "a row that breaks the format: version, turns, types"),
    "escaping_reference": FindingKind("error", "a recording's path leaves the data's folder"),
    "missing_reference": FindingKind("error", "a recording that is not where its path says"),
    "changed_reference": FindingKind("error", "a recording that is not the one that the data was prepared with"),
    "broken_sound": FindingKind("error", "a recording that cannot be decoded"),
    "silent_sound": FindingKind("error", "a recording without any sound"),
    "unknown_task": FindingKind("error", "a task that does not exist"),
    "unfit_row": FindingKind("error", "a turn that lacks what its task needs, or fits no task"),
    "codes_order": FindingKind("error", "codes in an order that their codec does not have"),
    "codes_shape": FindingKind("error", "codes without frames, or of another number of streams"),
    "codes_range": FindingKind("error", "codes that their codec does not have"),
    "codes_length": FindingKind("error", "codes that last longer or shorter than their recording"),
    "word_times": FindingKind("error", "words that end before they start, or outside of their recording"),
    "leaked_audio": FindingKind("error", "a question's recording that is in the other data too"),
    "unknown_codec": FindingKind("warning", "codes of a codec that is not known, so not checked"),
    "mostly_silent": FindingKind("warning", "a recording that is mostly silent"),
    "clipped": FindingKind("warning", "a recording that is clipped"),
    "empty_text": FindingKind("warning", "a recording or codes without their text"),
    "odd_text": FindingKind("warning", "a text with control or replacement characters"),
    "speech_rate": FindingKind("warning", "a text too long or too short for its sound"),
    "duplicate_row": FindingKind("warning", "a row whose texts and sound are those of an earlier row"),
    "duplicate_audio": FindingKind("warning", "a question's recording that an earlier row has"),
    "duplicate_text": FindingKind("warning", "a question and answer in words that an earlier row of this speaker has"),
    "leaked_text": FindingKind("warning", "a question in words that is in the other data too"),
    "leaked_speaker": FindingKind("warning", "a speaker who is in the other data too"),
}
"""Kinds of findings by name."""


@dataclass
class Findings:
    """Counts of findings by kind, and the first `examples` of each; `stream` gets all as lines of JSON."""

    examples: int = 5
    stream: TextIO | None = None
    counts: Counter[str] = field(default_factory=Counter)
    shown: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def add(self, kind: str, where: str, text: str, count: int = 1) -> None:
        """Add a finding, which counts for `count` rows."""
        severity = KINDS[kind].severity
        self.counts[kind] += count
        kept = self.shown.setdefault(kind, [])
        if len(kept) < self.examples:
            kept.append((where, text))
        if self.stream is not None:
            line = {"kind": kind, "severity": severity, "where": where, "text": text}
            self.stream.write(json.dumps(line, ensure_ascii=False) + "\n")

    def of(self, severity: Severity) -> int:
        """Number of findings of a severity."""
        return sum(count for kind, count in self.counts.items() if KINDS[kind].severity == severity)

    def kinds(self) -> Iterator[str]:
        """Kinds with findings, errors first."""
        return (name for name in KINDS if self.counts[name])

    def plain(self) -> dict[str, Any]:
        """Convert to plain data, for a report."""
        return {
            name: {
                "severity": KINDS[name].severity,
                "what": KINDS[name].description,
                "count": self.counts[name],
                "examples": [{"where": where, "text": text} for where, text in self.shown[name]],
            }
            for name in self.kinds()
        }


SPEECH_RATES: dict[str, tuple[float, float]] = {"zh": (1.0, 10.0), "yue": (1.0, 10.0), "ja": (1.5, 16.0), "ko": (1.5, 14.0)}
"""Lowest and highest speech rate in characters a second, by language: lower where a character is a syllable or a word."""
OTHER_RATES = (3.0, 30.0)
"""Speech rates of all other languages: English is read at about 15 characters a second."""
PAUSE_SECONDS = 1.0
"""Seconds by which a recording may exceed its text's duration at the lowest rate: silence around it."""
MISMATCH = (0.5, 0.1)
"""Seconds, and share of the recording's length, by which codes and their recording may differ: whichever is more."""

WORD_GRACE = 0.25
"""Seconds by which a word may end after its recording."""


@configuration
class Bounds:
    """Limits beyond which a measurement becomes a finding.

    Attributes:
        max_silence: share of silent windows from which a recording is mostly silent.
        max_clipping: share of clipped samples beyond which it is clipped.
        chars_per_second: lowest and highest rate of speech; None for the language's own (`SPEECH_RATES`).
    """

    max_silence: Share = 0.9
    max_clipping: Share = 0.001
    chars_per_second: Annotated[tuple[PositiveFloat, PositiveFloat] | None, span()] = None

    def rates(self, language: str) -> tuple[float, float]:
        """Lowest and highest speech rate of a language, in characters a second."""
        if self.chars_per_second is not None:
            return self.chars_per_second
        return SPEECH_RATES.get(primary(language), OTHER_RATES)


DIGESTS = ("audio", "texts", "pairs", "said", "whole")
"""Keys of `Checked.digests`."""


@dataclass
class Checked:
    """Results of the checks of a row.

    Attributes:
        problems: kinds and texts of findings.
        digests: by name, digests of the questions' recordings (`audio`) and words (`texts`), of each question and answer in
            words where both are there (`pairs`), also with the speaker where the question is a recording, or else with that
            recording (`said`), and of all texts, sounds and codes, where all can be read (`whole`).
    """

    turns: list[CheckedTurn]
    problems: list[tuple[str, str]] = field(default_factory=list)
    digests: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in DIGESTS})


def characters(text: str) -> int:
    """Number of spoken characters of a text: all but whitespace."""
    return len("".join(text.split()))


def check_row(row: Row, bounds: Bounds, codecs: Codecs) -> Checked:
    """Run all checks of a single row."""
    checked = Checked([CheckedTurn(row, turn, bounds, codecs) for turn in row.turns])
    if row.task and row.task not in TASKS:
        try:
            find_task(row.task)
        except UserError as error:
            checked.problems.append(("unknown_task", str(error)))
    for number, turn in enumerate(checked.turns):
        prefix = f"turn {number}: " if len(row.turns) > 1 else ""
        checked.problems += [(kind, prefix + text) for kind, text in turn.problems()]
        for name, value in turn.digests():
            checked.digests[name].append(value)
    if not any(turn.broken for turn in checked.turns):
        whole = digest(row.language.encode(), *(part for turn in checked.turns for part in turn.parts()))
        checked.digests["whole"].append(whole)
    return checked


class CheckedTurn:
    """A turn with the measures of its recordings, None for one that is absent or unreadable, and its answer's seconds."""

    def __init__(self, row: Row, turn: RowTurn, bounds: Bounds, codecs: Codecs) -> None:
        self.row, self.turn, self.bounds, self.codecs = row, turn, bounds, codecs
        self.broken: list[tuple[str, str]] = []
        self.question = self._measure("question_audio", turn.question_audio)
        self.answer = self._measure("answer_audio", turn.answer_audio)
        codes = turn.answer_codes
        self.spoken = self.answer.seconds if self.answer else codecs.seconds(codes) if codes else None

    def _measure(self, name: str, sound: Sound | None) -> Measured | None:
        if sound is None:
            return None
        try:
            return measure(sound)
        except BadSound as error:
            self.broken.append((error.kind, f"{name}: {error}"))
            return None

    def digests(self) -> Iterator[tuple[str, int]]:
        """Iterate over names and values of `Checked.digests`: the same words by several speakers are usual in speech data, and
        no duplicates. Where no speaker is named, the recording stands for it, so that each counts as another speaker."""
        question, answer = self.turn.question_text, self.turn.answer_text
        if self.question is not None:
            yield "audio", self.question.digest
        if question.strip():
            yield "texts", text_digest(question)
            if answer.strip():
                pair, sound = text_digest(question, answer), self.question or self.answer
                who = b"" if sound is None else sound.digest.to_bytes(8, "little")
                if self.question is not None and self.row.speaker:
                    who = self.row.speaker.encode()
                yield "pairs", pair
                yield "said", digest(pair.to_bytes(8, "little"), who)

    def parts(self) -> list[bytes]:
        """All parts of the turn as bytes, for a digest."""
        codes = self.turn.answer_codes
        stored = b"" if codes is None else f"{codes.codec} {codes.order}".encode() + codes.frames.numpy().tobytes()
        sounds = [b"" if sound is None else sound.digest.to_bytes(8, "little") for sound in (self.question, self.answer)]
        return [self.turn.question_text.encode(), self.turn.answer_text.encode(), *sounds, stored]

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from self.broken
        yield from self._fit()
        yield from self._sound("question_audio", self.question)
        yield from self._sound("answer_audio", self.answer)
        yield from self._codes()
        yield from self._words()
        yield from self._texts()
        yield from self._rate("question", self.turn.question_text, self.question.seconds if self.question else None)
        yield from self._rate("answer", self.turn.answer_text, self.spoken)

    def _fit(self) -> Iterator[tuple[str, str]]:
        if self.row.task in TASKS:
            missing = self.turn.lacks(find_task(self.row.task))
            if missing:
                yield "unfit_row", f"there is no {missing}, which its task {self.row.task} needs"
        elif all(self.turn.lacks(task) for task in TASKS.values()):
            yield "unfit_row", "it has the parts of no task: a question and an answer, or a recording and its words"

    def _sound(self, name: str, sound: Measured | None) -> Iterator[tuple[str, str]]:
        if sound is None:
            return
        if sound.silence == 1:
            yield "silent_sound", f"{name} of {sound.seconds:.2f} s is silent throughout"
        elif sound.silence > self.bounds.max_silence:
            yield "mostly_silent", f"{name} is silent for {100 * sound.silence:.0f} % of its {sound.seconds:.2f} s"
        if sound.clipping > self.bounds.max_clipping:
            yield "clipped", f"{name} has {100 * sound.clipping:.2f} % of its samples clipped"

    def _codes(self) -> Iterator[tuple[str, str]]:
        codes = self.turn.answer_codes
        if codes is None:
            return
        if self.codecs.facts(codes.codec) is None:
            yield "unknown_codec", f"codec {codes.codec!r} is not known here"
        try:
            self.codecs.streams(codes)
        except BadCodes as error:
            yield error.kind, str(error)
            return
        lasting = self.codecs.seconds(codes)
        if lasting is not None and self.answer is not None:
            apart, most = abs(lasting - self.answer.seconds), max(MISMATCH[0], MISMATCH[1] * self.answer.seconds)
            if apart > most:
                frames = codes.frames.shape[1]
                yield "codes_length", f"{frames} frames of codes last {lasting:.2f} s, answer_audio {self.answer.seconds:.2f} s"

    def _words(self) -> Iterator[tuple[str, str]]:
        """Find the first word whose times are wrong; ends may be rounded, by `WORD_GRACE` at most."""
        lengths = {"user": self.question.seconds if self.question else None, "model": self.spoken}
        for number, (text, start, end, who) in enumerate(self.turn.words):
            last, why = lengths.get(who), ""
            if who not in lengths:
                why = f"is said by {who!r}; there are user and model"
            elif start is None or end is None:  # stored as null
                why = f"has no {'start' if start is None else 'end'}"
            elif not 0 <= start <= end or (last is not None and end > last + WORD_GRACE):
                whole = "" if last is None else f" of the {last:.2f} s"
                why = f"is said from {start:.2f} to {end:.2f} s{whole} of the {who}'s sound"
            if why:
                yield "word_times", f"word {number}, {text!r}, {why}"
                return

    def _texts(self) -> Iterator[tuple[str, str]]:
        turn = self.turn
        if turn.question_audio is not None and not turn.question_text.strip():
            yield "empty_text", "question_audio has no question_text"
        if (turn.answer_audio is not None or turn.answer_codes is not None) and not turn.answer_text.strip():
            yield "empty_text", "the spoken answer has no answer_text"
        for name, text in (("question_text", turn.question_text), ("answer_text", turn.answer_text)):
            control = next((c for c in text if c == "\ufffd" or (unicodedata.category(c) == "Cc" and c not in "\n\r\t")), None)
            if control is not None:
                yield "odd_text", f"{name} holds the character U+{ord(control):04X}"

    def _rate(self, side: str, text: str, seconds: float | None) -> Iterator[tuple[str, str]]:
        """Check that a text of c characters takes between c / highest and c / lowest + `PAUSE_SECONDS` seconds."""
        count = characters(text)
        if seconds is None or not count:
            return
        low, high = self.bounds.rates(self.row.language)
        if seconds > count / low + PAUSE_SECONDS or seconds < count / high:
            rate = f"{count / max(seconds, 1e-3):.1f} a second, not {low:g} to {high:g}"
            yield "speech_rate", f"{side}: {count} characters in {seconds:.2f} s are {rate}"
