"""Settings of the ends of turns, under the names and with the defaults of OpenAI's Realtime API."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PCM_RATE = 24_000
"""Samples per second of the sound in which turns are found."""

EAGERNESS = {"low": 8.0, "medium": 4.0, "high": 2.0, "auto": 4.0}
"""Seconds of the longest wait of `semantic_vad`, as OpenAI states them."""

Eagerness = Literal["low", "medium", "high", "auto"]

Milliseconds = Annotated[int, Field(ge=0, le=60_000)]


class Section(BaseModel):
    """A part of the configuration; what is not given stays as it is."""

    model_config = ConfigDict(extra="ignore", validate_assignment=True)


class ServerVad(Section):
    """Turns end after a fixed silence."""

    type: Literal["server_vad"] = "server_vad"
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    prefix_padding_ms: Milliseconds = 300
    silence_duration_ms: Milliseconds = 500
    idle_timeout_ms: Annotated[int, Field(ge=5000, le=30_000)] | None = None
    create_response: bool = True
    interrupt_response: bool = True


class SemanticVad(Section):
    """Turns end sooner where speech has clearly ended, and an answer goes on under a short sound of its listener."""

    type: Literal["semantic_vad"] = "semantic_vad"
    eagerness: Eagerness = "auto"
    create_response: bool = True
    interrupt_response: bool = True

    @property
    def longest_wait(self) -> float:
        return EAGERNESS[self.eagerness]
