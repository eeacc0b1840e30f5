"""mini-omni's checkpoints, built from names and shapes: cut into ours, and joined back bit for bit."""

from __future__ import annotations

import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import whisper
import yaml
from torch import Tensor

from omni.checkpoint.folder import load_folder
from omni.convert import mini_omni
from omni.convert import omni_folder as streamed
from omni.convert.lazy import FLOATS, Lazy, Progress
from omni.convert.mini_omni import save_archive
from omni.encoder.whisper_config import WhisperConfig
from omni.errors import UserError
from omni.layout import Layout
from tests.close import assert_near
from tests.convert.mini_omni_toys import AUDIO, EAR, SHAPES, TEXT, State, save, settings_of, state_of

Made = tuple[Path, dict[str, Any], State]


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def made(shape: str, tmp_path: Path) -> Made:
    settings = settings_of(shape)
    state = state_of(settings)
    return save(tmp_path / "theirs", settings, state), settings, state


def slow_logits(state: State, s: dict[str, Any], columns: Tensor, heard: Tensor) -> list[Tensor]:
    """Logits of the eight streams, one position and one head at a time; `heard` stands in positions 1.. of streams 0-6."""
    size, group = s.get("head_size") or s["n_embd"] // s["n_head"], s["n_head"] // s["n_query_groups"]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + s["norm_eps"]).sqrt() * state[f"{name}.weight"]

    def swiglu(x: Tensor, name: str) -> Tensor:
        gate, up = state[f"{name}.fc_1.weight"] @ x, state[f"{name}.fc_2.weight"] @ x
        return state[f"{name}.proj.weight"] @ (F.silu(gate) * up)

    def turn(x: Tensor, position: int) -> Tensor:
        angle = position * s["rope_base"] ** (-torch.arange(0, size, 2).double() / size)
        a, b = x[: size // 2].double(), x[size // 2 :].double()
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()]).float()

    def block(xs: list[Tensor], name: str) -> list[Tensor]:
        keys, values, out = [], [], []
        for t, x in enumerate(xs):
            fused = state[f"{name}.attn.attn.weight"] @ norm(x, f"{name}.norm_1") + state.get(f"{name}.attn.attn.bias", 0)
            slots = iter(fused.split(size))
            queries, k, v = [], [], []
            for _ in range(s["n_query_groups"]):
                queries += [turn(next(slots), t) for _ in range(group)]
                k.append(turn(next(slots), t))
                v.append(next(slots))
            keys.append(k)
            values.append(v)
            mixed = []
            for head, query in enumerate(queries):
                g = head // group
                share = torch.stack([query @ key[g] / size**0.5 for key in keys]).softmax(0)
                mixed.append(sum(w * value[g] for w, value in zip(share, values, strict=True)))
            x = x + state[f"{name}.attn.proj.weight"] @ torch.cat(mixed)
            out.append(x + swiglu(norm(x, f"{name}.norm_2"), f"{name}.mlp"))
        return out

    table, xs = state["transformer.wte.weight"], []
    adapter = "whisper_adapter"
    for t in range(columns.shape[1]):
        x = table[columns[7, t]].clone()
        for i in range(7):
            if 1 <= t <= len(heard):
                frame = heard[t - 1]
                x += (
                    state[f"{adapter}.weight"] @ frame + state[f"{adapter}.bias"]
                    if f"{adapter}.weight" in state
                    else swiglu(frame, adapter)
                )
            else:
                x += table[TEXT + AUDIO * i + columns[i, t]]
        xs.append(x / 8)
    for i in range(s["n_layer"]):
        xs = block(xs, f"transformer.h.{i}")
    joint = torch.stack([state["lm_head.weight"] @ norm(x, "transformer.ln_f") for x in xs])
    audio = joint[:, TEXT:]
    if s.get("post_adapter"):
        for i in range(s["post_adapter_layers"]):
            xs = block(xs, f"transformer.post_adapter.{i}")
        post = "transformer.post_adapter_audio"
        audio = torch.stack([state[f"{post}_lm_head.weight"] @ norm(x, f"{post}_ln") for x in xs])
    return [*audio.split(AUDIO, dim=1), joint[:, :TEXT]]


@pytest.mark.sampled(1)
@torch.no_grad()
def test_logits_equal_the_slow_way(made: Made, tmp_path: Path) -> None:
    folder, settings, state = made
    assert mini_omni.recognise(folder)
    streamed.write(mini_omni.read(folder), tmp_path / "ours")
    model = load_folder(tmp_path / "ours").model
    torch.manual_seed(1)
    columns = torch.cat([torch.randint(AUDIO, (7, 6)), torch.randint(TEXT, (1, 6))])
    heard, index = torch.randn(3, EAR), torch.tensor([[-1, 0, 1, 2, -1, -1]])
    hidden = model(columns[None], model.projector(heard, [3]), index)
    for ours, wanted in zip(model.decoder.logits(hidden), slow_logits(state, settings, columns, heard), strict=True):
        assert_near(ours[0], wanted, 1e-5)


@pytest.mark.sampled(1)
def test_rows_of_the_joint_table_are_the_streams(made: Made) -> None:
    folder, settings, state = made
    source: Any = mini_omni.read(folder)
    layout = source.config.layout
    assert layout == Layout.preset("mini-omni") and source.config.codec == "snac"
    audio, table = source.tensors["decoder.audio_embedding.weight"](), state["transformer.wte.weight"]
    for i in range(7):
        end = TEXT + AUDIO * i + 4096  # _eoa of stream i
        assert torch.equal(audio[AUDIO * i + layout.audio[i].special("end")], table[end])
    for offset, name in enumerate(["end", "pad", "input", "answer", "asr"]):
        row = source.tensors["decoder.text_embedding.weight"].read(151936 + offset, 151937 + offset)
        assert layout.text.special(name) == 151936 + offset and torch.equal(row[0], table[151936 + offset])
    assert source.config.decoder.tie_text == settings.get("tie_word_embeddings", False)
    assert source.names["decoder.blocks.0.attention.v.weight"] == "transformer.h.0.attn.attn.weight"


def test_mixed_types_become_one_that_holds_both(tmp_path: Path) -> None:
    settings = settings_of("released")
    state = {name: t.bfloat16() for name, t in state_of(settings).items()}
    source = mini_omni.read(save(tmp_path / "a", settings, state, torch.float16))
    assert {t.dtype for t in source.tensors.values()} == {torch.float32}
    norm = source.tensors["decoder.norm.weight"]()
    assert torch.equal(norm.bfloat16(), state["transformer.ln_f.weight"])


def test_settings_of_a_post_adapter_that_is_not_there(tmp_path: Path) -> None:
    """The original sets `post_adapter` aside when it loads: the weights decide."""
    settings = settings_of("released")
    folder = save(tmp_path / "a", settings | {"post_adapter": True}, state_of(settings))
    assert mini_omni.read(folder).config.decoder.post_layers == 0  # type: ignore[union-attr]


def test_mini_omni2_hears_and_speaks_without_its_eyes(tmp_path: Path) -> None:
    settings = settings_of("released") | {"vision_adapter_dim": 5}
    eyes = {"vision_adapter.fc_1.weight": torch.randn(12, 5), "vision_adapter.proj.weight": torch.randn(8, 12)}
    folder = save(tmp_path / "a", settings, state_of(settings) | eyes)
    with pytest.raises(UserError, match=r"tensor vision_adapter.fc_1.weight belongs to a mini-omni2.*--drop_vision"):
        mini_omni.read(folder)
    source = mini_omni.read(folder, drop_vision=True)
    files = mini_omni.write(source, tmp_path / "out")
    assert "vision" not in (tmp_path / "out" / "model_config.yaml").read_text() and len(files) == 4
    assert not [name for name in torch.load(tmp_path / "out" / "lit_model.pth") if "vision" in name]


@pytest.mark.long
def test_the_encoder_may_come_from_elsewhere(tmp_path: Path) -> None:
    settings = settings_of("released")
    folder = save(tmp_path / "a", settings, state_of(settings))
    (folder / "small.pt").rename(tmp_path / "other.pt")
    with pytest.raises(UserError, match=r"has no small.pt.*--encoder"):
        mini_omni.read(folder)
    given = mini_omni.read_whisper(tmp_path / "other.pt")
    source = mini_omni.read(folder, encoder=given)
    assert torch.equal(source.tensors["encoder.whisper.conv1.weight"](), given.tensors["encoder.whisper.conv1.weight"]())
    drawn: Any = mini_omni.read(folder, encoder=WhisperConfig(width=EAR, heads=1, layers=2, mode="padded"))
    assert drawn.config.encoder.layers == 2
    with pytest.raises(UserError, match=r"width 6 \(whisper_adapter_dim\), and the one given is 8 wide"):
        mini_omni.read(folder, encoder=WhisperConfig(width=8, heads=1, layers=2))


@pytest.mark.sampled(1)
def test_in_out_and_in_again_is_bitwise_the_same(made: Made, tmp_path: Path) -> None:
    folder, settings, state = made
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 7}))
    streamed.write(mini_omni.read(folder), tmp_path / "ours")
    seen = []
    files = mini_omni.write(streamed.read(tmp_path / "ours"), tmp_path / "out", lambda done, total: seen.append((done, total)))
    for name, stamp in files.items():
        data = (tmp_path / "out" / name).read_bytes()
        assert (len(data), zlib.crc32(data)) == (stamp.bytes, stamp.crc32), name
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]

    again = torch.load(tmp_path / "out" / "lit_model.pth", weights_only=True)
    assert again.keys() == state.keys()
    for name, tensor in state.items():
        if settings.get("post_adapter") and name == "lm_head.weight":  # its audio rows are never read: zeros now
            assert torch.equal(again[name][:TEXT], tensor[:TEXT]) and not again[name][TEXT:].any()
        else:
            assert torch.equal(again[name], tensor), name
    read_back = yaml.safe_load((tmp_path / "out" / "model_config.yaml").read_text())
    assert {key: read_back[key] for key in settings} == settings
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == {"model_max_length": 7}

    first, second = streamed.read(tmp_path / "ours"), mini_omni.read(tmp_path / "out")
    assert first.config == second.config
    assert first.tensors.keys() == second.tensors.keys()
    assert all(torch.equal(tensor(), second.tensors[name]()) for name, tensor in first.tensors.items())
    assert second.tokenizer.encode("hé") == first.tokenizer.encode("hé")  # type: ignore[union-attr]


@pytest.mark.long
@torch.no_grad()
def test_openai_whisper_loads_the_encoder_that_goes_out(tmp_path: Path) -> None:
    settings = settings_of("released")
    folder = save(tmp_path / "a", settings, state_of(settings), torch.float16)
    mini_omni.write(mini_omni.read(folder), tmp_path / "out")
    before, after = (whisper.load_model(str(place / "small.pt"), "cpu") for place in (folder, tmp_path / "out"))
    mel = torch.randn(1, 80, 3000)
    assert torch.equal(before.embed_audio(mel), after.embed_audio(mel))


@pytest.mark.long
def test_a_head_trained_apart_is_no_longer_tied(tmp_path: Path) -> None:
    settings = settings_of("linear-tied")
    source = mini_omni.read(save(tmp_path / "a", settings, state_of(settings)))
    head = source.tensors["decoder.audio_head.weight"]()
    tensors = {**source.tensors, "decoder.audio_head.weight": mini_omni.Lazy.of(head + 1)}
    mini_omni.write(dataclasses.replace(source, tensors=tensors), tmp_path / "out")
    again: Any = mini_omni.read(tmp_path / "out")
    assert not again.config.decoder.tie_text
    assert torch.equal(again.tensors["decoder.audio_head.weight"](), head + 1)
    assert torch.equal(again.tensors["decoder.text_head.weight"](), source.tensors["decoder.text_embedding.weight"]())


@pytest.mark.parametrize("mapped", [False, True])
def test_pytorch_reads_what_is_written(tmp_path: Path, mapped: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(shape, dtype) for shape in ((5, 3), (1,), (), (0, 4), (2, 3, 4), (70, 11)) for dtype in FLOATS]
    state = {f"layer.{i}": torch.randn(shape, generator=generator).to(dtype) for i, (shape, dtype) in enumerate(shapes)}
    state["layer.15"][69, 3] = float("nan")
    state["layer.view"] = state["layer.15"][3:5]  # a piece is stored without the rest of its tensor
    path, progress = tmp_path / "a.pt", Progress(1 << 30, None)
    lazy = {name: Lazy.of(tensor) for name, tensor in state.items()}
    stamp = save_archive(path, lazy, progress, lambda held: {"dims": {"n": 3}, "state": held})
    data = path.read_bytes()
    assert (len(data), zlib.crc32(data)) == (stamp.bytes, stamp.crc32) and progress.done == len(data)
    assert stamp.nonfinite == ("layer.15",)
    found = torch.load(path, weights_only=True, mmap=mapped)
    assert found["dims"] == {"n": 3} and list(found["state"]) == list(state)
    for name, tensor in found["state"].items():
        assert tensor.dtype == state[name].dtype and torch.equal(tensor.nan_to_num(), state[name].nan_to_num())
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
