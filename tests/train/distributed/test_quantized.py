"""Laws of sharded runs on a quantised base (gloo, CPU): adapters are sharded, packed weights whole in every process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.processes import several
from tests.train.distributed.test_fabric import LINES, losses, make_together
from tests.train.toys import adapted_parts, assert_adapters_learn, final_tensors, toy_config, toy_fit, toy_lora

pytestmark = pytest.mark.long
KINDS = ("nf4", "int8")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of runs of eight steps: alone, in two processes, and in two that are stopped before the third and go on."""
    top, together = tmp_path_factory.mktemp("quantised"), []
    fsdp = {"devices": 2, "strategy": "fsdp"}
    for kind in KINDS:
        toy_fit(toy_config(top / f"{kind}-one", lora=toy_lora(kind), **LINES), adapted_parts(toy_lora(kind)))
        for name, kills in (("fsdp", [None]), ("stopped", [["SIGTERM", 3], None])):
            together += [{"folder": str(top / f"{kind}-{name}"), "fabric": fsdp, "lora": kind, "kill": kill} for kill in kills]
    make_together(together)
    return top


@pytest.mark.parametrize("kind", KINDS)
def test_two_sharded_processes_learn_what_one_learns(runs: Path, kind: str) -> None:
    torch.testing.assert_close(losses(runs / f"{kind}-fsdp"), losses(runs / f"{kind}-one"), rtol=1e-4, atol=1e-4)
    ours, theirs = final_tensors(runs / f"{kind}-fsdp"), final_tensors(runs / f"{kind}-one")
    assert ours.keys() == theirs.keys()
    assert_adapters_learn(runs / f"{kind}-fsdp", toy_lora(kind))
    assert not any(t.dtype in (torch.uint8, torch.int8) for t in ours.values())  # what stands still is not stored
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_they_go_on_bitwise(runs: Path, kind: str) -> None:
    stopped, whole = final_tensors(runs / f"{kind}-stopped"), final_tensors(runs / f"{kind}-fsdp")
    assert stopped.keys() == whole.keys()
    assert all(tensor.equal(stopped[name]) for name, tensor in whole.items())
    assert losses(runs / f"{kind}-stopped").shape == (8, 3)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_base_that_the_first_process_alone_reads_and_quantises_learns_the_same(tmp_path: Path, strategy: str) -> None:
    """The command itself; the other process begins without values."""
    given = ["--lora.quantize", "nf4", "--lora.trainable", "[projector.*]", "--optimizer.name", "adamw", "--budget.steps", "3"]
    given += ["--budget.minutes", "null", "--data.micro_batches", "2", "--log.every", "1", "--validation.questions", "0"]
    given += ["--model.decoder.layers", "2", "--model.encoder.layers", "1", "--fabric.precision", "32-true"]
    for count, more in ((1, ["--fabric.devices", "1"]), (2, ["--fabric.devices", "2", "--fabric.strategy", strategy])):
        for ended in several(
            count, "train", "fit", "configs/nano-scratch.yaml", "--run_folder", str(tmp_path / str(count)), *given, *more
        ):
            assert ended.code == 0, ended.said
    torch.testing.assert_close(losses(tmp_path / "2"), losses(tmp_path / "1"), rtol=1e-4, atol=1e-4)
