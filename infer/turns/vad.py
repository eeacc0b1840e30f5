"""Voice activity by silero's ONNX model (MIT, in the wheel of `silero-vad`): the probability of speech every 32 ms.

The model's inputs are 512 samples at 16 kHz after the 64 before them, and a state [2, B, 128]. A server's sessions share it:
frames of all that wait are resampled and judged as one batch, in one thread, which takes a third of the time and leaves the
loop free.

    24 kHz    ...|  MARGIN  |  context  |        a frame        |  MARGIN  |...     the margins are the filter's
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torchaudio.transforms import Resample

from infer.pcm import PCM_RATE

RATE, FRAME, CONTEXT = 16_000, 512, 64
"""Samples per second of the model; samples of a frame, and of those before it that the model sees again."""

FRAME_SECONDS = FRAME / RATE

MARGIN = 24  # samples at 24 kHz on either side of what is resampled; the filter reaches ten of them
STEP, BEFORE = FRAME * PCM_RATE // RATE, CONTEXT * PCM_RATE // RATE + MARGIN  # samples at 24 kHz of a frame, and before it
GATHER = 0.008  # seconds for which frames of several sessions are gathered


@dataclass(eq=False)
class SpeechStream:
    """One session's sound on its way through the model: pieces at 24 kHz from the context of the next frame on."""

    state: np.ndarray = field(default_factory=lambda: np.zeros((2, 128), np.float32))
    pieces: list[np.ndarray] = field(default_factory=lambda: [np.zeros(BEFORE, np.int16)])
    count: int = BEFORE

    def add(self, samples: np.ndarray) -> bool:
        """Take more samples [S], int16 at 24 kHz; returns whether a frame is whole."""
        self.pieces.append(samples)
        self.count += len(samples)
        return self.count >= BEFORE + STEP + MARGIN

    def frames(self) -> np.ndarray:
        """The frames that are whole, with what is around them: [N, BEFORE + STEP + MARGIN]; they are taken."""
        sound = np.concatenate(self.pieces)
        number = (len(sound) - BEFORE - MARGIN) // STEP
        rest = sound[number * STEP :]
        self.pieces, self.count = [rest], len(rest)
        return np.stack([sound[start : start + BEFORE + STEP + MARGIN] for start in range(0, number * STEP, STEP)])


class VoiceActivity:
    """The model, for all sessions of one loop of asyncio."""

    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        (package,) = importlib.util.find_spec("silero_vad").submodule_search_locations  # type: ignore[union-attr, misc]
        file = Path(package) / "data" / "silero_vad.onnx"  # the package need not be imported for it
        self._model = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        self._resample = Resample(PCM_RATE, RATE)
        self._thread = ThreadPoolExecutor(1, "omni-vad", lambda: torch.set_num_threads(1))
        self._waiting: deque[tuple[SpeechStream, asyncio.Future[list[float]]]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def push(self, stream: SpeechStream, samples: np.ndarray) -> list[float]:
        """Probabilities of speech of the frames that are whole after more samples [S], int16 at 24 kHz; one call of a stream at
        a time."""
        if not stream.add(samples):
            return []
        done: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        self._waiting.append((stream, done))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        return await done

    async def _work(self) -> None:
        while self._waiting:
            await asyncio.sleep(GATHER)
            batch = list(self._waiting)
            self._waiting.clear()
            streams = [stream for stream, _ in batch]
            results: list[Any]
            try:
                results = await asyncio.get_running_loop().run_in_executor(self._thread, self._judge, streams)
            except Exception as error:
                results = [error] * len(batch)
            for (_, done), result in zip(batch, results, strict=True):
                if not done.done():
                    (done.set_exception if isinstance(result, Exception) else done.set_result)(result)

    def _judge(self, batch: list[SpeechStream]) -> list[list[float]]:
        """Probabilities of streams that each have a whole frame: frame after frame of all together; a stream leaves with its
        last."""
        batches = [stream.frames() for stream in batch]
        counts = [len(frames) for frames in batches]
        sound = torch.from_numpy(np.concatenate(batches).astype(np.float32) / 32768)
        margin = MARGIN * RATE // PCM_RATE
        heard = self._resample(sound)[:, margin : margin + CONTEXT + FRAME].numpy()
        starts = np.cumsum([0, *counts])
        probabilities: list[list[float]] = [[] for _ in batch]
        for number in range(max(counts)):
            rows = [row for row, count in enumerate(counts) if number < count]
            streams = [batch[row] for row in rows]
            state = np.stack([stream.state for stream in streams], axis=1)
            new = heard[[starts[row] + number for row in rows]]
            speech, state = self._model.run(None, {"input": new, "state": state, "sr": np.array(RATE, dtype=np.int64)})
            for index, (row, stream) in enumerate(zip(rows, streams, strict=True)):
                stream.state = state[:, index]
                probabilities[row].append(float(speech[index, 0]))
        return probabilities
