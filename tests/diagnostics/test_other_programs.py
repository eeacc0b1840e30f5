"""Training programs of many styles: correct ones give no finding and run on, wrong ones name the line that is to be changed."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from omni.diagnostics import Finding, GraphError, Guard
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


# --- correct ones --------------------------------------------------------------------------------------------------------


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
    """Keeps a loss and a list of features for the training loop, anew in every forward."""

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


# --- wrong ones ----------------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Layers under a decaying mask, checkpointed; `how` the mask comes to them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def part(self, layer: nn.Module, x: Tensor, mask: Any) -> Tensor:
        return (layer(x) * (mask["mask"] if isinstance(mask, dict) else mask)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(WIDTH)
        for layer in self.layers:
            if self.how == "keyword":
                x = checkpoint(self.part, layer, x, mask=mask, use_reentrant=False)
            elif self.how == "partial":
                x = checkpoint(functools.partial(self.part, layer, mask=mask), x, use_reentrant=False)
            elif self.how == "closure":
                x = checkpoint(lambda x, layer=layer: self.part(layer, x, mask), x, use_reentrant=False)  # noqa: B023
            else:
                x = checkpoint(self.part, layer, x, {"mask": mask}, use_reentrant=self.how == "dict, reentrant")
            mask *= 0.9
        return x


def masked(how: str) -> Made:
    model = Masked(how)
    return trained(model, lambda i: model(data(i).requires_grad_()).square().mean())


def weights_put_back() -> Made:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    average = {name: value.clone() * 0.5 for name, value in model.state_dict().items()}
    optimizer = sgd(model)

    def step(i: int) -> None:
        optimizer.zero_grad()
        loss = checkpoint(model, data(i), use_reentrant=False).square().mean()
        model.load_state_dict(average)
        loss.backward()
        optimizer.step()

    return model, optimizer, step


def past_autograd() -> Made:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))

    def loss(i: int) -> Tensor:
        hidden = model[0](data(i)).exp()
        hidden.data.mul_(2)
        return model[1](hidden).mean()

    return trained(model, loss)


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, out: Tensor) -> None:
        return None


def no_gradient() -> Made:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    return trained(model, lambda i: model[1](Nothing.apply(model[0](data(i)))).mean())


SILENT: dict[str, tuple[Callable[[], Made], str, str]] = {
    **{how: (lambda how=how: masked(how), "recompute", "mask *= 0.9") for how in ("keyword", "partial", "closure", "dict")},
    "dict, reentrant": (lambda: masked("dict, reentrant"), "recompute", "mask *= 0.9"),
    "weights": (weights_put_back, "recompute", "model.load_state_dict(average)"),
    "nothing": (no_gradient, "no_gradient", ""),
}


@pytest.mark.parametrize("name", SILENT)
def test_wrong_gradients_without_an_error_are_found_without_being_asked_for_a_trace(name: str) -> None:
    make, kind, line = SILENT[name]
    model, optimizer, step = make()
    guard = Guard(model, optimizer)
    for i in range(3):
        with guard.step():
            step(i)
    assert [finding.kind for finding in guard.findings] == [kind]
    place = guard.findings[0].place
    assert (place.code if place is not None else "") == line


def test_a_write_past_autograd_shows_in_a_trace() -> None:
    model, optimizer, step = past_autograd()
    guard = Guard(model, optimizer)
    with guard.step(trace=True):
        step(0)
    (finding,) = guard.findings
    assert finding.kind == "inplace" and "mul_" in finding.what
    assert finding.place is not None and finding.place.code == "hidden.data.mul_(2)"


class Trainer:
    """A loop of the user's own that carries something from step to step."""

    def __init__(self, guard: bool = True) -> None:
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.optimizer = sgd(self.layer)
        self.guard = Guard(self.layer, self.optimizer)
        self.state: Any = None
        self.memory: dict[str, Any] = {"state": None}
        self.total: Any = 0.0

    def on_itself(self, i: int) -> Tensor:
        out, self.state = self.layer(data(i)[None], self.state)
        return out.mean()

    def in_a_mapping(self, i: int) -> Tensor:
        out, self.memory["state"] = self.layer(data(i)[None], self.memory["state"])
        return out.mean()

    def summed(self, i: int) -> Tensor:
        loss = self.layer(data(i)[None])[0].mean()
        self.total += loss
        return self.total / 2

    def train(self, how: str) -> Finding:
        loss = getattr(self, how)
        for i in range(3):
            with self.guard.step():
                self.optimizer.zero_grad()
                loss(i).backward()
                self.optimizer.step()
        raise AssertionError("nothing failed")


def in_a_variable(trainer: Trainer) -> None:
    state = None
    for i in range(3):
        with trainer.guard.step():
            out, state = trainer.layer(data(i)[None], state)
            out.mean().backward()


CARRIED = {
    "on_itself": "out, self.state = self.layer(data(i)[None], self.state)",
    "in_a_mapping": 'out, self.memory["state"] = self.layer(data(i)[None], self.memory["state"])',
    "summed": "self.total += loss",
    "in_a_variable": "out, state = trainer.layer(data(i)[None], state)",
}


@pytest.mark.parametrize("how", CARRIED)
def test_who_carries_a_graph_from_step_to_step(how: str) -> None:
    trainer = Trainer()
    with pytest.raises(GraphError) as error:
        in_a_variable(trainer) if how == "in_a_variable" else trainer.train(how)
    (finding,) = error.value.findings
    assert finding.kind == "freed" and "carries the graph" in finding.what and "detach" in finding.remedy
    assert finding.place is not None and finding.place.code == CARRIED[how]


def test_a_tensor_of_autocast_that_is_changed_in_place() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model[0](data(0)).exp()
            hidden[:, 0] = 0
            F.relu(model[1](hidden)).float().mean().backward()

    guard = Guard(model, sgd(model))
    with pytest.raises(GraphError) as error:
        guard.run(step)
    (finding,) = error.value.findings
    assert finding.place is not None and finding.place.code == "hidden[:, 0] = 0" and "fill_" in finding.what
    assert Path(finding.place.file).name == Path(__file__).name


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


class Wrapper:
    """An optimizer of the user's own that holds torch's."""

    def __init__(self, model: nn.Module) -> None:
        self.inside = sgd(model)

    def step(self) -> None:
        self.inside.step()


def wrapped() -> Made:
    model = nn.Linear(WIDTH, 1)
    optimizer = Wrapper(model)

    def step(i: int) -> None:
        optimizer.inside.zero_grad()
        model(data(i)).mean().backward()
        optimizer.step()

    return model, optimizer, step


HARD = {
    "sparse": sparse, "jagged": jagged, "selective": selective, "generator": by_generator, "scripted": scripted,
    "wrapped": wrapped,
}  # fmt: skip


@pytest.mark.parametrize("way", ["watched", "traced", "run"])
@pytest.mark.parametrize("name", HARD)
def test_what_is_hard_to_look_at_learns_the_same(name: str, way: str) -> None:
    learnt = []
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
        learnt.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *learnt))


def test_no_optimizer_at_all() -> None:
    with pytest.raises(TypeError, match="object is no torch.optim.Optimizer, nor holds one"):
        Guard(nn.Linear(1, 1), object())  # type: ignore[arg-type]


def test_the_hook_of_an_optimizer_stays_the_same() -> None:
    """A compiled step is compiled anew where it differs."""
    model, optimizer, step = auxiliary()
    guard, seen = Guard(model, optimizer), []
    for i in range(2):
        with guard.step():
            seen.append(list(optimizer._optimizer_step_pre_hooks.items()))
            step(i)
    assert seen[0] == seen[1] != [] and not optimizer._optimizer_step_pre_hooks


def test_a_loop_that_went_on_before_a_part_is_repeated() -> None:
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def loss(i: int) -> Tensor:
        x = data(i)
        for layer in layers:
            x = checkpoint(lambda x: layer(x).tanh(), x, use_reentrant=False)  # noqa: B023
        return x.mean()

    model, optimizer, step = trained(layers, loss)
    guard = Guard(model, optimizer)
    for i in range(2):
        with guard.step():
            step(i)
    kinds = {(finding.kind, finding.place.code if finding.place else "") for finding in guard.findings}
    line = "x = checkpoint(lambda x: layer(x).tanh(), x, use_reentrant=False)  # noqa: B023"
    assert kinds == {("recompute", line)} and "runs through 2 now" in guard.report() and "bind what" in guard.report()


@pytest.mark.parametrize("kind", ["list", "mapping", "object", "generator"])
def test_values_that_a_part_reads(kind: str) -> None:
    model, dice = nn.Linear(WIDTH, 1), torch.Generator().manual_seed(0)
    held: Any = {"list": [1.0], "mapping": {0: 1.0}, "object": types.SimpleNamespace(scale=1.0), "generator": dice}[kind]

    def part(x: Tensor) -> Tensor:
        if kind == "generator":
            return model(x * torch.rand((), generator=held)).tanh()
        return (model(x) * (held.scale if kind == "object" else held[0])).tanh()

    def loss(i: int) -> Tensor:
        out = checkpoint(part, data(i), use_reentrant=False).mean()
        if kind == "object":
            held.scale *= 0.5
        elif kind != "generator":
            held[0] *= 0.5
        return out

    model, optimizer, step = trained(model, loss)
    guard = Guard(model, optimizer)
    for i in range(2):
        with guard.step():
            step(i)
    (finding,) = guard.findings
    name = {"list": "held[0]", "mapping": "held[0]", "object": "held.scale", "generator": "held"}[kind]
    assert finding.kind == "recompute" and f"in forward: {name} was" in finding.what


def test_looking_at_much_data_is_bounded() -> None:
    data = [{"ids": [(i, i) for i in range(50)], "spans": [[i] for i in range(50)]} for _ in range(500)]
    seen = set[int]()
    assert list(tensors_in(data, seen)) == [] and len(seen) == VISITS
