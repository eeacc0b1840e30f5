"""Laws of the optimizers: Muon equals torch's, several rules are one optimizer, groups and patterns."""

from __future__ import annotations

import copy
from typing import Literal

import pytest
import torch
from torch import nn

from omni.errors import UserError
from omni.utils.arguments import match_names
from tests.train.toys import ToyModel
from train.config.sections import GroupConfig, OptimizerConfig
from train.optim.optimizer import (
    Average,
    BatchedMuon,
    Optimizers,
    build_optimizer,
    orthogonalize,
    parameter_groups,
    set_learning_rate,
    set_trainable,
)


def slow_orthogonalize(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The same polynomial, applied to the singular values in float64."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


@pytest.mark.parametrize("shape", [(8, 8), (6, 20)])
@pytest.mark.parametrize("steps", [3, 5])
def test_orthogonalize_equals_the_polynomial_of_the_singular_values(shape: tuple[int, int], steps: int) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    got = orthogonalize(matrices, steps=steps)
    for one, whole in zip(got, matrices, strict=True):
        torch.testing.assert_close(one.double(), slow_orthogonalize(whole, steps), rtol=1e-4, atol=1e-4)
    assert orthogonalize(torch.zeros(1, 4, 4)).abs().max() == 0


@pytest.mark.parametrize(
    ("precision", "half"), [("32-true", False), ("16-mixed", False), ("bf16-mixed", True), ("bf16-true", True)]
)
def test_muon_iterates_in_the_runs_precision(precision: str, half: bool) -> None:
    """In bf16 it is torch's own to the last bit of that; in fp32 it is not."""
    dice = torch.Generator().manual_seed(2)
    ours, theirs = (nn.Parameter(torch.zeros(16, 16)) for _ in range(2))
    optimizer = build_optimizer([("w", ours)], OptimizerConfig("muon", muon_lr=1.0, weight_decay=0.0), precision)
    reference = torch.optim.Muon([theirs], lr=1.0, weight_decay=0.0, momentum=0.95)
    ours.grad = torch.randn(16, 16, generator=dice)
    theirs.grad = ours.grad.clone()
    optimizer.step()
    reference.step()
    far = float((ours - theirs).detach().abs().max())
    assert far < 0.03 and (far == 0) == half


@pytest.mark.parametrize("shapes", [[(16, 16), (16, 16)], [(24, 8), (8, 24), (8, 8)]])
def test_batched_muon_equals_torch_muon(shapes: list[tuple[int, int]]) -> None:
    """Up to the bf16 of torch's iteration."""
    dice = torch.Generator().manual_seed(1)
    ours = [nn.Parameter(torch.randn(s, generator=dice)) for s in shapes]
    theirs = copy.deepcopy(ours)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}
    mine, reference = BatchedMuon(ours, **options), torch.optim.Muon(theirs, **options)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=dice)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        moved = max(1.0, a.shape[0] / a.shape[1]) ** 0.5 * 0.1
        torch.testing.assert_close(a, b, rtol=0, atol=0.03 * 3 * moved)
        assert mine.state[a]["momentum_buffer"].equal(reference.state[b]["momentum_buffer"])


def gradients(model: nn.Module, seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=dice)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_several_rules_are_one_optimizer_also_after_loading(name: str) -> None:
    """Against the rules run apart, over a save and a load in the middle."""
    config = OptimizerConfig(name=name, lr=1e-2, muon_lr=3e-2, weight_decay=0.1)
    model, apart = ToyModel(), ToyModel()
    apart.load_state_dict(model.state_dict())
    ours = build_optimizer(list(model.named_parameters()), config)
    rules = {g["rule"] for g in ours.param_groups}
    assert rules == ({"adamw"} if name == "adamw" else {"adamw", "muon"})
    others = []
    for group in parameter_groups(list(apart.named_parameters()), config):
        if group["rule"] == "muon":
            others.append(BatchedMuon(group["params"], lr=3e-2, weight_decay=group["weight_decay"]))
        else:
            decay = group["weight_decay"]
            others.append(torch.optim.AdamW(group["params"], lr=1e-2, betas=config.betas, weight_decay=decay, fused=True))
    for step in range(4):
        gradients(model, step)
        gradients(apart, step)
        ours.step()
        for other in others:
            other.step()
        if step == 1:
            saved = copy.deepcopy(ours.state_dict())
            ours = build_optimizer(list(model.named_parameters()), config)
            ours.load_state_dict(saved)
    for (key, a), b in zip(model.state_dict().items(), apart.state_dict().values(), strict=True):
        assert a.equal(b), key


def test_groups_take_the_first_pattern_and_leave_norms_undecayed() -> None:
    config = OptimizerConfig(
        lr=1e-3, weight_decay=0.1, groups=(GroupConfig("text_*", lr=5e-4), GroupConfig("*head*", lr=9e-4, weight_decay=0.3))
    )
    model = ToyModel()
    settings = {}
    names = {p: name for name, p in model.named_parameters()}
    for group in parameter_groups(list(model.named_parameters()), config):
        for p in group["params"]:
            settings[names[p]] = (group["lr"], group["weight_decay"])
    assert settings["text_head.weight"] == (5e-4, 0.1)  # the first pattern decides
    assert settings["audio_head.weight"] == (9e-4, 0.3)
    assert settings["blocks.0.1.weight"] == (1e-3, 0.1)
    assert settings["blocks.0.1.bias"] == settings["blocks.1.0.weight"] == (1e-3, 0.0)
    assert len(settings) == len(names)


def test_muon_takes_hidden_matrices_only() -> None:
    model = ToyModel()
    names = {p: name for name, p in model.named_parameters()}
    groups = parameter_groups(list(model.named_parameters()), OptimizerConfig(name="muon"))
    muon = {names[p] for g in groups if g["rule"] == "muon" for p in g["params"]}
    assert muon == {"blocks.0.1.weight", "blocks.1.1.weight"}


def test_learning_rates_keep_their_ratio() -> None:
    model = ToyModel()
    config = OptimizerConfig(lr=1e-3, groups=(GroupConfig("*head*", lr=4e-3),))
    optimizer = build_optimizer(list(model.named_parameters()), config)
    assert isinstance(optimizer, Optimizers)
    for factor in (0.5, 0.25):
        set_learning_rate(optimizer, factor)
        assert {g["lr"] for g in optimizer.param_groups} == {1e-3 * factor, 4e-3 * factor}
        assert all(inner.param_groups[0]["lr"] in (1e-3 * factor, 4e-3 * factor) for inner in optimizer.inner.values())


def test_trainable_patterns() -> None:
    model = ToyModel()
    set_trainable(model, ["audio_*", "re:blocks\\.1\\..*"])
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learning == {
        "audio_embedding.weight", "audio_head.weight", "blocks.1.0.weight", "blocks.1.0.bias", "blocks.1.1.weight",
        "blocks.1.1.bias",
    }  # fmt: skip
    with pytest.raises(UserError, match=r"pattern 'audio_tabel\.\*' matches no parameter; the closest names are audio_"):
        set_trainable(model, ["audio_tabel.*"])
    with pytest.raises(UserError, match="trainable is empty"):
        set_trainable(model, [])
    with pytest.raises(UserError, match="not a regular expression"):
        match_names(["re:("], ["a"], "trainable")


@pytest.mark.parametrize("decay", [0.5, 0.99])
def test_average_follows_its_recursion(decay: float) -> None:
    p = nn.Parameter(torch.zeros(3))
    average = Average([("p", p)], decay)
    expected = torch.zeros(3)
    for step in range(1, 30):
        p.data.fill_(float(step))
        average.update(step)
        d = min(decay, (1 + step) / (10 + step))
        expected = d * expected + (1 - d) * step
    torch.testing.assert_close(average.values["p"], expected)


def test_a_group_gives_each_rule_its_own_learning_rate() -> None:
    """AdamW's and Muon's differ by an order of magnitude: one number for both would be wrong for one."""
    params = list(ToyModel().named_parameters())
    config = OptimizerConfig(name="muon", groups=(GroupConfig("blocks.0.*", lr=5e-4), GroupConfig("blocks.1.*", muon_lr=0.3)))
    rates = {id(p): (g["rule"], g["lr"]) for g in parameter_groups(params, config) for p in g["params"]}
    named = {name: rates[id(p)] for name, p in params}
    assert named["blocks.0.1.weight"] == ("muon", config.muon_lr) and named["blocks.0.1.bias"] == ("adamw", 5e-4)
    assert named["blocks.1.1.weight"] == ("muon", 0.3) and named["blocks.1.1.bias"] == ("adamw", config.lr)
    with pytest.raises(UserError, match=r"'blocks.0.1.weight' gives lr 0.1, but all .* by Muon: give muon_lr instead"):
        parameter_groups(params, OptimizerConfig(name="muon", groups=(GroupConfig("blocks.0.1.weight", lr=0.1),)))
    with pytest.raises(UserError, match=r"gives muon_lr 0.1, but all .* by AdamW: give lr instead"):
        parameter_groups(params, OptimizerConfig(groups=(GroupConfig("blocks.*", muon_lr=0.1),)))
    with pytest.raises(UserError, match="GroupConfig: lr is -1"):
        GroupConfig("a", lr=-1)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_that_is_skipped_leaves_all_as_it_is(name: Literal["adamw", "muon"]) -> None:
    """And one that is not, with the flag there, is bitwise the plain one."""
    torch.manual_seed(0)
    models = [ToyModel() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    config = OptimizerConfig(name=name, weight_decay=0.3)
    optimizers = [build_optimizer(list(m.named_parameters()), config) for m in models]
    for skip in (1.0, 0.0, 0.0, 1.0, 0.0):
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad / 0 if skip else p.grad.clone()
        optimizers[1].skip = torch.tensor(skip)
        optimizers[1].step()
        if not skip:
            optimizers[0].step()
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert p.equal(q)


def test_adamw_in_eight_bits_follows_adamw_and_keeps_a_byte_a_value() -> None:
    """On a matrix that is large enough to be held so (bitsandbytes keeps small ones whole)."""
    dice = torch.Generator().manual_seed(1)
    start = torch.randn(64, 128, generator=dice)
    ends = []
    for name in ("adamw", "paged_adamw_8bit"):
        p = nn.Parameter(start.clone())
        optimizer = build_optimizer([("w", p)], OptimizerConfig(name, lr=1e-2))  # type: ignore[arg-type]
        for step in range(10):
            p.grad = torch.cos(start * (1 + step % 3)) * 0.1 + 0.2
            optimizer.step()
        ends.append(p.detach())
    state = optimizer.state[p]
    assert state["state1"].dtype == torch.uint8 and float(state["step"]) == 10
    moved = (ends[0] - start).norm()
    assert (ends[1] - ends[0]).norm() < 0.05 * moved
    optimizer.skip = torch.ones(())
    before = p.detach().clone()
    optimizer.step()
    assert p.equal(before)
