"""Sound comes in as one mono tensor or as one clear error."""

from __future__ import annotations

import io
import os
import random
import re
import socket
import struct
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import torchaudio

from omni.audio.decode import container, foreign, quiet_decoder
from omni.audio.io import audio_info, from_pcm16, level, read_audio, sound_warnings
from omni.audio.resample import StreamResampler, resample
from omni.audio.wav import pcm16, write_wav
from omni.errors import SoundWarning, UserError
from tests.sounds import by_ffmpeg, encoded


def sine(seconds: float, rate: int, hertz: float = 440.0) -> torch.Tensor:
    return 0.5 * torch.sin(2 * torch.pi * hertz * torch.arange(int(seconds * rate)) / rate)


def wav_header(data_bytes: int, rate: int = 8000, channels: int = 1) -> bytes:
    form = struct.pack("<IHHIIHH", 16, 1, channels, rate, rate * 2 * channels, 2 * channels, 16)
    size = min(36 + data_bytes, 0xFFFFFFFF)
    return b"RIFF" + struct.pack("<I", size) + b"WAVEfmt " + form + b"data" + struct.pack("<I", data_bytes)


def refusal(source: object, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        read_audio(source, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 24000, 44100, 48000])
@pytest.mark.parametrize("form", ["WAV", "FLAC"])
def test_any_rate_is_read_as_16_khz(tmp_path: Path, rate: int, form: str) -> None:
    path = tmp_path / f"tone.{form.lower()}"
    soundfile.write(path, sine(0.5, rate).numpy(), rate)
    audio = read_audio(path)
    assert audio.dtype == torch.float32 and audio.shape == (8000,)
    middle = slice(1000, -1000)  # the filter rings at the edges
    assert (audio - sine(0.5, 16000))[middle].abs().max() < 2e-3
    info = audio_info(path)
    assert (info.sample_rate, info.channels, info.samples) == (rate, 1, rate // 2) and info.seconds == 0.5


@pytest.mark.parametrize(("source", "target"), [(22050, 16000), (8000, 16000), (16000, 24000), (93, 100), (44100, 8000)])
@pytest.mark.parametrize("shape", [(1,), (977,), (2, 3000)])
def test_resample_equals_torchaudio(source: int, target: int, shape: tuple[int, ...]) -> None:
    audio = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    wanted = torchaudio.functional.resample(audio.double(), source, target).float()  # its filter follows the dtype
    torch.testing.assert_close(resample(audio, source, target), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rate", "target"), [(44100, 16000), (48000, 16000), (192000, 16000), (11127, 16000), (16000, 24000)])
def test_a_file_is_resampled_block_by_block_as_if_at_once(monkeypatch: pytest.MonkeyPatch, rate: int, target: int) -> None:
    data = encoded(np.random.default_rng(0).normal(0, 0.1, 50000), rate=rate)
    whole = read_audio(data, target)
    monkeypatch.setattr("omni.audio.decode._BLOCK", 7001)
    torch.testing.assert_close(read_audio(data, target), whole, rtol=0, atol=1e-6)


def test_long_sound_is_resampled_in_parts_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    audio = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    whole = resample(audio, 24000, 16000)
    monkeypatch.setattr("omni.audio.resample._FRAMES", 100)
    torch.testing.assert_close(resample(audio, 24000, 16000), whole, rtol=1e-6, atol=1e-6)


RATES = [(24_000, 16_000), (8_000, 16_000), (44_100, 16_000), (48_000, 16_000), (16_000, 16_000), (16_000, 24_000)]
UNUSUAL = [(44_101, 16_000), (16_001, 16_000), (15_999, 16_000), (1, 16), (7_919, 16_000)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("given", "wanted"), RATES + UNUSUAL)
@pytest.mark.parametrize("samples", [0, 1, 2, 700, 30_001])
def test_any_split_equals_the_whole(given: int, wanted: int, samples: int) -> None:
    audio = torch.randn(samples, generator=torch.Generator().manual_seed(samples)) * 0.3
    whole = resample(audio, given, wanted)
    for most in (2, 300, 40_000):
        if samples > 1000 and most == 2:
            continue
        draw, at, stream, out = random.Random(most), 0, StreamResampler(given, wanted), list[torch.Tensor]()
        while at < samples:
            size = draw.randrange(most)
            out.append(stream.push(audio[at : at + size]))
            at += size
        out.append(stream.finish())
        torch.testing.assert_close(torch.cat(out), whole, rtol=1e-6, atol=1e-6)


def test_only_what_the_filter_needs_is_held_back() -> None:
    stream, given = StreamResampler(24_000, 16_000), 0
    for n in range(1, 100):
        given += len(stream.push(torch.ones(240)))
        assert 160 * n - given <= 10
    assert len(stream._held) < 100


def read_by_pipe(folder: Path, data: bytes) -> torch.Tensor:
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    feeder = threading.Thread(target=pipe.write_bytes, args=(data,))
    feeder.start()
    samples = read_audio(pipe)
    feeder.join()
    return samples


def test_path_bytes_file_and_pipe_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    write_wav(path, sine(0.1, 16000), 16000)
    from_path = read_audio(path)
    data = path.read_bytes()
    assert torch.equal(read_by_pipe(tmp_path, data), from_path)
    assert torch.equal(read_audio(str(path)), from_path)
    assert torch.equal(read_audio(data), from_path)
    assert torch.equal(read_audio(io.BytesIO(data)), from_path)
    with open(path, "rb") as file:
        assert torch.equal(read_audio(file), from_path)


def test_channels_are_mixed_or_chosen(tmp_path: Path) -> None:
    channels = torch.stack([sine(0.1, 16000, hertz) for hertz in (200.0, 300.0, 400.0)], dim=1)
    stereo, three = tmp_path / "stereo.wav", tmp_path / "three.wav"
    soundfile.write(stereo, channels[:, :2].numpy(), 16000, subtype="FLOAT")
    soundfile.write(three, channels.numpy(), 16000, subtype="FLOAT")
    assert torch.allclose(read_audio(stereo), channels[:, :2].mean(dim=1))
    assert torch.equal(read_audio(three, channel=2), channels[:, 2])
    assert "no channel 3" in refusal(three, channel=3)


def test_silence_and_streamed_headers_are_sound(tmp_path: Path) -> None:
    path = tmp_path / "silence.wav"
    write_wav(path, torch.zeros(1600), 16000)
    assert torch.equal(read_audio(path), torch.zeros(1600))
    samples = pcm16(sine(0.1, 8000))
    for unknown in (0xFFFFFFFF, 0x7FFFF000):  # what ffmpeg and sox write into a pipe
        assert read_audio(wav_header(unknown) + samples).shape == (1600,)


@pytest.mark.parametrize("rate", [8000, 16000])
def test_raw_pcm(rate: int) -> None:
    audio = sine(0.2, rate)
    read = from_pcm16(pcm16(audio), rate)
    assert read.shape == (3200,)
    assert torch.allclose(read, resample(audio, rate, 16000), atol=1e-4)
    for bad in (b"", b"abc"):
        with pytest.raises(UserError, match=f"{len(bad)} bytes"):
            from_pcm16(bad, rate)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.wav", b"", "empty"),
        ("notes.txt", b"not a sound, " * 40, "not a sound file"),
        ("none.wav", wav_header(0), "no samples"),
        ("nothing.wav", wav_header(16000), "promises 16000 bytes and 0 bytes are there"),
        ("half.wav", wav_header(16000) + bytes(8000), "promises 1.00 s and 0.50 s are there"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    message = refusal(path)
    assert said in message and name in message
    assert said in refusal(content)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 12000])
def test_not_finite(tmp_path: Path, bad: float, place: int) -> None:
    path = tmp_path / "bad.wav"
    samples = np.zeros(16000, np.float32)
    samples[place] = bad
    soundfile.write(path, samples, 16000, subtype="FLOAT")
    assert f"NaN or infinity at {place / 16000:.3f} s" in refusal(path)


def test_three_hours_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long.wav"
    data_bytes = 3 * 3600 * 16000
    with open(path, "wb") as file:  # a hole: takes no space
        file.write(wav_header(data_bytes))
        file.truncate(44 + data_bytes)

    def read_nothing(*_: object, **__: object) -> None:
        raise AssertionError("decoded before it was refused")

    monkeypatch.setattr(soundfile.SoundFile, "read", read_nothing)
    message = refusal(path)
    assert "10800.0 s" in message and "1800 s" in message


def test_a_length_that_only_decoding_shows_is_refused_too() -> None:
    endless = wav_header(0xFFFFFFFF) + bytes(2 * 8000 * 5)
    assert "limit is 2 s" in refusal(endless, max_seconds=2)
    assert read_audio(endless, max_seconds=5).shape == (80000,)


def test_rates_without_a_common_divisor_are_taken_as_their_neighbour(tmp_path: Path) -> None:
    """11,127 and 44,101 Hz: an exact filter would take hundreds of megabytes; the pitch is off by less than a cent."""
    for rate in (11127, 44101):
        path = tmp_path / "odd.wav"
        soundfile.write(path, sine(0.5, rate).numpy(), rate)
        audio = read_audio(path)
        assert audio.shape == (-(-(rate // 2) * 16000 // rate),)
        assert (audio - sine(0.5, 16000)[: len(audio)])[1000:-1000].abs().max() < 5e-3
    with pytest.raises(UserError, match="rates start at 1"):
        resample(torch.zeros(5), 0, 16000)


NOISE = np.random.default_rng(0).normal(0, 0.1, 20000)
FORMS = ["WAV", "WAVEX", "RF64", "W64", "AIFF", "AU", "CAF", "FLAC", "OGG", "OGG/OPUS", "NIST", "MP3"]


def unmeasured(form: str, size: int, lead: int = 0) -> bytes:
    """Half a second whose header tells another number of bytes; `lead` samples are silent."""
    samples = NOISE[:8000].copy()
    samples[:lead] = 0
    data = bytearray(encoded(samples, form))
    places = {
        "WAV": [(4, "<I"), (40, "<I")],
        "WAVEX": [(4, "<I"), (data.find(b"data") + 4, "<I")],
        "AIFF": [(4, ">I"), (data.find(b"COMM") + 10, ">I"), (data.find(b"SSND") + 4, ">I")],
        "AU": [(8, ">I")],
        "CAF": [(data.find(b"data") + 4, ">Q")],
        "W64": [(16, "<Q"), (data.find(b"data") + 16, "<Q")],
        "RF64": [(20, "<Q"), (28, "<Q"), (36, "<Q")],
    }[form]
    for at, kind in places:
        most = (1 << 8 * struct.calcsize(kind)) - 1
        struct.pack_into(kind, data, at, most if size == 0xFFFFFFFF else size)
    return bytes(data)


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF, 0x7FFFFFFF, 2_000_000_000])
@pytest.mark.parametrize("form", ["WAV", "WAVEX", "AIFF", "AU", "CAF", "W64", "RF64"])
@pytest.mark.parametrize("lead", [0, 3000])
def test_what_has_no_length_is_heard_to_its_end(form: str, size: int, lead: int) -> None:
    """As programs write into a pipe; some begin with silence, which looks like an empty chunk."""
    assert len(read_audio(unmeasured(form, size, lead))) == 8000


def test_a_flac_of_unknown_length_is_heard_within_the_limit() -> None:
    data = bytearray(encoded(NOISE, "FLAC"))
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    assert len(read_audio(bytes(data))) == 20000 == audio_info(bytes(data)).samples
    assert "limit is 1 s" in refusal(bytes(data), max_seconds=1)


@pytest.mark.parametrize("form", FORMS)
def test_joined_recordings_are_all_heard_or_refused(form: str) -> None:
    parts = [encoded(NOISE[:length], *form.split("/")) for length in (8000, 16000, 4000)]
    heard = read_audio(b"".join(parts))
    assert abs(len(heard) - 28000) <= (4000 if form == "MP3" else 0)  # the padding of each MP3 is heard
    end, alone = heard[-2000:], read_audio(parts[-1])[-2000:]
    assert form == "MP3" or torch.equal(end, alone)
    if form != "MP3":
        assert "part 3, is" in refusal(b"".join(parts)[:-1000])


def test_joined_recordings_may_differ(tmp_path: Path) -> None:
    for form in ("WAV", "FLAC", "OGG"):
        path = tmp_path / "joined"
        path.write_bytes(encoded(NOISE, form) + encoded(np.stack([NOISE, NOISE], axis=1)[:8000], form, rate=8000))
        assert len(read_audio(path)) == 36000
    with_tags = (b"ID3\4\0\0\0\0\0\x14" + bytes(20) + encoded(NOISE, "MP3")) * 2
    assert len(read_audio(with_tags)) == 40000
    assert len(read_audio(encoded(NOISE, "MP3") + b"TAG" + bytes(125))) == 20000


OTHERS_FORMS = [
    ("ipod", "aac"),
    ("mp4", "aac"),
    ("3gp", "aac"),
    ("mov", "pcm_s16le"),
    ("adts", "aac"),
    ("webm", "libopus"),
    ("matroska", "pcm_s16le"),
    ("asf", "wmav2"),
]


@pytest.mark.parametrize(("form", "codec"), OTHERS_FORMS)
def test_what_libsndfile_does_not_read_ffmpeg_does(form: str, codec: str, tmp_path: Path) -> None:
    rate = 48000
    tone = sine(1.0, rate)
    data = by_ffmpeg(tone.numpy(), form, codec, rate)
    heard = read_audio(data)
    assert 15600 < len(heard) < 17700 and abs(audio_info(data).seconds - 1) < 0.1
    assert 0.3 < heard[4000:12000].square().mean().sqrt() < 0.4
    assert torch.equal(read_by_pipe(tmp_path, data), heard)
    if form == "ipod":
        ahead = by_ffmpeg(tone.numpy(), form, codec, rate, movflags="faststart")
        assert "cut short after 0.4" in refusal(ahead[: len(ahead) // 2])
        pieces = by_ffmpeg(tone.numpy(), form, codec, rate, movflags="frag_keyframe+empty_moov", frag_duration="200000")
        assert abs(len(read_audio(pieces)) - len(heard)) < 1000
        assert abs(audio_info(pieces).seconds - 1) < 0.1
    if form != "adts":  # which promises nothing
        assert re.search("truncated|cut short", refusal(data[: len(data) // 2]))


def test_a_playlist_opens_no_other_file(tmp_path: Path) -> None:
    secret = write_wav(tmp_path / "secret.wav", sine(0.5, 16000), 16000)
    for text in (f"#EXTM3U\n#EXTINF:1,\n{secret}\n", f"ffconcat version 1.0\nfile {secret}\n"):
        assert "but text" in refusal(text.encode())
        refusal(b"\0\1" + text.encode())


@pytest.mark.parametrize("form", FORMS)
def test_half_of_a_file_is_never_read_as_a_whole(form: str) -> None:
    data = encoded(NOISE, *form.split("/"))
    assert len(read_audio(data)) == 20000
    for part in (len(data) // 2, len(data) - 1000):
        assert any(word in refusal(data[:part]) for word in ("truncated", "cut short"))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("hello there, what is the time?".encode("utf-16"), "but text"),
        (b'{"question": "what is the time?"}', "but JSON"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (b"\xff\xfb\x90\x44" + bytes(range(256)) * 8, "no two frames|cannot be read|can be read"),
        (bytes(100_000), "can be read"),
    ],
)
def test_what_is_not_sound_is_named(data: bytes, said: str) -> None:
    assert re.search(said, refusal(data))
    assert foreign(encoded(NOISE)[:4096]) is None and container(data[:4096]) is None


@pytest.mark.parametrize("form", ["MP3", "AAC"])
def test_utf_16_and_pcm_are_not_mp3_and_frames_in_a_row_are(form: str) -> None:
    """All start with eleven set bits."""
    data = encoded(NOISE, "MP3") if form == "MP3" else by_ffmpeg(NOISE, "adts", "aac")
    assert container(data[:4096]) == form and container("ÿþ".encode("utf-16") + data[10:4096]) is None
    quiet = np.random.default_rng(0).integers(-1100, 1100, 2048).astype("<i2").tobytes()
    assert container(data[:2] + quiet) is None and container(b"\xff\xff" + quiet) is None


def test_an_ogg_that_ends_between_pages_is_told() -> None:
    ogg = encoded(NOISE, "OGG")
    with pytest.warns(SoundWarning, match="not marked as the end"):
        read_audio(ogg[: ogg.rindex(b"OggS")])


OTHERS = b"error: no frame\n\nWarning: a stream was slow\nNote: layer 3 is frozen\n  File x.py, line 1, in decode_frame\n"
"""What other threads may write while an MP3 is decoded."""


def test_the_decoder_writes_nothing_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    data = encoded(NOISE, "MP3")
    refusal(data[: len(data) // 2])
    refusal(data[:20])
    with quiet_decoder("MP3"):
        os.write(2, b"\nWarning: Xing stream size off by more than 1%\n[src/libmpg123/id3.c:f():9] error: a tag\n" + OTHERS)
    assert capfd.readouterr().err.encode() == OTHERS


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG"])
def test_channels_that_cancel_each_other_are_not_mixed_to_silence(form: str) -> None:
    left = sine(0.5, 16000).numpy()
    data = encoded(np.stack([0.5 * left, -0.52 * left], axis=1), form)
    with pytest.warns(SoundWarning, match="channel 1 is used alone"):
        heard = read_audio(data)
    assert (heard + 0.52 * sine(0.5, 16000)).abs().max() < 0.02
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (read_audio(data, channel=0) - 0.5 * sine(0.5, 16000)).abs().max() < 0.02
        read_audio(encoded(np.stack([left, -0.5 * left], axis=1), form))
        read_audio(encoded(np.zeros((500, 2)), form))


def test_level_and_length_are_remarked() -> None:
    tone = sine(1.0, 16000)
    assert level(tone, 16000) == pytest.approx(20 * np.log10(0.5 / np.sqrt(2)), abs=0.05)
    burst = torch.cat([torch.zeros(16000), tone[:1600], torch.zeros(16000)])
    assert level(burst, 16000) == pytest.approx(level(tone, 16000), abs=0.05)  # the loudest 100 ms, not the mean
    assert level(torch.full((16000,), 0.3), 16000) < -150  # a constant is not heard
    assert sound_warnings(tone, 16000) == [] and sound_warnings(tone * 0.003, 16000) == []
    assert "is silent: its loudest 100 ms reach -69 dBFS" in sound_warnings(tone * 0.001, 16000)[0]
    assert "lasts 1 ms" in sound_warnings(tone[:16], 16000)[0] and len(sound_warnings(tone[:1599], 16000)) == 1
    assert [r.split()[0] for r in sound_warnings(torch.zeros(1), 16000)] == ["lasts", "is"]


class Endless(io.RawIOBase):
    """A pipe that gives the beginning and then zeros for ever; counts what was taken."""

    def __init__(self, begin: bytes) -> None:
        self.begin, self.taken = begin, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        assert size > 0, "read without a bound"
        self.taken += size
        given, self.begin = self.begin[:size], self.begin[size:]
        return given.ljust(size, b"\0")


def test_streams_without_end_are_refused_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni.audio.io.MAX_STREAM_BYTES", 1 << 20)
    for begin, most, said in (
        (b"", 4096, "no sound file"),
        (b"dear diary ", 4096, "no sound file"),
        (encoded(NOISE), 1 << 20, "1 MiB"),
    ):
        pipe = Endless(begin)
        assert said in refusal(pipe) and pipe.taken <= most + 1


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom", "/dev/null"])
def test_devices_are_refused(device: str) -> None:
    assert device in refusal(device)


def test_a_socket_and_names_that_no_file_can_have(tmp_path: Path) -> None:
    place = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        assert "socket" in refusal(place)
    assert "no file can have this name" in refusal("a\0.wav") and "no file can have" in refusal("\ud800.wav")
    long = refusal("x" * 100_000)
    assert len(long) < 400
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.wav")
    write_wav(path, sine(0.1, 16000), 16000)
    assert read_audio(path).shape == (1600,)


def test_long_silence_in_a_small_flac_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(encoded(np.zeros(1 << 21, np.int16), "FLAC"))
    assert len(data) < 20000  # 131 s
    assert "131.1 s" in refusal(bytes(data), max_seconds=100)
    data[21] &= 0xF0
    data[22:26] = bytes(4)  # a header that does not say how many
    blocks = []
    decode = soundfile.SoundFile.read

    def counted(self: soundfile.SoundFile, frames: int, **options: object) -> np.ndarray:
        blocks.append(frames)
        return decode(self, frames, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(soundfile.SoundFile, "read", counted)
    assert "limit is 20 s" in refusal(bytes(data), max_seconds=20)
    assert sum(blocks) <= 20 * 16000 + 2 * (1 << 18)
