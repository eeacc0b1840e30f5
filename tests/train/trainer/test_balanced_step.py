"""Balance in the real loop: a run equals the same training written slowly, for every method at every level."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from omni.model.speech_model import SpeechModel
from omni.tasks import TASKS
from omni.utils.arguments import match_names
from tests.close import assert_near
from tests.train.balance.backward import backward
from tests.train.balance.toys import balanced_config, balanced_fit, balanced_parts, slow_losses, slow_run
from tests.train.toys import OF_THE_MACHINE
from train.balance.balancer import Bilevel, build
from train.balance.config import BalanceConfig, balanced_tasks
from train.balance.methods import METHODS
from train.config.run import FitConfig
from train.config.sections import FabricConfig, LogConfig
from train.data.batching.batch import Batch
from train.objective.objective import cells, targets
from train.trainer.logs import BALANCE, METRICS, read_table

SETTINGS: dict[str, dict[str, Any]] = {
    "dwa": {"window": 1}, "stch": {"warmup": 1}, "uncertainty": {"lr": 0.1}, "famo": {"lr": 0.5, "look": "same"},
    "gradnorm": {"lr": 0.1}, "autolambda": {"lr": 0.1}, "moml": {"lr": 0.1}, "forum": {"lr": 0.1, "inner_lr": 0.01},
    "excessmtl": {"step_size": 0.5},
}  # fmt: skip
EVERY = [(method, level) for method, kind in METHODS.items() for level in kind.levels]


def section_of(method: str, level: str, **options: Any) -> BalanceConfig:
    return BalanceConfig(method, level, SETTINGS.get(method, {}), **options)


def slow_step(config: FitConfig) -> Callable[[SpeechModel, Sequence[Batch], Tensor, float], Any]:
    """What the balancer alone does with losses of one graph."""
    assert config.balance is not None
    section = config.balance
    names = balanced_tasks(section, config.data)
    balancer = build(section, names or ["a0", "a1", "a2", "a3", "text"])
    outer = list(balanced_parts(config).outer)
    taken = 0

    def summed(model: SpeechModel, batches: Sequence[Batch], counts: Tensor, keep: list[Tensor] | None = None) -> list[Tensor]:
        each = [slow_losses(model, b, names, counts, keep) for b in batches]
        return [torch.stack(column).sum() for column in zip(*each, strict=True)]

    def others(model: SpeechModel, batches: Sequence[Batch], counts: Tensor) -> Tensor:
        """What belongs to no balanced task."""
        return torch.stack(summed_all(model, batches, counts)).sum() - torch.stack(summed(model, batches, counts)).sum()

    def summed_all(model: SpeechModel, batches: Sequence[Batch], counts: Tensor) -> list[Tensor]:
        return [torch.stack(slow_losses(model, b, (), counts)).sum() for b in batches]

    def step(model: SpeechModel, batches: Sequence[Batch], counts: Tensor, lr: float) -> Any:
        nonlocal taken
        taken += 1
        learning = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        apart = match_names(section.separate, [n for n, _ in learning], "", strict=False)
        shared, own = ([p for n, p in learning if (n in apart) == which] for which in (False, True))
        if isinstance(balancer, Bilevel):
            judge = outer[(taken - 1) % len(outer)]
            wanted = targets(judge)
            balancer.update_weights(
                lambda: summed(model, batches, counts), lambda: summed(model, [judge], wanted), [*shared, *own], lr
            )
            if section.method != "forum":
                pairs = zip(balancer.ahead().tolist(), summed(model, batches, counts), strict=True)
                torch.stack([weight * loss for weight, loss in pairs]).sum().backward()
            return None
        if section.at == "loss":
            backward(balancer, summed(model, batches, counts), shared, own)
        elif section.at == "parameters":
            groups = [batches[i :: len(batches)] for i in range(len(batches))] if section.spec.batches == 3 else [batches]
            each = [summed(model, group, torch.stack([targets(b) for b in group]).sum(0)) for group in groups]
            rows = [list(TASKS).index(name) for name in names]
            everywhere = [sum(cells(b) for b in group)[rows].sum(1) for group in groups]  # type: ignore[index]
            here = torch.stack(everywhere).amin(0) if names else None
            backward(balancer, each[0], shared, own, others=each[1:], counts=here)
        else:
            features: list[Tensor] = []
            losses = summed(model, batches, counts, features)
            below = [p for n, p in learning if n.startswith(("encoder.", "projector."))]
            above = [p for n, p in learning if not n.startswith(("encoder.", "projector."))]
            backward(balancer, losses, below, above, features=features)
        if section.method == "famo":
            return lambda: balancer.after(summed(model, batches, counts))
        rest = others(model, batches, counts)
        if rest.requires_grad:
            for (_, p), g in zip(learning, torch.autograd.grad(rest, [p for _, p in learning], allow_unused=True), strict=True):
                if g is not None:
                    p.grad = g if p.grad is None else p.grad + g
        return None

    return step


def compare(config: FitConfig, tolerance: float = 2e-5) -> None:
    ours, wanted = balanced_fit(config), slow_run(config, slow_step(config))
    start = {f"model.model.{n}": t for n, t in balanced_parts(config).objective.get_submodule("model").state_dict().items()}
    moved = torch.cat([(ours[n] - t).flatten() for n, t in start.items() if t.is_floating_point()])
    should = torch.cat([(wanted[n] - t).flatten() for n, t in start.items() if t.is_floating_point()])
    assert float(should.norm()) > 1e-3
    assert_near(moved, should, tolerance)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("method", "level"), EVERY)
def test_every_method_is_the_slow_one(tmp_path: Path, method: str, level: str) -> None:
    """One micro-batch a step (three where the method takes them apart); changes of the weights in three steps of AdamW.

    What a combination of almost opposed gradients gives is sensitive to the last digit, and AdamW's first steps are too.
    """
    count = METHODS[method].batches if METHODS[method].batches == 3 else 1
    names = ("A1T1", "A1A2") if level == "features" else ()
    data = replace(balanced_config(tmp_path, None).data, micro_batches=count)
    config = balanced_config(tmp_path, section_of(method, level, names=names), data=data)
    compare(config, 2e-3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("method", "level", "options"),
    [
        ("equal", "loss", {}),
        ("uncertainty", "loss", {}),
        ("geometric", "loss", {}),
        ("famo", "loss", {}),
        ("uncertainty", "loss", {"tasks": "streams"}),
        ("upgrad", "parameters", {}),
        ("upgrad", "parameters", {"tasks": "streams"}),
        ("mgda", "parameters", {"own": "weighted"}),
        ("mgda", "parameters", {"names": ("A1T1", "T1A2")}),
    ],
)
@pytest.mark.parametrize("checkpointing", [True, pytest.param(False, marks=pytest.mark.long)])
def test_accumulated_it_is_the_slow_one(
    tmp_path: Path, method: str, level: str, options: dict[str, Any], checkpointing: bool
) -> None:
    """Two micro-batches are one batch, whichever way the losses' weights become known."""
    config = balanced_config(
        tmp_path, section_of(method, level, **options), fabric=FabricConfig("cpu", 1, checkpointing=checkpointing)
    )
    compare(config, 2e-3)


def test_a_method_gets_the_losses_that_its_settings_need(tmp_path: Path) -> None:
    """At level features too, where they are summed over micro-batches and processes for those alone that need them."""
    section = BalanceConfig("mgda", "features", {"normalize": "loss"}, names=("A1T1", "A1A2"))
    data = replace(balanced_config(tmp_path, None).data, micro_batches=1)
    compare(balanced_config(tmp_path, section, data=data), 2e-3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("ctc", [False, True])
def test_equal_weights_are_the_plain_run(tmp_path: Path, micro: int, ctc: bool) -> None:
    """Bit for bit, and so are the figures of the log."""
    config = balanced_config(tmp_path / "equal", BalanceConfig(), ctc)
    config = replace(config, data=replace(config.data, micro_batches=micro))
    plain = replace(config, balance=None, run_folder=str(tmp_path / "plain"))
    found = balanced_fit(config)
    for name, value in balanced_fit(plain).items():
        assert value.equal(found[name]), name
    ours, theirs = (read_table(tmp_path / kind / METRICS) for kind in ("equal", "plain"))
    for a, b in zip(ours, theirs, strict=True):
        for key in a.keys() - OF_THE_MACHINE:
            assert a[key] == pytest.approx(b[key], rel=1e-5), key


def test_the_table_of_a_run(tmp_path: Path) -> None:
    balanced_fit(balanced_config(tmp_path, section_of("mgda", "parameters")))
    rows = read_table(tmp_path / BALANCE)
    assert [row["step"] for row in rows] == [1, 2, 3]
    names = [f"{kind}/{task}" for kind in ("weight", "norm") for task in ("A1T1", "A1A2", "T1A2")]
    assert all(row[name] >= 0 for row in rows for name in names)
    assert all(sum(row[f"weight/{t}"] for t in ("A1T1", "A1A2", "T1A2")) == pytest.approx(1) for row in rows)
    assert all(-1 <= row["cosine/A1T1/A1A2"] <= 1 for row in rows)


def test_a_task_that_touches_nothing_shared_is_told_once(tmp_path: Path) -> None:
    """Where the adapter alone learns, a question in writing has no gradient, and stops nobody."""
    with pytest.warns(UserWarning, match=r"T1A2\b.*shared parameters.*mgda") as said:
        balanced_fit(balanced_config(tmp_path, section_of("mgda", "parameters"), trainable=("projector.*",)))
    assert sum("did not touch" in str(one.message) for one in said) == 1
    for row in read_table(tmp_path / BALANCE):
        assert row["zero/T1A2"] == 1 and row["norm/T1A2"] == 0 and row["weight/T1A2"] == 0
        assert row["weight/A1T1"] + row["weight/A1A2"] == pytest.approx(1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("section", [{"method": "stch"}, {"method": "mgda", "level": "features"}, {"method": "mgda"}])
def test_a_guarded_run_is_the_same_and_nothing_is_said(
    tmp_path: Path, section: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    section = {"level": "parameters", **section} if section["method"] == "mgda" else section
    lines = LogConfig(every=1, progress="lines")
    runs = [balanced_config(tmp_path / str(on), BalanceConfig(**section), guard=on, log=lines) for on in (False, True)]
    plain, watched = (balanced_fit(config) for config in runs)
    assert all(t.equal(watched[name]) for name, t in plain.items())
    assert "guard, step" not in "".join(capsys.readouterr())


assert {m for m, kind in METHODS.items() if kind.bilevel} == {m for m, kind in METHODS.items() if kind.batches == 2}
