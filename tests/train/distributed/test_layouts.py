"""Laws of the layouts of processes (gloo, CPU), on a small model of our own: each learns what one process learns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from omni.errors import UserError
from tests.processes import several
from tests.train.distributed.combinations import try_all
from tests.train.toys import final_tensors
from train.config.sections import FabricConfig
from train.distributed.sharding import ParallelDims
from train.trainer.logs import METRICS, read_table

TWO = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "replicas": {"strategy": "fsdp", "replicas": 2},
    "tensor": {"strategy": "fsdp", "tensor_parallel": 2},
}
FOUR = {**TWO, "replicas-tensor": {"strategy": "fsdp", "replicas": 2, "tensor_parallel": 2}}
ADAPTED: dict[str, dict[str, Any]] = {"ddp": TWO["ddp"], "replicas": TWO["replicas"]}
Move = tuple[str, tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]]
"""A run that goes on elsewhere: its name, and processes and layout before and after."""

MOVES: list[Move] = [("2-tensor-to-2-replicas", (2, TWO["tensor"]), (2, TWO["replicas"]))]
MOVES_OF_FOUR: list[Move] = [
    ("4-tensor-to-4-tensor", (4, FOUR["replicas-tensor"]), (4, FOUR["replicas-tensor"])),
    ("4-tensor-to-2-fsdp", (4, FOUR["tensor"]), (2, TWO["fsdp"])),
    ("4-replicas-to-2-tensor", (4, FOUR["replicas"]), (2, TWO["tensor"])),
    ("4-ddp-to-2-ddp", (4, FOUR["ddp"]), (2, TWO["ddp"])),
]

RUN = {
    "balance": None,
    "micro": 4,
    "steps": 4,
    "ctc": True,
    "ema": 0.9,
    "decoder": {"qk_norm": True, "qkv_bias": True, "post_layers": 1},
}


def run_of(folder: Path, count: int, fabric: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"folder": str(folder), "fabric": {"devices": count, **fabric}, **RUN, **more}


MIXED = {"precision": "bf16-mixed"}
TAUGHT: dict[str, dict[str, Any]] = {"ddp": TWO["ddp"], "fsdp": {**TWO["fsdp"], "checkpointing": True}}
DISTILLED = {"distill": 1.0, "align_first": 1.0, "ctc": False}


def make(top: Path, count: int, layouts: dict[str, Any], moves: Sequence[Move], adapted: bool = True) -> None:
    """Make runs of four steps of four micro-batches in `count` processes, those of adapters and teachers if wanted, and their
    parts of runs that move; all of them share one process group."""
    first = {"mixed": {"align_first": 0.25}}  # a step that leaves the decoder alone
    listed = [run_of(top / f"{count}-{name}", count, fabric, **first.get(name, {})) for name, fabric in layouts.items()]
    alone: dict[str, dict[str, Any]] = {"one": {}}
    for name, fabric in (ADAPTED if count > 1 else alone).items() if adapted else ():
        listed.append(run_of(top / f"{count}-lora-{name}", count, fabric, lora=True))
    for name, fabric in (TAUGHT if count > 1 else alone).items() if adapted else ():
        listed.append(run_of(top / f"{count}-taught-{name}", count, fabric, **DISTILLED))
        listed.append(run_of(top / f"{count}-taught-lora-{name}", count, fabric, **DISTILLED, lora=True))
    for name, before, after in moves:  # the first two steps there, the others here
        listed += [run_of(top / name, count, fabric, steps=2) for n, fabric in [before] if n == count]
        listed += [run_of(top / name, count, fabric, resume="extend") for n, fabric in [after] if n == count]
    for ended in several(count, "tests.train.balance.toys", json.dumps({"runs": listed})):
        assert ended.code == 0, ended.said


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of runs of one and of two processes."""
    top = tmp_path_factory.mktemp("layouts")
    make(top, 1, {"one": {}, "mixed": MIXED}, ())
    make(top, 2, {**TWO, "mixed": {**TWO["fsdp"], **MIXED}}, MOVES)
    return top


@pytest.fixture(scope="module")
def runs_of_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of runs of one and of four processes, and of those that move to two."""
    top = tmp_path_factory.mktemp("layouts")
    for count, layouts in ((1, {"one": {}}), (4, FOUR), (2, {})):
        make(top, count, layouts, MOVES_OF_FOUR, adapted=False)
    return top


@pytest.mark.long
@pytest.mark.parametrize(
    ("alone", "name"),
    [
        *(("1-one", name) for name in (*(f"2-{layout}" for layout in TWO), MOVES[0][0])),
        *(("1-lora-one", f"2-lora-{layout}") for layout in ADAPTED),
        *((f"1-{kind}-one", f"2-{kind}-{layout}") for kind in ("taught", "taught-lora") for layout in TAUGHT),
    ],
)
def test_each_layout_learns_what_one_process_learns(runs: Path, alone: str, name: str) -> None:
    """Adapters, and of a teacher, too."""
    check_learnt(runs, alone, name)
    assert "taught" not in alone or float(read_table(runs / alone / METRICS)[-1]["loss/distill"]) > 0


@pytest.mark.long
@pytest.mark.parametrize("name", [*(f"4-{name}" for name in FOUR), *(move[0] for move in MOVES_OF_FOUR)])
def test_each_layout_of_four_learns_what_one_process_learns(runs_of_four: Path, name: str) -> None:
    check_learnt(runs_of_four, "1-one", name)


@pytest.mark.long
def test_what_goes_together_is_what_the_document_says() -> None:
    assert try_all() in Path("docs/scaling.md").read_text()


def check_learnt(runs: Path, alone: str, name: str) -> None:
    """The losses of every row, and the final state, are those of the run of one process."""
    one, found = (read_table(runs / folder / METRICS) for folder in (alone, name))
    assert len(one) == len(found) == 4
    for ours, theirs in zip(found, one, strict=True):
        for column in (c for c in theirs if c.startswith("loss") or c == "gradient_norm"):
            assert ours[column] == pytest.approx(theirs[column], rel=2e-4), column
    expected, tensors = final_tensors(runs / alone), final_tensors(runs / name)
    assert tensors.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(tensors[key], tensor, rtol=1e-3, atol=2e-4, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.long
def test_a_run_that_goes_on_in_its_layout_ends_bitwise_as_an_undisturbed_one(runs_of_four: Path) -> None:
    whole, moved = (final_tensors(runs_of_four / name) for name in ("4-replicas-tensor", "4-tensor-to-4-tensor"))
    assert whole.keys() == moved.keys()
    for key, tensor in whole.items():
        assert tensor.equal(moved[key]), key


@pytest.mark.long
def test_parameters_gathered_in_half_precision_learn_nearly_the_same(runs: Path) -> None:
    one, found = (read_table(runs / folder / METRICS) for folder in ("1-mixed", "2-mixed"))
    for ours, theirs in zip(found, one, strict=True):
        for column in ("loss", "loss/text", "loss/audio"):
            assert ours[column] == pytest.approx(theirs[column], rel=0.02, nan_ok=True), column


def test_dimensions_follow_from_the_number_of_processes() -> None:
    fsdp = {"strategy": "fsdp", "accelerator": "cpu"}
    assert ParallelDims.of(FabricConfig(accelerator="cpu"), 4) == ParallelDims(replicas=4)
    assert ParallelDims.of(FabricConfig(**fsdp), 8) == ParallelDims(shards=8)
    found = ParallelDims.of(FabricConfig(**fsdp, replicas=2, tensor_parallel=2), 16)
    assert found == ParallelDims(2, 4, 2) and found.data == 8
    with pytest.raises(UserError, match=r"2 x 3, which does not divide the 8 processes"):
        ParallelDims.of(FabricConfig(**fsdp, replicas=2, tensor_parallel=3), 8)
