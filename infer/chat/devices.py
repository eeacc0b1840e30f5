"""Finds and lists microphones and loudspeakers; PortAudio is reached through the package `sounddevice`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Literal

from omni.errors import UserError
from omni.utils.charts import print_table

Kind = Literal["input", "output"]

NAMES = {"input": "microphone", "output": "loudspeaker"}
OPTIONS = {"input": "--device_in", "output": "--device_out"}


@dataclass(frozen=True)
class SoundDevice:
    """A device of PortAudio: its channels, its own samples per second, and as what it is the system's default."""

    index: int
    name: str
    host: str
    inputs: int
    outputs: int
    rate: int
    default: tuple[Kind, ...] = ()

    def channels(self, kind: Kind) -> int:
        return self.inputs if kind == "input" else self.outputs

    def __str__(self) -> str:
        return f"{self.name!r} ({self.index})"


def all_devices(sound: Any) -> list[SoundDevice]:
    """The devices that there are; `sound` is the module `sounddevice`."""
    hosts = [host["name"] for host in sound.query_hostapis()]
    usual: dict[Kind, int] = {}
    for kind in ("input", "output"):
        with contextlib.suppress(sound.PortAudioError):  # there is none
            usual[kind] = sound.query_devices(kind=kind)["index"]
    return [
        SoundDevice(
            index,
            " ".join(info["name"].split()),
            hosts[info["hostapi"]],
            info["max_input_channels"],
            info["max_output_channels"],
            round(info["default_samplerate"]),
            tuple(kind for kind in usual if usual[kind] == index),
        )
        for index, info in enumerate(sound.query_devices())
    ]


def listing(devices: list[SoundDevice], kind: Kind) -> str:
    """The devices of a kind, for an error."""
    names = [str(device) for device in devices if device.channels(kind)]
    return f"there are {', '.join(names)}" if names else f"there is no {NAMES[kind]} at all; connect one"


def find_device(sound: Any, kind: Kind, query: str | None) -> SoundDevice:
    """The device of a number or a part of a name, by default the system's; UserError for none, several, or the other kind."""
    devices, option = all_devices(sound), OPTIONS[kind]
    able = [device for device in devices if device.channels(kind)]
    if query is None:
        for device in able:
            if kind in device.default:
                return device
        choose = f"; choose one with {option}" if able else ""
        raise UserError(f"the system names no {NAMES[kind]}{choose}: {listing(devices, kind)}")
    if query.isascii() and query.isdigit():
        wanted = int(query)
    else:
        try:
            wanted = sound.query_devices(query, kind)["index"]
        except (ValueError, sound.PortAudioError):
            wanted = -1
            matching = [str(device) for device in able if query.lower() in f"{device.name}, {device.host}".lower()]
            if len(matching) > 1:
                several = ", ".join(matching)
                raise UserError(f"{option} {query!r} is the name of several: {several}; give the number of one") from None
    for device in able:
        if device.index == wanted:
            return device
    raise UserError(f"{option} {query} is no {NAMES[kind]}; {listing(devices, kind)}")


def show_devices(sound: Any) -> None:
    """Print a table of the devices."""
    devices = all_devices(sound)
    if not devices:
        print("PortAudio finds no microphone and no loudspeaker; connect one, or give this user access to it")
        return
    defaults = [", ".join(NAMES[kind] for kind in device.default) for device in devices]
    rows = [
        (str(d.index), d.name, d.host, str(d.inputs or ""), str(d.outputs or ""), str(d.rate), kinds)
        for d, kinds in zip(devices, defaults, strict=True)
    ]
    print_table("", ("", "device", "by", "in", "out", "Hz", "default"), rows)


def load_sounddevice(feature: str = "--speaker", otherwise: str = ", or use --out answer.wav") -> Any:
    """The optional module `sounddevice`, through which PortAudio is reached; UserError where it or its library is missing.

    Args:
        feature: what needs it; `otherwise`: what can be done without it.
    """
    try:
        import sounddevice
    except ImportError as error:
        raise UserError(f'{feature} needs the package sounddevice: pip install "omni-speech[speaker]"') from error
    except OSError as error:
        raise UserError(f"{feature} needs the PortAudio library ({error}): install it{otherwise}") from error
    return sounddevice
