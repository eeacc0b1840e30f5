"""Lhotse's cuts as NeMo trains on them, and NeMo's own lists: stretches of longer recordings.

A cut is `{id, start, duration, channel, supervisions: [{start, duration, text, speaker, language, channel}], recording:
{sampling_rate, duration, sources: [{type, channels, source}]}, custom: {target_audio: {... a recording}}, type: MonoCut |
MultiCut}`, one a line (`.jsonl`, `.jsonl.gz`). `start` and `duration` choose a stretch of the recording, a supervision's
`start` counts from the cut's. With `target_audio` (the model's side, as long as the cut) or a supervision by `agent` or
`assistant`, those are answers and all others are questions, and consecutive ones make turns; the model's are cut from
`target_audio`, or from the supervision's channel. Otherwise a cut is one question with its text. A NeMo list has
`{audio_filepath, duration, offset, text}` and is read so. Sources: the data classes of lhotse-speech/lhotse; NVIDIA/NeMo's
duplex speech-to-speech data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from omni.errors import UserError
from train.data.readers.contract import Options
from train.data.readers.files import Files, header
from train.data.readers.source import RecordReader, make_row, number, text
from train.data.row import Row, RowTurn, Sound

_ANSWERING = ("agent", "assistant", "model")


class Stretch(NamedTuple):
    """A part of one channel of a recording, in seconds."""

    path: str
    start: float
    end: float
    channel: int

    def part(self, start: float, duration: float) -> Stretch:
        """`duration` seconds of this one from its `start` on; UserError where they reach beyond."""
        lasting = self.end - self.start
        if start < -0.01 or duration < 0 or start + duration > lasting + 0.1:
            raise UserError(
                f"a supervision goes from {start:.2f} to {start + duration:.2f} s of a cut that lasts {lasting:.2f} s"
            )
        begin = self.start + max(start, 0.0)
        return Stretch(self.path, begin, min(begin + duration, self.end), self.channel)


def cut_row(data: Mapping[str, Any], where: str, files: Files, options: Options) -> Row:
    """The row of one cut or one line of a NeMo list; UserError where it is broken."""
    if "audio_filepath" in data:
        return _nemo_row(data, where, files, options)
    kind = text(data, "type") or "MonoCut"
    if kind not in ("MonoCut", "MultiCut"):
        raise UserError(f"is a {kind}: only MonoCut and MultiCut are read, write such cuts to files of their own first")
    supervisions = data.get("supervisions") or []
    if not isinstance(supervisions, list) or not all(isinstance(entry, Mapping) for entry in supervisions):
        raise UserError("its supervisions are no list of objects: mend the row")
    asking = _stretch(data, data.get("recording"))
    custom = data.get("custom") or {}
    target = custom.get("target_audio") if isinstance(custom, Mapping) else None
    if target is None and not any(_answers(entry) for entry in supervisions):
        turns = [_question(supervisions, asking, files)]
    else:
        turns = _dialogue(supervisions, data, asking, None if target is None else _whole(target), files)
    speaker = next(filter(None, (text(entry, "speaker") for entry in supervisions if not _answers(entry))), "")
    language = next(filter(None, (text(entry, "language") for entry in supervisions)), "")
    return make_row(turns, options, "cuts", where, id=text(data, "id"), speaker=speaker, language=language)


def _stretch(cut: Mapping[str, Any], recording: Any, channel: Any = None) -> Stretch:
    """Where a cut lies, in its own channel or that one; UserError where it is not within the recording, or that is no file."""
    if not isinstance(recording, Mapping):
        raise UserError("has no recording: mend the row")
    channel = cut.get("channel", 0) if channel is None else channel
    channel = channel[0] if isinstance(channel, list) and channel else channel
    sources = recording.get("sources")
    for source in sources if isinstance(sources, list) else []:
        held = source.get("channels", [0]) if isinstance(source, Mapping) else None
        if isinstance(held, list) and channel in held:
            break
    else:
        raise UserError(f"channel {channel!r} is in none of the recording's sources: mend the row")
    if source.get("type", "file") != "file":
        raise UserError(f"the recording is of type {source['type']!r}, not a file: save the cuts with their audio as files")
    start, duration = number(cut, "start", 0.0), number(cut, "duration")
    lasting = number(recording, "duration", start + duration)
    if start < 0 or duration <= 0 or start + duration > lasting + 0.1:
        raise UserError(f"the cut goes from {start:.2f} to {start + duration:.2f} s of a recording that lasts {lasting:.2f} s")
    return Stretch(text(source, "source", needed=True), start, min(start + duration, lasting), held.index(channel))


def _whole(recording: Any) -> Stretch:
    """All of a recording of its own, in its first channel."""
    if not isinstance(recording, Mapping):
        raise UserError("its target_audio is no recording: mend the row")
    sources = recording.get("sources")
    first = sources[0] if isinstance(sources, list) and sources else None
    channels = first.get("channels") if isinstance(first, Mapping) else None
    channel = channels[0] if isinstance(channels, list) and channels else 0
    return _stretch({"duration": number(recording, "duration"), "channel": channel}, recording)


def _question(supervisions: Sequence[Mapping[str, Any]], asking: Stretch, files: Files) -> RowTurn:
    """All that is said in a cut, as one question."""
    for entry in supervisions:
        asking.part(_start(entry), number(entry, "duration", 0.0))
    said = " ".join(filter(None, (text(entry, "text") for entry in sorted(supervisions, key=_start))))
    return RowTurn(question_text=said, question_audio=_sound(asking, files))


def _dialogue(
    supervisions: Sequence[Mapping[str, Any]], cut: Mapping[str, Any], asking: Stretch, answering: Stretch | None, files: Files
) -> list[RowTurn]:
    """Turns of supervisions in the order of their starts: a new one begins where the user speaks after the model has.

    The model's are cut from `answering`, or else from the cut's own recording, in the supervision's channel. An `answering`
    that no supervision speaks of is the answer as a whole.
    """
    groups: list[tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]] = []
    for entry in sorted(supervisions, key=_start):
        answer = _answers(entry)
        if not groups or (not answer and groups[-1][1]):
            groups.append(([], []))
        groups[-1][answer].append(entry)
    turns = []
    for sides in groups:
        parts: list[Any] = []
        for entries, stretch in zip(sides, (asking, answering), strict=True):
            if entries and (stretch is None or (stretch is asking and isinstance(cut.get("channel"), list))):
                stretch = _stretch(cut, cut.get("recording"), entries[0].get("channel"))
            parts += _side(entries, stretch, files)
        turns.append(RowTurn(*parts))
    if answering is not None and not any(answered for _, answered in groups):
        last = turns.pop() if turns else RowTurn(question_audio=_sound(asking, files))
        turns.append(replace(last, answer_audio=_sound(answering, files)))
    return turns


def _side(entries: Sequence[Mapping[str, Any]], stretch: Stretch | None, files: Files) -> tuple[str, Sound | None]:
    """Text and sound of one side of a turn, from the start of its first supervision to the end of its last."""
    if not entries or stretch is None:
        return "", None
    parts = [stretch.part(_start(entry), number(entry, "duration")) for entry in entries]
    said = " ".join(filter(None, (text(entry, "text") for entry in entries)))
    return said, _sound(parts[0]._replace(end=max(part.end for part in parts)), files)


def _sound(stretch: Stretch | None, files: Files) -> Sound | None:
    """A whole file of one channel stays as it is, anything else is cut out."""
    if stretch is None or files.audio == "none":
        return None
    try:
        info = header(files.file(stretch.path))
    except UserError:
        if files.audio == "optional":
            return None
        raise
    if info.channels == 1 and stretch.channel == 0 and stretch.start == 0 and abs(stretch.end - info.seconds) < 0.01:
        return files.sound(stretch.path)
    return files.cut(stretch.path, stretch.start, stretch.end, stretch.channel)


def _nemo_row(data: Mapping[str, Any], where: str, files: Files, options: Options) -> Row:
    path, start = text(data, "audio_filepath", needed=True), number(data, "offset", 0.0)
    asking = Stretch(path, start, start + number(data, "duration"), 0)
    turn = RowTurn(
        question_text=text(data, "text"),
        question_audio=_sound(asking, files),
        answer_text=text(data, "answer"),
    )
    return make_row(
        [turn], options, "cuts", where, id=text(data, "id") or path, speaker=text(data, "speaker"), language=text(data, "lang")
    )


def _answers(entry: Mapping[str, Any]) -> bool:
    return text(entry, "speaker").lower() in _ANSWERING


def _start(entry: Mapping[str, Any]) -> float:
    return number(entry, "start", 0.0)


CUTS = RecordReader(
    "cuts",
    "Lhotse and NeMo cuts (JSON lines, also .gz): stretches of recordings with supervisions; NeMo lists of audio_filepath",
    cut_row,
    (".jsonl", ".jsonl.gz", ".json"),
    (frozenset({"id", "start", "duration", "recording"}), frozenset({"audio_filepath", "duration"})),
)
