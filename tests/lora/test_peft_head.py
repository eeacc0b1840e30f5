"""Adapters of heads, embeddings and parts of modules, against PEFT: exchanged both ways, beside a model and merged."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from omni import SpeechLM
from omni.errors import UserError
from omni.lora.peft import WEIGHTS, AdapterWeights, load_adapter, save_adapter
from omni.model.speech_model import SpeechModel
from tests.close import assert_near
from tests.convert.hub_toys import VOCABULARY, save_text, text_logits, text_model
from tests.lora.test_peft import TEXT, adapter_of, grown, lm, model_of, said, saved
from train.commands.models import run_convert as main

__all__ = ["grown", "lm"]

HEAD = ("decoder.blocks.*", "decoder.text_head")


def exported(grown: Path, tmp_path: Path) -> SpeechModel:
    """A model with an adapter that reaches its head, saved, and the folder under transformers' names."""
    model = model_of(grown)
    save_adapter(tmp_path / "a", adapter_of(model, *HEAD))
    assert main([str(tmp_path / "a"), str(tmp_path / "hf"), "--kind", "hf"]) == 0
    return model


def test_a_head_goes_to_the_language_model_without_the_rows_of_our_own_ids(grown: Path, lm: Path, tmp_path: Path) -> None:
    model = exported(grown, tmp_path)
    assert load_adapter(tmp_path / "a").pairs["decoder.text_head"][1].shape[0] > VOCABULARY
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(lm), str(tmp_path / "hf")).eval()
    with torch.no_grad():
        assert_near(said(model), theirs(TEXT).logits, 1e-5)


def test_an_adapter_loses_no_rows_in_its_own_place_and_tells_what_it_leaves_out(grown: Path, tmp_path: Path, capsys) -> None:
    exported(grown, tmp_path)
    rows = load_adapter(tmp_path / "a").pairs["decoder.text_head"][1].shape[0] - VOCABULARY
    assert f"names, without {rows} rows of the text head or table, those of our own ids" in capsys.readouterr().out
    before = (tmp_path / "a" / WEIGHTS).read_bytes()
    with pytest.raises(UserError, match=f"SOURCE.*lose {rows} rows"):
        main([str(tmp_path / "a"), str(tmp_path / "a"), "--kind", "hf", "--overwrite"])
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == before
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--kind", "omni"]) == 0
    assert (tmp_path / "b" / WEIGHTS).read_bytes() == before


def test_a_head_that_is_the_embedding_is_no_target(tmp_path: Path) -> None:
    folder = save_text(text_model("llama3-tied"), tmp_path / "lm")
    assert main([str(folder), str(tmp_path / "grown"), "--encoder", "nano", "--codec", "codec2", "--quiet"]) == 0
    with pytest.raises(UserError, match="decoder.text_head.*text embedding"):
        adapter_of(model_of(tmp_path / "grown"), *HEAD)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("base", ["lm", "grown"])
def test_a_head_comes_back_from_there_onto_either_base(grown: Path, lm: Path, tmp_path: Path, base: str, capsys) -> None:
    model = exported(grown, tmp_path)
    source = [str(lm), "--encoder", "nano", "--codec", "codec2"] if base == "lm" else [str(grown)]
    target = tmp_path / "merged"
    assert main([source[0], str(target), *source[1:], "--lora", str(tmp_path / "hf"), "--quiet"]) == 0
    assert_near(said(model_of(target)), said(model), 1e-5)
    other = model_of(grown)
    with torch.no_grad():
        other.decoder.text_head.weight[3] += 0.1
    with pytest.raises(UserError, match="checksum differs"):
        load_onto(other, tmp_path / "hf", grown)
    capsys.readouterr()


def load_onto(model: SpeechModel, adapter: Path, folder: Path) -> SpeechLM:
    speech = SpeechLM.from_pretrained(folder)
    speech.model = model
    speech.load_adapter(adapter)
    return speech


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["embedding", "head adapted", "head whole"],
)
def test_a_head_that_is_the_embedding_parts_from_it(tmp_path: Path, settings: dict, capsys) -> None:
    base = text_model("llama3-tied")
    assert base.config.tie_word_embeddings
    folder = save_text(base, tmp_path / "lm")
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), peft.LoraConfig(r=4, **settings)).eval()
    torch.manual_seed(0)
    wanted = saved(theirs, tmp_path / "peft")
    target = tmp_path / "merged"
    more = ["--encoder", "nano", "--codec", "codec2", "--lora", str(tmp_path / "peft"), "--quiet"]
    assert main([str(folder), str(target), *more]) == 0
    model = model_of(target)
    assert_near(text_logits(model, TEXT), wanted, 1e-5)
    assert not model.config.decoder.tie_text
    capsys.readouterr()


def test_a_head_of_peft_stands_beside_a_model_unless_its_base_is_another(lm: Path, grown: Path, tmp_path: Path) -> None:
    """PEFT stores the weight below an adapted head unasked."""
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(lm), settings).eval()
    theirs.save_pretrained(tmp_path / "peft", save_embedding_layers=True)
    assert load_adapter(tmp_path / "peft").copies == {"decoder.text_head.weight"}
    model = model_of(grown)
    load_onto(model, tmp_path / "peft", grown)
    for part in model.modules():
        if hasattr(part, "lora"):
            part.lora.active.names = ("peft",)
    with torch.no_grad():
        assert_near(said(model), theirs(TEXT).logits, 1e-5)
    other = model_of(grown)
    with torch.no_grad():
        other.decoder.text_head.weight[3] += 0.1
    with pytest.raises(UserError, match="brings decoder.text_head.weight whole"):
        load_onto(other, tmp_path / "peft", grown)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "patterns", [("decoder.blocks.*.norm.bias", "*.q.bias"), ("decoder.norm.*",), ("encoder.*norm*.bias",)]
)
def test_parts_of_modules_that_trained_go_out_and_come_back(grown: Path, tmp_path: Path, patterns: tuple[str, ...]) -> None:
    model = model_of(grown)
    names = [name for name, _ in model.named_parameters()]
    whole = tuple(name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in (*patterns, "encoder.*.bias")))
    save_adapter(tmp_path / "a", adapter_of(model, "decoder.blocks.*", "encoder.*", whole=whole))
    theirs = peft.PeftModel.from_pretrained(model_of(grown), str(tmp_path / "a")).base_model.model.eval()
    mel = torch.randn(1, model.config.encoder.n_mels, 200)
    with torch.no_grad():
        assert_near(said(model), text_logits(theirs, TEXT), 1e-5)
        assert_near(model.encode(mel, [200], [100]), theirs.encode(mel, [200], [100]), 1e-5)
    back: AdapterWeights = load_adapter(tmp_path / "a")
    assert set(back.whole) == set(whole) and all(torch.equal(back.whole[n], dict(model.named_parameters())[n]) for n in whole)
    save_adapter(tmp_path / "b", back)
    first, again = (load_file(tmp_path / name / WEIGHTS) for name in "ab")
    assert first.keys() == again.keys() and all(first[name].equal(again[name]) for name in first)
