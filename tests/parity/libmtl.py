"""`python -m tests.parity.libmtl CHECKOUT`: our balance of tasks against median-research-group/LibMTL's own code.

Both are given the same random losses and gradients, of three tasks and 200 values, from several seeds and over several steps;
compared is the gradient that the shared parameters end up with. The checkout's files are imported one by one, so that a method
is left out, and said so, where what it imports is not installed (`pip install -e .[parity]`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import io
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.parity.report import Line, show
from tests.train.balance.backward import backward
from train.balance.balancer import Balancer, Bilevel, build
from train.balance.config import BalanceConfig
from train.balance.methods import METHODS
from train.balance.rows import Rows
from train.balance.solvers import on_simplex, solved

TASKS, WIDTH, POSITIONS, CHANNELS, STEPS, SEEDS = 3, 200, 10, 20, 6, 5
NAMES = [f"task{i}" for i in range(TASKS)]
BOUND = 1e-5
SHOWN = ("normalize", "rescale", "max_norm")


@dataclass(frozen=True)
class Case:
    """A method of ours and what it is compared with.

    Attributes:
        theirs: module and class in `LibMTL/weighting`, and what it is called with.
        factor: theirs over ours.
        bound: largest difference, beside the largest number.
        weights: the weights are compared instead of the gradient.
    """

    method: str
    theirs: str
    arguments: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    level: str | None = None
    factor: float = 1.0
    bound: float = BOUND
    weights: bool = False
    note: str = ""


CASES = (
    Case("equal", "EW"),
    Case("uncertainty", "UW", settings={"lr": 0.02}, note="theirs with Adam on its scales"),
    Case("dwa", "DWA", {"T": 2.0}, {"window": 1}, note="a window of one step is an epoch of theirs"),
    Case("random", "RLW", note="the same draws"),
    Case("geometric", "GLS"),
    Case("stch", "STCH", {"STCH_mu": 0.7, "STCH_warmup_epoch": 4}, {"mu": 0.7, "warmup": 3}),
    Case("famo", "FAMO", {"FAMO_w_lr": 0.025, "FAMO_w_gamma": 1e-3}),
    Case("gradnorm", "GradNorm", {"alpha": 1.5}, {"lr": 0.02}, note="theirs with Adam on its scales"),
    Case("gradnorm", "GradNorm", {"alpha": 1.5}, {"lr": 0.02}, "features"),
    Case("excessmtl", "ExcessMTL", {"robust_step_size": 0.1}, {"step_size": 0.1}),
    Case("dbmtl", "DB_MTL", {"DB_beta": 0.9, "DB_beta_sigma": 0.5}, {"beta": 0.9, "sigma": 0.5}),
    *(
        Case("mgda", "MGDA", {"mgda_gn": kind}, {"normalize": kind}, level, note="theirs stopped at 1e-9")
        for kind in ("none", "l2", "loss", "loss+")
        for level in (("parameters", "features") if kind == "none" else ("features",))
    ),
    *(
        Case(
            "mgda", "MGDA", {"mgda_gn": kind}, {"normalize": kind}, weights=True,
            note="theirs stopped at 1e-9; it weighs the divided gradients here, ours (and theirs of features) the given ones",
        )
        for kind in ("l2", "loss", "loss+")
    ),
    Case("pcgrad", "PCGrad", note="the same orders"),
    Case("gradvac", "GradVac", {"GradVac_beta": 0.5, "GradVac_group_type": 0}, note="the same orders"),
    Case("graddrop", "GradDrop", {"leak": 0.2}, {"leak": 0.2}, "features", note="the same draws"),
    *(
        Case(
            "cagrad", "CAGrad", {"calpha": 0.5, "rescale": r}, {"c": 0.5, "rescale": r}, note="theirs with a finer minimize"
        )
        for r in (0, 1, 2)
    ),
    Case(
        "nashmtl", "Nash_MTL", {"update_weights_every": 1, "optim_niter": 500, "max_norm": 1.0},
        note="theirs with 500 turns, stopped at 1e-9",
    ),
    Case(
        "nashmtl", "Nash_MTL", {"update_weights_every": 1, "optim_niter": 500, "max_norm": 0.0}, {"max_norm": 0.0},
        note="theirs with 500 turns, stopped at 1e-9",
    ),
    Case("imtlg", "IMTL"),
    Case("imtlg", "IMTL", level="features"),
    Case("alignedmtl", "Aligned_MTL", factor=TASKS, note="theirs sums over tasks, TorchJD takes the mean"),
    Case("alignedmtl", "Aligned_MTL", level="features", factor=TASKS, note="the same"),
    Case("fairgrad", "FairGrad", {"FairGrad_alpha": 2.0}, {"alpha": 2.0}, note="theirs with a finer least_squares"),
    Case("sdmgrad", "SDMGrad", {"SDMGrad_lamda": 0.3, "SDMGrad_niter": 20}),
    Case("modo", "MoDo", {"MoDo_gamma": 1e-3, "MoDo_rho": 0.1}),
    Case(
        "moco", "MoCo",
        {"MoCo_beta": 0.5, "MoCo_beta_sigma": 0.5, "MoCo_gamma": 0.1, "MoCo_gamma_sigma": 0.5, "MoCo_rho": 0.2}, {"rho": 0.2},
    ),
    Case("upgrad", "UPGrad", {"UPGrad_norm_eps": 1e-4, "UPGrad_reg_eps": 1e-4}),
)  # fmt: skip


def open_checkout(path: Path) -> None:
    """Make `LibMTL` importable file by file; names that newer libraries dropped are given back."""
    if not (path / "LibMTL" / "weighting" / "abstract_weighting.py").is_file():
        raise SystemExit(f"{path} is no checkout of median-research-group/LibMTL: it has no LibMTL/weighting")
    sys.dont_write_bytecode = True
    for name, folder in (("LibMTL", "LibMTL"), ("LibMTL.weighting", "LibMTL/weighting")):
        module = ModuleType(name)
        module.__path__ = [str(path / folder)]
        sys.modules[name] = module
    setattr(torch, "symeig", symeig)  # noqa: B010
    if not hasattr(np, "alltrue"):
        setattr(np, "alltrue", np.all)  # noqa: B010
    if importlib.util.find_spec("torch_geometric") is None:
        sys.modules["torch_geometric"] = ModuleType("torch_geometric")  # loads data, which no comparison does


def symeig(matrix: Tensor, eigenvectors: bool) -> Any:
    return torch.linalg.eigh(matrix)


def load(name: str) -> Any:
    """A class of theirs; its solvers are asked for more digits, and its shuffles draw as TorchJD does."""
    module = importlib.import_module(f"LibMTL.weighting.{name}")
    if name == "CAGrad":
        module.minimize = functools.partial(module.minimize, tol=1e-15, options={"maxiter": 2000})  # type: ignore[attr-defined]
    if name == "FairGrad":
        module.least_squares = functools.partial(  # type: ignore[attr-defined]
            module.least_squares, xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=10000
        )
    kind = getattr(module, name)
    if name == "MGDA":
        code = kind._find_min_norm_element.__code__
        exact = {1e-5: 1e-9, 250: 20000}  # its limit and its most turns, which are constants of the function
        assert set(exact) <= set(code.co_consts) or set(exact.values()) <= set(code.co_consts), "their limits are others"
        kind._find_min_norm_element.__code__ = code.replace(
            co_consts=tuple(exact.get(c, c) if isinstance(c, (int, float)) else c for c in code.co_consts)
        )
    if name == "Nash_MTL":
        kind._stop_criteria = lambda self, gtg, alpha: (
            self.alpha_param.value is None or np.linalg.norm(self.alpha_param.value - self.prvs_alpha_param.value) < 1e-9
        )
    return kind


def shuffle(items: list[int]) -> None:
    items[:] = [items[i] for i in torch.randperm(len(items)).tolist()]


@contextlib.contextmanager
def drawing(key: int) -> Iterator[None]:
    """Their draws are ours."""
    before, random.shuffle = random.shuffle, shuffle  # type: ignore[assignment]
    torch.default_generator.manual_seed(key)
    try:
        yield
    finally:
        random.shuffle = before


def make(seed: int, *shape: int) -> Tensor:
    """Gradients of the tasks: some conflict, some agree."""
    g = torch.Generator().manual_seed(seed)
    common = torch.randn(shape, generator=g)
    return torch.randn(TASKS, *shape, generator=g) + 0.5 * torch.randn(TASKS, *(1 for _ in shape), generator=g) * common


def linear(values: Tensor, jacobian: Tensor, at: Any) -> Tensor:
    """Losses of given values and gradients; `at` is what they are differentiated by, or one per task."""
    parts = [at] * TASKS if isinstance(at, Tensor) else at
    return torch.stack([v + ((x - x.detach()) * j).sum() for v, j, x in zip(values, jacobian, parts, strict=True)])


def their_model(kind: Any, level: str) -> Any:
    """An object of theirs, with the model that it expects to be a part of."""
    model = type(kind.__name__, (kind,), {})()  # some look at what they are a base of
    model.task_num, model.task_name, model.device, model.rep_grad = TASKS, NAMES, torch.device("cpu"), level == "features"
    model.theta = nn.Parameter(torch.zeros(WIDTH))
    model.encoder, model.decoders = nn.Module(), {}
    model.encoder.theta = model.theta
    model.get_share_params = lambda: iter([model.theta])
    model.zero_grad_share_params = lambda: model.encoder.zero_grad(set_to_none=False)
    model.init_param()
    model.train_loss_buffer = np.zeros((TASKS, STEPS + 10))
    return model


def theirs(case: Case, model: Any, step: int, losses: Tensor, jacobians: list[Tensor], key: int, lr: float) -> Tensor:
    """The gradient of their shared parameters."""
    model.theta.grad = torch.zeros_like(model.theta)
    model.epoch = step
    if case.theirs == "STCH":
        model.epoch = 4 if step < 3 else 5
    if case.theirs == "GradNorm":
        model.epoch = 1
        if step == 0:
            model.train_loss_buffer[:, 0] = losses.numpy()
    at: Any = model.theta
    if case.level == "features":
        model.rep = model.theta.view(POSITIONS, CHANNELS) + features(step)
        model.rep_tasks = {name: model.rep.detach().clone().requires_grad_() for name in NAMES}
        at = list(model.rep_tasks.values())
    if case.theirs == "SDMGrad":
        jacobians = [jacobians[2], *jacobians[:2]]  # it learns from the first of its batches, MoDo from the last
    given = torch.stack([linear(losses, j, at) for j in jacobians]).squeeze(0)
    scales = [p for name, p in model.named_parameters() if name == "loss_scale"]
    if case.theirs in ("UW", "GradNorm") and not hasattr(model, "adam"):
        model.adam = torch.optim.Adam(scales, lr=lr)
    with drawing(key), contextlib.redirect_stdout(io.StringIO()):
        model.zero_grad(set_to_none=False)
        said = model.backward(given, **case.arguments)
    if hasattr(model, "adam"):
        model.adam.step()
    if case.theirs == "DWA":
        model.train_loss_buffer[:, step] = losses.numpy()
    if case.theirs == "FAMO":
        model.update_w(losses * after(step))
    return torch.as_tensor(said) if case.weights else model.theta.grad.clone()


def features(step: int) -> Tensor:
    return torch.randn(POSITIONS, CHANNELS, generator=torch.Generator().manual_seed(900 + step))


def after(step: int) -> Tensor:
    """By how much an optimizer's step changes the losses."""
    return 0.8 + 0.3 * torch.rand(TASKS, generator=torch.Generator().manual_seed(500 + step))


def ours(case: Case, balancer: Balancer, step: int, losses: Tensor, jacobians: list[Tensor]) -> Tensor:
    """The gradient of our shared parameters, or the weights."""
    theta = nn.Parameter(torch.zeros(WIDTH))
    if balancer.config.at == "loss":
        backward(balancer, linear(losses, jacobians[0], theta), [theta])
        balancer.after(losses * after(step))
    elif balancer.config.at == "features":
        rep = theta.view(POSITIONS, CHANNELS) + features(step)
        backward(balancer, linear(losses, jacobians[0], rep), [theta], features=[rep])
    else:
        rows = [Rows(j) for j in jacobians]
        report = balancer.combine(losses, rows[-1], [theta], others=rows[:-1])
        if case.weights:
            return report.weights
    assert theta.grad is not None
    return theta.grad


def compare(case: Case) -> Line:
    name = " ".join([case.method, case.level or "", *(f"{k} {v}" for k, v in case.settings.items() if k in SHOWN)])
    try:
        kind = load(case.theirs)
    except ImportError as error:
        return Line(name, "", "-", None, f"not compared: {error.name} is not installed")
    worst = 0.0
    for seed in range(SEEDS):
        level = case.level or METHODS[case.method].levels[-1]
        config = BalanceConfig(case.method, level, case.settings)
        balancer, model = build(config, NAMES, seed), their_model(kind, config.at)
        assert isinstance(balancer, Balancer)
        for step in range(STEPS):
            losses = 0.5 + torch.rand(TASKS, generator=torch.Generator().manual_seed(100 * seed + step)) * 2
            shape = (POSITIONS, CHANNELS) if config.at == "features" else (WIDTH,)
            batches = 3 if config.spec.batches == 3 else 1
            jacobians = [make(1000 * seed + 10 * step + b, *shape) for b in range(batches)]
            wanted = theirs(case, model, step, losses, jacobians, seed * 1_000_003 + step, case.settings.get("lr", 0.0))
            got = ours(case, balancer, step, losses, jacobians) * case.factor
            worst = max(worst, float((got - wanted).abs().max() / wanted.abs().max()))
    note = case.note + (f" (theirs is {case.factor:g} times ours)" if case.factor != 1 else "")
    return Line(name, f"{SEEDS} seeds x {STEPS} steps", f"{worst:.1e}", worst <= case.bound, note)


def compare_bilevel(method: str) -> Line:
    """Weights, and for forum the gradient, of a small network over several steps."""
    try:
        trainer = importlib.import_module("LibMTL.trainer").Trainer
        weighing = importlib.import_module("LibMTL.weighting.MGDA")
    except ImportError as error:
        return Line(method, "", "-", None, f"not compared: {error.name} is not installed")
    weighing.MGDA._find_min_norm_element = lambda self, grads: solved(on_simplex, grads @ grads.T)
    worst, lr = 0.0, 0.05
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, TASKS))
        settings: dict[str, Any] = {"lr": 0.02}
        if method == "forum":
            settings |= {"inner_steps": 3, "inner_lr": 0.1}
        bilevel = build(BalanceConfig(method, None, settings), NAMES)
        assert isinstance(bilevel, Bilevel)
        fake = their_trainer(trainer, net, lr, method)
        buffer = np.zeros(TASKS)
        for step in range(STEPS):
            batches = [(torch.randn(5, 6), torch.randn(5, TASKS)) for _ in range(2)]
            inner, outer = (functools.partial(network_losses, net, *batch) for batch in batches)
            report = bilevel.update_weights(inner, outer, list(net.parameters()), lr)
            got = [report.weights]
            if method == "forum":
                got.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
            net.zero_grad()
            data = [x for batch in batches for x in batch]
            with contextlib.redirect_stdout(io.StringIO()):
                if method == "forum":
                    buffer = fake.bacth_forward_FORUM(*data, buffer, step)
                else:
                    getattr(fake, {"autolambda": "bacth_forward_AutoLambda", "moml": "bacth_forward_MOML"}[method])(*data, None)
            wanted = [fake.tw.weights.detach().softmax(0)]
            if method == "forum":
                wanted.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
            for a, b in zip(got, wanted, strict=True):
                worst = max(worst, float((a - b).abs().max() / b.abs().max()))
            net.zero_grad()
    note = {
        "moml": "theirs with our MGDA: its own stops at 1e-5, and Adam magnifies that",
        "forum": "decay by steps, where theirs counts epochs",
    }.get(method, "")
    return Line(method, f"{SEEDS} seeds x {STEPS} steps", f"{worst:.1e}", worst <= BOUND, note)


def network_losses(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (net(x) - y).square().mean(0)


def their_trainer(trainer: Any, net: nn.Module, lr: float, method: str) -> Any:
    """Their trainer without its data, loaders and meters; the model is not stepped, so that both see the same one."""
    fake = trainer.__new__(trainer)
    nn.Module.__init__(fake)
    nothing = SimpleNamespace(update=lambda *_, **__: None)
    fake.model, fake.meter, fake.multi_input, fake.task_num, fake.task_name = net, nothing, False, TASKS, NAMES
    fake.device = torch.device("cpu")
    fake.kwargs = {"weight_args": {"inner_lr": 0.1, "inner_step": 3 if method == "forum" else 1, "FORUM_phi": 0.1}}
    fake._prepare_tw(0.02)
    fake.tw.double()
    fake.optimizer = SimpleNamespace(param_groups=[{"lr": lr}], zero_grad=lambda: None, step=lambda: None)
    fake.scheduler = None
    fake._process_data = lambda _: (torch.zeros(1, 6), torch.zeros(1, TASKS))

    def forward4loss(model: nn.Module, x: Tensor, y: Tensor, return_preds: bool = False) -> Any:
        losses = network_losses(model, x, y)
        return (losses, None) if return_preds else losses

    fake.forward4loss = forward4loss
    return fake


def lines() -> Iterator[Line]:
    for case in CASES:
        yield compare(case)
    for method in ("autolambda", "moml", "forum"):
        yield compare_bilevel(method)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of a checkout of median-research-group/LibMTL")
    open_checkout(parser.parse_args().checkout.resolve())
    torch.set_default_dtype(torch.float64)
    warnings.filterwarnings("ignore", category=UserWarning)  # of cvxpy, on a problem of theirs
    good = show("LibMTL", lines())
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
