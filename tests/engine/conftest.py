"""Fixtures of the tests of the engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from omni import plugins
from omni.checkpoint.folder import save_folder
from omni.codec.registry import CODECS
from omni.text import Tokenizer
from tests.generate.conftest import LAYOUTS, begun, chatty, folders, layout, make_model

__all__ = ["begun", "chatty", "folders", "layout"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model folder with a codec of `tests.engine.echo`, for processes that load it; beside it one with the portable one."""
    plugins.load_plugins(["tests.engine.echo"])
    place = tmp_path_factory.mktemp("models") / "model"
    model = make_model(LAYOUTS["pad"], context=2000)
    for codec, folder in (("echo", place), ("portable", place.with_name("portable"))):
        save_folder(folder, replace(model.config, codec=codec), model.state_dict(), Tokenizer.bytes())
    yield place
    for codec in ("echo", "portable"):
        del CODECS[codec], CODECS._sources[codec]  # and away again after the tests
    plugins._loaded.remove("tests.engine.echo")
    del sys.modules["tests.engine.echo"]
