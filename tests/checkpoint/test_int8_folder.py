"""Model folders in int8: the same model however it is made, memory that its int8 bytes bound, and refusals of what is none."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from omni.checkpoint import folder as folders
from omni.checkpoint import folder as int8_state
from omni.checkpoint.folder import check_full_precision, load_folder, save_folder
from omni.checkpoint.places import CONFIG, TOKENIZER, WEIGHTS
from omni.convert import omni_folder
from omni.convert.omni_folder import quantize_folder
from omni.cpu.int8 import TABLES, Int8Embedding, Int8Linear, is_int8, to_int8
from omni.errors import UserError
from omni.generate.speech_lm import SpeechLM
from omni.layout import Layout
from omni.model.decoder import Hidden
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer
from omni.utils.profiling import high_water
from tests.checkpoint.test_folder import CONFIGS


def save(place: Path, name: str, dtype: torch.dtype = torch.float32) -> SpeechModel:
    torch.manual_seed(0)
    model = SpeechModel(CONFIGS[name]).to(dtype).eval()
    with torch.no_grad():
        model.decoder.blocks[0].mlp.down.weight[3] = 0
    save_folder(place, model.config, model.state_dict(), Tokenizer.bytes(), extra={"step": 7})
    return model


@pytest.fixture(params=[("codec2", torch.float32), ("mini-omni", torch.float32), ("mini-omni", torch.bfloat16)])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[SpeechModel, Path, Path]]:
    """A model in full precision, its folder, and the one in int8."""
    model = save(tmp_path / "model", *request.param)
    quantize_folder(tmp_path / "model", tmp_path / "int8")
    yield model, tmp_path / "model", tmp_path / "int8"


def checksums(model: SpeechModel) -> dict[str, Any]:
    return {name: part.plain_checksum for name, part in model.named_modules() if isinstance(part, Int8Linear)}  # type: ignore[misc]


@pytest.mark.sampled(1)
def test_a_model_is_the_same_however_it_is_made(made: tuple[SpeechModel, Path, Path]) -> None:
    _, full, place = made
    stored, read = load_folder(place).model, load_folder(full, quantize="int8").model
    turned = to_int8(load_folder(full).model)
    assert isinstance(turned, SpeechModel)
    tokens = torch.stack([torch.randint(s.size, (2, 6)) for s in stored.layout.streams], dim=1)
    with torch.no_grad():
        wanted = stored.decoder.logits(stored(tokens))
        for other in (read, turned, load_folder(place, quantize="int8").model):
            assert other.state_dict().keys() == stored.state_dict().keys()
            for name, tensor in stored.state_dict().items():
                assert torch.equal(other.state_dict()[name], tensor) and other.state_dict()[name].dtype == tensor.dtype, name
            assert checksums(other) == checksums(stored) and None not in checksums(other).values()
            assert all(map(torch.equal, other.decoder.logits(other(tokens)), wanted))


def test_weights_are_within_half_a_step(made: tuple[SpeechModel, Path, Path]) -> None:
    """Of their row's largest, which is 127 steps; what is no linear or table is as it was."""
    model, _, place = made
    plain, found, linears = model.state_dict(), load_file(place / WEIGHTS), 0
    for name, tensor in found.items():
        if name.endswith(".scale"):
            continue
        if tensor.dtype != torch.int8:
            assert torch.equal(tensor, plain[name])
            continue
        linears += 1
        wanted, scale = plain[name].double(), found[name.removesuffix("weight") + "scale"].double()
        assert ((tensor * scale[:, None] - wanted).abs() <= scale[:, None] * 0.5001).all(), name
        torch.testing.assert_close(scale * 127, wanted.abs().amax(1), rtol=1e-6, atol=0)
        assert (tensor.abs().amax(1) == torch.where(scale > 0, 127, 0)).all()
    held = [n for n, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    assert linears == len(held) + len(TABLES) and ("decoder.text_head.weight" in found) == (not model.config.decoder.tie_text)


def test_a_tied_head_is_one_tensor_with_its_table(made: tuple[SpeechModel, Path, Path]) -> None:
    model = load_folder(made[2]).model
    if not model.config.decoder.tie_text:
        assert isinstance(model.decoder.text_head, Int8Linear)
        return
    table = model.decoder.text_embedding
    assert isinstance(table, Int8Embedding) and table.head().weight is table.weight
    ids, x = torch.tensor([[3, 255, 3]]), torch.randn(2, model.config.decoder.width).to(table.dtype)
    assert torch.equal(table(ids), table.dense()[ids].to(table.dtype)) and table.dtype == made[0].decoder.norm.weight.dtype
    logits = model.decoder.text_logits(Hidden(x, x))
    assert torch.equal(logits, Int8Linear.of(made[0].decoder.text_embedding.weight)(x))
    model.to(torch.float16)
    assert table(ids).dtype == torch.float16 and table.scale.dtype == torch.float32 and table.head().weight is table.weight


@pytest.mark.sampled(1)
def test_pieces_do_not_matter(made: tuple[SpeechModel, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_state, "PIECE", 7000)
    quantize_folder(made[1], made[1].parent / "again")
    for name in (WEIGHTS, TOKENIZER, CONFIG):
        assert (made[1].parent / "again" / name).read_bytes() == (made[2] / name).read_bytes()
    assert json.loads((made[2] / CONFIG).read_text())["extra"] == {"step": 7}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak of memory")
def test_memory_is_that_of_the_int8_bytes(tmp_path: Path) -> None:
    """And about one tensor in full precision; reading the model whole first takes up to twice its size, which none of
    these comes near, although what the allocator and the page cache keep differs from run to run by tens of megabytes."""
    layout = Layout.preset("codec2", 30_000)
    decoder = dataclasses.replace(CONFIGS["codec2"].decoder, width=256, heads=4, mlp_width=256)
    model = SpeechModel(dataclasses.replace(CONFIGS["codec2"], layout=layout, decoder=decoder))
    save_folder(tmp_path / "model", model.config, model.state_dict(), Tokenizer.bytes())
    full, largest = sum(p.nbytes for p in model.parameters()), model.decoder.text_embedding.weight.nbytes
    del model

    def peak(work: Any) -> int:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back to the system, so that using it again counts
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten (proc_pid_clear_refs(5))
        before = psutil.Process().memory_info().rss
        kept = work()
        del kept
        return high_water() - before

    quantize_folder(tmp_path / "model", tmp_path / "warm")
    small = (tmp_path / "warm" / WEIGHTS).stat().st_size
    assert full > 60e6 and small < 0.27 * full
    assert peak(lambda: load_folder(tmp_path / "model", quantize="int8")) < full
    assert peak(lambda: load_folder(tmp_path / "warm")) < small + largest
    assert peak(lambda: quantize_folder(tmp_path / "model", tmp_path / "int8")) < full
    assert peak(lambda: to_int8(load_folder(tmp_path / "model").model)) > 1.2 * full


def altered(place: Path, change: Any) -> Path:
    """The folder with other data in its configuration."""
    data = json.loads((place / CONFIG).read_text())
    change(data)
    (place / CONFIG).write_text(json.dumps(data))
    return place


def with_tensors(place: Path, change: Any) -> Path:
    """The folder with other tensors, whose checksum is right."""
    tensors = load_file(place / WEIGHTS)
    change(tensors)
    save_file(tensors, place / WEIGHTS)
    entry = {"bytes": (place / WEIGHTS).stat().st_size, "crc32": folders.crc32_of(place / WEIGHTS)}
    return altered(place, lambda data: data["files"].update({WEIGHTS: entry}))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    save(tmp_path / "model", "codec2")
    quantize_folder(tmp_path / "model", tmp_path / "int8")
    return tmp_path / "model", tmp_path / "int8"


NAN = float("nan")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: altered(p, lambda d: d["quantized"].update(form="int4")), "quantized.form is 'int4'; it must be 'int8'"),
        (lambda p: altered(p, lambda d: d.pop("quantized")), r"tensor \S+\.scale is not part"),
        (lambda p: with_tensors(p, lambda t: t.pop("decoder.audio_head.scale")), "decoder.audio_head.scale is missing"),
        (
            lambda p: with_tensors(
                p, lambda t: t.update({"decoder.audio_head.weight": t["decoder.audio_head.weight"].float()})
            ),
            "tensor decoder.audio_head.weight is float32, which does not fit a model in int8",
        ),
        (lambda p: with_tensors(p, lambda t: t["decoder.audio_head.scale"].fill_(NAN)), "audio_head.scale holds numbers"),
    ],
)
def test_a_folder_in_int8_that_is_damaged_is_refused(pair: tuple[Path, Path], change: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_folder(change(pair[1]))


@pytest.mark.parametrize("name", ["decoder.blocks.0.mlp.up.weight", "decoder.norm.weight", "decoder.audio_embedding.weight"])
def test_weights_that_are_not_finite_are_named(pair: tuple[Path, Path], name: str) -> None:
    place = with_tensors(pair[0], lambda t: t[name].view(-1)[5:6].fill_(NAN))
    for work in (lambda: quantize_folder(place, place.parent / "new"), lambda: load_folder(place, quantize="int8")):
        with pytest.raises(UserError, match=f"tensor {name} holds numbers that are not finite"):
            work()
    assert sorted(p.name for p in place.parent.iterdir()) == ["int8", "model"]


def test_damage_is_not_made_valid(pair: tuple[Path, Path]) -> None:
    file = pair[0] / WEIGHTS
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match="does not match its checksum"):
        quantize_folder(pair[0], pair[0].parent / "new")
    file.write_bytes(data[:-100])
    with pytest.raises(UserError, match="truncated"):
        quantize_folder(pair[0], pair[0].parent / "new")
    assert sorted(p.name for p in file.parent.parent.iterdir()) == ["int8", "model"]


def test_codec_and_adapters_come_along(pair: tuple[Path, Path]) -> None:
    others = ("codec/config.json", "adapters/slt/adapter_config.json")
    for name in others:
        (pair[0] / name).parent.mkdir(parents=True)
        (pair[0] / name).write_text("{}")
    new = pair[0].parent / "new"
    listed = quantize_folder(pair[0], new)
    assert [(new / name).read_text() for name in others] == ["{}", "{}"]
    assert "codec/config.json" in listed and listed.keys() == json.loads((new / CONFIG).read_text())["files"].keys()


def test_what_needs_full_precision_says_so(pair: tuple[Path, Path]) -> None:
    place = pair[1]
    with pytest.raises(UserError, match=r"quantised already \(int8\); quantise the folder in full precision"):
        quantize_folder(place, place.parent / "new")
    with pytest.raises(UserError, match="holds int8 weights, which only answer: converting needs"):
        omni_folder.read(place)
    with pytest.raises(UserError, match="holds int8 weights, which are for device cpu, not for meta"):
        load_folder(place, device="meta")
    check_full_precision(pair[0], "anything")
    loaded = load_folder(place)
    shutil.rmtree(place)
    with pytest.raises(UserError, match="quantised already"):
        to_int8(loaded.model)


def test_from_pretrained_takes_it_and_says_so(pair: tuple[Path, Path]) -> None:
    lm, again = SpeechLM.from_pretrained(pair[1]), SpeechLM.from_pretrained(pair[1], quantize="int8", dtype="bfloat16")
    assert is_int8(lm.model) and "int8 with float32" in repr(lm) and "int8 with bfloat16" in repr(again)
    assert again.model.decoder.text_embedding.weight.dtype == torch.int8
    with pytest.raises(UserError, match=r"quantize 'int4' is unknown"):
        SpeechLM.from_pretrained(pair[1], quantize="int4")
