"""Codec2: its bits, its sound against the library's own in a fresh process, its private copies of it."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from omni.codec import codec2
from omni.codec.codec2 import Codec2Codec, pack, unpack
from omni.errors import UserError

SIZES = {"codec2": (512, 512, 16, 64), "codec2-1600": (512, 128, 128, 512, 256, 256, 256, 256)}
RATES = {"codec2": 700, "codec2-1600": 1600}


@pytest.fixture(scope="module", params=SIZES)
def codec(request: pytest.FixtureRequest) -> Codec2Codec:
    return Codec2Codec(request.param)


def random_codes(codec: Codec2Codec, frames: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randint(0, size, (frames,), generator=generator) for size in SIZES[codec.name]])


def voice(seconds: float = 1.2) -> Tensor:
    """A buzz of 120 Hz through two formants at 8 kHz, loud and soft by turns every 0.2 s."""
    time = torch.arange(int(8000 * seconds)) / 8000
    harmonics = torch.arange(1, 32)[:, None]
    formants = sum(torch.exp(-(((harmonics * 120 - centre) / 200) ** 2)) for centre in (600, 1500))
    buzz = (formants * torch.sin(2 * torch.pi * 120 * harmonics * time)).sum(0)
    loudness = torch.where((time / 0.2).long() % 2 == 0, 0.3, 0.02)
    return buzz / buzz.abs().max() * loudness


def test_bits_against_a_slow_reference(codec: Codec2Codec) -> None:
    codes = random_codes(codec, 20)
    packed = pack(codes, codec.mode)
    for frame, own in enumerate(codes.t().tolist()):
        bits = "".join(f"{code:0{size.bit_length() - 1}b}" for code, size in zip(own, SIZES[codec.name], strict=True))
        bits += "0" * (-len(bits) % 8)
        assert packed[frame].tobytes() == int(bits, 2).to_bytes(len(bits) // 8, "big")
    assert torch.equal(unpack(packed, codec.mode), codes)


FRESH_PROCESS = """
import sys, numpy as np, pycodec2
pcm = np.load(sys.argv[1] + "/pcm.npy")
coder = pycodec2.Codec2(int(sys.argv[2]))
packed = [coder.encode(frame) for frame in pcm.reshape(-1, 320)]
decoder = pycodec2.Codec2(int(sys.argv[2]))
sound = np.concatenate([decoder.decode(frame) for frame in packed])
np.savez(sys.argv[1] + "/out.npz", packed=np.frombuffer(b"".join(packed), np.uint8), sound=sound)
"""


def test_equals_the_library_in_a_fresh_process(codec: Codec2Codec, tmp_path: Path) -> None:
    """In a process that has drawn no noise before, the package itself decodes as we always do."""
    noise = torch.randn(8000, generator=torch.Generator().manual_seed(0)) / 20
    pcm = (torch.cat([voice(), noise]) * 32768).round()
    np.save(tmp_path / "pcm.npy", pcm.numpy().astype(np.int16))
    subprocess.run([sys.executable, "-c", FRESH_PROCESS, str(tmp_path), str(RATES[codec.name])], check=True)
    expected = np.load(tmp_path / "out.npz")
    codes = codec.encode(pcm / 32768, 8000)
    assert torch.equal(codes, unpack(expected["packed"].reshape(codes.shape[1], -1), codec.mode))
    if codec.name == "codec2":
        assert (codes[3] == 0).any() and (codes[3] > 0).any()  # unvoiced and voiced frames
    assert torch.equal(codec.decode(codes) * 32768, torch.from_numpy(expected["sound"]).float())


def test_decoding_elsewhere_in_the_process_changes_nothing(codec: Codec2Codec) -> None:
    """The trap: unvoiced frames draw from a random state that all of the package's decoders share."""
    import pycodec2

    codes = random_codes(codec, 20)
    codes[[0, 3]] = 0  # unvoiced
    whole = codec.decode(codes)
    other = pycodec2.Codec2(RATES[codec.name])
    stream, heard = codec.stream(), []
    for frame in codes.split(1, dim=1):
        other.decode(pack(codes[:, :1], codec.mode).tobytes())
        heard.append(stream.push(frame))
    assert torch.equal(torch.cat(heard), whole)


@pytest.mark.parametrize("fill", ["lowest", "highest", "random"])
def test_any_codes_give_sound(codec: Codec2Codec, fill: str) -> None:
    sizes = torch.tensor(codec.codebook_sizes)[:, None]
    codes = {"lowest": sizes.expand(-1, 50) * 0, "highest": sizes.expand(-1, 50) - 1, "random": random_codes(codec, 500)}[fill]
    sound = codec.decode(codes)
    assert sound.isfinite().all() and sound.abs().max() <= 1


def test_encode_clips_what_is_too_loud(codec: Codec2Codec) -> None:
    audio = voice() * 20
    assert torch.equal(codec.encode(audio), codec.encode(audio.clamp(-1, 1)))


def test_pickled_codec_decodes_the_same(codec: Codec2Codec) -> None:
    codes = random_codes(codec, 5)
    assert torch.equal(pickle.loads(pickle.dumps(codec)).decode(codes), codec.decode(codes))


# -- the private copies --------------------------------------------------------------------------------------


def test_copies_leave_no_file_and_are_released(codec, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    finished, dropped = codec.stream(), codec.stream()
    finished.push(random_codes(codec, 2))
    assert list(tmp_path.iterdir()) == []
    finished.finish()
    releases = [finished._release, dropped._release]
    assert [release.alive for release in releases] == [False, True]
    del dropped
    gc.collect()
    assert not releases[1].alive


def test_a_copy_that_cannot_be_loaded_leaves_no_file(tmp_path, monkeypatch) -> None:
    library = tmp_path / "broken.so"
    library.write_bytes(b"not a library")
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(UserError, match=r"broken\.so"):
        codec2.load_private(str(library))
    assert list(folder.iterdir()) == []
