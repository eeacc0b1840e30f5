"""A stand-in for the module `sounddevice`, whose clock passes only where the program waits for its next event.

A script yields what the microphone hears next: samples, or `Wait` for events of the answer. Then the loudspeaker takes a piece
of the same length, which is heard `LATENCY` later.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from infer.turns.vad import BEFORE, STEP, SpeechStream

RATE = 24_000
BLOCK = 480
LATENCY = 0.05


class Wait(NamedTuple):
    """Let no time pass until so many chunks of the answer came, or its end."""

    chunks: int = 1_000_000


Script = Callable[["FakeSound"], Iterator[Any]]


class PortAudioError(Exception):
    pass


class FakeStream:
    def __init__(self, sound: FakeSound, kind: str, **asked: Any) -> None:
        sound.opened.append((kind, asked["device"], asked["samplerate"], asked["channels"]))
        rates, channels = sound.takes[kind]
        if asked["samplerate"] not in rates or asked["channels"] not in channels:
            raise PortAudioError(f"Invalid sample rate [PaErrorCode -9997] {asked['samplerate']}")
        self.sound, self.kind = sound, kind
        self.rate, self.channels = asked["samplerate"], asked["channels"]
        self.callback, self.finished = asked["callback"], asked["finished_callback"]
        self.latency, self.active, self.stopped, self.gone = LATENCY, False, True, False
        self.pieces: list[tuple[float, np.ndarray]] = []  # when heard, samples of the first channel
        self.calls: list[str] = []
        sound.streams[kind] = self

    @property
    def time(self) -> float:
        self.check()
        return self.sound.now

    def check(self) -> None:
        if self.gone:
            raise PortAudioError("Unanticipated host error [PaErrorCode -9999]")

    def start(self) -> None:
        if self.kind in self.sound.refuse_start:
            raise PortAudioError("Device unavailable [PaErrorCode -9985]")
        self.calls.append("start")
        self.active, self.stopped = True, False

    def abort(self) -> None:
        self.check()
        self.calls.append("abort")
        was, self.active, self.stopped = self.active, False, True
        if self.kind == "output":
            self.sound.silenced.append(self.heard())
        if was:
            self.finished()

    def stop(self) -> None:
        self.calls.append("stop")
        self.active, self.stopped = False, True

    def close(self) -> None:
        self.calls.append("close")

    def unplug(self) -> None:
        """The device is gone."""
        self.active, self.gone = False, True
        self.finished()

    def fill(self, seconds: float) -> None:
        """Take the next piece."""
        frames = round(seconds * self.rate)
        out = bytearray(frames * 2 * self.channels)
        times = SimpleNamespace(currentTime=self.time, outputBufferDacTime=self.time + LATENCY)
        self.callback(memoryview(out), frames, times, SimpleNamespace(output_underflow=False))
        self.pieces.append((self.time + LATENCY, np.frombuffer(bytes(out), np.int16)[:: self.channels]))

    def heard(self) -> np.ndarray:
        """What was heard by now, from the piece on in which the last answer began."""
        found = [np.zeros(0, np.int16)]
        for at, piece in self.pieces:
            known = piece[: max(round((self.time - at) * self.rate), 0)]
            if len(found) == 1 and not piece.any():
                continue
            found.append(known)
        return np.concatenate(found)


class FakeSound:
    """The module.

    Attributes:
        takes: rates and channels that the devices take, by kind.
        heard: all that the microphone has given, in its own form.
        questions: how many the program was told of.
        silenced: what had been heard of each answer when the loudspeaker was stopped.
    """

    PortAudioError = PortAudioError

    def __init__(self, script: Script | None = None) -> None:
        self.devices = [
            {"name": "Built-in Microphone", "max_input_channels": 2, "max_output_channels": 0},
            {"name": "Built-in Speakers", "max_input_channels": 0, "max_output_channels": 2},
            {"name": "USB Headset", "max_input_channels": 1, "max_output_channels": 2},
        ]
        self.default: dict[str, int] = {"input": 0, "output": 1}
        self.takes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
            "input": ((RATE,), (1,)),
            "output": ((8000, RATE), (1,)),
        }
        self.refuse_start: set[str] = set()
        self.opened: list[tuple[Any, ...]] = []
        self.streams: dict[str, FakeStream] = {}
        self.samples = self.questions = 0
        self.heard: list[np.ndarray] = []
        self.silenced: list[np.ndarray] = []
        self.script = iter(()) if script is None else script(self)

    # --- what sounddevice has -----------------------------------------------------------------------------------------

    def query_hostapis(self) -> tuple[dict[str, str], ...]:
        return ({"name": "ALSA"},)

    def query_devices(self, device: Any = None, kind: str | None = None) -> Any:
        whole = [{**one, "index": i, "hostapi": 0, "default_samplerate": 48000.0} for i, one in enumerate(self.devices)]
        if device is None and kind is None:
            return whole
        if device is None:
            if self.default.get(kind, -1) < 0:
                raise PortAudioError("Error querying device -1")
            return whole[self.default[kind]]
        matching = [one for one in whole if device.lower() in one["name"].lower() and one[f"max_{kind}_channels"]]
        if len(matching) != 1:
            raise ValueError(f"{len(matching)} devices")
        return matching[0]

    def RawInputStream(self, **asked: Any) -> FakeStream:
        return FakeStream(self, "input", **asked)

    def RawOutputStream(self, **asked: Any) -> FakeStream:
        return FakeStream(self, "output", **asked)

    # --- what scripts use ---------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.samples / RATE

    def quiet(self, seconds: float, level: float = 0.001) -> Iterator[np.ndarray]:
        """Noise that is no speech."""
        yield from self.noise(seconds, level)

    def say(self, seconds: float) -> Iterator[np.ndarray]:
        """What `LevelVad` takes for speech."""
        yield from self.noise(seconds, 0.2)

    def noise(self, seconds: float, level: float) -> Iterator[np.ndarray]:
        generator = np.random.default_rng(self.samples)
        for _ in range(round(seconds * RATE / BLOCK)):
            yield np.clip(generator.normal(0, level * 32768, BLOCK), -32768, 32767).astype(np.int16)

    def until_heard(self, seconds: float) -> Iterator[np.ndarray]:
        """Quiet, until so much of the last answer was heard."""
        out = self.streams["output"]
        while len(out.heard()) < seconds * out.rate:
            yield from self.quiet(0.02)

    def until_played(self) -> Iterator[Any]:
        """The whole answer, without anybody who speaks, and half a second of its echo."""
        yield Wait()
        yield from self.quiet(1.2)
        out = self.streams["output"]
        self.silenced.append(out.heard())
        out.pieces.clear()

    def step(self, block: np.ndarray) -> None:
        """Let the time of a block pass."""
        self.heard.append(block)
        self.samples += len(block)
        microphone = self.streams["input"]
        if microphone.active:
            data = np.repeat(block, microphone.channels).tobytes()
            microphone.callback(data, len(block), SimpleNamespace(), SimpleNamespace(input_overflow=False))
        if "output" in self.streams and self.streams["output"].active:
            self.streams["output"].fill(len(block) / RATE)

    @property
    def input(self) -> np.ndarray:
        """All samples that the microphone has given."""
        return np.concatenate(self.heard)


class LockstepQueue:
    """The queue of a chat's events: where it is empty, the script goes on; where that ends, so does the input."""

    def __init__(self, sound: FakeSound) -> None:
        self.sound, self.queue = sound, queue.SimpleQueue[Any]()
        self.put = self.queue.put
        self.wanted = 0

    def get(self, timeout: float | None = None) -> Any:
        while True:
            try:
                event = self.queue.get(timeout=20) if self.wanted else self.queue.get_nowait()
            except queue.Empty:
                assert not self.wanted, "no answer came"
                block = next(self.sound.script, "end")
                if isinstance(block, Wait):
                    self.wanted = block.chunks
                elif isinstance(block, str):
                    return block
                elif block is not None:
                    self.sound.step(block)
                continue
            if isinstance(event, dict):
                self.sound.questions += event["type"] == "input_audio_buffer.committed"
                self.wanted -= event["type"] == "response.output_audio.delta" and self.wanted > 0
                self.wanted = 0 if self._whole(event) else self.wanted
            return event

    def _whole(self, event: dict[str, Any]) -> bool:
        """Whether an event ends an answer that was not interrupted."""
        return event["type"] == "response.done" and event["response"]["status"] != "cancelled"


class LevelVad:
    """In the place of silero's model: what is loud is speech."""

    async def push(self, stream: SpeechStream, samples: np.ndarray) -> list[float]:
        if not stream.add(samples):
            return []
        levels = np.abs(stream.frames()[:, BEFORE : BEFORE + STEP].astype(np.float32) / 32768).mean(axis=1)
        return [min(float(level) * 10, 1.0) for level in levels]
