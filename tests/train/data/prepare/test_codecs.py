"""Answers encoded by SNAC and Mimi: the packages' own codes, whatever the number of processes, of one set of weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import soundfile
import torch
from safetensors.torch import load_file, save_file
from snac import SNAC
from torch import Tensor
from transformers import MimiModel

from omni.codec.snac import SNAC_24KHZ
from omni.errors import UserError
from tests.codec.mimi_toys import PLAIN
from tests.codec.mimi_toys import save as save_mimi
from train.cli import main
from train.data.prepare import rows as blocks
from train.data.prepare import shards
from train.data.prepare.prepare import prepare
from train.data.prepare.rows import PrepareConfig
from train.data.rows.parquet import StoredRows

pytestmark = pytest.mark.usefixtures("forked")
RATE = 24000
ROWS = 34  # more than a block, so that two processes have work
SMALL_SNAC = dict(SNAC_24KHZ, encoder_dim=4, encoder_rates=[2, 4], decoder_dim=32, decoder_rates=[4, 2])
Encode = Callable[[Tensor], Tensor]


def save_snac(folder: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = SNAC(**SMALL_SNAC).state_dict()
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SMALL_SNAC))


def snac_of(folder: Path) -> Encode:
    """The package's encoder; a frame is c0 c1 c2 c2 c1 c2 c2."""
    model = SNAC(**SMALL_SNAC).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))

    def encode(audio: Tensor) -> Tensor:
        one, two, four = (level[0] for level in model.encode(audio[None, None]))
        frames = zip(one, two.view(-1, 2), four.view(-1, 4), strict=True)
        return torch.stack([torch.stack([a, b, d, e, c, f, g]) for a, (b, c), (d, e, f, g) in frames], dim=1)

    return torch.no_grad()(encode)


def mimi_of(folder: Path) -> Encode:
    """Transformers' encoder; the last frame is filled up with silence."""
    model = MimiModel.from_pretrained(folder).eval()
    size = round(RATE / model.config.frame_rate)

    def encode(audio: Tensor) -> Tensor:
        filled = torch.nn.functional.pad(audio, (0, -len(audio) % size))
        return model.encode(filled[None, None], num_quantizers=8).audio_codes[0]

    return torch.no_grad()(encode)


@pytest.fixture(params=["snac", "mimi"])
def codec(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Encode]:
    """Name, folder of small random weights, and the encoder of somebody else's package with these weights."""
    folder = tmp_path / "codec"
    if request.param == "mimi":
        save_mimi(PLAIN, folder)
        return "mimi", folder, mimi_of(folder)
    save_snac(folder)
    return "snac", folder, snac_of(folder)


def answers(folder: Path) -> list[Tensor]:
    """Noise of many lengths at the codecs' rate, spoken as answers in a table."""
    (folder / "wav").mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    sounds = [torch.rand(500 + 83 * index, generator=generator) - 0.5 for index in range(ROWS)]
    for index, sound in enumerate(sounds):
        soundfile.write(folder / f"wav/{index}.wav", sound.numpy(), RATE, subtype="FLOAT")
    lines = ["question_text,answer_text,answer_audio", *(f"q{index},a{index},wav/{index}.wav" for index in range(ROWS))]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    return sounds


@pytest.mark.long
def test_stored_codes_are_the_packages_own_for_any_number_of_processes(codec, tmp_path):
    name, folder, encode = codec
    sounds = answers(tmp_path / "in")
    for workers in ("0", "2"):
        command = ["data", "prepare", tmp_path / "in/rows.csv", tmp_path / workers, "--progress", "off", "--workers", workers]
        assert main([str(part) for part in (*command, "--codec", name, "--codec_folder", folder)]) == 0
    alone, shared = ({file.name: file.read_bytes() for file in (tmp_path / n).iterdir()} for n in ("0", "2"))
    assert alone == shared
    rows = list(StoredRows(tmp_path / "0"))
    assert len(rows) == ROWS
    seen = set()
    for row, sound in zip(rows, sounds, strict=True):
        (turn,) = row.turns
        assert turn.answer_audio is None and turn.answer_codes is not None and turn.answer_codes.codec == name
        assert torch.equal(turn.answer_codes.frames, encode(sound))
        seen |= set(turn.answer_codes.frames.flatten().tolist())
    assert len(seen) > 10  # the sound is heard in them


@pytest.mark.long
def test_other_weights_of_a_codec_are_noticed(codec, tmp_path, monkeypatch):
    """One bit of one weight: neither what is half made nor what is whole is taken for theirs."""
    name, folder, _ = codec
    answers(tmp_path / "in")
    config = PrepareConfig(workers=0, codec=name, codec_folder=str(folder))
    make, add, count = blocks.BlockMaker.__call__, shards.ShardWriter.add, []

    def interrupted(self, *arguments):
        count.append(1)
        if len(count) > 1:
            raise KeyboardInterrupt
        return make(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(blocks.BlockMaker, "__call__", interrupted)
        patch.setattr(shards.ShardWriter, "add", lambda self, block: (add(self, block), self.finish()))
        prepare(tmp_path / "in/rows.csv", tmp_path / "out", config)
    file = folder / "model.safetensors"
    mine = file.read_bytes()
    others = mine[:-4] + bytes([mine[-4] ^ 1]) + mine[-3:]  # the last bit of a weight
    for content, state in ((others, "was started"), (mine, ""), (others, "was prepared")):
        file.write_bytes(content)
        if not state:
            assert prepare(tmp_path / "in/rows.csv", tmp_path / "out", config).rows == ROWS
            continue
        with pytest.raises(
            UserError, match=rf"out\S* {state} with other settings: codec_weights.model.safetensors was \d+ and is now \d+;"
        ):
            prepare(tmp_path / "in/rows.csv", tmp_path / "out", config)
