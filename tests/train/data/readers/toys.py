"""Small data sets of other people's formats, by the book: of sine waves and random codes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile
import torch

from tests.sounds import encoded
from train.data.readers import Broken, ReaderOptions, open_source
from train.data.rows.parquet import write_rows
from train.data.rows.row import Codes, Row, RowTurn, Sound

RATE = 16000


def tone(seconds: float, hertz: float = 440.0, rate: int = RATE) -> np.ndarray:
    """A sine wave [S]."""
    return (0.3 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def noise(seconds: float, seed: int) -> np.ndarray:
    """Noise [S], in which every place is another."""
    return np.random.default_rng(seed).uniform(-0.5, 0.5, round(seconds * RATE)).astype(np.float32)


def write_tone(path: Path, seconds: float = 0.2, hertz: float = 440.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, tone(seconds, hertz), RATE)
    return path


def flac(seconds: float, hertz: float) -> bytes:
    return encoded(tone(seconds, hertz), "FLAC")


def snac_frames(seed: int, frames: int = 4) -> list[list[int]]:
    """Frames of seven codes."""
    draw = random.Random(seed)
    return [[draw.randrange(4096) for _ in range(7)] for _ in range(frames)]


def snac_text(frames: list[list[int]]) -> str:
    """As VoiceAssistant-400K has it."""
    return " ".join("# " + " ".join(map(str, frame)) for frame in frames)


def voice_assistant(index: int) -> dict[str, Any]:
    """Row `index` of a VoiceAssistant-400K."""
    return {
        "split_name": "identity",
        "index": index,
        "round": 1,
        "question": f"Question {index}?",
        "question_audio": {"bytes": flac(0.1, 200 + index), "path": f"q{index}.wav"},
        "answer": f"Answer {index}.",
        "answer_snac": snac_text(snac_frames(index)),
    }


def write_parquet(path: Path, rows: list[dict[str, Any]], row_group: int = 4, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group, **options)
    return path


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def write_json(path: Path, rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=2, ensure_ascii=False), "utf-8")
    return path


def rows(path: Path, **options: Any) -> list[Row]:
    """All rows of a source, none of them broken."""
    found = list(open_source(path, ReaderOptions(**options)))
    assert all(isinstance(item, Row) for item in found), found
    return found  # type: ignore[return-value]


def heard(sound: Sound | None, seconds: float, hertz: float) -> None:
    """The sound is that tone (within what 16 bits and FLAC keep)."""
    assert sound is not None
    samples = sound.load(RATE)
    np.testing.assert_allclose(samples.numpy(), tone(seconds, hertz), atol=2 / 32768)


def lucy(folder: Path) -> Path:
    for index in range(3):
        write_tone(folder / f"wav/q{index}.wav", 0.2, 300 + index)
        write_tone(folder / f"wav/a{index}.wav", 0.4, 500 + index)
        text = "\n".join(" ".join(map(str, frame)) for frame in snac_frames(index))
        (folder / f"wav/a{index}.snac").write_text(text + "\n")
    user = {"role": "user", "content": "eins?", "wavpath": "wav/q0.wav", "codec": "wav/nowhere.snac"}
    answer = {"role": "assistant", "content": "zwei", "wavpath": "wav/a0.wav", "codec": "wav/a0.snac", "speaker": "F10"}
    more = [
        {"role": "user", "content": "drei?", "wavpath": "wav/q1.wav"},
        {"role": "assistant", "content": "vier", "codec": "wav/a1.snac"},
    ]
    system = {"role": "system", "content": "You are Lucy."}
    return write_json(
        folder / "lucy.json",
        [{"conversations": [system, user, answer]}, {"conversations": [user, answer, *more]}, {"conversations": [user]}],
    )


def llama_omni(folder: Path) -> Path:
    for index in range(4):
        write_tone(folder / f"speech/{index}.wav", 0.2, 300 + index)
    np.save(folder / "units.npy", np.arange(10, dtype=np.int64) * 7)
    asked = {"from": "human", "value": "<speech>\nPlease directly answer the questions in the user's speech."}
    written = {"from": "human", "value": "In text?"}
    one, two, yes = ({"from": "gpt", "value": value} for value in ("One.", "1", "Yes."))
    first = {"id": "a", "speech": "speech/0.wav", "conversations": [asked, one], "units": "units.npy"}
    second = {"id": "b", "speech": ["speech/1.wav", "speech/2.wav"], "conversations": [asked, two, asked]}
    return write_json(folder / "data.json", [first, second, {"id": "c", "conversations": [written, yes], "units": [1, 2]}])


def moshi(folder: Path, alignments: list[Any] | None = None, seconds: float = 4.0) -> Path:
    """Left: the model's 500 Hz at 1.5 to 2 and 3.5 to 4 s; right: the user's 300 Hz at 0.5 to 1 and 2.5 to 3 s."""
    left, right = np.zeros(round(seconds * RATE), np.float32), np.zeros(round(seconds * RATE), np.float32)
    for channel, hertz, starts in ((left, 500, (1.5, 3.5)), (right, 300, (0.5, 2.5))):
        for start in starts:
            at = round(start * RATE)
            channel[at : at + RATE // 2] = tone(0.5, hertz)[: max(0, len(channel) - at)]
    (folder / "data").mkdir(parents=True, exist_ok=True)
    soundfile.write(folder / "data/a.wav", np.stack([left, right], 1), RATE)
    if alignments is None:
        alignments = [
            ["fine", [1.5, 1.7], "SPEAKER_MAIN"],
            ["thanks", [1.75, 2.0], "SPEAKER_MAIN"],
            ["how", [0.5, 0.7], "SPEAKER_OTHER"],
            ["now?", [0.8, 1.0], "SPEAKER_OTHER"],
            ["bye", [2.5, 3.0], "SPEAKER_OTHER"],
            ["ciao", [3.5, 4.0], "SPEAKER_MAIN"],
        ]
    write_json(folder / "data/a.json", {"alignments": alignments})
    return write_lines(folder / "data.jsonl", [{"path": "data/a.wav", "duration": seconds}])


def cut(folder: Path, **changes: Any) -> dict[str, Any]:
    """A cut of 1 to 3 s of a recording of two channels, of 4 s."""
    if not (folder / "long.wav").exists():
        folder.mkdir(parents=True, exist_ok=True)
        soundfile.write(folder / "long.wav", np.stack([noise(4.0, 0), noise(4.0, 1)], 1), RATE)
        soundfile.write(folder / "target.wav", noise(2.0, 2), RATE)
    sources = [{"type": "file", "channels": [0, 1], "source": "long.wav"}]
    recording = {"id": "r", "sampling_rate": RATE, "num_samples": 4 * RATE, "duration": 4.0, "sources": sources}
    said = {"start": 0.25, "duration": 1.0, "channel": 0, "text": "hi", "speaker": "ann", "language": "de"}
    entry = {"id": "c", "start": 1.0, "duration": 2.0, "channel": 0, "supervisions": [said], "recording": recording}
    return entry | {"type": "MonoCut"} | changes


def common_voice(folder: Path) -> Path:
    lines = ["client_id\tpath\tsentence\tlocale"]
    for index in range(3):
        write_tone(folder / f"clips/{index}.wav", 0.2, 300 + index)
        lines.append(f'ann\t{index}.wav\tSay "{index}\tfr')
    (folder / "train.tsv").write_text("\n".join(lines) + "\n")
    return folder / "train.tsv"


def librispeech(folder: Path) -> Path:
    for chapter in ("84/121123", "84/121550", "1272/1"):
        stem = chapter.replace("/", "-")
        for index in range(2):
            write_tone(folder / chapter / f"{stem}-{index:04}.flac", 0.2, 300 + index)
        (folder / chapter / f"{stem}.trans.txt").write_text("".join(f"{stem}-{i:04} SENTENCE {i}\n" for i in range(2)))
    return folder


def recordings(folder: Path) -> Path:
    """Four recordings in folders of two depths, and a hidden file."""
    for number, name in enumerate(("b.wav", "a/c.flac", "a/d/e.ogg", "a/f.WAV")):
        write_tone(folder / name, 0.2, 300 + number)
    (folder / ".DS_Store").write_text("x")
    return folder


def chat(folder: Path) -> Path:
    system = {"role": "system", "content": "You are kind."}
    first = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Three?"}, {"type": "text", "text": "Or more?"}]}]
    rows = [{"messages": [system, *first]}, {"id": "b", "messages": [*first, *parts, first[1]]}, {"messages": parts}]
    return write_lines(folder / "chat.jsonl", rows)


def alpaca(folder: Path) -> Path:
    said = {"instruction": "Say hi.", "output": "Hi!"}
    rows = [said | {"input": "To Bob."}, said | {"input": ""}, said | {"history": [["One?", "Two."]], "id": "c"}]
    return write_json(folder / "alpaca.json", rows)


def own_rows(folder: Path) -> Path:
    """Three rows as a preparation stores them: answers with sound and codes of a codec."""
    sounds = [Sound(data=flac(0.5, hertz)) for hertz in (300, 400, 500)]
    codes = Codes("codec2", torch.arange(48, dtype=torch.int32).reshape(4, 12) % 16)
    turns = [RowTurn(f"One {i}?", sound, "Two.", sound, codes) for i, sound in enumerate(sounds)]
    write_rows(folder / "a.parquet", [Row((turn,), id=f"r{i}", source="rows", task="A1A2") for i, turn in enumerate(turns)])
    return folder


def make(kind: str, folder: Path) -> Path:
    """A small data set of that format."""
    if kind == "voiceassistant":
        return write_parquet(folder / "data/train-00000.parquet", [voice_assistant(i) for i in range(10)]).parent.parent
    if kind == "slam-omni":
        write_tone(folder / "q.wav")
        asked = {"source_wav": "q.wav", "source_text": "<USER>: Hi?", "target_text": "Ho.", "target_token": [5, 4095, 0]}
        return write_lines(folder / "a.jsonl", [{"key": f"k{i}"} | asked for i in range(5)])
    if kind == "cuts":
        return write_lines(folder / "cuts.jsonl", [cut(folder, id=f"c{i}") for i in range(3)])
    if kind == "dialogues":
        folder.mkdir()
        (folder / "d.yaml").write_text("dialogues: [{skill: greeting, question: '(hi | hello)', answer: hello}]\n")
        return folder / "d.yaml"
    if kind == "table":
        write_tone(folder / "q.wav")
        (folder / "a.csv").write_text("question_audio,question_text,answer_text\nq.wav,Hi?,Ho.\n,Hu?,Ha.\n")
        return folder / "a.csv"
    toys = {"lucy": lucy, "llama-omni": llama_omni, "moshi": moshi, "common-voice": common_voice, "librispeech": librispeech}
    return (toys | {"recordings": recordings, "chat": chat, "alpaca": alpaca, "rows": own_rows})[kind](folder)


def only_broken(path: Path, **options: Any) -> Broken:
    """The one item of a source that is broken; there are others, and they are rows."""
    found = list(open_source(path, ReaderOptions(**options)))
    broken = [item for item in found if isinstance(item, Broken)]
    assert len(broken) == 1 and len(found) > 1, found
    assert "\n" not in broken[0].why
    return broken[0]
