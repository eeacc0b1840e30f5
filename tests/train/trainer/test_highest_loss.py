"""The examples with the highest loss: which are kept, for how long, over processes, and that no loss changes by it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from omni.model.speech_model import SpeechModel
from tests.golden.toys import RECIPE, inside, place
from tests.train.balance.toys import tiny, tiny_pipeline
from tests.train.toys import ALONE, final_tensors
from train.cli import main
from train.data.batching.loader import StepLoader
from train.objective.objective import Losses, Objective, PlainLosses, targets
from train.trainer import logs
from train.trainer.logs import HIGHEST, HighestLosses


def losses_of(*each: tuple[float, int]) -> Losses:
    """Losses of examples, by their mean and number of targets."""
    nothing = torch.zeros(())
    by_example = torch.tensor([[mean * count, count] for mean, count in each]).T
    return Losses(nothing, nothing, nothing, nothing, nothing, None, by_example)


def named(*names: str) -> Any:
    return SimpleNamespace(names=SimpleNamespace(each=[(name, "A1T1") if name else ("", "") for name in names]))


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / HIGHEST).read_text().splitlines()]


def test_losses_by_example_are_those_of_the_plain_loss() -> None:
    """Also of examples without targets and unused ends of rows; sums and gradients are the same to the bit."""
    config = tiny()
    batches = [batch for step, _ in zip(StepLoader(tiny_pipeline(config), 2), range(3), strict=False) for batch in step]
    torch.manual_seed(0)
    objective = Objective(SpeechModel(config))
    seen = set()
    for batch in batches:
        found: list[tuple[Losses, list[Tensor]]] = []
        for task_losses in (PlainLosses(), PlainLosses(by_example=True)):
            objective.zero_grad()
            losses = objective(batch, targets(batch), 1.0, task_losses)
            losses.total.backward()
            found.append((losses, [p.grad.clone() for p in objective.parameters() if p.grad is not None]))
        (plain, gradients), (ours, theirs) = found
        assert plain.by_example is None and ours.by_example is not None
        assert plain.total.equal(ours.total) and plain.sums.equal(ours.sums)
        assert all(a.equal(b) for a, b in zip(gradients, theirs, strict=True))
        wanted = slow(objective, batch)
        assert len(batch.names.each) == ours.by_example.shape[1] == len(wanted)
        torch.testing.assert_close(ours.by_example.T, torch.tensor(wanted), rtol=1e-5, atol=1e-5)
        assert [name != ("", "") for name in batch.names.each] == [count > 0 for _, count in wanted]
        assert batch.to("cpu").names.each == batch.names.each
        seen.update(task for _, task in batch.names.each)
    assert {"A1T1", "A1A2", "T1A2", ""} == seen


def slow(objective: Objective, batch: Any) -> list[tuple[float, float]]:
    """Sum and count of each segment, from whole logits."""
    model = objective.model
    with torch.no_grad():
        features = model.encode(batch.inputs, batch.input_lengths, batch.frames)
        logits = model.decoder.logits(model(batch.tokens, features, batch.feature_index, segments=batch.segments))
    found = []
    for row in range(len(batch.tokens)):
        for number in batch.segments[row].unique_consecutive().tolist():
            here = batch.segments[row] == number
            goals = batch.targets[row][:, here]
            each = [F.cross_entropy(x[row, here], goal, reduction="sum") for x, goal in zip(logits, goals, strict=True)]
            count = float((goals != -100).sum())
            found.append((float(torch.stack(each).nan_to_num().sum()) if count else 0.0, count))
    return found


def test_the_highest_are_kept_in_order(tmp_path: Path) -> None:
    """A row that was drawn again is there as it was last; examples without targets, and unused ends, are none."""
    kept = HighestLosses(3, tmp_path, ALONE)
    kept.on_log(0, {})
    assert not (tmp_path / HIGHEST).exists()
    kept.step = 1
    kept.add(losses_of((1.0, 4), (5.0, 2), (0.0, 0)), named("row 1", "row 2", ""))
    kept.add(losses_of((3.0, 2), (9.0, 0)), named("row 3", "row 4"))
    kept.step = 2
    kept.add(losses_of((2.0, 8)), named("row 5"))
    kept.add(Losses(*[torch.zeros(())] * 5), named("row 6"))  # of a phase without losses by example
    kept.on_log(0, {})
    assert read(tmp_path) == [
        {"loss": 5.0, "row": "row 2", "task": "A1T1", "targets": 2, "step": 1},
        {"loss": 3.0, "row": "row 3", "task": "A1T1", "targets": 2, "step": 1},
        {"loss": 2.0, "row": "row 5", "task": "A1T1", "targets": 8, "step": 2},
    ]
    kept.step = 3
    kept.add(losses_of((2.5, 2), (math.nan, 3)), named("row 2", "row 7"))
    kept.on_log(0, {})
    assert [(one["loss"], one["row"], one["step"]) for one in read(tmp_path)] == [
        (None, "row 7", 3), (3.0, "row 3", 1), (2.5, "row 2", 3),
    ]  # fmt: skip
    few = HighestLosses(9, tmp_path, ALONE)
    few.add(losses_of((1.0, 4), (0.0, 0), (9.0, 0)), named("row 1", "", "row 2"))
    few.on_log(0, {})
    assert [one["row"] for one in read(tmp_path)] == ["row 1"]


def test_examples_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a number of steps, and so are those that wait for a row of the log that is long in coming."""
    monkeypatch.setattr(logs, "WINDOW", 5)
    kept = HighestLosses(2, tmp_path, ALONE)
    for step in range(1, 9):
        kept.step = step
        kept.add(losses_of((10.0 - step, 2)), named(f"row {step}"))
        assert len(kept._waiting) <= 5
    kept.on_log(0, {})
    assert [one["row"] for one in read(tmp_path)] == ["row 4", "row 5"]
    kept.step = 9
    kept.add(losses_of((0.5, 2)), named("row 9"))
    kept.on_log(0, {})
    assert [one["row"] for one in read(tmp_path)] == ["row 5", "row 9"]  # only the highest of each row of the log are known


def test_the_file_has_the_highest_of_all_processes(tmp_path: Path) -> None:
    own: list[Sequence[Any]] = []

    def gather(mine: Sequence[Any]) -> list[Sequence[Any]]:
        own.append(mine)
        return own

    for rank, loss in ((1, 7.0), (0, 3.0)):
        group: Any = SimpleNamespace(gather=gather, first=rank == 0)
        kept = HighestLosses(1, tmp_path / str(rank), group)
        kept.file.parent.mkdir()
        kept.step = 1
        kept.add(losses_of((loss, 2)), named(f"process {rank}"))
        kept.on_log(0, {})
    assert [one["row"] for one in read(tmp_path / "0")] == ["process 1"] and not (tmp_path / "1" / HIGHEST).exists()


@pytest.mark.long
@pytest.mark.untrained("*")
def test_a_run_names_its_rows_and_trains_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with inside(tmp_path):
        place(tmp_path, "model", "rows")
        for count in (2, 0):
            monkeypatch.setattr("train.trainer.build.COUNT", count)
            log = {**RECIPE["log"], "every": 2}
            recipe = {**RECIPE, "validation": {"questions": 0}, "log": log, "run_folder": f"run{count}"}
            Path(f"{count}.yaml").write_text(yaml.safe_dump(recipe))
            assert main(["fit", f"{count}.yaml"]) == 0
        found = read(tmp_path / "run2")
        assert len(found) == 2 and not Path("run0", HIGHEST).exists()
        for one in found:
            assert one["row"].startswith("rows/rows-00000.parquet") and one["task"] in RECIPE["data"]["sources"][0]["tasks"]
            assert one["loss"] > 0 and one["targets"] > 0 and 1 <= one["step"] <= 4
        ours, theirs = (final_tensors(f"run{count}") for count in (2, 0))
        assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())
