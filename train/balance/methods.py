"""Balance methods of one level: by losses, by a gradient of each task, and by gradients with a state between steps.

Those of gradients are TorchJD's implementations wherever possible. Each gives the weights of the present tasks, [k].
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from train.balance import bilevel  # noqa: F401
from train.balance.registry import METHODS, Setting, rate, register_method
from train.balance.rows import MethodChoice, MethodInput
from train.balance.solvers import cagrad as cagrad_dual
from train.balance.solvers import dual_cone, fair, on_simplex, solved

__all__ = ["METHODS"]  # with those of `bilevel`


TINY = 1e-20


@register_method("equal", "loss", ahead=True)
def equal(inputs: MethodInput) -> MethodChoice:
    return MethodChoice(torch.ones_like(inputs.losses))


@register_method("uncertainty", "loss", settings={"lr": rate(1e-3), "initial": Setting(-0.5, low=-20.0, high=20.0)}, ahead=True)
def uncertainty(inputs: MethodInput) -> MethodChoice:
    """Kendall, Gal and Cipolla 2018: L / (2 s) + log(s) / 2 with a variance s per task, whose logarithm is trained by Adam."""
    initial, lr = inputs.settings["initial"], inputs.settings["lr"]
    weights = (-inputs.get("log_variance", initial)).exp() / 2
    inputs.adam("log_variance", 0.5 - weights * inputs.losses, initial, lr)
    return MethodChoice(weights)


@register_method("dwa", "loss", settings={"temperature": rate(2.0), "window": Setting(100, low=1)}, ahead=True)
def dwa(inputs: MethodInput) -> MethodChoice:
    """Dynamic weight average (Liu, Johns and Davison 2019, eq. 7) over windows of steps instead of epochs.

    m softmax(r / T), r being a task's mean loss of the last window over that of the one before; a task's windows are counted
    in the steps it takes part in. Weights are relative to all tasks; r is 1 before two windows have passed.
    """
    window = inputs.settings["window"]
    total, seen = inputs.get("sum", 0.0), inputs.get("seen", 0.0)
    last, before = inputs.get("last", 0.0), inputs.get("before", 0.0)
    inputs.get("ratio", 1.0)
    ratio = inputs.state.values["ratio"]  # of all tasks, [m]
    weights = (len(ratio) * (ratio / inputs.settings["temperature"]).softmax(0))[inputs.present]
    total, seen = total + inputs.losses, seen + 1
    full = seen >= window
    before = torch.where(full, last, before)
    last = torch.where(full, total / seen, last)
    known = full & (before > 0)
    inputs.set("ratio", torch.where(known, last / before.clamp_min(TINY), inputs.get("ratio", 1.0)))
    inputs.set("last", last)
    inputs.set("before", before)
    inputs.set("sum", torch.where(full, 0.0, total))
    inputs.set("seen", torch.where(full, 0.0, seen))
    return MethodChoice(weights)


@register_method("random", "loss", ahead=True)
def random(inputs: MethodInput) -> MethodChoice:
    """Random loss weighting (Lin et al. 2022): the softmax of a normal draw, of all tasks."""
    draw = torch.randn(inputs.state.tasks, generator=torch.Generator().manual_seed(inputs.key)).double().softmax(0)
    return MethodChoice(draw[inputs.present])


@register_method("geometric", "loss")
def geometric(inputs: MethodInput) -> MethodChoice:
    """Geometric loss strategy (Chennupati et al. 2019): the gradient of the geometric mean by each loss."""
    k = len(inputs.losses)
    mean = inputs.losses.clamp_min(TINY).log().mean().exp()
    return MethodChoice(mean / (k * inputs.losses.clamp_min(TINY)))


@register_method("stch", "loss", settings={"mu": rate(1.0), "warmup": Setting(100, low=1)})
def stch(inputs: MethodInput) -> MethodChoice:
    """Smooth Tchebycheff scalarization (Lin et al. 2024): the gradient of k mu log sum exp(log(L / N) / mu).

    N is the mean loss of a task's first `warmup` steps, in which log L is trained instead.
    """
    mu, warmup = inputs.settings["mu"], inputs.settings["warmup"]
    steps, nadir = inputs.count(), inputs.get("nadir", 0.0)
    warm = steps <= warmup
    inputs.set("nadir", torch.where(warm, nadir + (inputs.losses - nadir) / steps, nadir))
    losses = inputs.losses.clamp_min(TINY)
    share = torch.zeros_like(losses)
    share[~warm] = ((losses / nadir.clamp_min(TINY)).log() / mu)[~warm].softmax(0) * int((~warm).sum())
    return MethodChoice(torch.where(warm, 1.0, share) / losses)


def famo_after(inputs: MethodInput) -> None:
    """Train the logits by Adam, by the decrease of each log loss; `inputs.losses` are the same batch's after the step."""
    z = inputs.get("logits", 0.0).softmax(0)
    fallen = (inputs.get("previous", 0.0) + 1e-8).log() - (inputs.losses + 1e-8).log()
    gradient = z * (fallen - (z * fallen).sum())
    inputs.adam("logits", gradient, 0.0, inputs.settings["lr"], inputs.settings["weight_decay"])


@register_method(
    "famo",
    "loss",
    settings={"lr": rate(0.025), "weight_decay": Setting(1e-3), "look": Setting("next", choices=("next", "same"))},
    after=famo_after,
    again=lambda settings: settings["look"] == "same",
)
def famo(inputs: MethodInput) -> MethodChoice:
    """FAMO (Liu et al. 2023, algorithm 2): the gradient of the log losses under softmax weights, normalized.

    The logits are trained by `famo_after`, once the losses after the step are known.
    """
    z = inputs.get("logits", 0.0).softmax(0)
    ratio = z / (inputs.losses + 1e-8)
    inputs.get("previous", 0.0)
    inputs.set("previous", inputs.losses)
    return MethodChoice(ratio / ratio.sum())


@register_method(
    "mgda",
    "features",
    "parameters",
    settings={"normalize": Setting("none", choices=("none", "l2", "loss", "loss+"))},
    losses=lambda settings: settings["normalize"] in ("loss", "loss+"),
)
def mgda(inputs: MethodInput) -> MethodChoice:
    """The element of least norm in the gradients' convex hull (Sener and Koltun 2018), exactly.

    `normalize` divides each gradient by its norm (l2), its loss, or both (loss+) before the weights are computed.
    """
    gramian, normalize = inputs.rows.gramian(), inputs.settings["normalize"]
    size = torch.ones_like(inputs.losses)
    if normalize in ("l2", "loss+"):
        size = size * gramian.diagonal().clamp_min(1e-24).sqrt()
    if normalize in ("loss", "loss+"):
        size = size * inputs.losses.clamp_min(1e-12)
    return MethodChoice(solved(on_simplex, gramian / size[:, None] / size))


@register_method("pcgrad", "features", "parameters")
def pcgrad(inputs: MethodInput) -> MethodChoice:
    """PCGrad (Yu et al. 2020): projects conflicting gradients."""
    from torchjd.aggregation import PCGradWeighting

    with inputs.drawing():
        return MethodChoice(PCGradWeighting()(inputs.rows.gramian()))


@register_method("cagrad", "features", "parameters", settings={"c": Setting(0.5), "rescale": Setting(1, high=2)})
def cagrad(inputs: MethodInput) -> MethodChoice:
    """CAGrad, conflict-averse gradient descent (Liu et al. 2021); `rescale` 1 divides by 1 + c^2, 2 by 1 + c.

    No step is taken where a combination of the gradients vanishes.
    """
    c, gramian = inputs.settings["c"], inputs.rows.gramian()
    w = solved(cagrad_dual, gramian, c)
    mean, norm = gramian.mean().clamp_min(0).sqrt(), (w @ gramian @ w).clamp_min(0).sqrt()
    weights = torch.full_like(w, 1 / len(w)) + c * mean / norm.clamp_min(1e-300) * w
    if norm <= 1e-6 * gramian.diagonal().max().sqrt():
        weights = torch.zeros_like(w)
    return MethodChoice(weights / (1.0, 1 + c * c, 1 + c)[inputs.settings["rescale"]])


@register_method("nashmtl", "features", "parameters", settings={"max_norm": Setting(1.0)})
def nashmtl(inputs: MethodInput) -> MethodChoice:
    """Nash-MTL (Navon et al. 2022): G a = 1 / a; the direction is clipped at `max_norm` (0: not at all)."""
    gramian, most = inputs.rows.gramian(), inputs.settings["max_norm"]
    weights = solved(fair, gramian, 1.0)
    norm = (weights @ gramian @ weights).clamp_min(0).sqrt()
    return MethodChoice(weights * (most / (norm + 1e-6)).clamp_max(1) if most > 0 else weights)


@register_method("imtlg", "features", "parameters")
def imtlg(inputs: MethodInput) -> MethodChoice:
    """IMTL-G, impartial multi-task learning by gradients (Liu et al. 2021): equal projections on every gradient."""
    from torchjd.aggregation import IMTLGWeighting

    gramian = inputs.rows.gramian()
    size = gramian.diagonal().max()  # TorchJD's gives no weights to gradients longer than 1e12
    return MethodChoice(IMTLGWeighting()(gramian / size if size > 0 else gramian))


@register_method("alignedmtl", "features", "parameters", settings={"scale": Setting("min", choices=("min", "median", "rmse"))})
def alignedmtl(inputs: MethodInput) -> MethodChoice:
    """Aligned-MTL, independent component alignment (Senushkin et al. 2023)."""
    from torchjd.aggregation import AlignedMTLWeighting

    return MethodChoice(AlignedMTLWeighting(scale_mode=inputs.settings["scale"])(inputs.rows.gramian()))


@register_method("fairgrad", "features", "parameters", settings={"alpha": rate(1.0)})
def fairgrad(inputs: MethodInput) -> MethodChoice:
    """FairGrad (Ban and Ji 2024): G w = w ** (-1 / alpha)."""
    return MethodChoice(solved(fair, inputs.rows.gramian(), 1 / inputs.settings["alpha"]))


@register_method("upgrad", "features", "parameters", settings={"norm_eps": rate(1e-20), "reg_eps": rate(1e-4)})
def upgrad(inputs: MethodInput) -> MethodChoice:
    """UPGrad, unconflicting projection of gradients (Quinton and Rey 2024): the mean of the rows, each projected onto the dual
    cone."""
    from torchjd.aggregation import UPGradWeighting

    projector: Any = partial(dual_cone, norm_eps=inputs.settings["norm_eps"], reg_eps=inputs.settings["reg_eps"])
    return MethodChoice(UPGradWeighting(projector=projector)(inputs.rows.gramian()))


@register_method("graddrop", "features", settings={"leak": Setting(0.0, high=1.0)}, linear=False, signs=True)
def graddrop(inputs: MethodInput) -> MethodChoice:
    """GradDrop, gradient sign dropout (Chen et al. 2020, algorithm 1): each channel keeps one sign, drawn by its purity.

    The rows are gradients times the features' signs, summed over positions, [k, C]; the share `leak` of the others passes too.
    """
    rows, leak = inputs.rows.values, inputs.settings["leak"]
    purity = 0.5 * (1 + rows.sum(0) / (rows.abs().sum(0) + 1e-7))
    draw = torch.rand(purity.shape, generator=torch.Generator().manual_seed(inputs.key)).to(purity)
    kept = torch.where(purity > draw, rows > 0, (purity < draw) & (rows < 0)).to(rows)
    factors = leak + (1 - leak) * kept
    return MethodChoice(factors.mean(1).to("cpu", torch.float64), factors=factors)


@register_method(
    "gradnorm", "features", "parameters", settings={"alpha": Setting(1.5), "lr": rate(1e-3)}, losses=lambda settings: True
)
def gradnorm(inputs: MethodInput) -> MethodChoice:
    """GradNorm (Chen et al. 2018): weights k softmax(s), s trained by Adam.

    s is trained to make the weighted norms equal, corrected by each task's rate of training: the target of a task's norm is the
    mean norm times (L / L_first, over its mean) ** alpha, L_first being the task's loss when first seen.
    """
    alpha, lr = inputs.settings["alpha"], inputs.settings["lr"]
    first = inputs.get("first", 0.0)
    first = torch.where(inputs.count() == 1, inputs.losses, first)
    inputs.set("first", first)
    norms = inputs.rows.norms()
    with torch.enable_grad():
        logits = inputs.get("logits", 0.0).requires_grad_()
        weights = len(norms) * logits.softmax(0)
        weighted = weights * norms
        speed = inputs.losses / first.clamp_min(1e-12)
        target = weighted.mean() * (speed / speed.mean().clamp_min(1e-12)) ** alpha
        (gradient,) = torch.autograd.grad((weighted - target.detach()).abs().sum(), logits)
    inputs.adam("logits", gradient, 0.0, lr)
    return MethodChoice(weights.detach())


@register_method("excessmtl", "features", "parameters", settings={"step_size": rate(1e-2)}, keeps=True)
def excessmtl(inputs: MethodInput) -> MethodChoice:
    """ExcessMTL (He et al. 2024): weights grow exponentially with a task's excess risk.

    The risk is g' diag(sum of g^2)^(-1/2) g, over that of the task's first step.
    """
    rows = inputs.rows.values
    squares = inputs.get("squares", torch.zeros_like(rows[0])) + rows.square()
    inputs.set("squares", squares)
    risk = inputs.rows.statistic((rows.square() / (squares + 1e-7).sqrt()).sum(1))
    first = inputs.get("first", 0.0)
    new = first == 0
    weights = inputs.get("weights", 1.0)
    power = torch.where(new, 0.0, risk / first.clamp_min(1e-12) * inputs.settings["step_size"])
    grown = (weights.clamp_min(1e-30).log() + power).softmax(0) * weights.sum()  # as a softmax: exp(power) may overflow
    inputs.set("first", torch.where(new, risk, first))
    inputs.set("weights", grown)
    return MethodChoice(grown)


@register_method(
    "dbmtl", "parameters", settings={"beta": Setting(0.9, high=1.0), "sigma": Setting(0.0)}, linear=False, keeps=True
)
def dbmtl(inputs: MethodInput) -> MethodChoice:
    """DB-MTL, dual-balancing (Lin et al. 2023): smoothed gradients of log losses, all scaled to the length of the longest."""
    rows = inputs.rows.times(1 / (inputs.losses + 1e-8)).values
    rate = (inputs.settings["beta"] / inputs.count() ** inputs.settings["sigma"]).to(rows)[:, None]
    smooth = inputs.get("smooth", torch.zeros_like(rows[0]))
    smooth = rows + rate * (smooth - rows)
    inputs.set("smooth", smooth)
    norms = inputs.rows.statistic(smooth.square().sum(1)).sqrt()
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
def moco(inputs: MethodInput) -> MethodChoice:
    """MoCo (Fernando et al. 2023): weights by gradients that are tracked with momentum.

    Each gradient is scaled to the length of its loss; the weights are the softmax of one descent step on the tracked gradients'
    norm.
    """
    s, rows, steps = inputs.settings, inputs.rows, inputs.count()
    unit = rows.times(inputs.losses / (rows.norms() + 1e-8)).values
    tracked = inputs.get("tracked", torch.zeros_like(unit[0]))
    tracked = tracked - (s["beta"] / steps ** s["beta_sigma"]).to(unit)[:, None] * (tracked - unit)
    inputs.set("tracked", tracked)
    weights = inputs.get("weights", 1 / inputs.state.tasks)
    gramian = rows.statistic(tracked @ tracked.T) + s["rho"] * torch.eye(len(weights), dtype=torch.float64)
    weights = (weights - s["gamma"] / steps ** s["gamma_sigma"] * (gramian @ weights)).softmax(0)
    inputs.set("weights", weights)
    return MethodChoice(weights, direction=weights.to(tracked) @ tracked)


@register_method("gradvac", "features", "parameters", settings={"beta": Setting(0.5, high=1.0)})
def gradvac(inputs: MethodInput) -> MethodChoice:
    """GradVac, gradient vaccine (Wang et al. 2021): turns pairs of gradients towards the average of their past cosines."""
    from torchjd.aggregation import GradVacWeighting

    gramian, method = inputs.rows.gramian(), GradVacWeighting(beta=inputs.settings["beta"])
    return MethodChoice(_with(inputs, method, gramian, "_phi_t", inputs.get("cosines", 0.0, pairs=True), "cosines"))


@register_method(
    "sdmgrad", "parameters", settings={"preference": Setting(0.3), "lr": rate(5.0), "steps": Setting(20, low=1)}, batches=3
)
def sdmgrad(inputs: MethodInput) -> MethodChoice:
    """SDMGrad (Xiao, Ban and Ji 2023): weights by two independent batches, for the gradients of a third."""
    from torchjd.aggregation import SDMGradWeighting

    s = inputs.settings
    method = SDMGradWeighting(lr=s["lr"], momentum=0.5, n_iter=s["steps"], lambda_=s["preference"])
    matrix, weights = inputs.others[0].gramian(inputs.others[1]), _on_simplex(inputs)
    return MethodChoice(_with(inputs, method, matrix, "_w", weights, "weights"))


@register_method("modo", "parameters", settings={"gamma": rate(1e-3), "rho": Setting(0.1)}, batches=3)
def modo(inputs: MethodInput) -> MethodChoice:
    """MoDo (Chen et al. 2023): a projected gradient step on the weights by two independent batches, for a third."""
    from torchjd.aggregation import MoDoWeighting

    method = MoDoWeighting(gamma=inputs.settings["gamma"], rho=inputs.settings["rho"])
    matrix, weights = inputs.others[0].gramian(inputs.others[1]), _on_simplex(inputs)
    return MethodChoice(_with(inputs, method, matrix, "_lambda", weights, "weights"))


def _on_simplex(inputs: MethodInput) -> Tensor:
    """The stored weights of the present tasks, normalised to sum 1."""
    weights = inputs.get("weights", 1 / inputs.state.tasks)
    share = weights.sum()
    return weights / share if share > 0 else torch.full_like(weights, 1 / len(weights))


def _with(inputs: MethodInput, method: torch.nn.Module, matrix: Tensor, buffer: str, state: Tensor, name: str) -> Tensor:
    """Call a TorchJD weighting with a given state in its `buffer`, and store the state after it under `name`."""
    with inputs.drawing():
        method(torch.eye(len(matrix), dtype=matrix.dtype))  # a first call makes the buffer that the state is loaded into
    method.load_state_dict({buffer: state.to(matrix)})
    with inputs.drawing():
        weights = method(matrix)
    after = method.state_dict()[buffer]
    if name == "weights":
        after = after * inputs.get("weights", 1 / inputs.state.tasks).sum()
    inputs.set(name, after)
    return weights
