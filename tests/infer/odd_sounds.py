"""Some two hundred malformed and unusual sound inputs, made by rules: every container whole, cut, damaged and empty;
headers that lie; what is no sound at all; sound in which nothing is heard.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import product

import numpy as np

from tests.sounds import encoded

RATE = 16000
NOISE = np.random.default_rng(0).normal(0, 0.1, 3200)

CONTAINERS = [
    *product(["WAV"], ["PCM_16", "PCM_U8", "PCM_24", "FLOAT", "DOUBLE", "ULAW", "ALAW", "IMA_ADPCM", "GSM610"]),
    *product(["RF64", "W64", "AIFF", "AU", "CAF"], ["PCM_16", "FLOAT"]),
    ("WAVEX", "PCM_24"),
    ("FLAC", "PCM_16"),
    ("OGG", "VORBIS"),
    ("OGG", "OPUS"),
    ("MP3", "MPEG_LAYER_III"),
    ("NIST", "PCM_16"),
]
NOT_READ = [("VOC", "PCM_16"), ("XI", "DPCM_16"), ("MAT4", "PCM_16"), ("HTK", "PCM_16"), ("SVX", "PCM_16")]


def header(rate: int = RATE, channels: int = 1, bits: int = 16, length: int = 3200, code: int = 1, width: int = 0) -> bytes:
    """Of a WAV, with whatever is claimed."""
    step = width or channels * bits // 8
    form = struct.pack("<IHHIIHH", 16, code, channels, rate, rate * step & 0xFFFFFFFF, step & 0xFFFF, bits)
    return b"RIFF" + struct.pack("<I", (length + 36) & 0xFFFFFFFF) + b"WAVEfmt " + form + b"data" + struct.pack("<I", length)


def odd_sounds() -> Iterator[tuple[str, bytes]]:
    """Names and bytes; a name starts with `good` where it must be answered, `bad` where it must be refused."""
    draw = np.random.default_rng(1)
    for form, subtype in CONTAINERS:
        data, name = encoded(NOISE, form, subtype), f"{form} {subtype}"
        yield f"good {name}", data
        yield f"bad {name} in half", data[: len(data) // 2]
        yield f"bad {name} of 10 bytes", data[:10]
        yield f"{name} with a byte more", data + b"\0"
        spoilt = bytearray(data)
        for place in draw.integers(12, len(data), 40):
            spoilt[place] = draw.integers(256)
        yield f"{name} with 40 bytes changed", bytes(spoilt)
        spoilt = bytearray(data)
        for place in draw.integers(4, min(60, len(data)), 6):
            spoilt[place] = draw.integers(256)
        yield f"{name} with its header changed", bytes(spoilt)
    for form, subtype in NOT_READ:
        yield f"bad {form}", encoded(NOISE, form, subtype)
    yield from _lies()
    yield from _foreign(draw)
    silence = np.zeros(3200)
    yield "good silence", encoded(silence)
    yield "good 1 ms", encoded(NOISE[:16])
    yield "good one sample", encoded(NOISE[:1])
    yield "bad no sample", encoded(NOISE[:0])
    yield "good opposite channels", encoded(np.stack([NOISE, -NOISE], axis=1))
    yield "good white noise", encoded(np.tile(NOISE, 5))
    yield "good square of full scale", encoded(np.sign(NOISE))
    yield "bad not a number", encoded(NOISE * np.nan, subtype="FLOAT")
    yield "bad infinite", encoded(np.append(NOISE, np.inf), subtype="DOUBLE")
    yield "bad 31 seconds", encoded(np.zeros(31 * RATE))
    yield "bad long silence in a small file", encoded(np.zeros(100 * RATE), "FLAC")
    for rate in (100, 8000, 11025, 11127, 44100, 44101, 192000, 655350):
        yield f"good at {rate} Hz", encoded(np.resize(NOISE, max(20, rate // 5)), rate=rate)


def _lies() -> Iterator[tuple[str, bytes]]:
    sound = encoded(NOISE)[44:]
    for rate in (0, 1, 99, 1_000_001, 10**9, 0xFFFFFFFF):
        yield f"bad claims {rate} Hz", header(rate) + sound
    for channels in (0, 3, 8, 1024, 10_000, 65535):
        yield f"bad claims {channels} channels", header(channels=channels, length=len(sound)) + sound
    for bits in (0, 1, 3, 7, 48, 65535):  # libsndfile takes the bytes that hold them
        yield f"{'' if 0 < bits < 8 else 'bad '}claims {bits} bits", header(bits=bits, length=len(sound)) + sound
    for length in (6402, 1 << 20, 900_000_000):
        yield f"bad claims {length} bytes", header(length=length) + sound
    for length in (0xFFFFFFFF, 0x7FFFF000, 0x7FFEFFFF, 2_000_000_000, 0):
        yield f"good of unknown length {length:x}", header(length=length) + sound
    yield "bad claims nothing", header(length=0)
    for code in (0, 2, 3, 6, 7, 17, 0x55, 0xFFFE, 0xFFFF):
        yield f"of coding {code}", header(code=code, length=len(sound)) + sound
    yield "bad chunk of 4 GB before the sound", header()[:12] + b"junk\xff\xff\xff\xff" + header()[12:] + sound
    yield "a thousand chunks", header()[:12] + b"junk\0\0\0\0" * 1000 + header(length=6400)[12:] + sound
    yield "bad format twice as long", header()[:16] + b"\x20" + header()[17:] + sound
    flac = bytearray(encoded(NOISE, "FLAC"))
    flac[21:26] = b"\xff" * 5
    yield "bad FLAC of 2^36 samples", bytes(flac)
    tag = b"ID3\4\0\0\x7f\x7f\x7f\x7f"
    yield "bad tag of 256 MiB", tag + encoded(NOISE, "MP3", "MPEG_LAYER_III")


def _foreign(draw: np.random.Generator) -> Iterator[tuple[str, bytes]]:
    words = "What is seven plus five? \n" * 40
    for encoding in ("ascii", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"):
        yield f"bad text in {encoding}", words.encode(encoding)
    yield "bad Chinese", ("七加五是多少\n" * 40).encode("utf-16")
    yield "bad JSON", b'{"audio": [0.1, 0.2]}'
    yield "bad HTML", b"<!doctype html><title>404</title>"
    yield "bad LFS pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    for mark in (b"%PDF-1.7\n", b"PK\3\4", b"\x1f\x8b\x08", b"\x89PNG\r\n", b"\xff\xd8\xff", b"\x7fELF", b"\x1aE\xdf\xa3"):
        yield f"bad {mark!r}", mark + draw.bytes(500)
    yield "bad M4A", b"\0\0\0\x20ftypM4A " + draw.bytes(500)
    yield "bad AVI", b"RIFF\xff\0\0\0AVI " + draw.bytes(500)
    yield "bad empty", b""
    yield "bad zeros", bytes(10_000)
    for mark in (b"RIFF", b"fLaC", b"OggS", b"FORM", b"caff", b".snd", b"ID3\3", b"\xff\xfb", b"riff", b"NIST_1A\n"):
        yield f"bad {mark!r} and nothing", mark
        yield f"bad {mark!r} and noise", mark + draw.bytes(2000)
