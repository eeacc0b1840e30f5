"""Models in int8 in training's commands: evaluated, also beside the original; all that changes weights refuses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from omni.checkpoint.folder import save_folder
from omni.convert.omni_folder import quantize_folder
from omni.errors import UserError
from omni.generate.speech_lm import SpeechLM
from omni.layout import IGNORE, Layout
from omni.tasks import Turn, prompt
from tests.train.data.toys import TOKENIZER
from tests.train.eval.toys import QUICK, noise, random_model, read_lines, save_model
from train.commands import edit
from train.commands.eval import main as evaluate
from train.commands.models import run_convert
from train.config.sections import ModelSection
from train.data.rows.parquet import write_rows
from train.data.rows.row import Row, RowTurn, Sound
from train.eval.against import _allowed, _follow, _log_probabilities, distance
from train.eval.held_out import Item
from train.trainer.initial_model import build_initial, shape_of


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, the same in int8, another model, and questions."""
    folder = tmp_path_factory.mktemp("int8")
    save_model(folder / "model")
    save_model(folder / "other", seed=1)
    wider = random_model(layout=Layout.preset("codec2", 300))
    save_folder(folder / "wider", wider.config, wider.state_dict(), TOKENIZER)
    quantize_folder(folder / "model", folder / "small")
    for name in ("facts", "edits"):
        (folder / name).mkdir()
    rows = [Row((RowTurn(f"what {i}", Sound(torch.from_numpy(noise(i)), 16000), "ab"),), id=str(i)) for i in range(7)]
    write_rows(folder / "rows.parquet", rows)
    return folder


DIGITS = "[{kind: spoken-digits}]"
NO = r"small holds int8 weights, which only answer: {} needs the folder in full precision that it was made from"
REFUSED: dict[str, tuple[Any, list[str], str]] = {
    "edit apply": (edit.main, ["apply", "@small", "@facts", "@out"], "editing"),
    "edit fit": (edit.main, ["fit", "--model", "@small", "--out", "@out", "--data.sources", DIGITS], "editing"),
    "edit eval": (edit.main, ["eval", "@small", "@edits", "@facts", "@out"], "editing"),
    "edit merge": (edit.main, ["merge", "@small", "@edits", "@out"], "merging"),
    "edit revert": (edit.main, ["revert", "@small", "@edits", "@out"], "merging"),
    "convert": (run_convert, ["@small", "@out", "--kind", "omni", "--dtype", "bfloat16"], "converting"),
    "convert --kind": (run_convert, ["@small", "@out", "--kind", "hf"], "converting"),
    "fit": (lambda words: shape_of(ModelSection(init_from=words[0])), ["@small"], "training"),
    "fit, building": (lambda words: build_initial(ModelSection(init_from=words[0]), 0), ["@small"], "training"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_weights_refuses_them(place: Path, name: str) -> None:
    command, words, what = REFUSED[name]
    before = sorted(place.iterdir())
    with pytest.raises(UserError, match=NO.format(what)):
        command([str(place / w[1:]) if w.startswith("@") else w for w in words])
    assert sorted(place.iterdir()) == before


def run(place: Path, out: Path, model: str, *more: str) -> dict[str, Any]:
    words = [str(place / model), str(place / "rows.parquet"), "--out", str(out), *QUICK, *more]
    assert evaluate([str(place / w[1:]) if w.startswith("@") else w for w in words]) == 0
    return json.loads((out / "report.json").read_text())


@pytest.mark.long
def test_int8_is_evaluated_beside_the_original(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same from a folder as from `--quantize`; beside itself a model is at no distance."""
    against = ("--against", "@model", "--against_limit", "5")
    found = run(place, tmp_path / "a", "small", *against)
    printed, table = capsys.readouterr().out, (tmp_path / "a" / "report.md").read_text()
    assert found["against"] == str(place / "model") and found["answered"] == 7
    assert found["figures"]["kl"]["questions"] == found["figures"]["agreement"]["questions"] == 5
    assert 0 < found["figures"]["kl"]["value"] < 1 and found["figures"]["agreement"]["value"] > 0.7
    assert {"exact_match", "ended", "steps"} <= set(found["against_change"]) and found["against_change"]["steps"]["against"]
    lines = read_lines(tmp_path / "a" / "against.jsonl")
    full, small = lines[0]["bytes"]
    assert len(lines) == 5 and [("against" in line) for line in lines] == [True, True, False, False, False]
    assert small < 0.6 * full and f"{small / 1e6:.1f} MB of this model" in table and f"{small / 1e6:.1f} MB" in printed
    assert "| KL per step |" in table and f"## Against {place / 'model'}" in table and f"against {place / 'model'}" in printed
    again = run(place, tmp_path / "b", "model", "--quantize", "int8", *against)
    for name in ("kl", "agreement", "same_answer", "exact_match", "wer"):
        assert again["figures"][name] == found["figures"][name]
    itself = run(place, tmp_path / "c", "model", *against)
    assert itself["figures"]["kl"]["value"] == 0
    assert itself["figures"]["agreement"]["value"] == itself["figures"]["same_answer"]["value"] == 1
    assert all(c["difference"]["value"] == 0 for n, c in itself["against_change"].items() if n != "steps")


def test_a_distance_is_that_of_the_logits(place: Path) -> None:
    """Along one written answer, against a slow sum."""
    lm, other = (SpeechLM.from_pretrained(place / name) for name in ("small", "model"))
    item = Item("T1T2", "what 3", "what 3", None, None)
    answer = other.generate("what 3", "T1T2", max_tokens=6)
    found = distance(lm, other, item, answer)
    (distant, steps), (agreed, tokens) = found["kl"], found["agreement"]
    assert steps == tokens == len(answer.tokens) + (answer.ended == "end") and agreed <= tokens
    allowed = slice(0, lm.layout.text.size + 1)  # the ordinary ids and `end`
    columns, kl = prompt(lm.layout, Turn("T1T2", question=other.tokenizer.encode("what 3"))).tokens, 0.0
    with torch.no_grad():
        for step in range(int(steps)):
            p, q = (
                m.model.decoder.text_logits(m.model(columns[None]))[0, -1, allowed].double().softmax(-1) for m in (other, lm)
            )
            kl += float((p * (p / q).log()).sum())
            column = lm.layout.ids("pad")
            if step < len(answer.tokens):
                column[-1] = answer.tokens[step]
            columns = torch.cat([columns, column[:, None]], dim=1)
    assert distant == pytest.approx(kl, rel=1e-3) and kl > 1e-4


def test_a_greedy_answer_is_the_likeliest_along_itself(place: Path) -> None:
    """So what is compared are the columns that were answered, ends and delays included."""
    lm = SpeechLM.from_pretrained(place / "model")
    for task in ("A1A2", "A1T1", "T1A2", "T1T2"):
        question: Any = torch.from_numpy(noise(3)) if task.startswith("A") else "what 3"
        answer = lm.generate(question, task, max_seconds=0.4, max_tokens=10)
        item = Item(task, question, "", None, None)
        found = distance(lm, lm, item, answer)
        assert found["kl"][0] == 0 and found["agreement"][0] == found["agreement"][1] > 0, task
        with torch.no_grad():
            columns, hidden = _follow(lm, item, answer)
        for stream, targets in enumerate(columns.targets):
            positions = (targets != IGNORE).nonzero().flatten()
            likeliest = _log_probabilities(lm, hidden, stream, positions).argmax(-1)
            assert _allowed(lm, stream)[likeliest].equal(targets[positions]), task
