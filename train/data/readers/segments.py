"""Reads segments of recordings: conversations on two channels (moshi-finetune), Lhotse's cuts, and NeMo's manifests.

moshi-finetune: a line of JSON for each recording, `{"path", "duration"}`: a stereo file with the model on the left (channel 0)
and the user on the right (1), and beside it a `.json` of the same name, `{"alignments": [[word, [start s, end s],
"SPEAKER_MAIN"], ...]}`. SPEAKER_MAIN is the model; any other speaker is the user. Source: the data section of
kyutai-labs/moshi-finetune's README and its annotate.py, which writes the model's words only. A recording becomes one row. An
utterance is a run of one speaker's words with less than `ReaderOptions.pause` seconds between them. A turn consists of what the
user says, then what the model says until the user starts again; where the alignment lacks the user's words, the user's side is
the right channel between two utterances of the model, and utterances with silence between them on that channel are one answer.
Each side is cut from its own channel, and the words stay with the turn (`RowTurn.words`).

A cut of Lhotse, as NeMo trains on them, is `{id, start, duration, channel, supervisions: [{start, duration, text, speaker,
language, channel}], recording: {sampling_rate, duration, sources: [{type, channels, source}]}, custom: {target_audio: {... a
recording}}, type: MonoCut | MultiCut}`, one a line (`.jsonl`, `.jsonl.gz`). `start` and `duration` select a segment of the
recording, a supervision's `start` counts from the cut's. With `target_audio` (the model's side, as long as the cut) or a
supervision by `agent` or `assistant`, those are answers and all others are questions, and consecutive ones make turns; the
model's are cut from `target_audio`, or from the supervision's channel. Otherwise a cut is one question with its text. A NeMo
manifest has lines `{audio_filepath, duration, offset, text}`, each one question; a line may name its channel
(`channel_selector` or `channel`: a number, a list, "average"). Where no channel is named, or several are, they are mixed.
Sources: the data classes of lhotse-speech/lhotse; NVIDIA/NeMo's manifests and its duplex speech-to-speech data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from omni.errors import UserError
from train.data.readers.containers import TAR
from train.data.readers.contract import ReaderOptions
from train.data.readers.files import Files, cut, header
from train.data.readers.source import RecordReader, items, make_row, number, text
from train.data.rows.row import Row, RowTurn, Sound, Word

Entry = TypeVar("Entry")


def to_sides(entries: Iterable[Entry], answers: Callable[[Entry], bool]) -> list[tuple[list[Entry], list[Entry]]]:
    """Group what was said, in order, into turns of (the user's, the model's): a turn starts where the user speaks after the
    model has. `answers`: whether an entry is the model's."""
    turns: list[tuple[list[Entry], list[Entry]]] = []
    for entry in entries:
        if not turns or (turns[-1][1] and not answers(entry)):
            turns.append(([], []))
        turns[-1][answers(entry)].append(entry)
    return turns


# ------------------------------------------------------------------------------------------------------ moshi-finetune

MODEL, USER = 0, 1  # channels

_LATE = 0.1  # seconds by which a word may end after the recording: recognisers round
_DISAGREE = 0.5  # seconds by which the duration in the list may differ from the file's
_SILENCE = 10 ** (-50 / 20)  # root mean square of a segment in which nobody speaks: -50 dB of full scale


class Utterance(NamedTuple):
    """A speaker's words without a pause between them. Times in seconds of the recording."""

    who: str
    start: float
    end: float
    words: tuple[Word, ...]


def moshi_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> Row:
    """Make the row of one recording; UserError where it, or its alignment, is broken."""
    name = text(data, "path", needed=True)
    path = files.file(name)
    info = header(path)
    if info.channels != 2:
        raise UserError(
            f"{name!r} has {info.channels} channels, not 2 (left the model, right the user): it cannot be cut into turns"
        )
    promised = number(data, "duration", info.seconds)
    if abs(promised - info.seconds) > _DISAGREE:
        raise UserError(
            f"{name!r} lasts {info.seconds:.2f} s, the list says {promised:.2f} s: it is another file, or cut short"
        )
    words = read_words(files.file(str(Path(name).with_suffix(".json"))), info.seconds)
    utterances = to_utterances(words, options.pause)
    if not any(word.who == "user" for word in words):
        utterances = _with_silent_user(utterances, path, info.seconds)
    turns = []
    for asked, answered in to_sides(utterances, lambda utterance: utterance.who == "model"):
        (question, question_audio, heard, start), (answer, answer_audio, said, later) = (
            _channel(side, name, files, channel) for side, channel in ((asked, USER), (answered, MODEL))
        )
        turns.append(RowTurn(question, question_audio, answer, answer_audio, None, (*heard, *said), start, later))
    return make_row(turns, options, "moshi", where, id=str(Path(name).with_suffix("")))


class _Alignment(TypedDict):
    alignments: list[tuple[str, tuple[float, float], str]]


def read_words(path: Path, seconds: float) -> list[Word]:
    """Read the words of an alignment in the order of their starts, times in seconds of the recording, which lasts `seconds`.
    UserError for a file that is no alignment, and words that end before they start or lie beyond the recording."""
    try:
        alignments = TypeAdapter(_Alignment).validate_json(path.read_bytes())["alignments"]
    except ValueError as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"alignment {path} is no list of [word, [start, end], speaker] ({why}): make it again") from error
    words = []
    for index, (word, (start, end), speaker) in enumerate(alignments):
        if not 0 <= start <= end < float("inf"):
            raise UserError(f"alignment {path} word {index} ({word!r}) goes from {start} to {end} s: make it again")
        if end > seconds + _LATE:
            raise UserError(f"alignment {path} word {index} ({word!r}) ends at {end:.2f} s, the recording at {seconds:.2f} s")
        who = "model" if speaker == "SPEAKER_MAIN" else "user"
        words.append(Word(word.strip(), min(start, seconds), min(end, seconds), who))
    if not words:
        raise UserError(f"alignment {path} has no words: drop the recording, or make it again")
    return sorted(words, key=lambda word: word.start)


def to_utterances(words: Sequence[Word], pause: float) -> list[Utterance]:
    """Group words, sorted by start, into utterances, sorted by start; `pause` seconds of silence end one."""
    runs: list[list[Word]] = []
    latest: dict[str, list[Word]] = {}
    for word in words:
        run = latest.get(word.who)
        if run is None or word.start - max(earlier.end for earlier in run) >= pause:
            run = latest[word.who] = []
            runs.append(run)
        run.append(word)
    return [Utterance(run[0].who, run[0].start, max(word.end for word in run), tuple(run)) for run in runs]


def _with_silent_user(utterances: Sequence[Utterance], path: Path, seconds: float) -> list[Utterance]:
    """Add, between the model's utterances, what sounds on the user's channel, as utterances without words."""
    out: list[Utterance] = []
    before = 0.0
    for utterance in (*utterances, Utterance("model", seconds, seconds, ())):
        if utterance.start - before >= 0.02:
            samples = cut(path, before, utterance.start, USER).samples
            if samples is not None and float(samples.square().mean().sqrt()) > _SILENCE:
                out.append(Utterance("user", before, utterance.start, ()))
        out.append(utterance)
        before = utterance.end
    return out[:-1]


def _channel(
    utterances: Sequence[Utterance], name: str, files: Files, channel: int
) -> tuple[str, Sound | None, tuple[Word, ...], float]:
    """Text, sound, words (from the start of the sound) and start of one side of a turn."""
    if not utterances:
        return "", None, (), 0.0
    start, end = utterances[0].start, max(utterance.end for utterance in utterances)
    words = [word for utterance in utterances for word in utterance.words]
    moved = tuple(Word(word.text, word.start - start, word.end - start, word.who) for word in words)
    said = " ".join(word.text for word in words if word.text)
    return said, files.cut(name, start, end, channel), moved, start


MOSHI = RecordReader(
    "moshi",
    "moshi-finetune: JSON lines of path and duration, stereo recordings, .json alignments beside them",
    moshi_row,
    (".jsonl", TAR),
    (frozenset({"path", "duration"}),),
    also=lambda record: not {"text", "sentence", "question_text"} & record.keys(),
    notice="the left channel is taken to be the model, the right one the user",
)


# --------------------------------------------------------------------------------------------------------------- cuts

_ANSWERING = ("agent", "assistant", "model")


class Segment(NamedTuple):
    """A segment of a recording, in seconds, and the file's channels that are mixed: all where none is named."""

    path: str
    start: float
    end: float
    channels: tuple[int, ...]

    def part(self, start: float, duration: float) -> Segment:
        """The segment of `duration` seconds from `start` on within this one; UserError where it exceeds this one."""
        lasting = self.end - self.start
        if start < -0.01 or duration < 0 or start + duration > lasting + 0.1:
            raise UserError(
                f"a supervision goes from {start:.2f} to {start + duration:.2f} s of a cut that lasts {lasting:.2f} s"
            )
        begin = self.start + max(start, 0.0)
        return Segment(self.path, begin, min(begin + duration, self.end), self.channels)


def cut_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> Row:
    """Make the row of one cut or one line of a NeMo manifest; UserError where it is broken."""
    if "audio_filepath" in data:
        return _nemo_row(data, where, files, options)
    cut_type = text(data, "type") or "MonoCut"
    if cut_type not in ("MonoCut", "MultiCut"):
        raise UserError(f"is a {cut_type}: only MonoCut and MultiCut are read, write such cuts to files of their own first")
    supervisions = items(data, "supervisions") if data.get("supervisions") else []
    asked = [entry for entry in supervisions if not _answers(entry)]
    channels = _listed(data.get("channel"))
    asking = _segment(data, data.get("recording"), channels if len(channels) < 2 else _spoken_in(asked, data))
    custom = data.get("custom") or {}
    target = custom.get("target_audio") if isinstance(custom, Mapping) else None
    if target is None and len(asked) == len(supervisions):
        for entry in supervisions:
            asking.part(_start(entry), number(entry, "duration", 0.0))
        said = " ".join(filter(None, (text(entry, "text") for entry in sorted(supervisions, key=_start))))
        turns = [RowTurn(question_text=said, question_audio=_sound(asking, files))]  # one question of all
    else:
        turns = _dialogue(supervisions, data, asking, None if target is None else _segment({}, target, []), files)
    speaker = next(filter(None, (text(entry, "speaker") for entry in asked)), "")
    language = next(filter(None, (text(entry, "language") for entry in supervisions)), "")
    return make_row(turns, options, "cuts", where, id=text(data, "id"), speaker=speaker, language=language)


def _spoken_in(entries: Sequence[Mapping[str, Any]], cut: Mapping[str, Any]) -> list[Any]:
    """Channels that the supervisions name, or else the cut's."""
    named = [channel for entry in entries for channel in _listed(entry.get("channel"))]
    return [channel for index, channel in enumerate(named) if channel not in named[:index]] or _listed(cut.get("channel"))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _segment(cut: Mapping[str, Any], recording: Any, channels: Sequence[Any]) -> Segment:
    """The segment of a cut in these channels (none: all), the whole recording for an empty cut; UserError where it exceeds the
    recording, or that is no file."""
    if not isinstance(recording, Mapping):
        raise UserError("has no recording: fix the row")
    held = [(source, _listed(source.get("channels", [0]))) for source in items(recording, "sources")]
    fitting = [(source, names) for source, names in held if all(channel in names for channel in channels)]
    if not fitting or (not channels and len(held) > 1):
        named = f"channel {' and '.join(map(repr, channels))} is in none" if channels else "no channel is named"
        raise UserError(f"{named} of the recording's {len(held)} files: name one channel, files are not mixed")
    source, names = fitting[0]
    if source.get("type", "file") != "file":
        raise UserError(f"the recording is of type {source['type']!r}, not a file: save the cuts with their audio as files")
    start, duration = number(cut, "start", 0.0), number(cut or recording, "duration")
    lasting = number(recording, "duration", start + duration)
    if start < 0 or duration <= 0 or start + duration > lasting + 0.1:
        raise UserError(f"the cut goes from {start:.2f} to {start + duration:.2f} s of a recording that lasts {lasting:.2f} s")
    indices = tuple(names.index(channel) for channel in channels)
    return Segment(text(source, "source", needed=True), start, min(start + duration, lasting), indices)


def _dialogue(
    supervisions: Sequence[Mapping[str, Any]], cut: Mapping[str, Any], asking: Segment, answering: Segment | None, files: Files
) -> list[RowTurn]:
    """Make turns of supervisions in the order of their starts. The model's sound is cut from `answering`, or else from the
    cut's own recording, in the supervision's channel. An `answering` without supervisions of its own is one answer as a
    whole."""
    groups = to_sides(sorted(supervisions, key=_start), _answers)
    turns = []
    for sides in groups:
        parts: list[Any] = []
        for entries, segment in zip(sides, (asking, answering), strict=True):
            said = ""
            sound: Sound | None = None
            if entries:
                if segment is None or (segment is asking and isinstance(cut.get("channel"), list)):
                    segment = _segment(cut, cut.get("recording"), _spoken_in(entries, cut))
                pieces = [segment.part(_start(entry), number(entry, "duration")) for entry in entries]
                said = " ".join(filter(None, (text(entry, "text") for entry in entries)))
                sound = _sound(pieces[0]._replace(end=max(piece.end for piece in pieces)), files)  # to the end of the last
            parts += said, sound
        turns.append(RowTurn(*parts))
    if answering is not None and not any(answered for _, answered in groups):
        last = turns.pop() if turns else RowTurn(question_audio=_sound(asking, files))
        turns.append(replace(last, answer_audio=_sound(answering, files)))
    return turns


def _sound(segment: Segment, files: Files) -> Sound | None:
    """The sound of a segment: the file itself where all of it and all its channels are wanted, otherwise a part cut out."""
    if files.audio == "none":
        return None
    info = files.or_without(lambda: header(files.file(segment.path)))
    if info is None:
        return None
    every = info.channels <= 2 and segment.channels in ((), tuple(range(info.channels)))
    if every and segment.start == 0 and abs(segment.end - info.seconds) < 0.01:
        return files.sound(segment.path)
    return files.cut(segment.path, segment.start, segment.end, *segment.channels)


def _nemo_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> Row:
    """Make the row of a line of a manifest; its id is its own, or else the recording, and the segment where it selects one."""
    path, start = text(data, "audio_filepath", needed=True), number(data, "offset", 0.0)
    field = "channel_selector" if data.get("channel_selector") is not None else "channel"
    channels = [] if data.get(field) == "average" else _listed(data.get(field))
    if not all(type(channel) is int for channel in channels):
        advice = "give its number from 0, a list of numbers or 'average'"
        raise UserError(f"field {field!r} is {data[field]!r}, no channel: {advice}")
    asking = Segment(path, start, start + number(data, "duration"), tuple(channels))
    turn = RowTurn(text(data, "text"), _sound(asking, files), text(data, "answer"))
    name, speaker, language = (text(data, field) for field in ("id", "speaker", "lang"))
    if not name:
        times = "-".join(f"{seconds:.3f}".rstrip("0").rstrip(".") for seconds in asking[1:3])
        name = f"{path}@{times}" if data.get("offset") is not None else path
        name += "".join(f"#{channel}" for channel in channels)
    return make_row([turn], options, "cuts", where, id=name, speaker=speaker, language=language)


def _answers(entry: Mapping[str, Any]) -> bool:
    return text(entry, "speaker").lower() in _ANSWERING


def _start(entry: Mapping[str, Any]) -> float:
    return number(entry, "start", 0.0)


CUTS = RecordReader(
    "cuts",
    "Lhotse and NeMo cuts (JSON lines, also .gz): stretches of recordings with supervisions; NeMo lists of audio_filepath",
    cut_row,
    (".jsonl", ".jsonl.gz", ".json", TAR),
    (frozenset({"id", "start", "duration", "recording"}), frozenset({"audio_filepath", "duration"})),
)
