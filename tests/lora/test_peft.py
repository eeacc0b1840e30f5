"""Adapters' folders against PEFT itself: what it writes we read, what we write it reads; and merging on the way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from omni.checkpoint.folder import load_folder
from omni.errors import UserError
from omni.lora.attach import add_adapter, attach, linears_of
from omni.lora.config import LoRAConfig
from omni.lora.peft import CONFIG, WEIGHTS, AdapterWeights, load_adapter, merged_state, replace_whole, save_adapter, weights_of
from omni.model.linears import base_checksum
from omni.model.speech_model import SpeechModel
from tests.close import assert_near
from tests.convert.hub_toys import VOCABULARY, columns, save_text, text_logits, text_model
from train.commands.models import run_convert as main

TEXT = torch.randint(256, (2, 10), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def lm(tmp_path: Path) -> Path:
    return save_text(text_model("mistral"), tmp_path / "lm")


@pytest.fixture
def grown(lm: Path, tmp_path: Path) -> Path:
    assert main([str(lm), str(tmp_path / "grown"), "--encoder", "nano", "--codec", "codec2", "--quiet"]) == 0
    return tmp_path / "grown"


def model_of(folder: Path) -> SpeechModel:
    return load_folder(folder).model.eval()


def adapter_of(model: SpeechModel, *targets: str, seed: int = 1, whole: tuple[str, ...] = ()) -> AdapterWeights:
    """A stirred adapter with the checksum of its base; it stays on the model."""
    torch.manual_seed(seed)
    chosen = add_adapter(model, LoRAConfig(targets or ("decoder.blocks.*",), rank=3, alpha=6.0))
    base = base_checksum(model, chosen)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(".b") or name in whole:
                p.add_(torch.randn_like(p) * 0.1)
    return weights_of(model, model.state_dict(), whole, base)


def saved(theirs: peft.PeftModel, folder: Path) -> torch.Tensor:
    """Stir what an adapter of PEFT's has learned, and save it; its logits of `TEXT`."""
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                p.add_(torch.randn_like(p) * 0.1)
    theirs.save_pretrained(folder)
    with torch.no_grad():
        return theirs(TEXT).logits


def said(model: SpeechModel) -> torch.Tensor:
    with torch.no_grad():
        return text_logits(model, TEXT)


def test_peft_reads_ours_on_our_own_model(grown: Path, tmp_path: Path) -> None:
    model = model_of(grown)
    save_adapter(tmp_path / "a", adapter_of(model, "decoder.blocks.*", "projector.*", "decoder.*_head"))
    theirs = peft.PeftModel.from_pretrained(model_of(grown), str(tmp_path / "a")).eval()
    with torch.no_grad():
        wanted = theirs(columns(model.layout, TEXT))
        assert_near(model(columns(model.layout, TEXT)).text, wanted.text, 1e-6)
        assert_near(
            model.projector(torch.ones(3, model.config.encoder.width), [3]),
            theirs.projector(torch.ones(3, model.config.encoder.width), [3]),
            1e-6,
        )
        logits = theirs.decoder.audio_head(wanted.audio)
        assert_near(model.decoder.audio_logits(wanted), logits, 1e-6)


def test_peft_reads_ours_on_the_language_model(grown: Path, lm: Path, tmp_path: Path) -> None:
    model = model_of(grown)
    save_adapter(tmp_path / "a", adapter_of(model))
    assert main([str(tmp_path / "a"), str(tmp_path / "hf"), "--kind", "hf"]) == 0
    theirs = peft.PeftModel.from_pretrained(text_model("mistral"), str(tmp_path / "hf")).eval()
    with torch.no_grad():
        wanted = theirs(TEXT).logits
    assert_near(said(model), wanted, 1e-5)
    assert not torch.allclose(said(model_of(grown)), wanted)
    back = load_adapter(tmp_path / "hf")
    assert back.base == load_adapter(tmp_path / "a").base is not None
    fresh = model_of(grown)
    attach(fresh, back.modules())
    assert torch.equal(said(fresh), said(model))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("merging", ["language model", "speech model"])
def test_what_peft_wrote_is_merged(grown: Path, lm: Path, tmp_path: Path, merging: str, capsys) -> None:
    """With patterns of rank and alpha, rank-stabilised, a head narrower than the grown one, and a module trained whole."""
    torch.manual_seed(4)
    settings = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "down_proj", "lm_head"], use_rslora=True, init_lora_weights=False,
        rank_pattern={"layers.1.mlp.down_proj": 2}, alpha_pattern={r"layers\.[01]\.self_attn\.q_proj": 3},
        modules_to_save=["norm"],
    )  # fmt: skip
    theirs = peft.get_peft_model(text_model("mistral"), settings).eval()
    wanted = saved(theirs, tmp_path / "peft")
    source = {"language model": [str(lm), "--encoder", "nano", "--codec", "codec2"], "speech model": [str(grown)]}[merging]
    target = tmp_path / "merged"
    assert main([source[0], str(target), *source[1:], "--lora", str(tmp_path / "peft"), "--quiet"]) == 0
    assert_near(said(model_of(target)), wanted, 1e-5)
    model, weights = model_of(grown), load_adapter(tmp_path / "peft")
    replace_whole(model, weights, "peft")
    attach(model, weights.modules())
    assert_near(said(model), wanted, 1e-5)
    assert "lora" not in " ".join(load_file(target / "model.safetensors"))
    capsys.readouterr()


def test_a_merged_folder_is_what_the_adapter_says_and_goes_out_again(grown: Path, tmp_path: Path) -> None:
    model = model_of(grown)
    whole = ("decoder.audio_head.weight",)
    save_adapter(tmp_path / "a", adapter_of(model, whole=whole))
    wanted = merged_state(model, model.state_dict())
    assert main([str(grown), str(tmp_path / "merged"), "--lora", str(tmp_path / "a"), "--quiet"]) == 0
    found = load_file(tmp_path / "merged" / "model.safetensors")
    for name, tensor in wanted.items():
        assert_near(found[name], tensor, 1e-6, name)
    assert main([str(grown), str(tmp_path / "out"), "--lora", str(tmp_path / "a"), "--kind", "hf", "--quiet"]) == 0
    theirs = load_file(tmp_path / "out" / "model.safetensors")
    q = "decoder.blocks.0.attention.q.weight"
    assert_near(theirs["model.layers.0.self_attn.q_proj.weight"], wanted[q], 1e-6)
    assert theirs["lm_head.weight"].shape[0] == VOCABULARY


def test_the_checksum_knows_another_base_but_not_another_type(grown: Path) -> None:
    model = model_of(grown)
    names = [name for name in linears_of(model) if name.startswith("decoder.blocks.")]

    def of(m: SpeechModel) -> int:
        return base_checksum(m, names)

    first = of(model)
    assert of(model_of(grown).to(torch.bfloat16)) == first  # type: ignore[arg-type]
    with torch.no_grad():
        model.decoder.blocks[1].mlp.up.weight[3, 5] += 0.1
    assert of(model) != first


def broken(folder: Path, **changes) -> None:
    data = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(data | changes))


def retensor(folder: Path, change) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file(change(tensors), folder / WEIGHTS)


KEY = "base_model.model.decoder.blocks.0.attention.q.lora_A.weight"


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda f: (f / CONFIG).unlink(), "is no adapter: adapter_config.json is missing"),
        (lambda f: broken(f, peft_type="LOHA"), "peft_type is 'LOHA'; only LORA"),
        (lambda f: broken(f, use_dora=True), "use_dora is True .DoRA."),
        (lambda f: broken(f, r=16), "lora_A of .* is .3, .*, but adapter_config.json gives it the rank 16"),
        (lambda f: broken(f, use_rslora="false"), "use_rslora is 'false'; it must be a boolean"),
        (lambda f: broken(f, init_lora_weights="pissa_niter_4"), "'pissa_niter_4', so the adapter belongs to a base that PEFT"),
        (lambda f: retensor(f, lambda t: t | {KEY: t[KEY].long()}), "lora_A.weight has the type torch.int64"),
        (lambda f: retensor(f, lambda t: t | {KEY: t[KEY] * float("nan")}), "lora_A.weight has values that are not finite"),
        (lambda f: (f / WEIGHTS).rename(f / "adapter_model.bin"), "is a pickle, which could run code"),
        (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-10]), "truncated"),
        (lambda f: retensor(f, lambda t: t | {"a.lora_magnitude_vector": t[KEY].clone()}), "kind of LoRA that is not known"),
    ],
)
def test_broken_adapters_are_refused(grown: Path, tmp_path: Path, change, message: str) -> None:
    save_adapter(tmp_path / "a", adapter_of(model_of(grown)))
    change(tmp_path / "a")
    with pytest.raises(UserError, match=message):
        load_adapter(tmp_path / "a")


def test_an_adapter_of_another_model_is_refused_and_nothing_is_written(grown: Path, lm: Path, tmp_path: Path, capsys) -> None:
    weights = adapter_of(model_of(grown))
    name, (a, b, scale) = next(iter(weights.pairs.items()))
    cases = {
        "their checksum differs": replace(weights, base=1),
        "does not have": replace(weights, pairs={"decoder.blocks.9.mlp.up": (a, b, scale)}),
        "features, the model's from": replace(weights, pairs={name: (a[:, :-1], b, scale)}, base=None),
        "does not fit": replace(weights, whole={"decoder.norm.weight": torch.ones(3)}),
    }
    for words, case in cases.items():
        save_adapter(tmp_path / "x", case)
        with pytest.raises(UserError, match=words):
            main([str(grown), str(tmp_path / "no"), "--lora", str(tmp_path / "x"), "--quiet"])
        assert not (tmp_path / "no").exists()
    save_adapter(tmp_path / "x", adapter_of(model_of(grown), "projector.*"))
    with pytest.raises(UserError, match="no part of a language model"):
        main([str(tmp_path / "x"), str(tmp_path / "no"), "--kind", "hf"])
    with pytest.raises(UserError, match="say whose names.*--kind.*--lora"):
        main([str(tmp_path / "x"), str(tmp_path / "no")])
    assert not (tmp_path / "no").exists()
    capsys.readouterr()
