"""An editor trained from rows of data: the same whether or not the run was stopped, and of use to `edit apply`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from omni.edit.config import MendConfig, TransformConfig
from omni.edit.deltas import Delta, Edits, edited
from omni.edit.mend import Mend, gradient_factors, load_mend
from omni.edit.storage import load_edits, read_tensors
from omni.errors import UserError
from omni.generate.speech_lm import SpeechLM
from tests.edit.test_foreign import their_state
from tests.edit.test_foreign import write as archive_of
from tests.train.edit.test_edit import QUICK, VOICE, write
from tests.train.eval.toys import save_model
from train.commands.edit import main, read_command
from train.edit.apply import STRENGTHS, _correction, choose_linears
from train.edit.config import ApplyConfig, EditFitConfig, SpeakConfig
from train.edit.facts import Synthesiser, fact_rows, read_facts
from train.edit.fit import Corrections
from train.edit.lessons import EditObjective

LINEAR = "decoder.blocks.1.mlp.up"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fit")
    save_model(folder / "model")
    digits = {"arithmetic": 1.0, "rare": 0.0, "answer_rate": 400, "rate": [400, 400]}
    config = {
        "model": str(folder / "model"),
        "out": str(folder / "run"),
        "data": {"sources": [{"kind": "spoken-digits", "options": digits}]},
        "mend": {"transform": {"rank": 4}, "edit_lr": 0.01},
        "linears": ["decoder.blocks.1.mlp.up"],
        "tasks": ["T1T2"],
        "rephrase": VOICE,
        "steps": 4,
        "accumulate": 1,
        "others": 1,
        "checkpoint_steps": 2,
    }
    (folder / "fit.yaml").write_text(yaml.safe_dump(config))
    return folder


def fit(place: Path, *words: str) -> int:
    return main(["fit", str(place / "fit.yaml"), *words])


@pytest.mark.long
def test_a_stopped_run_goes_on_as_if_it_had_not_been(place, capsys):
    assert fit(place) == 0
    assert "step 4 of 4: loss" in capsys.readouterr().out
    fit(place, "--out", str(place / "two"), "--steps", "2")
    half = load_mend(place / "two" / "editor").state_dict()
    fit(place, "--out", str(place / "two"))
    whole, again = (load_mend(place / run / "editor").state_dict() for run in ("run", "two"))
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)
    assert any(not torch.equal(whole[name], half[name]) for name in whole)
    counts = [tensor for name, tensor in whole.items() if name.endswith("count")]
    assert counts and all(int(count) > 4 for count in counts)
    with pytest.raises(UserError, match=r"another configuration"):
        fit(place, "--lr", "0.5")


@pytest.mark.long
def test_an_editor_edits(place, tmp_path):
    if not (place / "run" / "editor").exists():
        fit(place)
    lines = [{"question_text": "one", "answer_text": "ab"}, {"question_text": "two", "answer_text": "ba"}]
    facts = write(tmp_path / "facts.jsonl", lines[:1])
    editor = ("--method", "mend", "--editor", str(place / "run" / "editor"), "--tasks", "[T1T2]")
    assert main(["apply", str(place / "model"), str(facts), str(tmp_path / "edits"), *QUICK, *editor]) == 0
    lm = SpeechLM.from_pretrained(place / "model")
    edits = load_edits(tmp_path / "edits", lm.model)
    assert list(edits.deltas) == ["decoder.blocks.1.mlp.up"] and edits.deltas["decoder.blocks.1.mlp.up"].b.any()
    assert json.loads((tmp_path / "edits" / "edits.json").read_text())["extra"]["method"] == "mend"
    several = []
    for name, chosen in (("second", lines[1:]), ("both", lines)):  # several facts are several edits together
        write(facts, chosen)
        assert main(["apply", str(place / "model"), str(facts), str(tmp_path / name), *QUICK, *editor]) == 0
        several.append(load_edits(tmp_path / name, lm.model).deltas["decoder.blocks.1.mlp.up"].weight())
    torch.testing.assert_close(several[1], several[0] + edits.deltas["decoder.blocks.1.mlp.up"].weight())


class Steepest:
    """In place of an editor: a long step down the gradient of one linear."""

    def edit(self, model, pieces, loss_of) -> Edits:
        weight = model.get_submodule(LINEAR).weight
        gradient = torch.autograd.grad(loss_of(model, pieces), weight.requires_grad_())[0]
        return Edits({LINEAR: Delta(-gradient.T * 4 / gradient.norm())})


def test_a_correction_is_as_weak_as_its_lesson_allows(place, tmp_path):
    """It is the editor's own at another strength: the least tried at which the loss of every form is low enough, or lowest."""
    facts = write(tmp_path / "facts.jsonl", [{"question_text": "one", "answer_text": "ab", "rephrased": ["just one"]}])
    lm = SpeechLM.from_pretrained(place / "model")
    lessons, speakers = EditObjective(lm, []), Synthesiser(SpeakConfig(voices=(VOICE,), answer_voice=VOICE), lm.codec)
    forms = lessons.pieces(fact_rows(read_facts(facts, lm.tokenizer), speakers, 2)[0], ["T1T2"])
    pieces = forms[:1]

    def loss(edits: Edits) -> float:
        with torch.no_grad(), edited(lm.model, edits):
            return max(float(lessons.loss(lm.model, [form])) for form in forms)

    def made(until: float | None) -> Edits:
        return _correction(Steepest(), lm.model, lessons, pieces, forms, until)  # type: ignore[arg-type]

    whole = made(None)
    losses = [loss(whole.scaled(strength)) for strength in STRENGTHS]
    assert min(losses) < losses[0] - 0.01
    middle = (losses[0] + min(losses)) / 2
    number = next(i for i, value in enumerate(losses) if value <= middle)
    assert loss(made(middle)) == pytest.approx(losses[number], rel=1e-5) and 0 < number < len(STRENGTHS) - 1
    assert loss(made(1e-9)) == pytest.approx(min(losses), rel=1e-5)
    weight = whole.deltas[LINEAR].weight()
    torch.testing.assert_close(made(middle).deltas[LINEAR].weight(), weight * STRENGTHS[number])


def test_an_editor_of_others_edits(place, tmp_path):
    lm = SpeechLM.from_pretrained(place / "model")
    for p in lm.model.parameters():
        p.requires_grad_(False)
    mend = Mend.of(lm.model, ["decoder.blocks.1.mlp.up"], MendConfig(TransformConfig(rank=4), edit_lr=0.01))
    lessons = EditObjective(lm, mend.shapes)
    facts = write(tmp_path / "facts.jsonl", [{"question_text": "one", "answer_text": "ab"}])
    speaker = Synthesiser(SpeakConfig(voices=(VOICE,), answer_voice=VOICE), lm.codec)
    rows = fact_rows(read_facts(facts, lm.tokenizer), speaker, 1)
    pieces = lessons.pieces(rows[0], ["T1T2"])
    mend(gradient_factors(lm.model, mend.shapes, pieces, lessons.loss))  # its statistics
    archive = archive_of(tmp_path / "mend.pt", their_state(mend))
    (tmp_path / "config.json").write_text(json.dumps({"inner_params": ["model.layers.1.mlp.up_proj.weight"]}))
    words = ("--method", "mend", "--editor", str(archive), "--tasks", "[T1T2]", "--until", "null")
    apply = ["apply", str(place / "model"), str(facts), str(tmp_path / "edits"), *QUICK, *words]
    with pytest.raises(UserError, match=r"linears"):
        main(apply)
    assert main([*apply, "--editor_settings", str(tmp_path / "config.json")]) == 0
    got = load_edits(tmp_path / "edits", lm.model).deltas["decoder.blocks.1.mlp.up"].weight()
    torch.testing.assert_close(got, mend.edit(lm.model, pieces, lessons.loss).deltas["decoder.blocks.1.mlp.up"].weight())
    with pytest.raises(UserError, match=r"without an editor; name the archive"):
        ApplyConfig(editor_settings="config.json")


@pytest.mark.long
def test_several_corrections_act_together(place, tmp_path):
    words = ["--config", str(place / "fit.yaml"), "--together", "3", "--others", "4", "--tasks", "[A1T2, T1T2]"]
    _, config = read_command(words, "fit", "", {}, EditFitConfig)
    lm = SpeechLM.from_pretrained(config.model)
    corrections = Corrections(lm, EditObjective(lm, choose_linears(lm.model, config.linears)), config)
    asked, sizes = [], set()
    corrections.lessons.pieces = lambda rows, tasks: asked.append(([r.turns[0] for r in rows], tuple(tasks))) or list(rows)
    for number in range(10):
        asked.clear()
        edits, _, stay = corrections.make(number)
        sizes.add(len(edits))
        first = [turns[0] for turns, _ in asked[: len(edits)]]
        again, kinds = asked[len(edits)]
        assert kinds == (("A1T2",), ("T1T2",))[number % 2]
        questions = [turn.question_text for turn in first]
        assert len(set(questions)) == len(questions) == len(again)
        assert [(t.question_text, t.answer_text) for t in again] == [(t.question_text, t.answer_text) for t in first]
        voices = [[turn.question_audio.load(16000) for turn in turns] for turns in (first, again)]
        assert [torch.equal(*pair) for pair in zip(*voices, strict=True)] == [kinds == ("T1T2",)] * len(first)
        assert stay and all(row.turns[0].question_text not in questions for row in stay)
    assert sizes == {1, 2, 3}
    assert fit(place, *words[2:], "--out", str(tmp_path / "run"), "--steps", "2") == 0
    assert load_mend(tmp_path / "run" / "editor")


@pytest.mark.long
def test_what_is_no_number_any_more_is_not_kept(place, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(UserError, match=r"step [23]\b.*loss.*lower lr"):
        fit(place, "--out", str(out), "--lr", "1e30", "--checkpoint_steps", "1")
    tensors, _ = read_tensors(out / "checkpoint", "fit")
    assert all(tensor.isfinite().all() for tensor in tensors.values()) and not (out / "editor").exists()
