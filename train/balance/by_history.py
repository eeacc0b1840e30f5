"""Methods that use one gradient per task and keep state between steps, per task (or per pair of tasks)."""

from __future__ import annotations

import torch
from torch import Tensor

from train.balance.given import Given, MethodChoice
from train.balance.registry import Setting, rate, register_method


@register_method(
    "gradnorm", "features", "parameters", settings={"alpha": Setting(1.5), "lr": rate(1e-3)}, losses=lambda settings: True
)
def gradnorm(given: Given) -> MethodChoice:
    """GradNorm (Chen et al. 2018): weights k softmax(s), s trained by Adam.

    s is trained to make the weighted norms equal, corrected by each task's rate of training: the target of a task's norm is the
    mean norm times (L / L_first, over its mean) ** alpha, L_first being the task's loss when first seen.
    """
    alpha, lr = given.settings["alpha"], given.settings["lr"]
    first = given.get("first", 0.0)
    first = torch.where(given.count() == 1, given.losses, first)
    given.set("first", first)
    norms = given.rows.norms()
    with torch.enable_grad():
        logits = given.get("logits", 0.0).requires_grad_()
        weights = len(norms) * logits.softmax(0)
        weighted = weights * norms
        speed = given.losses / first.clamp_min(1e-12)
        target = weighted.mean() * (speed / speed.mean().clamp_min(1e-12)) ** alpha
        (gradient,) = torch.autograd.grad((weighted - target.detach()).abs().sum(), logits)
    given.adam("logits", gradient, 0.0, lr)
    return MethodChoice(weights.detach())


@register_method("excessmtl", "features", "parameters", settings={"step_size": rate(1e-2)}, keeps=True)
def excessmtl(given: Given) -> MethodChoice:
    """ExcessMTL (He et al. 2024): weights grow exponentially with a task's excess risk.

    The risk is g' diag(sum of g^2)^(-1/2) g, over that of the task's first step.
    """
    rows = given.rows.values
    squares = given.get("squares", torch.zeros_like(rows[0])) + rows.square()
    given.set("squares", squares)
    risk = given.rows.statistic((rows.square() / (squares + 1e-7).sqrt()).sum(1))
    first = given.get("first", 0.0)
    new = first == 0
    weights = given.get("weights", 1.0)
    power = torch.where(new, 0.0, risk / first.clamp_min(1e-12) * given.settings["step_size"])
    grown = (weights.clamp_min(1e-30).log() + power).softmax(0) * weights.sum()  # as a softmax: exp(power) may overflow
    given.set("first", torch.where(new, risk, first))
    given.set("weights", grown)
    return MethodChoice(grown)


@register_method(
    "dbmtl", "parameters", settings={"beta": Setting(0.9, high=1.0), "sigma": Setting(0.0)}, linear=False, keeps=True
)
def dbmtl(given: Given) -> MethodChoice:
    """DB-MTL, dual-balancing (Lin et al. 2023): smoothed gradients of log losses, all scaled to the length of the longest."""
    rows = given.rows.times(1 / (given.losses + 1e-8)).values
    rate = (given.settings["beta"] / given.count() ** given.settings["sigma"]).to(rows)[:, None]
    smooth = given.get("smooth", torch.zeros_like(rows[0]))
    smooth = rows + rate * (smooth - rows)
    given.set("smooth", smooth)
    norms = given.rows.statistic(smooth.square().sum(1)).sqrt()
    weights = norms.max() / (norms + 1e-8)
    return MethodChoice(weights, direction=weights.to(smooth) @ smooth)


@register_method(
    "moco",
    "parameters",
    settings={
        "beta": Setting(0.5, high=1.0), "beta_sigma": Setting(0.5), "gamma": rate(0.1), "gamma_sigma": Setting(0.5),
        "rho": Setting(0.0),
    },
    linear=False,
    keeps=True,
)  # fmt: skip
def moco(given: Given) -> MethodChoice:
    """MoCo (Fernando et al. 2023): weights by gradients that are tracked with momentum.

    Each gradient is scaled to the length of its loss; the weights are the softmax of one descent step on the tracked gradients'
    norm.
    """
    s, rows, steps = given.settings, given.rows, given.count()
    unit = rows.times(given.losses / (rows.norms() + 1e-8)).values
    tracked = given.get("tracked", torch.zeros_like(unit[0]))
    tracked = tracked - (s["beta"] / steps ** s["beta_sigma"]).to(unit)[:, None] * (tracked - unit)
    given.set("tracked", tracked)
    weights = given.get("weights", 1 / given.state.tasks)
    gramian = rows.statistic(tracked @ tracked.T) + s["rho"] * torch.eye(len(weights), dtype=torch.float64)
    weights = (weights - s["gamma"] / steps ** s["gamma_sigma"] * (gramian @ weights)).softmax(0)
    given.set("weights", weights)
    return MethodChoice(weights, direction=weights.to(tracked) @ tracked)


@register_method("gradvac", "features", "parameters", settings={"beta": Setting(0.5, high=1.0)})
def gradvac(given: Given) -> MethodChoice:
    """GradVac, gradient vaccine (Wang et al. 2021): turns pairs of gradients towards the average of their past cosines."""
    from torchjd.aggregation import GradVacWeighting

    gramian, method = given.rows.gramian(), GradVacWeighting(beta=given.settings["beta"])
    return MethodChoice(_with(given, method, gramian, "_phi_t", given.get("cosines", 0.0, pairs=True), "cosines"))


@register_method(
    "sdmgrad", "parameters", settings={"preference": Setting(0.3), "lr": rate(5.0), "steps": Setting(20, low=1)}, batches=3
)
def sdmgrad(given: Given) -> MethodChoice:
    """SDMGrad (Xiao, Ban and Ji 2023): weights by two independent batches, for the gradients of a third."""
    from torchjd.aggregation import SDMGradWeighting

    s = given.settings
    method = SDMGradWeighting(lr=s["lr"], momentum=0.5, n_iter=s["steps"], lambda_=s["preference"])
    matrix, weights = given.others[0].gramian(given.others[1]), _on_simplex(given)
    return MethodChoice(_with(given, method, matrix, "_w", weights, "weights"))


@register_method("modo", "parameters", settings={"gamma": rate(1e-3), "rho": Setting(0.1)}, batches=3)
def modo(given: Given) -> MethodChoice:
    """MoDo (Chen et al. 2023): a projected gradient step on the weights by two independent batches, for a third."""
    from torchjd.aggregation import MoDoWeighting

    method = MoDoWeighting(gamma=given.settings["gamma"], rho=given.settings["rho"])
    matrix, weights = given.others[0].gramian(given.others[1]), _on_simplex(given)
    return MethodChoice(_with(given, method, matrix, "_lambda", weights, "weights"))


def _on_simplex(given: Given) -> Tensor:
    """The stored weights of the present tasks, normalised to sum 1."""
    weights = given.get("weights", 1 / given.state.tasks)
    share = weights.sum()
    return weights / share if share > 0 else torch.full_like(weights, 1 / len(weights))


def _with(given: Given, method: torch.nn.Module, matrix: Tensor, buffer: str, state: Tensor, name: str) -> Tensor:
    """Call a TorchJD weighting with a given state in its `buffer`, and store the state after it under `name`."""
    with given.drawing():
        method(torch.eye(len(matrix), dtype=matrix.dtype))  # a first call makes the buffer that the state is loaded into
    method.load_state_dict({buffer: state.to(matrix)})
    with given.drawing():
        weights = method(matrix)
    after = method.state_dict()[buffer]
    if name == "weights":
        after = after * given.get("weights", 1 / given.state.tasks).sum()
    given.set(name, after)
    return weights
