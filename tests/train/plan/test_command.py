"""The command `plan`: what it prints, and where it refuses what `fit` refuses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from omni.errors import UserError
from train.commands.fit import main as fit_main
from train.commands.fit import run_plan as main
from train.config.parse import read_run
from train.data.rows.parquet import write_rows
from train.data.rows.row import Codes, Row, RowTurn, Sound
from train.trainer.build import fit

pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    sound = Sound(torch.linspace(-0.1, 0.1, 24000), 16000)
    codes = Codes("codec2", torch.zeros(4, 9, dtype=torch.long))
    rows = [Row((RowTurn("two and two", sound, "four", answer_codes=codes),)) for _ in range(8)]
    write_rows(tmp_path / "rows.parquet", rows)
    path.write_text(
        "budget: {steps: 50}\n"
        "model: {preset: nano, decoder: {layers: 1}, encoder: {layers: 1}}\n"
        "data: {micro_batches: 2, packing: {rows: 2, length: 64},\n"
        f"       sources: [{{kind: stored, path: {tmp_path / 'rows.parquet'}, tasks: {{A1A2: 1.0}}, held_out: 4}}]}}\n"
        "validation: {questions: 4}\n"
        "fabric: {accelerator: cpu, devices: 1}\n"
    )
    return str(path)


@pytest.fixture
def nowhere(file: str, tmp_path: Path) -> str:
    """The same without its data."""
    path = tmp_path / "nowhere.yaml"
    path.write_text(Path(file).read_text().replace("rows.parquet", "nowhere"))
    return str(path)


def test_command_answers_in_json_and_tables(file: str, nowhere: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([nowhere, "--json"]) == 1  # as `fit`, which would not start; the plan is of full rows
    shown = capsys.readouterr()
    plan = json.loads(shown.out)
    assert plan["fits"] and plan["pace"]["columns"] == 2 * 2 * 64 and plan["pace"]["examples"] is None
    assert "nowhere" in plan["pace"]["source"] and plan["pace"]["steps"] == 50
    assert plan["pace"]["targets"] == 2 * 2 * 64 * 5  # four streams of codes, one of text
    (problem,) = plan["problems"]
    assert shown.err == f"error: {problem}\n" and "nowhere" in problem
    assert main([file, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["problems"] == [] and 0 < plan["pace"]["columns"] < 2 * 2 * 64
    memory = plan["memory"]
    assert memory["total"] == pytest.approx(sum(memory["phases"][memory["phase"]].values()))
    assert main([file]) == 0
    shown = capsys.readouterr().out
    for name in ("peak", "losses", "validation's answers", "a checkpoint on disk", "time to the budget"):
        assert f"\n{name} " in shown
    assert main([file, "--gpu_gib", "0.61", "--gpu=H100", "--mfu", "0.5", "--validation.questions", "0"]) == 1
    shown, said = capsys.readouterr()
    assert said.startswith("error: the run does not fit: ") and said.count("\n") == 1
    assert "IT DOES NOT FIT" in shown and "--fabric.precision bf16-true" in shown


def test_keys_reproduce_the_planned_run(file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    described = [file, "--gpu_gib", "0.61", "--data.micro_batches", "16", "--validation.questions", "0", "--json"]
    for words, named in (
        (["--devices", "8"], "--fabric.strategy fsdp --devices 16"),
        (
            ["--fabric.devices", "4", "--fabric.num_nodes", "2"],
            "--fabric.strategy fsdp --fabric.devices 16 --fabric.num_nodes 1",
        ),
    ):
        assert main([*described, *words]) == 1
        (knob,) = [one for one in json.loads(capsys.readouterr().out)["knobs"] if one["keys"] == named]
        main([*described, *words, *named.split()])
        assert json.loads(capsys.readouterr().out)["memory"]["total"] == pytest.approx(knob["total"])


def test_a_dry_run_takes_two_steps(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit_main([file, "--dry_run", "--data.alignment", "letters", "--objective.ctc_weight", "1"]) == 0
    said = capsys.readouterr().out
    found = re.search(r"peak ([\d.]+) GiB on each device \(([\d.]+) by the plan's arithmetic\)", said)
    assert found is not None and float(found[2]) > 0 and float(found[1]) > 0
    assert "pace: " in said and "M parameters" in said


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arguments", "message", "refused"),
    [
        ([], "nowhere", True),
        (["--fabric.devices", "600", "--data.micro_batches", "600"], "fabric.devices is 600", True),
        (["--fabric.accelerator", "cuda", "--gpu_gib", "80"], "PyTorch finds no GPU here", False),
        (["--model.codec_folder", "none"], "codec folder none does not exist", True),
        (["--optimizer.groups", "[{pattern: none.*}]"], "none.*", True),
        (["--run_folder", "FOLDER"], "holds", True),
        (["--data.packing.length", "24", "--data.workers", "0"], "a packed row holds 24", True),
        (["--optimizer.name", "paged_adamw_8bit"], "bitsandbytes", True),
        (["--optimizer.name", "paged_adamw_8bit", "--gpu_gib", "80"], "bitsandbytes", False),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="what is lacking here")
def test_the_exit_code_is_that_of_fit(
    file: str,
    nowhere: str,
    arguments: list[str],
    message: str,
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """1, and a line that says why, where `fit` refuses; what another machine may have is a note."""
    from train.trainer import preflight

    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    words = [str(Path(file).parent) if word == "FOLDER" else word for word in arguments] + ["--validation.questions", "0"]
    path = file if arguments else nowhere
    (Path(file).parent / "model.safetensors").touch()
    try:
        code = main([path, *words, "--json"])
        shown = capsys.readouterr()
        assert message in " ".join(json.loads(shown.out)["problems" if refused else "notes"])
        assert (message in shown.err) == refused
    except UserError as error:
        code = error.code
        assert message in str(error)
    assert code == int(refused)
    if refused:
        config = read_run([path, *words])
        with pytest.raises(UserError, match=re.escape(message)):
            fit(replace(config, run_folder=config.run_folder if "FOLDER" in arguments else str(Path(file).parent / "new")))
