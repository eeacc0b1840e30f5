"""The command `convert`: where it writes, and what it does not write over."""

from __future__ import annotations

import pytest
import torch

from omni.checkpoint.folder import load_folder
from omni.errors import UserError
from tests.convert.hub_toys import save_text, text_model
from tests.train.convert.test_convert import GROW, lm, run, snac_folder

__all__ = ["lm"]


def test_a_target_is_not_lost(lm, tmp_path):
    assert run(lm, tmp_path / "out", *GROW) == 0
    with pytest.raises(UserError, match="exists; give another name, or --overwrite"):
        run(lm, tmp_path / "out", *GROW)
    assert run(lm, tmp_path / "out", *GROW, "--overwrite", "--seed", "5") == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary").write_text("dear")
    with pytest.raises(UserError, match="only such a folder is overwritten"):
        run(lm, tmp_path / "mine", *GROW, "--overwrite")
    with pytest.raises(UserError, match="would be lost"):
        run(lm, tmp_path, *GROW, "--overwrite")
    assert (tmp_path / "mine" / "diary").read_text() == "dear"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("option", ["--encoder", "--lora", "--codec_folder", "--tokenizer"])
@pytest.mark.parametrize("name", ["out", "link"])
def test_no_input_within_the_target_is_lost(lm, tmp_path, option, name):
    assert run(lm, tmp_path / "out", *GROW) == 0
    (tmp_path / "link").symlink_to("out")
    kept = tmp_path / "out" / "kept"
    kept.write_text("dear")
    with pytest.raises(UserError, match=rf"{name} holds {kept}, which would be lost; give another name"):
        run(lm, tmp_path / name, "--overwrite", option, kept)
    with pytest.raises(UserError, match=rf"{name} holds {tmp_path / 'out'}, which would be lost"):
        run(lm, tmp_path / name, "--overwrite", option, tmp_path / "out")
    assert kept.read_text() == "dear"


@pytest.mark.parametrize("kind", [["--kind", "omni"], []], ids=["named", "not named"])
def test_a_model_may_become_another_in_its_place(lm, tmp_path, kind):
    assert run(lm, tmp_path / "out", *GROW) == 0
    again = [*kind, "--dtype", "bfloat16", "--overwrite"]
    assert run(tmp_path / "out", tmp_path / "out", *again) == 0
    assert {t.dtype for t in load_folder(tmp_path / "out").model.state_dict().values()} == {torch.bfloat16}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["out", "link"])
@pytest.mark.parametrize(
    "kind, words", [("hf", "text part: encoder, projector, audio tables"), ("mini-omni", "lose the codec's weights")]
)
def test_a_model_does_not_become_less_in_its_place(lm, tmp_path, kind, words, name):
    assert run(lm, tmp_path / "out", *GROW) == 0
    (tmp_path / "link").symlink_to("out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(UserError, match=f"{name} is SOURCE too: .*{words}.*; give another TARGET"):
        run(tmp_path / "out", tmp_path / name, "--kind", kind, "--overwrite")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_model_is_not_grown_over_what_it_grows_from(lm, tmp_path):
    before = {path.name: path.read_bytes() for path in lm.iterdir()}
    with pytest.raises(UserError, match="lm is SOURCE too: a language model's Hugging Face folder, whose own files would be"):
        run(lm, lm, *GROW, "--overwrite")
    codec = snac_folder(tmp_path / "snac")
    with pytest.raises(UserError, match="snac is SOURCE too: a SNAC codec's folder"):
        run(codec, codec, "--overwrite")
    assert {path.name: path.read_bytes() for path in lm.iterdir()} == before


@pytest.mark.parametrize("there", [True, False])
def test_what_a_link_points_at_is_written_and_the_link_stays(lm, tmp_path, there):
    (tmp_path / "disk").mkdir()
    if there:
        assert run(lm, tmp_path / "disk" / "model", *GROW) == 0
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "model")
    assert run(lm, tmp_path / "link", *GROW, "--seed", 1, "--overwrite") == 0
    assert run(lm, tmp_path / "plain", *GROW, "--seed", 1) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["disk", "link", "lm", "plain"]
    assert (tmp_path / "link").is_symlink() and [p.name for p in (tmp_path / "disk").iterdir()] == ["model"]
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("disk/model", "plain"))
    assert one == two


@pytest.mark.parametrize(
    "target, words",
    [
        (".", ". is or holds the folder that you are in"),
        ("../here", "../here is or holds the folder that you are in"),
        ("/", "/ is the root of a disk; give a folder in it"),
        ("../loop", "../loop cannot be followed"),
    ],
)
def test_a_target_without_a_name_of_its_own_is_refused(tmp_path, monkeypatch, target, words):
    source = save_text(text_model("qwen2"), tmp_path / "elsewhere" / "lm")
    (tmp_path / "work" / "here").mkdir(parents=True)
    (tmp_path / "work" / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path / "work" / "here")
    with pytest.raises(UserError) as error:
        run(source, target, *GROW)
    assert words in str(error.value)
    assert sorted(p.name for p in (tmp_path / "work").rglob("*")) == ["here", "loop"]
