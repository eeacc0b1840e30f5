"""Checkpoints and models that are copied to a store beside the steps, and runs that go on from there."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omni.errors import UserError
from omni.stores import drivers, tries
from tests.train.toys import final_tensors, toy_config, toy_export, toy_fit, toy_parts
from train.checkpoint import retention, upload
from train.checkpoint.upload import Uploads, bring_back
from train.config.sections import CheckpointConfig, LogConfig


def checkpoint(folder: Path, step: int) -> Path:
    """A folder like that of a checkpoint."""
    place = folder / "checkpoints" / retention.name_of(step)
    (place / "tensors").mkdir(parents=True)
    (place / "state.json").write_text(f'{{"step": {step}}}')
    (place / "tensors" / "state.safetensors").write_bytes(b"tensors")
    return place


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that are written, in their order."""
    order: list[str] = []
    real = drivers.write_object
    monkeypatch.setattr(upload, "write_object", lambda what, address: (real(what, address), order.append(address))[0])
    return order


@pytest.mark.long
def test_a_run_that_lost_its_folder_goes_on_from_the_bucket(
    bucket: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy_fit(toy_config(tmp_path / "whole"))
    saves = CheckpointConfig(every_steps=6, every_minutes=None, upload=bucket.address("runs/a"))
    config = toy_config(tmp_path / "first", checkpoint=saves, log=LogConfig(every=1, progress="lines"))
    bucket.server.errors = 0.05
    toy_fit(config, replace(toy_parts(), export=toy_export(str(tmp_path / "first" / "model"), False)))
    said = capsys.readouterr()
    assert f"uploaded {bucket.address('runs/a/checkpoints/step-00000008')}" in said.out + said.err
    assert f"uploaded {bucket.address('runs/a/model')}" in said.out + said.err
    bucket.server.heal()
    assert {"runs/a/checkpoints/last", "runs/a/checkpoints/step-00000006/state.json"} <= {*bucket.keys()}
    assert not list((tmp_path / "first" / "checkpoints").glob(".*"))
    bucket.put("runs/a/checkpoints/last", b"step-00000006\n")  # as if it had been lost then
    toy_fit(replace(config, run_folder=str(tmp_path / "second")))
    said = capsys.readouterr()
    assert f"going on from {bucket.address('runs/a/checkpoints/step-00000006')}" in said.out + said.err
    wanted, found = final_tensors(tmp_path / "whole"), final_tensors(tmp_path / "second")
    assert wanted.keys() == found.keys() and all(tensor.equal(found[name]) for name, tensor in wanted.items())


@pytest.mark.long
def test_a_store_that_fails_does_not_end_a_run(bucket: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saves = CheckpointConfig(every_steps=3, every_minutes=None, upload=bucket.address("runs/a"))
    config = toy_config(tmp_path / "run", checkpoint=saves, log=LogConfig(every=1, progress="lines"))
    bucket.server.broken = lambda environ: environ["REQUEST_METHOD"] == "PUT"
    outcome, _ = toy_fit(config)
    said = capsys.readouterr()
    assert outcome.step == 8 and not bucket.keys()
    assert "checkpoints/step-00000008 is not uploaded, and the run goes on: s3://" in said.out + said.err
    assert f"cannot be written: [Errno 16] Service Unavailable, status 503, {tries.TRIES} times" in said.out + said.err


def test_markers_are_written_last(bucket: Any, tmp_path: Path, written: list[str]) -> None:
    uploads = Uploads(bucket.address("runs/a"))
    uploads.add(checkpoint(tmp_path, 3))
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_text(name)
    uploads.add(model)
    wait([uploads.last])
    assert [address.removeprefix(bucket.address("runs/a") + "/") for address in written] == [
        "checkpoints/step-00000003/tensors/state.safetensors",
        "checkpoints/step-00000003/state.json",
        "checkpoints/last",
        "model/model.safetensors",
        "model/tokenizer.json",
        "model/config.json",
    ]
    told = [f"uploaded {bucket.address('runs/a')}/{name}" for name in ("checkpoints/step-00000003", "model")]
    assert list(uploads.lines) == told


def test_a_checkpoint_that_is_deleted_meanwhile_is_copied_and_one_that_waits_left_out(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, real = threading.Event(), upload.write_object

    def held_up(file: Path, address: str) -> None:
        assert go_on.wait(100)
        real(file, address)

    monkeypatch.setattr(upload, "write_object", held_up)
    uploads = Uploads(bucket.address("runs/a"))
    for step in (1, 2, 3):
        place = checkpoint(tmp_path, step)
        uploads.add(place)
        while step == 1 and not (uploads.last and uploads.last.running()):
            pass
        retention.discard(place)
    go_on.set()
    wait([uploads.last])
    lines = list(uploads.lines)
    assert lines[0] == "checkpoints/step-00000002 is not uploaded: the next checkpoint came first"
    assert [line.rpartition("/")[2] for line in lines[1:]] == ["step-00000001", "step-00000003"]
    assert not list((tmp_path / "checkpoints").iterdir())
    assert bring_back(bucket.address("runs/a"), tmp_path / "back") == bucket.address("runs/a/checkpoints/step-00000003")
    assert (tmp_path / "back" / "step-00000003" / "tensors" / "state.safetensors").read_bytes() == b"tensors"


def test_what_cannot_be_brought_back(bucket: Any, tmp_path: Path) -> None:
    assert bring_back(bucket.address("runs/a"), tmp_path / "back") is None
    bucket.put("runs/a/checkpoints/last", b"../../etc\n")
    with pytest.raises(UserError, match=r"checkpoints/last holds '../../etc', no checkpoint's name"):
        bring_back(bucket.address("runs/a"), tmp_path / "back")
