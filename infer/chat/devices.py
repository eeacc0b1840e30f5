"""Finds microphones and loudspeakers, and opens streams of 16-bit samples on them.

PortAudio is reached through the package `sounddevice`. A stream is opened in one channel at the rate that is wanted, or else at
the device's own rate, or else in two channels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from omni.errors import UserError
from omni.utils.charts import print_table

Kind = Literal["input", "output"]

NAMES = {"input": "microphone", "output": "loudspeaker"}
OPTIONS = {"input": "--device_in", "output": "--device_out"}

LATENCY = 0.06  # seconds that a device is asked to hold: its callbacks are Python's, and wait for other threads


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
    devices, name, option = all_devices(sound), NAMES[kind], OPTIONS[kind]
    able = [device for device in devices if device.channels(kind)]
    if query is None:
        matches = [device for device in able if kind in device.default]
        if not matches:
            way = f": {listing(devices, kind)}" if not able else f"; choose one with {option}: {listing(devices, kind)}"
            raise UserError(f"the system names no {name}{way}")
        return matches[0]
    if query.isascii() and query.isdigit():
        matches = [device for device in devices if device.index == int(query)]
    else:
        try:
            wanted = sound.query_devices(query, kind)["index"]
        except (ValueError, sound.PortAudioError):
            matching = [device for device in able if query.lower() in f"{device.name}, {device.host}".lower()]
            problem = f"{option} {query!r} is the name of several: {', '.join(map(str, matching))}; give the number of one"
            none = f"{option} {query!r} is no {name}; {listing(devices, kind)}"
            raise UserError(problem if len(matching) > 1 else none) from None
        matches = [device for device in devices if device.index == wanted]
    if not matches or not matches[0].channels(kind):
        other = f" ({matches[0].name!r} has no {kind})" if matches else ""
        raise UserError(f"{option} {query} is no {name}{other}; {listing(devices, kind)}")
    return matches[0]


def open_stream(
    sound: Any, device: SoundDevice, kind: Kind, rate: int, callback: Callable[..., None], finished: Callable[[], None]
) -> tuple[Any, int, int]:
    """Open a stream on a device, at `rate` where it takes that; returns it, its rate and its channels.

    PortAudio calls `callback` and `finished` (once the stream has ended) in a thread of its own. UserError where the device
    takes no form that was tried."""
    make = sound.RawInputStream if kind == "input" else sound.RawOutputStream
    refusals: dict[str, None] = {}
    for channels, stream_rate in _forms(device.channels(kind), rate, device.rate):
        try:
            stream = make(
                samplerate=stream_rate,
                channels=channels,
                dtype="int16",
                device=device.index,
                latency=LATENCY,
                callback=callback,
                finished_callback=finished,
            )
        except sound.PortAudioError as error:
            refusals[f"{stream_rate} Hz in {channels} channel{'s' * (channels > 1)}: {' '.join(str(error).split())}"] = None
        else:
            return stream, stream_rate, channels
    raise UserError(
        f"the {NAMES[kind]} {device} cannot be opened ({'; '.join(refusals)}); end other programs that use it, or choose "
        f"another with {OPTIONS[kind]}: {listing(all_devices(sound), kind)}"
    )


def _forms(most: int, wanted: int, own: int) -> Iterator[tuple[int, int]]:
    """Channels and rates in the order in which they are tried."""
    for channels in (1, 2):
        if channels <= most:
            yield from ((channels, rate) for rate in dict.fromkeys((wanted, own)))


def start_stream(sound: Any, device: SoundDevice, kind: Kind, stream: Any) -> None:
    """Start a stream; UserError where the device refuses."""
    try:
        stream.start()
    except sound.PortAudioError as error:
        raise UserError(
            f"the {NAMES[kind]} {device} cannot be started ({' '.join(str(error).split())}); end other programs that use it, "
            f"or choose another with {OPTIONS[kind]}: {listing(all_devices(sound), kind)}"
        ) from error


def close_stream(sound: Any, stream: Any) -> None:
    """Stop a stream at once and close it, also where its device is gone."""
    for act in (stream.abort, stream.close):
        with contextlib.suppress(sound.PortAudioError):
            act()


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
