"""`omni-train push` to a stand-in of the hub: what is uploaded, the card, whose card is kept, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from omni.checkpoint.folder import save_folder
from omni.config import to_dict
from omni.errors import UserError
from omni.generate.speech_lm import SpeechLM
from omni.lora.attach import add_adapter
from omni.lora.config import LoRAConfig
from omni.lora.peft import save_adapter, weights_of
from omni.model.linears import base_checksum
from tests.stores.hub_stand_in import Repository
from tests.train.data.toys import TOKENIZER
from tests.train.eval.toys import random_model
from train.commands.models import run_push as main
from train.eval.run import model_hash
from train.trainer.logs import VALIDATION, CsvTable

SETTINGS: dict[str, Any] = {
    "model": {"preset": None, "init_from": "hf://others/base@v1"},
    "data": {
        "sources": [
            {"kind": "stored", "path": "DATA", "tasks": {"A1A2": 1.0, "A1T1": 0.0}},
            {"kind": "spoken-digits", "path": None, "tasks": {"A1T2": 0.5}},
        ]
    },
    "fabric": {"precision": "bf16-mixed"},
    "optimizer": {"name": "muon"},
    "trainable": ["decoder.*"],
    "validation": {"questions": 20},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a finished run with all that a card is written from, and the data that it was trained on."""
    place, data, origin = tmp_path / "secret-place" / "run", tmp_path / "secret-place" / "rows", tmp_path / "VoiceSet"
    model = random_model()
    save_folder(place / "model", model.config, model.state_dict(), TOKENIZER)
    settings = json.loads(json.dumps(SETTINGS).replace("DATA", str(data)))
    (place / "config.yaml").write_text(yaml.safe_dump(settings))
    table = CsvTable(place / VALIDATION, 0)
    table.add(5, {"exact_match": 0.1, "loss": 2.0})
    table.add(9, {"exact_match": 0.75, "loss": 1.25, "wer": float("nan"), "seconds": 7.0})
    state = {"format": 1, "step": 9, "config": {}, "seconds": 150.0, "processes": 2}
    checkpoint = place / "checkpoints" / "step-00000009"
    checkpoint.mkdir(parents=True)
    rows = {"the number of rows of data.sources[0]": 1234}
    (checkpoint / "state.json").write_text(json.dumps(state | {"rows": rows}))
    for folder, text in ((data, {}), (origin, {"license": "cc-by-4.0", "language": ["en", "fr"]})):
        folder.mkdir()
        if text:
            (folder / "README.md").write_text(f"---\n{yaml.safe_dump(text)}---\n# A set\n")
    report = {"source": str(origin), "rows": 1300, "question_seconds": 3600.0, "answer_seconds": 1800.0}
    (data / "report.json").write_text(json.dumps(report))
    return place


def evaluation(folder: Path, model: Path, **more: Any) -> Path:
    figures = {"wer": {"value": 0.125, "low": 0.1, "high": 0.15, "questions": 40}}
    found = {"model": str(model), "model_hash": model_hash(model), "data": "/home/me/LibriSpeech/test-clean", "task": "A1T1"}
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps(found | {"answered": 40, "broken": [], "figures": figures} | more))
    return folder


def front(card: str) -> dict[str, Any]:
    return dict(yaml.safe_load(card.split("---\n")[1]))


def pushed(hub: Any, name: str = "me/mine", branch: str = "main") -> dict[str, bytes]:
    repo = hub.repos[name]
    return {name: data for name, data in repo.commits[repo.branches[branch]].items() if name != ".gitattributes"}


def test_a_run_is_pushed_with_a_card_and_read_again(hub: Any, run: Path, tmp_path: Path, capsys: Any) -> None:
    report = evaluation(tmp_path / "libri", run / "model")
    assert main([str(run), "hf://me/mine", "--license", "apache-2.0", "--report", str(report)]) == 0
    said, held = capsys.readouterr().out, pushed(hub)
    assert {name: data for name, data in held.items() if name != "README.md"} == {
        file.name: file.read_bytes() for file in (run / "model").iterdir()
    }
    assert len(hub.repos["me/mine"].messages) == 2 and not hub.repos["me/mine"].private
    first = said.splitlines()[:2]
    assert first[0].startswith("uploading 4 files, ") and first[0].endswith(f" of {run / 'model'}")
    assert first[1] == f"to {hub.address}/me/mine, branch main, a new repository, PUBLIC, as me"
    assert "SpeechLM.from_pretrained" in said and f"{hub.address}/me/mine/commit/" in said
    card = held["README.md"].decode()
    assert front(card) == {
        "license": "apache-2.0", "language": ["en", "fr"], "library_name": "omni-speech", "pipeline_tag": "audio-to-audio",
        "base_model": "others/base",
    }  # fmt: skip
    for line in (
        "| start | `hf://others/base@v1` |", "| steps | 9 |", "| time | 2:30 in 2 processes |", "| trainable | `decoder.*` |",
        "| rows, of VoiceSet | 1,234 | 1:30:00 | cc-by-4.0 | A1A2 |",
        "| spoken-digits, made while training | unknown | unknown | unknown | A1T2 |",
        "The run's own, at step 9, on held-out rows of its data.", "| exact match | 75.0 % |", "| loss | 1.25 |",
        "40 questions of `test-clean`, asked as A1T1.", "| word error rate | 12.50 % | 10.00 % to 15.00 % | 40 |",
        'lm = SpeechLM.from_pretrained("hf://me/mine")', "omni-infer ask question.wav --model hf://me/mine",
    ):  # fmt: skip
        assert f"\n{line}\n" in card, line
    assert "secret-place" not in card and "/home" not in card and "| wer |" not in card
    lm = SpeechLM.from_pretrained("hf://me/mine")
    assert to_dict(lm.config) == to_dict(SpeechLM.from_pretrained(run / "model").config)


def test_a_model_of_which_nothing_is_known_says_nothing_of_it(hub: Any, run: Path, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(run / "model", tmp_path / "elsewhere")
    main([str(tmp_path / "elsewhere"), "hf://me/mine", "--license", "other", "--dry_run"])
    out = capsys.readouterr()
    assert front(out.out) == {"license": "other", "library_name": "omni-speech", "pipeline_tag": "audio-to-audio"}
    for title in ("## Training", "## Data", "## Validation", "## Evaluation"):
        assert title not in out.out
    assert "The author has named no license" in out.out and "of a run that is not known" in out.err
    assert not hub.seen  # nothing is uploaded, or asked


def test_a_card_of_the_users_is_kept(hub: Any, run: Path, capsys: Any) -> None:
    own = b"---\nlicense: mit\n---\n# My own words\n"
    (run / "model" / "README.md").write_bytes(own)
    (run / "model" / "notes.txt").write_text("mine")
    main([str(run / "model"), "hf://me/mine", "--private"])
    assert pushed(hub)["README.md"] == own and "notes.txt" not in pushed(hub)
    said = capsys.readouterr().out
    assert ", private, as me" in said and "left out, no files of the model: notes.txt" in said
    assert f"card: {run / 'model' / 'README.md'}, as it is" in said


@pytest.mark.long
def test_a_card_that_was_edited_at_the_hub_is_kept_and_ours_is_replaced(hub: Any, run: Path, capsys: Any) -> None:
    words = [str(run), "hf://me/mine", "--license", "mit"]
    main([*words[:3], "apache-2.0"])
    main(words)
    assert front(pushed(hub)["README.md"].decode())["license"] == "mit"
    edited = pushed(hub)["README.md"].replace(b"# mine", b"# mine, and hers")
    hub.repos["me/mine"].commit("main", {"README.md": edited})
    capsys.readouterr()
    main([*words[:3], "apache-2.0"])
    assert pushed(hub)["README.md"] == edited
    assert "card: the one at the hub, which was edited there, is kept" in capsys.readouterr().out


def test_adapters_go_with_the_model_to_a_branch(hub: Any, run: Path) -> None:
    model = random_model()
    chosen = add_adapter(model, LoRAConfig(("decoder.blocks.0.*",), rank=2))
    weights = weights_of(model, model.state_dict(), base=base_checksum(model, chosen))
    save_adapter(run / "model" / "adapters" / "soft", weights)
    main([str(run), "hf://me/mine@v1", "--license", "mit", "--message", "The first"])
    names = ("adapter_config.json", "adapter_model.safetensors")
    held = pushed(hub, branch="v1")
    assert {name for name in held if name.startswith("adapters/")} == {f"adapters/soft/{name}" for name in names}
    assert not pushed(hub) and hub.repos["me/mine"].messages[-1] == "The first"
    assert "| adapters | soft |" in held["README.md"].decode()
    assert SpeechLM.from_pretrained("hf://me/mine@v1").load_adapter("soft") == "soft"
    (run / "model" / "adapters" / "soft" / "adapter_model.safetensors").write_bytes(b"\x80\x02}q")
    with pytest.raises(UserError, match="is a pickle, which could run code"):
        main([str(run), "hf://me/other", "--license", "mit"])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hf://me/mine"], r"--license is needed, such as apache-2.0"),
        (["hf://mine", "--license", "mit"], r"'hf://mine' is no repository at the hub; give hf://owner/name"),
        (["hf://me/mine/sub", "--license", "mit"], "is no repository at the hub"),
        (["hf://datasets/me/mine", "--license", "mit"], "is no repository at the hub"),
        (["hf://me/mine", "--license", "mit", "--license_link", "x"], "are for --license other"),
        (["hf://me/mine", "--license", "mit", "--report", "none"], "none holds no finished evaluation"),
        (["hf://others/mine", "--license", "mit"], r"hf://others/mine cannot be made: it is not allowed .*you may not make"),
        (["hf://me/public", "--license", "mit", "--private"], r"hf://me/public is there already, and is public: make it"),
        (["hf://me/public", "--license", "My Own"], r"hf://me/public: its card is refused: .*license.* must be known"),
        (["hf://me/new", "--license", "My Own"], r"hf://me/new: its card is refused"),
    ],
)
def test_what_cannot_be_pushed(hub: Any, run: Path, words: list[str], said: str) -> None:
    hub.repos["me/public"] = Repository()
    with pytest.raises(UserError, match=said):
        main([str(run), *words])
    assert set(hub.repos) == {"me/public"} and len(hub.repos["me/public"].messages) == 1


def test_folders_that_are_refused(hub: Any, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["hf://me/mine", "--license", "mit"]
    with pytest.raises(UserError, match="is of another model"):
        main([str(run), *words, "--report", str(evaluation(tmp_path / "r", run / "model", model_hash="x"))])
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match=r"hf://me/mine cannot be written without a token: run `hf auth login`"):
        main([str(run), *words])
    file = run / "model" / "config.json"
    data = json.loads(file.read_text())
    (run / "model" / "codec").mkdir()
    (run / "model" / "codec" / "pytorch_model.bin").write_bytes(b"abc")
    file.write_text(json.dumps(data | {"files": data["files"] | {"codec/pytorch_model.bin": {"bytes": 3, "crc32": 891568578}}}))
    with pytest.raises(UserError, match=r"pytorch_model.bin is neither JSON nor safetensors.*convert .*--codec_folder"):
        main([str(run), *words])
    file.write_text(json.dumps(data))
    weights = run / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\1\2\3\4")
    with pytest.raises(UserError, match="does not match its checksum"):
        main([str(run), *words])
    shutil.rmtree(run / "model")
    with pytest.raises(UserError, match="has no finished model yet"):
        main([str(run), *words])
    (run / "adapter").mkdir()
    with pytest.raises(UserError, match="has made an adapter alone: merge it"):
        main([str(run), *words])
    assert not hub.repos


@pytest.mark.long
def test_an_upload_that_broke_off_goes_on(hub: Any, run: Path) -> None:
    words = [str(run), "hf://me/mine", "--license", "mit"]
    hub.fail("POST .*/commit/", 1000)
    with pytest.raises(UserError, match=r"hf://me/mine cannot be written: .*run the same command again"):
        main(words)
    assert not pushed(hub)
    hub.fail("", 0)
    hub.seen.clear()
    main(words)
    assert set(pushed(hub)) == {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert not any(one.startswith("PUT") for one in hub.seen)
