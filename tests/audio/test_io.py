"""Sound comes in as one mono tensor or as one clear error, and goes out whole or not at all."""

from __future__ import annotations

import errno
import io
import os
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import torchaudio

from omni.audio.io import WavWriter, audio_info, from_pcm16, pcm16, read_audio, resample, write_wav
from omni.errors import UserError


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


# ---------------------------------------------------------------------------------------------------- what is read


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


def test_long_sound_is_resampled_in_parts_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    audio = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    whole = resample(audio, 24000, 16000)
    monkeypatch.setattr("omni.audio.io._FRAMES", 100)
    torch.testing.assert_close(resample(audio, 24000, 16000), whole, rtol=1e-6, atol=1e-6)


def test_path_bytes_file_and_pipe_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    write_wav(path, sine(0.1, 16000), 16000)
    from_path = read_audio(path)
    data = path.read_bytes()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    feeder = threading.Thread(target=pipe.write_bytes, args=(data,))
    feeder.start()
    assert torch.equal(read_audio(pipe), from_path)
    feeder.join()
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


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.wav", b"", "empty"),
        ("notes.txt", b"not a sound, " * 40, "not a sound file"),
        ("noise.bin", bytes(range(256)) * 8, "not a sound file"),
        ("noise.raw", bytes(range(256)) * 8, "no header"),
        ("head.wav", wav_header(4000)[:30], "not a sound file"),
        ("none.wav", wav_header(0), "no samples"),
        ("half.wav", wav_header(16000) + bytes(8000), "promises 1.00 s and 0.50 s are there"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    message = refusal(path)
    assert said in message and name in message
    if name != "noise.raw":
        assert said in refusal(content)


def test_missing_and_folder(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "nothing.wav")
    assert "is a folder" in refusal(tmp_path)
    assert "is a folder" in refusal(str(tmp_path), max_seconds=None)


@pytest.mark.parametrize("form", ["FLAC", "MP3"])
def test_truncated_compressed_files(form: str) -> None:
    whole = io.BytesIO()
    noise = np.random.default_rng(0).normal(0, 0.1, 40000)
    soundfile.write(whole, noise, 16000, format=form)
    assert read_audio(whole.getvalue()).shape == (40000,)
    message = refusal(whole.getvalue()[: len(whole.getvalue()) // 2])
    assert "truncated" in message or "cut short" in message


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 12000])
def test_not_finite(tmp_path: Path, bad: float, place: int) -> None:
    path = tmp_path / "bad.wav"
    samples = np.zeros(16000, np.float32)
    samples[place] = bad
    soundfile.write(path, samples, 16000, subtype="FLOAT")
    assert f"NaN or infinity at {place / 16000:.3f} s" in refusal(path)


def test_eight_channels(tmp_path: Path) -> None:
    path = tmp_path / "eight.wav"
    soundfile.write(path, np.zeros((800, 8), np.float32), 16000)
    message = refusal(path)
    assert "8 channels" in message and "channel=0 to channel=7" in message
    assert read_audio(path, channel=7).shape == (800,)


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


def test_rates_that_cannot_be_converted(tmp_path: Path) -> None:
    path = tmp_path / "odd.wav"
    soundfile.write(path, np.zeros(1000, np.float32), 44101)
    assert "44101 Hz" in refusal(path)
    assert read_audio(path, 44101).shape == (1000,)
    with pytest.raises(UserError, match="rates start at 1"):
        resample(torch.zeros(5), 0, 16000)


# ------------------------------------------------------------------------------------------------- what is written


def test_sixteen_bits_survive_reading_and_writing(tmp_path: Path) -> None:
    values = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    audio = from_pcm16(values.numpy().astype("<i2").tobytes(), 16000)
    assert pcm16(audio) == values.numpy().astype("<i2").tobytes()
    path = write_wav(tmp_path / "all.wav", audio, 16000)
    assert torch.equal(read_audio(path), audio)
    assert pcm16(torch.tensor([-9.0, 9.0])) == struct.pack("<hh", -32768, 32767)


@pytest.mark.parametrize(("encoding", "error"), [("pcm16", 1 / 32768), ("float32", 0.0)])
@pytest.mark.parametrize("sizes", [(1000,), (0, 1, 7, 992), ()])
def test_chunks_equal_the_whole(tmp_path: Path, encoding: str, error: float, sizes: tuple[int, ...]) -> None:
    path = tmp_path / "grown.wav"
    audio = torch.rand(sum(sizes), generator=torch.Generator().manual_seed(0)) * 2 - 1
    with WavWriter(path, 24000, encoding=encoding) as writer:  # type: ignore[arg-type]
        for chunk in audio.split(list(sizes)) if sizes else ():
            writer.append(chunk)
            assert not path.exists()
        assert writer.samples == len(audio) and writer.seconds == len(audio) / 24000
    written, rate = soundfile.read(path, dtype="float32")
    assert rate == 24000 and len(written) == len(audio)
    assert np.abs(written - audio.numpy()).max(initial=0.0) <= error
    assert os.listdir(tmp_path) == ["grown.wav"]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = write_wav(tmp_path / "answer.wav", torch.zeros(10), 16000)
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt), WavWriter(path, 16000) as writer:
        writer.append(torch.ones(1000))
        raise KeyboardInterrupt
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["answer.wav"]


def test_closed_early_is_a_whole_file(tmp_path: Path) -> None:
    writer = WavWriter(tmp_path / "early.wav", 16000)
    writer.append(torch.ones(123))
    assert writer.close() == writer.close() == tmp_path / "early.wav"
    assert read_audio(tmp_path / "early.wav").shape == (123,)
    with pytest.raises(ValueError, match="closed"):
        writer.append(torch.ones(1))


def test_the_unfinished_file_can_be_played(tmp_path: Path) -> None:
    writer = WavWriter(tmp_path / "a.wav", 16000)
    writer.append(torch.ones(50000))
    [part] = tmp_path.iterdir()
    assert len(read_audio(part)) > 0
    writer.abort()
    assert not list(tmp_path.iterdir())


def test_a_link_keeps_pointing_at_its_file(tmp_path: Path) -> None:
    (tmp_path / "link.wav").symlink_to(tmp_path / "real.wav")
    write_wav(tmp_path / "link.wav", torch.zeros(5), 16000)
    assert (tmp_path / "link.wav").is_symlink() and (tmp_path / "real.wav").is_file()


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    for place in (tmp_path / "none" / "a.wav", tmp_path, "/dev/null"):
        with pytest.raises(UserError) as caught:
            write_wav(place, torch.zeros(5), 16000)
        assert str(place) in str(caught.value)
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize("when", ["append", "close"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, when: str) -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "full.wav"
    writer = WavWriter(path, 16000)
    assert writer._file is not None
    writer._file.close()
    writer._file = Full()
    with pytest.raises(UserError, match="No space left"):
        writer.append(torch.zeros(100)) if when == "append" else writer.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("audio", [torch.tensor([0.0, float("nan")]), torch.zeros(2, 5)])
def test_sound_that_cannot_be_written(tmp_path: Path, audio: torch.Tensor) -> None:
    with pytest.raises(UserError, match="sound to write"):
        write_wav(tmp_path / "bad.wav", audio, 16000)
    assert not list(tmp_path.iterdir())
