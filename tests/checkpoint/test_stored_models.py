"""Model folders at addresses: brought here as a whole, checked as any other, and told by their address."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from omni.checkpoint.folder import check_files, read_config
from omni.checkpoint.places import check_folder
from omni.errors import UserError
from omni.generate.speech_lm import SpeechLM
from omni.stores.tries import MissingError
from tests.stores.test_hub import model
from tests.stores.web import web
from train.config.sections import ModelSection
from train.trainer.initial_model import build_initial

__all__ = ["model"]


def test_a_model_of_a_bucket_answers_as_the_folder(bucket: Any, model: Path) -> None:
    address = bucket.put_all(model, "models/mine")
    check_folder(Path(address))
    here, there = SpeechLM.from_pretrained(model), SpeechLM.from_pretrained(address)
    for name, tensor in here.model.state_dict().items():
        assert torch.equal(tensor, there.model.state_dict()[name])
    assert read_config(Path(address)) == read_config(model)


def test_a_run_given_as_a_model_names_its_own(model: Path) -> None:
    with pytest.raises(UserError, match=re.escape(f"that of this run is {model}")):
        check_folder(model.parent)


def test_a_run_starts_from_a_bucket(bucket: Any, model: Path) -> None:
    address = bucket.put_all(model, "models/mine")
    check_files(address)
    initial = build_initial(ModelSection(init_from=address), seed=0)
    same = build_initial(ModelSection(init_from=str(model)), seed=0)
    for name, tensor in same.model.state_dict().items():
        assert torch.equal(tensor, initial.model.state_dict()[name])


def test_a_model_of_a_web_server_is_known_by_the_files_that_it_lists(bucket: Any, model: Path) -> None:
    with web() as server:
        server.files |= {f"/m/{file.name}": file.read_bytes() for file in model.iterdir()}
        lm = SpeechLM.from_pretrained(f"{server.address}/m")
        assert lm.config == read_config(model)
        del server.files["/m/tokenizer.json"]
        with pytest.raises(MissingError, match=rf"{server.address}/m/tokenizer.json is not there"):
            SpeechLM.from_pretrained(f"{server.address}/m")
        with pytest.raises(MissingError, match=rf"{server.address}/n is not there"):
            SpeechLM.from_pretrained(f"{server.address}/n")
