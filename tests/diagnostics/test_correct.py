"""Correct training programs of many styles: no finding, and they learn what they learn unwatched."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import MappingProxyType

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.utils.checkpoint import checkpoint

from omni.diagnostics import Guard
from omni.diagnostics.held import VISITS, tensors_in
from tests.diagnostics import programs
from tests.diagnostics.programs import WIDTH, Program, data, train


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def normalised() -> tuple[nn.Module, nn.Module, nn.Module]:
    """A body whose buffers change in forward, so that checkpointing it makes the guard look closer in a later step."""
    body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
    head = nn.Linear(WIDTH, 1)
    return body, head, nn.ModuleList([body, head])


def transformed() -> Program:
    body, head, model = normalised()

    def loss(i: int) -> Tensor:
        slope = jacrev(head)(data(i)[0])
        return head(checkpoint(body, data(i), use_reentrant=False)).mean() + slope.square().mean()

    return train(model, loss)


def compiled() -> Program:
    body, head, model = normalised()
    fast = torch.compile(head, fullgraph=True, backend="eager")
    return train(model, lambda i: fast(checkpoint(body, data(i), use_reentrant=False)).mean())


def gradients_of_func() -> Program:
    model = nn.Linear(WIDTH, 1)
    optimizer = sgd(model)

    def step(i: int) -> None:
        optimizer.zero_grad()
        weights = {name: p.detach() for name, p in model.named_parameters()}
        found = grad(lambda w: functional_call(model, w, (data(i),)).square().mean())(weights)
        for name, p in model.named_parameters():
            p.grad = found[name].detach()
        optimizer.step()

    return Program(model, optimizer, step)


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


def auxiliary() -> Program:
    model = Auxiliary()
    return train(model, lambda i: model(data(i)).mean() + model.loss + model.features[0].abs().mean())


def adversaries() -> Program:
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

    return Program(model, optimizers, step)


def closures() -> Program:
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def step(i: int) -> None:
        def loss() -> Tensor:
            optimizer.zero_grad()
            value = model(data(i)).square().mean()
            value.backward()
            return value

        optimizer.step(loss)

    return Program(model, optimizer, step)


def stepped_in_backward() -> Program:
    model = nn.Linear(WIDTH, 1)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def hook(p: Tensor) -> None:
        optimizers[p].step()  # type: ignore[index]
        optimizers[p].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    return Program(model, list(optimizers.values()), lambda i: model(data(i)).mean().backward())


def wide_copies(counted: bool) -> Program:
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

    return Program(model, optimizer, step)


def looking() -> Program:
    """A hook that is a new one in every step, and gone before backward."""
    model, seen = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), list[Tensor]()

    def loss(i: int) -> Tensor:
        handle = model[0].register_forward_hook(lambda module, args, out: seen.append(out.detach()))
        out = checkpoint(model, data(i), use_reentrant=False)
        handle.remove()
        return out.square().mean()

    return train(model, loss)


CORRECT: dict[str, Callable[[], Program]] = {
    "cache": lambda: programs.whole_sequence(cached=False),
    "statistics": lambda: programs.running_statistics(detached=True),
    "embedding": programs.embedded_fixed,
    "mask": lambda: programs.masked(False, in_place=False),
    "mask, reentrant": lambda: programs.masked(True, in_place=False),
    "reentrant": lambda: programs.reentrant(fixed=True),
    "state": programs.checkpointed_state_fixed,
    "hook": lambda: programs.hook_gone(fixed=True),
    "inference": lambda: programs.evaluated(fixed=True),
    "looking hook": looking,
    "torch.func": transformed,
    "torch.compile": compiled,
    "gradients of torch.func": gradients_of_func,
    "auxiliary loss": auxiliary,
    "adversaries": adversaries,
    "LBFGS": closures,
    "stepped in backward": stepped_in_backward,
    "wide copies": lambda: wide_copies(True),
    "wide copies, data": lambda: wide_copies(False),
}


@pytest.mark.sampled(15)
@pytest.mark.parametrize("trace", [False, True], ids=["watched", "traced"])
@pytest.mark.parametrize("name", CORRECT)
def test_correct_programs_run_on_silently(name: str, trace: bool) -> None:
    torch.manual_seed(0)
    program = CORRECT[name]()
    guard = Guard(program.model, program.optimizer)
    for i in range(6):
        with guard.step(program.batch(i % 2), trace=trace):
            program.step(i % 2)
    assert guard.report() == ""


def sparse() -> Program:
    body, head, model = normalised()
    graph = torch.eye(4).to_sparse()
    compressed = torch.eye(4).to_sparse_csr()

    def loss(i: int) -> Tensor:
        hidden = checkpoint(body, data(i), use_reentrant=False)
        return head(compressed @ torch.sparse.mm(graph, hidden)).mean()

    return train(model, loss)


def jagged() -> Program:
    model = nn.Linear(WIDTH, 1)

    def loss(i: int) -> Tensor:
        rows = torch.nested.nested_tensor([data(i, 2), data(i, 3)], layout=torch.jagged).requires_grad_()
        return checkpoint(model, rows, use_reentrant=False).values().mean()

    return train(model, loss)


def scripted() -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frozen = torch.jit.script(nn.BatchNorm1d(WIDTH).eval().requires_grad_(False))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), frozen)
    return train(model, lambda i: model(data(i)).square().mean())


HARD = {"sparse": sparse, "jagged": jagged, "scripted": scripted}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["watched", "traced", "run"])
@pytest.mark.parametrize("name", HARD)
def test_what_is_hard_to_look_at_learns_the_same(name: str, way: str) -> None:
    learnt = []
    for watched in (False, True):
        torch.manual_seed(0)
        program = HARD[name]()
        guard = Guard(program.model, program.optimizer)
        for i in range(4):
            if not watched:
                program.step(i)
            elif way == "run":
                guard.run(functools.partial(program.step, i), trace=True)
            else:
                with guard.step(trace=way == "traced"):
                    program.step(i)
        assert guard.report() == ""
        learnt.append([p.detach().clone() for p in program.model.parameters()])
    assert all(map(torch.equal, *learnt))


def test_looking_at_much_data_is_bounded() -> None:
    data = [{"ids": [(i, i) for i in range(50)], "spans": [[i] for i in range(50)]} for _ in range(500)]
    seen = set[int]()
    assert list(tensors_in(data, seen)) == [] and len(seen) == VISITS
    assert list(tensors_in(MappingProxyType({"a": torch.ones(1)}))) == []  # a read-only mapping may read it from a file
