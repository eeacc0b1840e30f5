"""Reads Lhotse's cuts as NeMo trains on them, and NeMo's own manifests: segments of longer recordings.

A cut is `{id, start, duration, channel, supervisions: [{start, duration, text, speaker, language, channel}], recording:
{sampling_rate, duration, sources: [{type, channels, source}]}, custom: {target_audio: {... a recording}}, type: MonoCut |
MultiCut}`, one a line (`.jsonl`, `.jsonl.gz`). `start` and `duration` select a segment of the recording, a supervision's
`start` counts from the cut's. With `target_audio` (the model's side, as long as the cut) or a supervision by `agent` or
`assistant`, those are answers and all others are questions, and consecutive ones make turns; the model's are cut from
`target_audio`, or from the supervision's channel. Otherwise a cut is one question with its text. A NeMo manifest has lines
`{audio_filepath, duration, offset, text}`, each one question; a line may name its channel (`channel_selector` or `channel`: a
number, a list, "average"). Where no channel is named, or several are, they are mixed. Sources: the data classes of
lhotse-speech/lhotse; NVIDIA/NeMo's manifests and its duplex speech-to-speech data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from omni.errors import UserError
from train.data.readers.containers import TAR
from train.data.readers.contract import ReaderOptions
from train.data.readers.files import Files, header
from train.data.readers.source import RecordReader, make_row, number, text, to_sides
from train.data.rows.row import Row, RowTurn, Sound

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
    supervisions = data.get("supervisions") or []
    if not isinstance(supervisions, list) or not all(isinstance(entry, Mapping) for entry in supervisions):
        raise UserError("its supervisions are no list of objects: fix the row")
    channels = _listed(data.get("channel"))
    if len(channels) > 1:
        channels = _spoken_in([entry for entry in supervisions if not _answers(entry)], data)
    asking = _stretch(data, data.get("recording"), channels)
    custom = data.get("custom") or {}
    target = custom.get("target_audio") if isinstance(custom, Mapping) else None
    if target is None and not any(_answers(entry) for entry in supervisions):
        turns = [_question(supervisions, asking, files)]
    else:
        turns = _dialogue(supervisions, data, asking, None if target is None else _whole(target), files)
    speaker = next(filter(None, (text(entry, "speaker") for entry in supervisions if not _answers(entry))), "")
    language = next(filter(None, (text(entry, "language") for entry in supervisions)), "")
    return make_row(turns, options, "cuts", where, id=text(data, "id"), speaker=speaker, language=language)


def _spoken_in(entries: Sequence[Mapping[str, Any]], cut: Mapping[str, Any]) -> list[Any]:
    """Channels that the supervisions name, or else the cut's."""
    named: list[Any] = []
    for entry in entries:
        named += [channel for channel in _listed(entry.get("channel")) if channel not in named]
    return named or _listed(cut.get("channel"))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _stretch(cut: Mapping[str, Any], recording: Any, channels: Sequence[Any]) -> Segment:
    """The segment of a cut, in these channels (none: all); UserError where it exceeds the recording, or that is no file."""
    if not isinstance(recording, Mapping):
        raise UserError("has no recording: fix the row")
    sources = recording.get("sources")
    candidates = [
        (source, held)
        for source in (sources if isinstance(sources, list) else [])
        if isinstance(source, Mapping) and isinstance(held := source.get("channels", [0]), list)
    ]
    if not candidates:
        raise UserError("its recording has no sources: fix the row")
    for channel in channels:
        if not any(channel in held for _, held in candidates):
            raise UserError(f"channel {channel!r} is in none of the recording's sources: fix the row")
    fitting = [(source, held) for source, held in candidates if all(channel in held for channel in channels)]
    if not fitting or (not channels and len(candidates) > 1):
        clause = f"channels {', '.join(map(repr, channels))} lie" if channels else "no channel is named, and the recording lies"
        raise UserError(f"{clause} in {len(candidates)} files, which are not mixed: name one channel")
    source, held = fitting[0]
    if source.get("type", "file") != "file":
        raise UserError(f"the recording is of type {source['type']!r}, not a file: save the cuts with their audio as files")
    start, duration = number(cut, "start", 0.0), number(cut, "duration")
    lasting = number(recording, "duration", start + duration)
    if start < 0 or duration <= 0 or start + duration > lasting + 0.1:
        raise UserError(f"the cut goes from {start:.2f} to {start + duration:.2f} s of a recording that lasts {lasting:.2f} s")
    indices = tuple(held.index(channel) for channel in channels)
    return Segment(text(source, "source", needed=True), start, min(start + duration, lasting), indices)


def _whole(recording: Any) -> Segment:
    """The segment that covers a whole recording (`target_audio`), its channels mixed."""
    if not isinstance(recording, Mapping):
        raise UserError("its target_audio is no recording: fix the row")
    return _stretch({"duration": number(recording, "duration")}, recording, [])


def _question(supervisions: Sequence[Mapping[str, Any]], asking: Segment, files: Files) -> RowTurn:
    """Make one question of all supervisions of a cut."""
    for entry in supervisions:
        asking.part(_start(entry), number(entry, "duration", 0.0))
    said = " ".join(filter(None, (text(entry, "text") for entry in sorted(supervisions, key=_start))))
    return RowTurn(question_text=said, question_audio=_sound(asking, files))


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
        for entries, stretch in zip(sides, (asking, answering), strict=True):
            if entries and (stretch is None or (stretch is asking and isinstance(cut.get("channel"), list))):
                stretch = _stretch(cut, cut.get("recording"), _spoken_in(entries, cut))
            parts += _side(entries, stretch, files)
        turns.append(RowTurn(*parts))
    if answering is not None and not any(answered for _, answered in groups):
        last = turns.pop() if turns else RowTurn(question_audio=_sound(asking, files))
        turns.append(replace(last, answer_audio=_sound(answering, files)))
    return turns


def _side(entries: Sequence[Mapping[str, Any]], stretch: Segment | None, files: Files) -> tuple[str, Sound | None]:
    """Text and sound of one side of a turn, from the start of its first supervision to the end of its last."""
    if not entries or stretch is None:
        return "", None
    parts = [stretch.part(_start(entry), number(entry, "duration")) for entry in entries]
    said = " ".join(filter(None, (text(entry, "text") for entry in entries)))
    return said, _sound(parts[0]._replace(end=max(part.end for part in parts)), files)


def _sound(stretch: Segment | None, files: Files) -> Sound | None:
    """The sound of a segment: the file itself where all of it and all its channels are wanted, otherwise a part cut out."""
    if stretch is None or files.audio == "none":
        return None
    info = files.or_without(lambda: header(files.file(stretch.path)))
    if info is None:
        return None
    every = info.channels <= 2 and stretch.channels in ((), tuple(range(info.channels)))
    if every and stretch.start == 0 and abs(stretch.end - info.seconds) < 0.01:
        return files.sound(stretch.path)
    return files.cut(stretch.path, stretch.start, stretch.end, *stretch.channels)


def _nemo_row(data: Mapping[str, Any], where: str, files: Files, options: ReaderOptions) -> Row:
    path, start = text(data, "audio_filepath", needed=True), number(data, "offset", 0.0)
    asking = Segment(path, start, start + number(data, "duration"), _selected(data))
    turn = RowTurn(
        question_text=text(data, "text"),
        question_audio=_sound(asking, files),
        answer_text=text(data, "answer"),
    )
    name, speaker, language = (text(data, field) for field in ("id", "speaker", "lang"))
    return make_row([turn], options, "cuts", where, id=name or _name(data, asking), speaker=speaker, language=language)


def _selected(data: Mapping[str, Any]) -> tuple[int, ...]:
    """Channels that a line of a NeMo manifest names; none for all of them. UserError for a value that names no channel."""
    name = "channel_selector" if data.get("channel_selector") is not None else "channel"
    value = data.get(name)
    channels = [] if value == "average" else _listed(value)
    if not all(isinstance(channel, int) and not isinstance(channel, bool) for channel in channels):
        raise UserError(f"field {name!r} is {value!r}, no channel: give its number from 0, a list of numbers or 'average'")
    return tuple(channels)


def _name(data: Mapping[str, Any], stretch: Segment) -> str:
    """Id for a line of a NeMo manifest that has none: its recording, and the segment where the line selects one."""
    name = stretch.path
    if data.get("offset") is not None:
        name += "@" + "-".join(f"{seconds:.3f}".rstrip("0").rstrip(".") for seconds in (stretch.start, stretch.end))
    return name + "".join(f"#{channel}" for channel in stretch.channels)


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
