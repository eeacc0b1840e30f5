"""Pictures of runs are one pixel each: test_plots.py and test_balance_plots.py in tests/train/trainer draw them whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from train.console.charts import pyplot_quietly
from train.trainer import plots


@pytest.fixture(scope="session", autouse=True)
def quick_pictures() -> Iterator[Callable[[Any, Path], Path]]:
    """What saves them whole is given here."""

    def save(figure: Any, file: Path) -> Path:
        pyplot_quietly().close(figure)
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (1, 1)).save(file)
        return file

    with pytest.MonkeyPatch.context() as patch:
        real = plots.save_figure
        patch.setattr(plots, "save_figure", save)
        yield real


@pytest.fixture
def whole_pictures(quick_pictures: Callable[[Any, Path], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "save_figure", quick_pictures)
