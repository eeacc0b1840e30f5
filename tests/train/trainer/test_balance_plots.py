"""The picture of the balance shows what the table has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from train.balance.balancer import Balancer
from train.balance.config import BalanceConfig
from train.balance.rows import Rows
from train.trainer.logs import BALANCE, CsvTable, Logs, read_table
from train.trainer.plots import balance

pytestmark = pytest.mark.usefixtures("whole_pictures")
NAMES = ["A1T1", "A1T2", "A1A2"]


def ink(file: Path) -> float:
    """Pixels that are not background."""
    return float((np.asarray(Image.open(file).convert("L")) < 200).sum())


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
    assert inks[-1] > inks[0] > 1000


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


def test_losses_alone_draw_weights_alone(tmp_path: Path) -> None:
    report = Balancer(BalanceConfig("random"), NAMES).weights(torch.ones(3))
    assert {name.split("/")[0] for name in report.figures(NAMES)} == {"weight"}
    CsvTable(tmp_path / BALANCE, 0).add(1, report.figures(NAMES))
    picture = balance(tmp_path)
    assert picture is not None and Image.open(picture).size[1] < 400
