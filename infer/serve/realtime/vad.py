"""Voice activity by silero's ONNX model (MIT, in the wheel of `silero-vad`): the probability of speech every 32 ms.

The model's inputs are 512 samples at 16 kHz after the 64 before them, and a state [2, B, 128]; frames of all sessions that
wait are one batch, which takes a third of the time.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime

RATE, FRAME, CONTEXT = 16_000, 512, 64
"""Samples per second; samples of a frame, and of those before it that the model sees again."""

FRAME_SECONDS = FRAME / RATE


@dataclass(eq=False)
class SpeechStream:
    """One session's sound on its way through the model."""

    state: np.ndarray = field(default_factory=lambda: np.zeros((2, 128), np.float32))
    context: np.ndarray = field(default_factory=lambda: np.zeros(CONTEXT, np.float32))
    rest: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))


def model_file() -> Path:
    """The model in the wheel, which need not be imported for it."""
    found = importlib.util.find_spec("silero_vad")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent / "data" / "silero_vad.onnx"


class VoiceActivity:
    """The model, for all sessions of one loop of asyncio."""

    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._model = onnxruntime.InferenceSession(model_file(), options, providers=["CPUExecutionProvider"])
        self._waiting: deque[tuple[SpeechStream, np.ndarray, asyncio.Future[list[float]]]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def push(self, stream: SpeechStream, samples: np.ndarray) -> list[float]:
        """Probabilities of speech of the frames that are whole after more samples [S] at 16 kHz; one call of a stream at a
        time."""
        sound = np.concatenate([stream.rest, samples])
        count = len(sound) // FRAME
        stream.rest = sound[count * FRAME :]
        if not count:
            return []
        done: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        self._waiting.append((stream, sound[: count * FRAME].reshape(count, FRAME), done))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        return await done

    async def _work(self) -> None:
        while self._waiting:
            batch = list(self._waiting)
            self._waiting.clear()
            try:
                found = await asyncio.to_thread(self._run, [(stream, frames) for stream, frames, _ in batch])
            except BaseException as error:
                for *_, done in batch:
                    if not done.done():
                        done.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
                raise
            for (*_, done), probabilities in zip(batch, found, strict=True):
                if not done.done():
                    done.set_result(probabilities)

    def _run(self, batch: list[tuple[SpeechStream, np.ndarray]]) -> list[list[float]]:
        """Frame after frame of all streams together; a stream leaves with its last."""
        found: list[list[float]] = [[] for _ in batch]
        for number in range(max(len(frames) for _, frames in batch)):
            rows = [row for row, (_, frames) in enumerate(batch) if number < len(frames)]
            streams = [batch[row][0] for row in rows]
            new = np.stack([batch[row][1][number] for row in rows])
            given = np.concatenate([np.stack([stream.context for stream in streams]), new], axis=1)
            state = np.stack([stream.state for stream in streams], axis=1)
            speech, state = self._model.run(None, {"input": given, "state": state, "sr": np.array(RATE, dtype=np.int64)})
            for place, (row, stream) in enumerate(zip(rows, streams, strict=True)):
                stream.state, stream.context = state[:, place], new[place, -CONTEXT:]
                found[row].append(float(speech[place, 0]))
        return found
