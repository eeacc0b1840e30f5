"""Pictures: they are drawn from whatever a run folder holds, and show what they should."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from omni.utils.charts import printable
from train.balance.balancer import Balancer
from train.balance.config import BalanceConfig
from train.balance.rows import Rows
from train.trainer.logs import BALANCE, METRICS, VALIDATION, CsvTable, Logs, read_table
from train.trainer.plots import CURVES, balance, curves, spectrogram, spectrograms

pytestmark = pytest.mark.usefixtures("whole_pictures")
NAMES = ["A1T1", "A1T2", "A1A2"]


def ink(file: Path) -> float:
    """Share of the pixels that are not background."""
    pixels = np.asarray(Image.open(file).convert("L"))
    return float((pixels < 200).mean())


@pytest.mark.long
@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("name", [None, "loss/text", "loss/audio", "loss/alignment"])
def test_curves(tmp_path: Path, rows: int, name: str | None) -> None:
    assert curves(tmp_path) is None
    metrics = CsvTable(tmp_path / METRICS, 0)
    for step in range(1, rows + 1):
        losses = {"loss": 5 / step, "loss/audio0": 3 / step, "loss/A1A2": 2 / step}
        metrics.add(step, {**losses, "lr": 1e-3 / step, "seconds": 60.0 * step})
    bare = ink(curves(tmp_path))  # type: ignore[arg-type]
    if name:
        table = CsvTable(tmp_path / VALIDATION, 0)
        for step in (1, 20):
            table.add(step, {"exact_match": 0.04 * step, "wer": 2.0, "seconds": 60.0 * step})
        assert ink(curves(tmp_path)) > bare  # type: ignore[arg-type]
        asked = np.asarray(Image.open(tmp_path / CURVES).convert("L"))
        for step in (1, 20):
            table.add(step, {name: 3.0 / step, "seconds": 60.0 * step})
        shown = np.asarray(Image.open(curves(tmp_path)).convert("L"))  # type: ignore[arg-type]
        top = slice(0, shown.shape[0] // 2)  # the losses' axes
        assert (shown[top] != asked[top]).mean() > 0.002
    assert bare > 0.008
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("rate", [8000, 16000])
@pytest.mark.parametrize("tone", [440.0, 2000.0])
def test_a_tone_stands_at_its_frequency(rate: int, tone: float) -> None:
    samples = torch.sin(2 * torch.pi * tone * torch.arange(rate) / rate)
    power, seconds = spectrogram(samples, rate)
    assert seconds == 1.0
    bin_width = rate / 2 / (power.shape[0] - 1)
    assert abs(power.mean(1).argmax() * bin_width - tone) <= bin_width


@pytest.mark.sampled(1)
@pytest.mark.parametrize("asked_aloud", [True, False])
def test_spectrograms(tmp_path: Path, asked_aloud: bool) -> None:
    question = (torch.randn(16000), 16000) if asked_aloud else None
    file = spectrograms(tmp_path / "deep" / "s.png", question, (torch.randn(40), 8000), "what?\n$x$", "\x0c" + "so " * 99)
    height = Image.open(file).size[1]
    assert (height > 500) == asked_aloud


def test_titles_hold_anything() -> None:
    assert printable("a\nb$") == r"a b\$" and printable("x" * 200).endswith("x ...")


@pytest.mark.long
@pytest.mark.sampled(1)
def test_balance(tmp_path: Path) -> None:
    assert balance(tmp_path) is None
    balancer, table = Balancer(BalanceConfig("pcgrad", "parameters"), NAMES), CsvTable(tmp_path / BALANCE, 0)
    inks = []
    for step in range(1, 6):
        rows = torch.randn(3, 10, generator=torch.Generator().manual_seed(step)) * torch.tensor([[1.0], [1.0], [100.0]])
        counts = torch.tensor([1, 1, step % 2])
        report = balancer.combine(torch.ones(3), Rows(rows), [nn.Parameter(torch.zeros(10))], counts=counts)
        figures = report.figures(NAMES)
        assert ("norm/A1A2" in figures) == ("cosine/A1T1/A1A2" in figures) == ("absent/A1A2" not in figures) == bool(step % 2)
        assert figures["weight/A1T1"] == float(report.weights[0])
        table.add(step, figures)
        picture = balance(tmp_path)
        assert picture is not None
        inks.append(ink(picture))
    assert inks[-1] > inks[0] > 0.001


def test_columns_of_a_kind_stand_together(tmp_path: Path) -> None:
    """Whichever step first had them, also after a resumption."""
    rows = [
        {"weight/a": 1.0, "norm/a": 2.0, "absent/b": 1.0},
        {"weight/b": 1.0, "norm/b": 3.0, "zero/a": 1.0, "cosine/a/b": 0.0},
    ]
    rows.append({"absent/a": 1.0, "norm/c": 1.0})
    for step, row in enumerate(rows, 1):
        Logs(tmp_path, step - 1).write(BALANCE, step, row)
    table = read_table(tmp_path / BALANCE)
    wanted = "step weight/a weight/b norm/a norm/b norm/c cosine/a/b absent/b absent/a zero/a"
    assert list(table[0]) == wanted.split() and table[1]["norm/b"] == 3 and table[0]["absent/b"] == 1
