"""`fabric.deterministic`: what is set while a run trains, what is as before afterwards, and sums that no atomics add."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from omni.errors import UserError
from tests.test_recompute import made
from train import fit, recipe
from train.config.sections import FabricConfig
from train.distributed.fabric import WORKSPACE, deterministic
from train.objective.cross_entropy import sum_by
from train.objective.objective import alignment_loss
from train.trainer import build

DEFAULT = {"debug": 0, "cudnn": False, "benchmark": True, "fill": True, "workspace": None}


@pytest.fixture
def set_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)


def settings() -> dict[str, Any]:
    cudnn = torch.backends.cudnn
    return {
        "debug": torch.get_deterministic_debug_mode(),
        "cudnn": cudnn.deterministic,
        "benchmark": cudnn.benchmark,
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "workspace": os.environ.get(WORKSPACE),
    }


def test_what_is_set_and_restored(set_otherwise: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings() == DEFAULT
    with deterministic(False):
        assert settings() == DEFAULT
    with pytest.raises(UserError), deterministic(True):
        # 2: not only warned of. Attention's backward pass is deterministic in that mode alone.
        assert settings() == {"debug": 2, "cudnn": True, "benchmark": False, "fill": False, "workspace": ":4096:8"}
        assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
        raise UserError("the run has failed")
    assert settings() == DEFAULT
    monkeypatch.setenv(WORKSPACE, ":16:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic(True):
            assert settings()["debug"] == 2 and os.environ[WORKSPACE] == ":4096:8"
        assert settings()["debug"] == 1 and os.environ[WORKSPACE] == ":16:8"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("on", [False, True])
def test_a_run_has_it_from_before_its_devices_are_opened_to_its_end(
    on: bool, set_otherwise: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []

    def stop(config: FabricConfig) -> None:
        seen.append(settings())
        raise UserError("no further")

    monkeypatch.setattr(build, "build_fabric", stop)
    config = recipe("nano", run_folder=str(tmp_path / "run"), **{"fabric.accelerator": "cpu", "fabric.deterministic": on})
    with pytest.raises(UserError, match="no further"):
        fit(config)
    assert seen[0]["debug"] == (2 if on else 0) and seen[0]["workspace"] == (":4096:8" if on else None)
    assert settings() == DEFAULT


def test_sums_by_task_are_those_of_a_loop() -> None:
    dice = torch.Generator().manual_seed(0)
    cell, values = torch.randint(5, (200,), generator=dice), torch.randn(200, generator=dice)
    values[cell == 3] = torch.nan
    found = sum_by(cell, values, 6)
    for number in (0, 1, 2, 4, 5):  # a task's numbers that are none do not reach the others
        torch.testing.assert_close(found[number], values[cell == number].sum())
    assert bool(found[3].isnan())


def test_the_alignment_loss_is_the_same_where_it_is_taken_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, frames = torch.randn(30, 6, generator=torch.Generator().manual_seed(0)), [10, 12, 8]
    plain = alignment_loss(logits, frames, [[1, 2], [], [3]])
    devices = []
    real = F.ctc_loss
    monkeypatch.setattr(
        F, "ctc_loss", lambda scores, *more, **options: devices.append(scores.device) or real(scores, *more, **options)
    )
    with deterministic(True):
        assert alignment_loss(logits, frames, [[1, 2], [], [3]]).equal(plain)
    assert devices == [torch.device("cpu")]


@pytest.mark.cuda
@pytest.mark.parametrize("half", [False, True])
def test_a_step_on_a_gpu_repeats_bit_for_bit(half: bool) -> None:
    """And no operation of it lacks a deterministic form: that would be an error."""
    from train.objective.config import ObjectiveConfig
    from train.objective.objective import targets

    objective, batch = made()
    objective.config = replace(objective.config, ctc_weight=0.5)
    assert isinstance(objective.config, ObjectiveConfig)
    found = []
    with deterministic(True):
        objective.cuda()
        for _ in range(3):
            objective.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=half):
                loss = objective(batch.to("cuda"), targets(batch).cuda()).total
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in objective.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
