"""Models at the Hugging Face Hub, read and written, with a stand-in of its interface on this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from omni.checkpoint.folder import load_folder, read_config, save_folder
from omni.errors import UserError
from omni.generate.speech_lm import SpeechLM
from omni.stores import hub as hubs
from omni.stores.hub import parse_hub, upload
from omni.stores.reading import local_path
from omni.stores.tries import MissingError
from omni.text import Tokenizer
from tests.generate.conftest import LAYOUTS, make_model
from tests.stores.hub_stand_in import Repository


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models") / "model"
    made = make_model(LAYOUTS["pad"], context=200)
    save_folder(place, replace(made.config, codec="snac"), made.state_dict(), Tokenizer.bytes())
    return place


def put(hub: Any, model: Path, name: str = "me/mine", branch: str = "main", **more: bytes) -> Repository:
    repo = hub.repos.setdefault(name, Repository())
    repo.branches.setdefault(branch, repo.branches["main"])
    repo.commit(branch, {file.relative_to(model).as_posix(): file.read_bytes() for file in model.rglob("*") if file.is_file()})
    repo.commit(branch, {name.replace("__", "/").replace("_", "."): data for name, data in more.items()})
    return repo


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("hf://o/n", ("o/n", None, "")),
        ("hf://models/o/n", ("o/n", None, "")),
        ("hf://o/n@v1.0", ("o/n", "v1.0", "")),
        ("hf://o/n@refs/pr/3/a/b", ("o/n", "refs/pr/3", "a/b")),
        ("hf://o/n/a/b", ("o/n", None, "a/b")),
        *[(f"hf://{kind}/o/n", None) for kind in ("datasets", "spaces", "buckets")],
        ("hf://n", None),
        ("s3://o/n", None),
    ],
)
def test_addresses_of_models(address: str, parts: tuple[str, str | None, str] | None) -> None:
    found = parse_hub(address)
    assert (None if found is None else (found.repo, found.revision, found.inner)) == parts


def test_a_model_of_the_hub_answers_as_the_folder_and_nothing_else_comes(hub: Any, model: Path) -> None:
    put(hub, model, modeling_py=b"raise SystemExit", pytorch_model_bin=b"\x80\x02", codec__x_bin=b"\x80\x02", README_md=b"#")
    here, there = SpeechLM.from_pretrained(model), SpeechLM.from_pretrained("hf://me/mine")
    for name, tensor in here.model.state_dict().items():
        assert torch.equal(tensor, there.model.state_dict()[name])
    place = local_path("hf://me/mine")
    assert {file.name for file in place.rglob("*")} == {"config.json", "model.safetensors", "tokenizer.json"}
    hub.seen.clear()
    assert local_path("hf://me/mine", again=True) == place
    assert len(hub.seen) <= 2 and not any("/lfs/" in one or "/resolve/" in one for one in hub.seen)


def test_a_model_that_was_replaced_comes_again(hub: Any, model: Path, tmp_path: Path) -> None:
    put(hub, model)
    assert read_config("hf://me/mine").codec == "snac"
    made = make_model(LAYOUTS["pad"], context=200)
    save_folder(tmp_path / "other", replace(made.config, codec="mimi"), made.state_dict(), Tokenizer.bytes())
    put(hub, tmp_path / "other")
    local_path("hf://me/mine", again=True)
    assert read_config("hf://me/mine").codec == "mimi"


def test_a_revision_and_a_folder_of_a_repository(hub: Any, model: Path) -> None:
    repo = put(hub, model, branch="v1")
    repo.commit("main", {f"sub/x/{file.name}": file.read_bytes() for file in model.iterdir()})
    repo.commit("main", {"sub/x/../other.json": b"{}", "config.json": b"{}"})
    for address in ("hf://me/mine@v1", f"hf://me/mine@{repo.branches['v1']}", "hf://me/mine/sub/x"):
        assert load_folder(address, mute=True).config == read_config(model)
    with pytest.raises(MissingError, match=r"hf://me/mine@v2: me/mine has no branch, tag or commit 'v2'"):
        local_path("hf://me/mine@v2")
    with pytest.raises(MissingError, match=r"hf://me/mine/none has no config.json"):
        local_path("hf://me/mine/none")
    with pytest.raises(UserError, match="leads out"):
        local_path("hf://me/mine/sub/../../x")


def test_what_is_not_there_or_private_is_told(hub: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(hub, model, "me/secret").private = True
    with pytest.raises(MissingError, match=r"hf://me/none is not there, or is private: check the name; .*hf auth login"):
        local_path("hf://me/none")
    assert read_config("hf://me/secret") == read_config(model)
    monkeypatch.delenv("HF_TOKEN")
    hub.seen.clear()
    with pytest.raises(MissingError, match="hf://me/secret is not there, or is private"):
        local_path("hf://me/secret", again=True)
    assert len(hub.seen) == 1  # a refusal does not pass: it is not tried again, and what is cached does not answer
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UserError, match=r"hf://me/secret cannot be read: it is not allowed .*or run `hf auth login`"):
        local_path("hf://me/secret", again=True)


@pytest.mark.parametrize("file", ["codec/pytorch_model.bin", "codec/x.py", "weights.pt"])
def test_files_that_could_run_code_are_refused(hub: Any, model: Path, file: str) -> None:
    data = json.loads((model / "config.json").read_text())
    data["files"][file] = {"bytes": 3, "crc32": 0}
    put(hub, model, config_json=json.dumps(data).encode()).commit("main", {file: b"\x80\x02x"})
    with pytest.raises(UserError, match=f"hf://me/mine/{file} is not read from the hub, only JSON and safetensors"):
        SpeechLM.from_pretrained("hf://me/mine")
    assert not any(file in one for one in hub.seen)


def test_a_pickle_by_another_name_is_refused(hub: Any, model: Path) -> None:
    put(hub, model, model_safetensors=b"\x80\x02}q\x00.")
    with pytest.raises(UserError, match=r"hf://me/mine/model.safetensors is a pickle"):
        SpeechLM.from_pretrained("hf://me/mine")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("pattern", "times", "what"),
    [(r"GET /api/models", 3, 500), (r"GET /api/models/.*tree", 2, 503), (r"(GET|HEAD) /me/mine/resolve", 2, 502),
     (r"GET /lfs/", 1, "cut"), (r"GET /lfs/", 2, 500), (r"GET /api/models/me/mine$", 1, "cut")],
)  # fmt: skip
def test_failures_that_pass(hub: Any, model: Path, pattern: str, times: int, what: int | str) -> None:
    put(hub, model)
    hub.fail(pattern, times, what)
    assert SpeechLM.from_pretrained("hf://me/mine").config == read_config(model)


def test_failures_that_stay_are_told(hub: Any, model: Path) -> None:
    put(hub, model)
    hub.fail("GET /api", 1000)
    with pytest.raises(UserError, match=r"hf://me/mine cannot be read: .*500.*6 times; check the address") as told:
        local_path("hf://me/mine")
    assert told.value.again


def test_without_the_hub_what_is_cached_answers(hub: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    put(hub, model)
    put(hub, model, "me/other")
    place = local_path("hf://me/mine")
    hub.fail("", 1000)
    told: list[str] = []
    monkeypatch.setattr(hubs.LOG, "warning", lambda text, *values: told.append(text % values))
    assert local_path("hf://me/mine", again=True) == place
    assert len(told) == 1 and "hf://me/mine: the hub is not reached, and what is in the cache is used" in told[0]
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    assert local_path("hf://me/mine", again=True) == place
    with pytest.raises(UserError, match=r"hf://me/other cannot be read: .*check the address and the network"):
        local_path("hf://me/other")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert local_path("hf://me/mine", again=True) == place
    with pytest.raises(UserError, match="hf://me/other cannot be read: HF_HUB_OFFLINE is set, and it is not in the cache"):
        local_path("hf://me/other")


def test_an_incomplete_cache_does_not_answer(hub: Any, model: Path) -> None:
    put(hub, model)
    place = local_path("hf://me/mine")
    (place / "tokenizer.json").unlink()
    hub.fail("", 1000)
    with pytest.raises(UserError, match="hf://me/mine cannot be read"):
        local_path("hf://me/mine", again=True)
    hub.fail("", 0)
    assert (local_path("hf://me/mine", again=True) / "tokenizer.json").is_file()


@pytest.mark.long
def test_files_are_seen_together_or_not_at_all(hub: Any, tmp_path: Path) -> None:
    repo = hub.repos["me/mine"] = Repository()
    at = parse_hub("hf://me/mine")
    assert at is not None
    (tmp_path / "a.safetensors").write_bytes(bytes(range(256)) * 50)
    files: list[tuple[str, Path | bytes]] = [("a.safetensors", tmp_path / "a.safetensors"), ("config.json", b"{}")]
    hub.fail("POST .*/commit/", 1000)
    with pytest.raises(UserError, match=r"hf://me/mine cannot be written: .*500"):
        upload(at, files, "a model")
    assert set(repo.commits[repo.branches["main"]]) == {".gitattributes"}
    hub.fail("POST .*/commit/", 2)
    hub.seen.clear()
    assert upload(at, files, "a model").startswith(f"{hub.address}/me/mine/commit/")
    assert repo.commits[repo.branches["main"]] == {
        ".gitattributes": b"", "a.safetensors": bytes(range(256)) * 50, "config.json": b"{}",
    }  # fmt: skip
    assert not any(one.startswith("PUT") for one in hub.seen)  # it was sent before


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("pattern", "times", "what"),
    [("preupload", 2, 500), ("objects/batch", 1, 503), ("PUT", 2, 500), ("PUT", 1, "cut"), ("commit", 1, "cut")],
)
def test_failures_of_writing_that_pass(hub: Any, tmp_path: Path, pattern: str, times: int, what: int | str) -> None:
    repo = hub.repos["me/mine"] = Repository()
    at = parse_hub("hf://me/mine")
    assert at is not None
    (tmp_path / "a.safetensors").write_bytes(b"abc")
    hub.fail(pattern, times, what)
    upload(at, [("a.safetensors", tmp_path / "a.safetensors"), ("config.json", b"{}")], "a model")
    assert repo.commits[repo.branches["main"]]["a.safetensors"] == b"abc"
    assert len(repo.messages) == 2  # a commit whose answer was lost is not made twice


def test_a_driver_that_is_missing_is_named(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r'needs the package huggingface_hub: pip install "omni-speech\[hub\]"'):
        hubs.snapshot(hubs.HubAddress("hf://me/mine", "me/mine"))
