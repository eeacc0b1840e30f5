"""mini-omni's checkpoints, built from names and shapes: cut into ours, joined back bit for bit, refused where they misfit."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
import torch
import torch.nn.functional as F
import whisper
import yaml
from whisper.model import ModelDimensions, Whisper

from omni.audio.encoder_config import EncoderConfig
from omni.checkpoint import mini_omni, streamed
from omni.checkpoint.folder import load_folder
from omni.config import AdapterConfig, DecoderConfig, ModelConfig, RopeScaling, preset
from omni.errors import UserError
from omni.layout import Layout
from omni.text import Tokenizer
from tests.checkpoint.hub_toys import stirred
from tests.close import assert_near
from train.convert import main

TEXT, AUDIO, STREAMS = 152000, 4160, 7
ROWS = TEXT + AUDIO * STREAMS
EAR = 6
"""Width of the Whisper."""

BASE = {
    "name": "toy", "block_size": 64, "padded_vocab_size": ROWS, "n_layer": 2, "n_head": 4, "n_embd": 8, "n_query_groups": 2,
    "rotary_percentage": 1.0, "parallel_residual": False, "bias": False, "norm_class_name": "RMSNorm", "norm_eps": 1e-6,
    "mlp_class_name": "LLaMAMLP", "intermediate_size": 12, "rope_base": 1000, "add_qkv_bias": True, "whisper_adapter_dim": EAR,
}  # fmt: skip
SHAPES = {
    "released": {},
    "post": {"post_adapter": True, "post_adapter_layers": 1, "add_qkv_bias": False, "n_query_groups": 4, "head_size": 4},
    "linear-tied": {"asr_adapter": "mlp", "tie_word_embeddings": True, "n_query_groups": 1, "n_layer": 1},
}


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda handle: None)


def settings_of(shape):
    return BASE | SHAPES[shape]


def state_of(settings, seed=0):
    """Random weights under mini-omni's names."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator) * 0.5

    s = settings
    width, hidden, size = s["n_embd"], s["intermediate_size"], s.get("head_size") or s["n_embd"] // s["n_head"]
    out = {"lm_head.weight": draw(ROWS, width), "transformer.wte.weight": draw(ROWS, width)}
    if s.get("tie_word_embeddings"):
        out["lm_head.weight"] = out["transformer.wte.weight"]
    if s.get("asr_adapter") == "mlp":
        out |= {"whisper_adapter.weight": draw(width, EAR), "whisper_adapter.bias": draw(width)}
    else:
        out |= {f"whisper_adapter.fc_{i}.weight": draw(hidden, EAR) for i in (1, 2)}
        out["whisper_adapter.proj.weight"] = draw(width, hidden)
    blocks = [f"transformer.h.{i}" for i in range(s["n_layer"])]
    if s.get("post_adapter"):
        blocks += [f"transformer.post_adapter.{i}" for i in range(s["post_adapter_layers"])]
        out["transformer.post_adapter_audio_ln.weight"] = draw(width)
        out["transformer.post_adapter_audio_lm_head.weight"] = draw(AUDIO * STREAMS, width)
    fused = (s["n_head"] + 2 * s["n_query_groups"]) * size
    for block in blocks:
        out |= {f"{block}.norm_{i}.weight": draw(width) for i in (1, 2)}
        out[f"{block}.attn.attn.weight"] = draw(fused, width)
        if s["add_qkv_bias"]:
            out[f"{block}.attn.attn.bias"] = draw(fused)
        out[f"{block}.attn.proj.weight"] = draw(width, s["n_head"] * size)
        out |= {f"{block}.mlp.fc_{i}.weight": draw(hidden, width) for i in (1, 2)}
        out[f"{block}.mlp.proj.weight"] = draw(width, hidden)
    out["transformer.ln_f.weight"] = draw(width)
    return out


def save(folder, settings, state, dtype=torch.float32):
    """A folder as the original has it: weights, settings, tokenizer, and a Whisper of OpenAI's."""
    folder.mkdir(parents=True)
    torch.save(state, folder / "lit_model.pth")
    (folder / "model_config.yaml").write_text(yaml.safe_dump(settings))
    Tokenizer.bytes().save(folder / "tokenizer.json")
    torch.manual_seed(3)
    dims = ModelDimensions(80, 1500, EAR, 1, 1, 10, 10, 4, 1, 1)
    model = stirred(Whisper(dims).to(dtype))
    torch.save({"dims": dataclasses.asdict(dims), "model_state_dict": model.state_dict()}, folder / "small.pt")
    return folder


@pytest.fixture(params=SHAPES)
def shape(request):
    return request.param


@pytest.fixture
def made(shape, tmp_path):
    settings = settings_of(shape)
    state = state_of(settings)
    return save(tmp_path / "theirs", settings, state), settings, state


# --- in ---------------------------------------------------------------------------------------------------------------


def slow_logits(state, s, columns, heard):
    """Logits of the eight streams, one position and one head at a time; `heard` stands in positions 1.. of streams 0-6."""
    size, group = s.get("head_size") or s["n_embd"] // s["n_head"], s["n_head"] // s["n_query_groups"]

    def norm(x, name):
        return x / (x.square().mean() + s["norm_eps"]).sqrt() * state[f"{name}.weight"]

    def swiglu(x, name):
        gate, up = state[f"{name}.fc_1.weight"] @ x, state[f"{name}.fc_2.weight"] @ x
        return state[f"{name}.proj.weight"] @ (F.silu(gate) * up)

    def turn(x, position):
        angle = position * s["rope_base"] ** (-torch.arange(0, size, 2).double() / size)
        a, b = x[: size // 2].double(), x[size // 2 :].double()
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()]).float()

    def block(xs, name):
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


@torch.no_grad()
def test_logits_equal_the_slow_way(made, tmp_path):
    folder, settings, state = made
    assert mini_omni.recognise(folder)
    streamed.write(mini_omni.read(folder), tmp_path / "ours")
    model = load_folder(tmp_path / "ours").model
    torch.manual_seed(1)
    columns = torch.cat([torch.randint(AUDIO, (7, 6)), torch.randint(TEXT, (1, 6))])
    heard, index = torch.randn(3, EAR), torch.tensor([[-1, 0, 1, 2, -1, -1]])
    hidden = model(columns[None], model.adapter(heard, [3]), index)
    for ours, wanted in zip(model.decoder.logits(hidden), slow_logits(state, settings, columns, heard), strict=True):
        assert_near(ours[0], wanted, 1e-5)


def test_rows_of_the_joint_table_are_the_streams(made):
    folder, settings, state = made
    source = mini_omni.read(folder)
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


def test_queries_are_not_all_first(tmp_path):
    """All queries first, as others fuse them, would be another model."""
    settings = settings_of("released")
    state = state_of(settings)
    fused = state["transformer.h.0.attn.attn.weight"]  # two groups of two queries, a key and a value, two rows each
    ours = mini_omni.read(save(tmp_path / "a", settings, state)).tensors["decoder.blocks.0.attention.q.weight"]()
    assert torch.equal(ours, torch.cat([fused[:4], fused[8:12]])) and not torch.equal(ours, fused[:8])


def test_mixed_types_become_one_that_holds_both(tmp_path):
    settings = settings_of("released")
    state = {name: t.bfloat16() for name, t in state_of(settings).items()}
    source = mini_omni.read(save(tmp_path / "a", settings, state, torch.float16))
    assert {t.dtype for t in source.tensors.values()} == {torch.float32}
    norm = source.tensors["decoder.norm.weight"]()
    assert torch.equal(norm.bfloat16(), state["transformer.ln_f.weight"])


def test_settings_of_a_post_adapter_that_is_not_there(tmp_path):
    """The original sets `post_adapter` aside when it loads: the weights decide."""
    settings = settings_of("released")
    folder = save(tmp_path / "a", settings | {"post_adapter": True}, state_of(settings))
    assert mini_omni.read(folder).config.decoder.post_layers == 0


def test_mini_omni2_hears_and_speaks_without_its_eyes(tmp_path):
    settings = settings_of("released") | {"vision_adapter_dim": 5}
    eyes = {"vision_adapter.fc_1.weight": torch.randn(12, 5), "vision_adapter.proj.weight": torch.randn(8, 12)}
    folder = save(tmp_path / "a", settings, state_of(settings) | eyes)
    with pytest.raises(UserError, match=r"tensor vision_adapter.fc_1.weight belongs to a mini-omni2.*--drop_vision"):
        mini_omni.read(folder)
    source = mini_omni.read(folder, drop_vision=True)
    files = mini_omni.write(source, tmp_path / "out")
    assert "vision" not in (tmp_path / "out" / "model_config.yaml").read_text() and len(files) == 4
    assert not [name for name in torch.load(tmp_path / "out" / "lit_model.pth") if "vision" in name]


def test_the_encoder_may_come_from_elsewhere(tmp_path):
    settings = settings_of("released")
    folder = save(tmp_path / "a", settings, state_of(settings))
    (folder / "small.pt").rename(tmp_path / "other.pt")
    with pytest.raises(UserError, match=r"has no small.pt.*--encoder"):
        mini_omni.read(folder)
    given = mini_omni.whisper_weights.read(tmp_path / "other.pt")
    source = mini_omni.read(folder, encoder=given)
    assert torch.equal(source.tensors["encoder.whisper.conv1.weight"](), given.tensors["encoder.whisper.conv1.weight"]())
    drawn = mini_omni.read(folder, encoder=EncoderConfig(width=EAR, heads=1, layers=2, mode="padded"))
    assert drawn.config.encoder.layers == 2
    with pytest.raises(UserError, match=r"width 6 \(whisper_adapter_dim\), and the one given is 8 wide"):
        mini_omni.read(folder, encoder=EncoderConfig(width=8, heads=1, layers=2))


# --- out --------------------------------------------------------------------------------------------------------------


def test_in_out_and_in_again_is_bitwise_the_same(made, tmp_path):
    folder, settings, state = made
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 7}))
    streamed.write(mini_omni.read(folder), tmp_path / "ours")
    seen = []
    files = mini_omni.write(streamed.read(tmp_path / "ours"), tmp_path / "out", lambda done, total: seen.append((done, total)))
    for name, stamp in files.items():
        data = (tmp_path / "out" / name).read_bytes()
        assert (len(data), mini_omni.zlib.crc32(data)) == (stamp.bytes, stamp.crc32), name
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
    assert second.tokenizer.encode("hé") == first.tokenizer.encode("hé")


def test_by_the_command_in_and_out(tmp_path, capsys):
    settings = settings_of("released")
    folder = save(tmp_path / "theirs", settings, state_of(settings))
    assert main([str(folder), str(tmp_path / "ours")]) == 0  # the kind is recognised
    assert main([str(tmp_path / "ours"), str(tmp_path / "out"), "--kind", "mini-omni"]) == 0
    assert "lit_model.pth" in capsys.readouterr().out
    again = torch.load(tmp_path / "out" / "lit_model.pth", weights_only=True)
    assert all(torch.equal(again[name], tensor) for name, tensor in state_of(settings).items())


@torch.no_grad()
def test_openai_whisper_loads_the_encoder_that_goes_out(tmp_path):
    settings = settings_of("released")
    folder = save(tmp_path / "a", settings, state_of(settings), torch.float16)
    mini_omni.write(mini_omni.read(folder), tmp_path / "out")
    before, after = (whisper.load_model(str(place / "small.pt"), "cpu") for place in (folder, tmp_path / "out"))
    mel = torch.randn(1, 80, 3000)
    assert torch.equal(before.embed_audio(mel), after.embed_audio(mel))


def test_a_head_trained_apart_is_no_longer_tied(tmp_path):
    settings = settings_of("linear-tied")
    source = mini_omni.read(save(tmp_path / "a", settings, state_of(settings)))
    head = source.tensors["decoder.audio_head.weight"]()
    tensors = {**source.tensors, "decoder.audio_head.weight": mini_omni.Lazy.of(head + 1)}
    mini_omni.write(dataclasses.replace(source, tensors=tensors), tmp_path / "out")
    again = mini_omni.read(tmp_path / "out")
    assert not again.config.decoder.tie_text
    assert torch.equal(again.tensors["decoder.audio_head.weight"](), head + 1)
    assert torch.equal(again.tensors["decoder.text_head.weight"](), source.tensors["decoder.text_embedding.weight"]())


SMALL = ModelConfig(
    Layout.preset("mini-omni"),
    EncoderConfig(width=EAR, heads=1, layers=1, mode="padded"),
    AdapterConfig("gated", hidden=12, bias=False),
    DecoderConfig(width=8, layers=1, mlp_width=12),
    "snac",
)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("", {"codec": "mimi"}, "codec is 'mimi'"),
        ("", {"layout": Layout.preset("snac", 300)}, r"text stream \(size\) is 300"),
        ("", {"layout": dataclasses.replace(Layout.preset("mini-omni"), fill="pad")}, "layout.fill is 'pad'"),
        ("", {"layout": Layout.build([4096] * 6, 151936)}, "audio streams"),
        ("", {"layout": Layout.build([4096] * 7, 151936, delays=[1] * 7, text_rows=152000, fill="sampled")}, "delays"),
        ("decoder", {"qk_norm": True}, "decoder.qk_norm is True"),
        ("decoder", {"window": 8}, "decoder.window is 8"),
        ("decoder", {"combine": "sum"}, "decoder.combine is 'sum'"),
        ("decoder", {"rope_scaling": RopeScaling()}, "decoder.rope_scaling"),
        ("adapter", {"stack": 2}, "adapter.stack is 2"),
        ("adapter", {"kind": "mlp"}, "adapter.kind is 'mlp'"),
        ("adapter", {"bias": True}, "adapter.bias is True"),
        ("adapter", {"hidden": 13}, "adapter.hidden is 13"),
        ("encoder", {"mode": "variable"}, "encoder.mode is 'variable'"),
        ("encoder", {"n_mels": 128}, "encoder.n_mels is 128"),
        ("encoder", {"window_seconds": 20.0}, "encoder.window_seconds"),
    ],
)
def test_models_that_mini_omni_cannot_be(part, change, message):
    mini_omni.check_fits(SMALL, "here")
    config = dataclasses.replace(getattr(SMALL, part) if part else SMALL, **change)
    if part:
        config = dataclasses.replace(SMALL, **{part: config})
    with pytest.raises(UserError, match=f"here: the .*{message}.*mini-omni has .* only"):
        mini_omni.check_fits(config, "here")


def test_its_own_preset_but_the_mode_and_the_bias_can_be_written():
    config = preset("qwen2-0.5b-omni")
    config = dataclasses.replace(
        config,
        adapter=dataclasses.replace(config.adapter, bias=False),
        encoder=dataclasses.replace(config.encoder, mode="padded"),
    )
    mini_omni.check_fits(config, "preset")


# --- what does not fit ------------------------------------------------------------------------------------------------


def without(name):
    return lambda state: state.pop(name)


def with_tensor(name, tensor):
    return lambda state: state.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("transformer.h.1.norm_2.weight"), "tensor transformer.h.1.norm_2.weight is missing"),
        (without("lm_head.weight"), "tensor lm_head.weight is missing"),
        (without("transformer.h.0.attn.attn.bias"), "tensor transformer.h.0.attn.attn.bias is missing"),
        (with_tensor("transformer.h.2.norm_1.weight", torch.ones(8)), r"transformer.h.2.norm_1.weight \[8\] has no place"),
        (with_tensor("transformer.post_adapter.0.norm_1.weight", torch.ones(8)), "post_adapter.0.norm_1.weight .* no place"),
        (with_tensor("transformer.wte.weight", torch.zeros(TEXT, 8)), r"wte.weight has shape \[152000, 8\].*\[181120, 8\]"),
        (
            with_tensor("transformer.h.0.attn.attn.weight", torch.zeros(24, 8)),
            r"attn.attn.weight has shape \[24, 8\].*\[16, 8\]",
        ),
        (with_tensor("transformer.ln_f.weight", torch.ones(8, dtype=torch.int8)), "tensor transformer.ln_f.weight is int8"),
    ],
)
def test_weights_that_do_not_fit_are_named(change, message, tmp_path):
    settings = settings_of("released")
    state = state_of(settings)
    change(state)
    with pytest.raises(UserError, match=message):
        mini_omni.read(save(tmp_path / "a", settings, state))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotary_percentage": 0.25}, "rotary_percentage is 0.25; only 1.0"),
        ({"bias": True}, "bias is True"),
        ({"norm_class_name": "LayerNorm"}, "norm_class_name is 'LayerNorm'"),
        ({"text_vocab_size": 128256}, "text_vocab_size is 128256; only 152000"),
        ({"padded_vocab_size": 152000}, "the joint table has 152000 rows"),
        ({"padded_vocab_size": None}, "the joint table has 50688 rows"),
        ({"asr_adapter": "lamamlp"}, "asr_adapter 'lamamlp' is unknown; did you mean 'llamamlp'"),
        ({"n_head": "four"}, "n_head is 'four'; it must be a whole number"),
        ({"norm_eps": "small"}, "norm_eps is 'small'; it must be a number"),
        ({"n_heads": 4}, "unknown key 'n_heads'; did you mean 'n_head'"),
        ({"name": "Gemma-2b"}, "the norms of Gemma"),
        ({"whisper_adapter_dim": 768}, r"width 768 \(whisper_adapter_dim\), and the one given is 6 wide"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from transformer.wte.weight"),
        ({"n_layer": 1}, r"transformer.h.1.attn.attn.bias .*has no place|transformer.h.1.* has no place"),
    ],
)
def test_settings_that_do_not_fit_are_named(change, message, tmp_path):
    settings = settings_of("released")
    with pytest.raises(UserError, match=message):
        mini_omni.read(save(tmp_path / "a", settings | change, state_of(settings)))


class Code:
    def __reduce__(self):
        return print, ("run",)


def test_broken_files_are_refused(tmp_path, capsys):
    settings = settings_of("released")
    folder = save(tmp_path / "a", settings, state_of(settings))
    whole = (folder / "lit_model.pth").read_bytes()

    def refused(message):
        with pytest.raises(UserError, match=message):
            mini_omni.read(folder)

    (folder / "lit_model.pth").write_bytes(pickle.dumps({"lm_head.weight": Code()}, protocol=2))
    refused("lit_model.pth is a pickle with more than tensors in it")
    torch.save({"lm_head.weight": Code()}, folder / "lit_model.pth")
    refused("lit_model.pth is a pickle with more than tensors in it")
    assert "run" not in capsys.readouterr().out
    torch.save({"model": state_of(settings)}, folder / "lit_model.pth")
    refused("lit_model.pth holds a dict, not a mapping of names to tensors")
    (folder / "lit_model.pth").write_bytes(whole[:-1000])
    refused("lit_model.pth is truncated")
    (folder / "lit_model.pth").unlink()
    refused("lit_model.pth is missing")
    (folder / "lit_model.pth").write_bytes(whole)
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    refused("add_bos_token is true")
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").unlink()
    refused("tokenizer.json is missing.*--tokenizer")
    for text in ("a: [", "", "- 1"):
        (folder / "model_config.yaml").write_text(text)
        refused("model_config.yaml (is not YAML|holds no settings)")
    (folder / "model_config.yaml").unlink()
    refused("model_config.yaml is missing")


def test_nothing_is_left_of_a_write_that_fails(tmp_path):
    settings = settings_of("released")
    source = mini_omni.read(save(tmp_path / "a", settings, state_of(settings)))
    tensors = dict(source.tensors)
    name = "decoder.blocks.1.mlp.up.weight"
    cut = dataclasses.replace(source, tensors={n: t for n, t in tensors.items() if n != name})
    with pytest.raises(UserError, match=f"tensor {name} is missing"):
        mini_omni.write(cut, tmp_path / "out")
    mixed = dataclasses.replace(source, tensors=tensors | {name: tensors[name].to(torch.bfloat16)})
    with pytest.raises(UserError, match=r"tensor transformer.h.1.mlp.fc_2.weight is bfloat16 and most others are float32"):
        mini_omni.write(mixed, tmp_path / "out")

    def fail(start, stop):
        raise OSError(28, "No space left on device")

    full = mini_omni.Lazy((12, 8), torch.float32, fail)
    with pytest.raises(UserError, match="cannot be written"):
        mini_omni.write(dataclasses.replace(source, tensors=tensors | {name: full}), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
