"""Measures an answer's first audio, real-time factor and underruns of a simulated player.

The clock starts when the question has ended: all of it is there and the model is loaded. It is paused while the
answer is being written to its file, pipe or loudspeaker, so that a slow reader is not mistaken for a slow model.

- first audio, first text: time until the first exact samples (or characters) were handed out.
- real-time factor: time until the answer was complete over the length of its sound; below 1 is faster than it plays.
- underruns: a player that starts with the first chunk has played a chunk's samples `length / rate` seconds after it
  started with them. Each time the next chunk arrives later than that, the player underruns once, waits, and continues
  when it comes.
"""

from __future__ import annotations

from omni.generate.results import Clock


class Player:
    """Simulates a player, to count underruns; `dry_at`: second at which it has played all that came."""

    def __init__(self, sample_rate: int) -> None:
        self.sample_rate = sample_rate
        self.underruns = 0
        self.dry_at: float | None = None

    def receive(self, samples: int, at: float) -> float | None:
        """Takes a chunk of samples that arrives at the time `at`; returns the seconds it is late, None for the first."""
        late = None if self.dry_at is None else at - self.dry_at
        self.underruns += late is not None and late > 0
        self.dry_at = (at if self.dry_at is None else max(at, self.dry_at)) + samples / self.sample_rate
        return late


class AnswerMeter:
    """Measures one answer; made, or restarted, when the question has ended.

    Attributes:
        first_text, first_audio, total: seconds until its first text, first sound (None where there was none) and end.
        sound: seconds of its sound.
    """

    def __init__(self, sample_rate: int) -> None:
        self.clock, self.player = Clock(), Player(sample_rate or 1)
        self.first_text: float | None = None
        self.first_audio: float | None = None
        self.total = self.sound = 0.0

    def restart(self) -> None:
        """Start again, because the question has ended now."""
        self.clock = Clock()

    def add_text(self) -> None:
        """Note that some text was handed out just now."""
        if self.first_text is None:
            self.first_text = self.clock.seconds

    def add_sound(self, samples: int) -> None:
        """Note that a chunk of that many samples was handed out just now."""
        now = self.clock.seconds
        if self.first_audio is None:
            self.first_audio = now
        self.sound += samples / self.player.sample_rate
        self.player.receive(samples, now)

    def stop(self) -> None:
        """Note that the answer has ended just now."""
        self.total = self.clock.seconds

    @property
    def real_time_factor(self) -> float | None:
        return self.total / self.sound if self.sound else None

    def line(self) -> str:
        """The figures as one line of text."""
        if self.first_audio is None or self.real_time_factor is None:
            text = "no answer" if self.first_text is None else f"first text {self.first_text * 1e3:.0f} ms"
            return f"{text}, done after {self.total * 1e3:.0f} ms"
        underruns = self.player.underruns
        return (
            f"first audio {self.first_audio * 1e3:.0f} ms, real-time factor {self.real_time_factor:.2f}, "
            f"{underruns} underrun{'' if underruns == 1 else 's'}"
        )
