"""Going on with another rule, precision or budget than a run was started with, and what a start that fails leaves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from omni.errors import UserError
from tests.train.checkpoint.test_resume import OPTIMIZERS
from tests.train.toys import final_tensors, toy_config, toy_fit, toy_parts
from train.config.run import plain_config
from train.config.sections import BudgetConfig, FabricConfig, LogConfig
from train.distributed.fabric import build_fabric
from train.trainer import build


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run folders of whole runs, one per optimizer."""
    out = {}
    for name, optimizer in OPTIMIZERS.items():
        out[name] = tmp_path_factory.mktemp(name)
        toy_fit(toy_config(out[name], optimizer=optimizer))
    return out


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("before", "now"), [("adamw", "muon"), ("muon", "adamw")])
def test_state_of_another_rule_starts_again(
    tmp_path: Path, undisturbed: dict[str, Path], before: str, now: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of the parameters whose rule is another one; that of the others goes on."""
    shutil.copytree(undisturbed[before], tmp_path / "run")
    log = LogConfig(every=4, progress="lines")
    config = toy_config(tmp_path / "run", optimizer=OPTIMIZERS[now], resume="force", budget=BudgetConfig(steps=9), log=log)
    assert toy_fit(config)[0].step == 9
    stored = final_tensors(tmp_path / "run")
    names = {name.partition(".")[2].rpartition(".")[0]: name for name in stored if "momentum" in name or "exp_avg_sq" in name}
    steps = {names[name]: float(stored[f"optimizer.{name}.step"]) for name in names if f"optimizer.{name}.step" in stored}
    changed = 2 if now == "muon" else sum(step == 1 for step in steps.values())
    assert f"the optimizer's state starts again for {changed} parameters, which another rule trained before" in (
        capfd.readouterr().err
    )
    assert set(steps.values()) == ({9.0} if now == "muon" else {1.0, 9.0})


def test_a_run_goes_on_in_another_precision(tmp_path: Path, undisturbed: dict[str, Path]) -> None:
    """State of the optimizer takes the type of its parameter; the number of steps stays exact."""
    shutil.copytree(undisturbed["muon"], tmp_path / "run")
    for steps, precision, kind in ((9, "bf16-true", torch.bfloat16), (10, "32-true", torch.float32)):
        fabric, budget = FabricConfig("cpu", 1, precision=precision), BudgetConfig(steps=steps)  # type: ignore[arg-type]
        config = toy_config(tmp_path / "run", optimizer=OPTIMIZERS["muon"], resume="force", budget=budget, fabric=fabric)
        assert toy_fit(config)[0].step == steps
        stored = {name: t for name, t in final_tensors(tmp_path / "run").items() if name.startswith("optimizer.")}
        assert {t.dtype for name, t in stored.items() if not name.endswith(".step")} == {kind}
        assert {(float(t), t.dtype) for name, t in stored.items() if name.endswith(".step")} == {(steps, torch.float32)}


def test_a_start_that_fails_keeps_the_configuration_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new run's is there from the beginning; a resumed one's is written after its first step."""
    monkeypatch.setattr(build, "build_initial", lambda *_: type("Initial", (), {"model": torch.nn.Linear(1, 1)}))
    monkeypatch.setattr(build, "with_alignment", lambda config: config)
    monkeypatch.setattr(build.screen, "ready_lines", lambda *_: [])

    def start(steps: int, broken: bool) -> Any:
        def before(step: int) -> None:
            if broken:
                raise UserError("row 7 is broken")

        monkeypatch.setattr(build, "build_parts", lambda *_: toy_parts(before))
        config = toy_config(tmp_path, budget=BudgetConfig(steps=steps), resume="force")
        loop = build.prepare(config, build_fabric(config.fabric), tmp_path)
        kept = yaml.safe_load((tmp_path / "config.yaml").read_text())
        if broken:
            with pytest.raises(UserError, match="row 7"):
                loop.run()
        else:
            loop.run()
        return kept["budget"]["steps"], yaml.safe_load((tmp_path / "config.yaml").read_text())["budget"]["steps"]

    assert start(3, False) == (3, 3)
    assert start(5, True) == (3, 3)
    assert start(5, False) == (3, 5)
    assert start(4, False) == (5, 4)  # no step is left
    assert plain_config(toy_config(tmp_path))["budget"]["steps"] == 8
