"""The microphone: blocks of samples, as they come.

S samples, int16 at `PCM_RATE`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from infer.chat.devices import SoundDevice, close_stream, open_stream, start_stream
from infer.samples import to_int16
from infer.turns.settings import PCM_RATE


class MicrophoneInput:
    """Records until it is closed.

    Args:
        sound: the module `sounddevice`.
        deliver: called with the raw samples of each block and whether some before it were lost, in PortAudio's thread.
        lost: called there when the device is gone.

    Raises:
        UserError: the device cannot be opened.
    """

    def __init__(
        self, sound: Any, device: SoundDevice, deliver: Callable[[np.ndarray, bool], None], lost: Callable[[], None]
    ) -> None:
        self.device, self.sound, self._deliver, self._lost = device, sound, deliver, lost
        self._closed = False
        opened = open_stream(sound, device, "input", PCM_RATE, self._take, self._finished)
        self._stream, self._rate, self._channels = opened.stream, opened.rate, opened.channels
        self._resample = None if opened.rate == PCM_RATE else _resampler(opened.rate)

    def start(self) -> None:
        """UserError where the device refuses."""
        start_stream(self.sound, self.device, "input", self._stream)

    def _take(self, data: Any, frames: int, time: Any, status: Any) -> None:
        self._deliver(np.frombuffer(bytes(data), np.int16), bool(status.input_overflow))

    def _finished(self) -> None:
        if not self._closed:
            self._lost()

    def samples(self, raw: np.ndarray) -> np.ndarray:
        """The samples [S] of the next block that was delivered: two channels are averaged, another rate is resampled."""
        if self._channels == 1 and self._resample is None:
            return raw
        mono = raw.reshape(-1, self._channels).astype(np.float32).mean(axis=1) / 32768
        return to_int16(mono if self._resample is None else self._resample(mono))

    def close(self) -> None:
        self._closed = True
        close_stream(self.sound, self._stream)


def _resampler(rate: int) -> Callable[[np.ndarray], np.ndarray]:
    from infer.resampler import Resampler  # PyAV, which most microphones do not need

    return Resampler(rate, PCM_RATE).push
