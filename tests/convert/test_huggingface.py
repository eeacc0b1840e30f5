"""Language models of Hugging Face folders: in by our command, equal to transformers in every way, and out again."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from omni.checkpoint.folder import load_folder, save_folder
from omni.config import PRESETS, preset
from omni.convert.huggingface import read, text_config, their_config
from omni.errors import UserError
from omni.model.kv_cache import FunctionalKVCache
from omni.text import Tokenizer
from tests.close import assert_near
from tests.convert.hub_toys import TEXT, edit_config, save_text, text_logits, text_model
from tests.model.test_decoder_parity import names
from train.commands.models import run_convert as main

GROW = ["--encoder", "nano", "--codec", "codec2", "--quiet"]


@pytest.fixture(params=TEXT)
def family(request):
    return request.param


def converted(model, tmp_path, *options, shard="1GB"):
    source = save_text(model, tmp_path / "theirs", shard)
    assert main([str(source), str(tmp_path / "ours"), *(options or GROW)]) == 0
    return load_folder(tmp_path / "ours").model


@pytest.mark.sampled(1)
def test_text_logits_and_gradients_equal_transformers(family, tmp_path):
    theirs = text_model(family)
    ours = converted(theirs, tmp_path, shard="20KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 2
    text = torch.randint(256, (2, 24))
    logits, wanted = text_logits(ours, text), theirs(text).logits
    assert_near(logits, wanted, 1e-4)
    weight = torch.randn_like(wanted)
    logits.backward(weight)
    wanted.backward(weight)
    table, checked = dict(theirs.named_parameters()), set()
    for name, p in ours.decoder.named_parameters():
        if "audio" not in name:
            assert_near(p.grad[: len(table[names(name)])], table[names(name)].grad, 1e-4, name)
            checked.add(names(name))
    assert checked == set(table)


@pytest.mark.sampled(2)
@torch.no_grad()
def test_cached_text_logits_equal_transformers_beyond_the_window(family, tmp_path):
    theirs = text_model(family)
    ours = converted(theirs, tmp_path, "--keep_text", "--quiet")
    text = torch.randint(256, (2, 21))
    wanted = theirs(text).logits
    window = ours.config.decoder.window
    assert window == getattr(TEXT[family], "sliding_window", None) and (window or 0) < 15
    cache, functional = ours.make_cache(2, 64, chunk=15), FunctionalKVCache(3, window=window)
    pieces = [(0, 15), (15, 16), (16, 19), (19, 20), (20, 21)]
    for store in (cache, functional):
        got = []
        for start, stop in pieces:
            positions = torch.arange(start, stop).expand(2, -1)
            got.append(text_logits(ours, text[:, start:stop], input_pos=positions, cache=store))
        assert_near(torch.cat(got, dim=1), wanted, 1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [GROW, [*GROW, "--combine", "mean"]])
def test_the_text_part_goes_out_again(family, options, tmp_path):
    theirs = text_model(family)
    ours = converted(theirs, tmp_path, *options)
    assert main([str(tmp_path / "ours"), str(tmp_path / "again"), "--kind", "hf", "--quiet"]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    text = torch.randint(256, (2, 24))
    with torch.no_grad():
        assert_near(again(text).logits, text_logits(ours, text), 1e-5)  # the whole model while it is silent
    if "mean" in options:
        return
    state, wanted = again.state_dict(), theirs.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    assert type(again) is type(theirs)
    for key in ("vocab_size", "tie_word_embeddings", "eos_token_id", "sliding_window", "rope_parameters", "rms_norm_eps"):
        assert getattr(again.config, key, None) == getattr(theirs.config, key, None), key
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "again" / "tokenizer.json"))
    assert tokenizer.encode("hé") == Tokenizer.bytes().encode("hé")


def test_a_trained_silence_goes_out_with_the_text(tmp_path):
    """Pad rows that training has moved are folded into the embedding: the text part stays what the whole model says."""
    ours = converted(text_model("qwen3-tied"), tmp_path, "--keep_text")
    with torch.no_grad():
        ours.decoder.audio_embedding.weight.add_(0.3)
    save_folder(tmp_path / "trained", ours.config, ours.state_dict(), load_folder(tmp_path / "ours").tokenizer)
    assert main([str(tmp_path / "trained"), str(tmp_path / "out"), "--kind", "hf"]) == 0
    out = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    text = torch.randint(256, (1, 12))
    with torch.no_grad():
        assert_near(out(text).logits, text_logits(ours, text), 1e-5)
    assert not out.config.tie_word_embeddings


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_kept_bit_for_bit(dtype, tmp_path):
    theirs = text_model("llama").to(dtype)
    ours = converted(theirs, tmp_path, shard="10KB")
    assert {t.dtype for t in ours.state_dict().values()} == {dtype}
    assert torch.equal(ours.decoder.text_head.weight[:270], theirs.lm_head.weight)
    assert main([str(tmp_path / "ours"), str(tmp_path / "again"), "--kind", "hf"]) == 0
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in theirs.state_dict().items())
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == str(dtype)[6:]


@pytest.mark.parametrize("name", PRESETS[1:])
def test_the_presets_survive_their_config(name):
    decoder = preset(name).decoder
    settings = json.loads(json.dumps(their_config(decoder, 1000, decoder.tie_text)))
    read_back = text_config(settings).decoder
    assert (read_back.head_size, read_back.window, read_back.rope_scaling) == (
        decoder.head_size, decoder.window, decoder.rope_scaling
    )  # fmt: skip
    assert transformers.AutoConfig.for_model(**settings).num_hidden_layers == decoder.layers


def test_the_older_keys_are_read(tmp_path):
    """transformers 4 wrote rope_theta and rope_scaling, and left tie_word_embeddings out where it is usual."""
    folder = save_text(text_model("llama3-tied"), tmp_path / "a")
    new = read(folder).config
    rope = TEXT["llama3-tied"].rope_parameters
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    edit_config(folder, rope_parameters=None, rope_theta=rope["rope_theta"], rope_scaling=scaling, tie_word_embeddings=None)
    assert read(folder).config == new


PUBLISHED = {
    "qwen3-0.6b": dict(
        model_type="qwen3", attention_bias=False, head_dim=128, hidden_act="silu", hidden_size=1024, intermediate_size=3072,
        max_position_embeddings=40960, max_window_layers=28, num_attention_heads=16, num_hidden_layers=28,
        num_key_value_heads=8, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000, sliding_window=None,
        tie_word_embeddings=True, use_sliding_window=False, vocab_size=151936,
    ),
    "llama-3.2-1b": dict(
        model_type="llama", attention_bias=False, head_dim=64, hidden_act="silu", hidden_size=2048, intermediate_size=8192,
        max_position_embeddings=131072, mlp_bias=False, num_attention_heads=32, num_hidden_layers=16, num_key_value_heads=8,
        pretraining_tp=1, rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=True, vocab_size=128256,
        rope_scaling=dict(
            factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=8192, rope_type="llama3"
        ),
    ),
    "mistral-7b": dict(
        model_type="mistral", hidden_act="silu", hidden_size=4096, intermediate_size=14336, max_position_embeddings=32768,
        num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=10000.0,
        sliding_window=4096, tie_word_embeddings=False, vocab_size=32000,
    ),
    "qwen2-0.5b-omni": dict(
        model_type="qwen2", hidden_act="silu", hidden_size=896, intermediate_size=4864, max_position_embeddings=2048,
        max_window_layers=24, num_attention_heads=14, num_hidden_layers=24, num_key_value_heads=2, rms_norm_eps=1e-6,
        rope_theta=1000000.0, sliding_window=131072, tie_word_embeddings=False, use_sliding_window=False, vocab_size=151936,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_the_presets(name):
    found, wanted = text_config(PUBLISHED[name]), preset(name)
    assert found.size == wanted.layout.text.size
    plain = replace(wanted.decoder, combine="sum", head_dim=found.decoder.head_dim)
    assert found.decoder == plain and found.decoder.head_size == wanted.decoder.head_size


@pytest.mark.parametrize("shards", [False, True])
def test_weights_of_torch_save_are_read(shards, tmp_path):
    folder = save_text(text_model("qwen2"), tmp_path / "theirs")
    wanted = {name: lazy() for name, lazy in read(folder).tensors.items()}
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if shards:
        places = {name: f"pytorch_model-{i % 2}.bin" for i, name in enumerate(weights)}
        for place in set(places.values()):
            torch.save({name: weights[name] for name in weights if places[name] == place}, folder / place)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    else:
        torch.save(weights, folder / "pytorch_model.bin")
    found = read(folder).tensors
    assert all(torch.equal(found[name](), tensor) for name, tensor in wanted.items())


def broken(tmp_path, change, shard="1GB"):
    folder = save_text(text_model("qwen2"), tmp_path / "theirs", shard)
    change(folder)
    with pytest.raises(UserError) as error:
        main([str(folder), str(tmp_path / "ours"), *GROW])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["theirs"]
    assert "\n" not in str(error.value)
    return str(error.value)


def retensor(change):
    def apply(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return apply


UP, DOWN = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda w: w.pop(UP), f"tensor {UP} is missing"),
        (lambda w: w.update(extra=torch.ones(2)), "tensor extra [2] has no place"),
        (lambda w: w.update({UP: torch.ones(48, 31)}), f"tensor {UP} has shape [48, 31], the configuration asks for [48, 32]"),
        (lambda w: w.update({UP: torch.ones(48, 32, dtype=torch.int8)}), f"tensor {UP} is int8"),
        (lambda w: w.update({UP: torch.ones(48, 32).bfloat16()}), f"tensor {UP} is bfloat16 and most others"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path, change, words):
    assert words in broken(tmp_path, retensor(change))


def test_an_index_that_lies_is_refused(tmp_path):
    def lie(folder):
        index = folder / "model.safetensors.index.json"
        data = json.loads(index.read_text())
        data["weight_map"][UP] = data["weight_map"]["lm_head.weight"]
        data["weight_map"][DOWN] = data["weight_map"]["lm_head.weight"]
        index.write_text(json.dumps(data))

    assert "do not agree about tensor" in broken(tmp_path, lie, "20KB")


def test_an_index_that_leaves_the_folder_is_refused(tmp_path):
    def climb(folder):
        index = folder / "model.safetensors.index.json"
        index.write_text(index.read_text().replace('"model-00001', '"../model-00001'))

    assert "outside of the folder" in broken(tmp_path, climb, "20KB")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model_type": "qwen22"}, "'qwen22' is no family that is known here; did you mean 'qwen2'?"),
        ({"model_type": "mamba"}, "known: qwen2, qwen3, llama, mistral"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rotary scaling 'yarn' is not known"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        (
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "layer_types": None},
            "some layers have a sliding window",
        ),
        ({"eos_token_id": 262}, "no token 262"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path, changes, words):
    assert words in broken(tmp_path, lambda folder: edit_config(folder, **changes))


LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)  # fmt: skip


def test_another_models_tokenizer_is_refused(tmp_path):
    def swap(folder):
        path = folder / "tokenizer.json"
        data = json.loads(path.read_text())
        token = {"id": 300, "content": "<more>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}
        data["model"]["vocab"]["<more>"] = 300
        data["added_tokens"] = [token | {"normalized": False}]
        path.write_text(json.dumps(data))

    assert "token '<more>' has id 300, but the model's table has 270 rows" in broken(tmp_path, swap)


def test_a_head_that_contradicts_its_tie_is_refused(tmp_path):
    folder = save_text(text_model("llama3-tied"), tmp_path / "theirs")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    read(folder)  # the same weights twice do no harm
    weights["lm_head.weight"][3, 3] += 1
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        read(folder)


SLIDING = [
    dict(use_sliding_window=True, sliding_window=64),
    dict(use_sliding_window=True, max_window_layers=0),
    dict(use_sliding_window=True, max_window_layers=36),
    dict(use_sliding_window=True, sliding_window=64, layer_types=["sliding_attention"] * 36),
    dict(use_sliding_window=True, sliding_window=64, layer_types=["full_attention"] * 36, max_window_layers=0),
    dict(use_sliding_window=True, sliding_window=64, num_hidden_layers=28),
    dict(),
]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("changes", SLIDING, ids=str)
def test_windows_are_those_of_transformers_where_settings_are_left_out(kind, changes):
    base = PUBLISHED["qwen3-0.6b"] | {"model_type": kind, "num_hidden_layers": 36}
    settings = {
        k: v for k, v in base.items() if k not in ("max_window_layers", "sliding_window", "use_sliding_window")
    } | changes
    theirs = transformers.AutoConfig.for_model(**settings)
    slide = theirs.layer_types.count("sliding_attention")
    if 0 < slide < theirs.num_hidden_layers:
        with pytest.raises(UserError, match=rf"some layers have a sliding window and some none \({slide} of"):
            text_config(settings)
    else:
        assert text_config(settings).decoder.window == (theirs.sliding_window if slide else None)


@pytest.mark.parametrize("changes", [{}, {"sliding_window": None}, {"sliding_window": 7}, {"max_window_layers": 28}], ids=str)
def test_the_window_of_a_mistral_is_that_of_transformers(changes):
    settings = {key: value for key, value in PUBLISHED["mistral-7b"].items() if key != "sliding_window"} | changes
    assert text_config(settings).decoder.window == transformers.AutoConfig.for_model(**settings).sliding_window


def test_a_llama_has_no_window():
    """transformers' Llama overlooks these settings."""
    asked = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    assert text_config(PUBLISHED["llama-3.2-1b"] | asked).decoder.window is None


WINDOWED = dict(use_sliding_window=True, sliding_window=4, max_window_layers=0)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"hidden_size": None}, "hidden_size: decoder.width is None; it must be a whole number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: decoder.norm_eps is nan"),
        pytest.param({"rope_theta": 10**400}, "rope_theta: decoder.rope_base is 1000", id="beyond all floats"),
        ({"rope_parameters": LLAMA3 | {"factor": "a"}}, "decoder.rope_scaling.factor is 'a'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "decoder.rope_scaling.factor is None"),
        ({"vocab_size": 0}, "size is 0; it must be greater than 0"),
        (WINDOWED | {"use_sliding_window": "false"}, "use_sliding_window is 'false'; it must be true or false"),
        (
            WINDOWED | {"layer_types": []},
            "layer_types is []; it must list full_attention or sliding_attention for each of the 24",
        ),
    ],
    ids=str,
)
def test_a_setting_of_another_type_is_named(changes, words):
    with pytest.raises(UserError) as error:
        text_config(PUBLISHED["qwen2-0.5b-omni"] | changes, "there/config.json")
    assert str(error.value).startswith(f"there/config.json: {words}")
