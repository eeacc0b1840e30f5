"""Sound goes out whole or not at all."""

from __future__ import annotations

import errno
import io
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from omni.audio.io import from_pcm16, read_audio
from omni.audio.wav import WavWriter, pcm16, write_wav
from omni.errors import UserError


def test_sixteen_bits_survive_reading_and_writing(tmp_path: Path) -> None:
    values = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    audio = from_pcm16(values.numpy().astype("<i2").tobytes(), 16000)
    assert pcm16(audio) == values.numpy().astype("<i2").tobytes()
    path = write_wav(tmp_path / "all.wav", audio, 16000)
    assert torch.equal(read_audio(path), audio)
    assert pcm16(torch.tensor([-9.0, 9.0])) == struct.pack("<hh", -32768, 32767)


@pytest.mark.parametrize("sizes", [(1000,), (0, 1, 7, 992), ()])
def test_chunks_equal_the_whole(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    path = tmp_path / "grown.wav"
    audio = torch.rand(sum(sizes), generator=torch.Generator().manual_seed(0)) * 2 - 1
    with WavWriter(path, 24000) as writer:
        for chunk in audio.split(list(sizes)) if sizes else ():
            writer.append(chunk)
            assert not path.exists()
        assert writer.samples == len(audio) and writer.seconds == len(audio) / 24000
    written, rate = soundfile.read(path, dtype="float32")
    assert rate == 24000 and len(written) == len(audio)
    assert np.abs(written - audio.numpy()).max(initial=0.0) <= 1 / 32768
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
    for name in ("a\0.wav", "a" * 300 + ".wav"):
        with pytest.raises(UserError, match="cannot be written: .*: give another name"):
            write_wav(tmp_path / name, torch.zeros(5), 16000)


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
