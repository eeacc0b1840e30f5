"""Correct training programs of many styles: no finding, and they learn what they learn unwatched."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from omni.diagnostics import Guard
from omni.diagnostics.held import VISITS, tensors_in
from tests.diagnostics.programs import WIDTH, data

Made = tuple[nn.Module, Any, Callable[[int], Any]]
"""Model, optimizers, and a step."""


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def trained(model: nn.Module, loss: Callable[[int], Tensor]) -> Made:
    optimizer = sgd(model)

    def step(i: int) -> None:
        optimizer.zero_grad()
        loss(i).backward()
        optimizer.step()

    return model, optimizer, step


def normalised() -> tuple[nn.Module, nn.Module, nn.Module]:
    """A body whose buffers change in forward, so that checkpointing it makes the guard look closer in a later step."""
    body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
    head = nn.Linear(WIDTH, 1)
    return body, head, nn.ModuleList([body, head])


def transformed() -> Made:
    body, head, model = normalised()

    def loss(i: int) -> Tensor:
        slope = jacrev(head)(data(i)[0])
        return head(checkpoint(body, data(i), use_reentrant=False)).mean() + slope.square().mean()

    return trained(model, loss)


def compiled() -> Made:
    body, head, model = normalised()
    fast = torch.compile(head, fullgraph=True, backend="eager")
    return trained(model, lambda i: fast(checkpoint(body, data(i), use_reentrant=False)).mean())


def gradients_of_func() -> Made:
    model = nn.Linear(WIDTH, 1)
    optimizer = sgd(model)

    def step(i: int) -> None:
        optimizer.zero_grad()
        weights = {name: p.detach() for name, p in model.named_parameters()}
        found = grad(lambda w: functional_call(model, w, (data(i),)).square().mean())(weights)
        for name, p in model.named_parameters():
            p.grad = found[name].detach()
        optimizer.step()

    return model, optimizer, step


class Auxiliary(nn.Linear):
    """Keeps a loss and a list of features for the training loop, new in every forward."""

    loss: Tensor

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.features: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.loss = out.square().mean()
        self.features = [out]
        return out


def auxiliary() -> Made:
    model = Auxiliary()
    return trained(model, lambda i: model(data(i)).mean() + model.loss + model.features[0].abs().mean())


def adversaries() -> Made:
    """A generator, and a critic that steps twice as often."""
    model = nn.ModuleDict({"generator": nn.Linear(WIDTH, WIDTH), "critic": nn.Linear(WIDTH, 1)})
    generator, critic = model["generator"], model["critic"]
    optimizers = [sgd(generator), sgd(critic)]

    def step(i: int) -> None:
        made = generator(data(i))
        optimizers[1].zero_grad()
        (critic(made.detach()).mean() - critic(data(i + 9)).mean()).backward()
        optimizers[1].step()
        if i % 2:
            optimizers[0].zero_grad()
            (-critic(made).mean()).backward()
            optimizers[0].step()

    return model, optimizers, step


def closures() -> Made:
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def step(i: int) -> None:
        def loss() -> Tensor:
            optimizer.zero_grad()
            value = model(data(i)).square().mean()
            value.backward()
            return value

        optimizer.step(loss)

    return model, optimizer, step


def stepped_in_backward() -> Made:
    model = nn.Linear(WIDTH, 1)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def hook(p: Tensor) -> None:
        optimizers[p].step()  # type: ignore[index]
        optimizers[p].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    return model, list(optimizers.values()), lambda i: model(data(i)).mean().backward()


def wide_copies(counted: bool) -> Made:
    """The optimizer owns copies in float32 of weights in bfloat16."""
    model = nn.Linear(WIDTH, 1).to(torch.bfloat16)
    copies = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.5)

    def step(i: int) -> None:
        model.zero_grad()
        model(data(i).bfloat16()).float().square().mean().backward()
        for copy, p in zip(copies, model.parameters(), strict=True):
            copy.grad = p.grad.float()  # type: ignore[union-attr]
        optimizer.step()
        for copy, p in zip(copies, model.parameters(), strict=True):
            with torch.no_grad():
                (p if counted else p.data).copy_(copy)

    return model, optimizer, step


def experts() -> Made:
    """Each step goes through one of three experts."""
    model = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(3))
    optimizer = sgd(model)

    def step(i: int) -> None:
        optimizer.zero_grad()
        used = model if i == 0 else [model[i % 3]]
        sum(expert(data(i)).mean() for expert in used).backward()
        optimizer.step()

    return model, optimizer, step


CORRECT: dict[str, Callable[[], Made]] = {
    "torch.func": transformed,
    "torch.compile": compiled,
    "gradients of torch.func": gradients_of_func,
    "auxiliary loss": auxiliary,
    "adversaries": adversaries,
    "LBFGS": closures,
    "stepped in backward": stepped_in_backward,
    "wide copies": lambda: wide_copies(True),
    "wide copies, data": lambda: wide_copies(False),
    "experts": experts,
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("trace", [False, True], ids=["watched", "traced"])
@pytest.mark.parametrize("name", CORRECT)
def test_correct_programs_run_on_silently(name: str, trace: bool) -> None:
    torch.manual_seed(0)
    model, optimizer, step = CORRECT[name]()
    guard = Guard(model, optimizer)
    for i in range(6):
        with guard.step(trace=trace):
            step(i)
    assert guard.report() == ""


# --- programs that are hard to look at -----------------------------------------------------------------------------------


def sparse() -> Made:
    body, head, model = normalised()
    graph = torch.eye(4).to_sparse()
    compressed = torch.eye(4).to_sparse_csr()

    def loss(i: int) -> Tensor:
        hidden = checkpoint(body, data(i), use_reentrant=False)
        return head(compressed @ torch.sparse.mm(graph, hidden)).mean()

    return trained(model, loss)


def jagged() -> Made:
    model = nn.Linear(WIDTH, 1)

    def loss(i: int) -> Tensor:
        rows = torch.nested.nested_tensor([data(i, 2), data(i, 3)], layout=torch.jagged).requires_grad_()
        return checkpoint(model, rows, use_reentrant=False).values().mean()

    return trained(model, loss)


def selective() -> Made:
    body, head, model = normalised()
    kept = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    return trained(model, lambda i: head(checkpoint(body, data(i), use_reentrant=False, context_fn=kept)).mean())


def by_generator() -> Made:
    model = nn.Linear(WIDTH, 2)
    optimizer = sgd(model)

    def step(i: int) -> None:
        optimizer.zero_grad()
        losses = model(data(i)).mean(0)
        torch.autograd.backward(loss for loss in losses)
        optimizer.step()

    return model, optimizer, step


def scripted() -> Made:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frozen = torch.jit.script(nn.BatchNorm1d(WIDTH).eval().requires_grad_(False))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), frozen)
    return trained(model, lambda i: model(data(i)).square().mean())


HARD = {
    "sparse": sparse, "jagged": jagged, "selective": selective, "generator": by_generator, "scripted": scripted,
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["watched", "traced", "run"])
@pytest.mark.parametrize("name", HARD)
def test_what_is_hard_to_look_at_learns_the_same(name: str, way: str) -> None:
    trained = []
    for watched in (False, True):
        torch.manual_seed(0)
        model, optimizer, step = HARD[name]()
        guard = Guard(model, optimizer)
        for i in range(4):
            if not watched:
                step(i)
            elif way == "run":
                guard.run(functools.partial(step, i), trace=True)
            else:
                with guard.step(trace=way == "traced"):
                    step(i)
        assert guard.report() == ""
        trained.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *trained))


def test_looking_at_much_data_is_bounded() -> None:
    data = [{"ids": [(i, i) for i in range(50)], "spans": [[i] for i in range(50)]} for _ in range(500)]
    seen = set[int]()
    assert list(tensors_in(data, seen)) == [] and len(seen) == VISITS
