"""Methods that use one gradient per task and keep no state between steps; TorchJD's implementations wherever possible."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from train.balance.given import Given, MethodChoice
from train.balance.registry import Setting, rate, register_method
from train.balance.solvers import DualCone, fair, on_simplex, solved
from train.balance.solvers import cagrad as cagrad_dual


@register_method(
    "mgda",
    "features",
    "parameters",
    settings={"normalize": Setting("none", choices=("none", "l2", "loss", "loss+"))},
    losses=lambda settings: settings["normalize"] in ("loss", "loss+"),
)
def mgda(given: Given) -> MethodChoice:
    """The element of least norm in the gradients' convex hull (Sener and Koltun 2018), exactly.

    `normalize` divides each gradient by its norm (l2), its loss, or both (loss+) before the weights are computed.
    """
    gramian, kind = given.rows.gramian(), given.settings["normalize"]
    size = torch.ones_like(given.losses)
    if kind in ("l2", "loss+"):
        size = size * gramian.diagonal().clamp_min(1e-24).sqrt()
    if kind in ("loss", "loss+"):
        size = size * given.losses.clamp_min(1e-12)
    return MethodChoice(solved(on_simplex, gramian / size[:, None] / size))


@register_method("pcgrad", "features", "parameters")
def pcgrad(given: Given) -> MethodChoice:
    """PCGrad (Yu et al. 2020): projects conflicting gradients."""
    from torchjd.aggregation import PCGradWeighting

    with given.drawing():
        return MethodChoice(PCGradWeighting()(given.rows.gramian()))


@register_method("cagrad", "features", "parameters", settings={"c": Setting(0.5), "rescale": Setting(1, high=2)})
def cagrad(given: Given) -> MethodChoice:
    """CAGrad, conflict-averse gradient descent (Liu et al. 2021); `rescale` 1 divides by 1 + c^2, 2 by 1 + c.

    No step is taken where a combination of the gradients vanishes.
    """
    c, gramian = given.settings["c"], given.rows.gramian()
    w = solved(cagrad_dual, gramian, c)
    mean, norm = gramian.mean().clamp_min(0).sqrt(), (w @ gramian @ w).clamp_min(0).sqrt()
    weights = torch.full_like(w, 1 / len(w)) + c * mean / norm.clamp_min(1e-300) * w
    if norm <= 1e-6 * gramian.diagonal().max().sqrt():
        weights = torch.zeros_like(w)
    return MethodChoice(weights / (1.0, 1 + c * c, 1 + c)[given.settings["rescale"]])


@register_method("nashmtl", "features", "parameters", settings={"max_norm": Setting(1.0)})
def nashmtl(given: Given) -> MethodChoice:
    """Nash-MTL (Navon et al. 2022): G a = 1 / a; the direction is clipped at `max_norm` (0: not at all)."""
    gramian, most = given.rows.gramian(), given.settings["max_norm"]
    weights = solved(fair, gramian, 1.0)
    norm = (weights @ gramian @ weights).clamp_min(0).sqrt()
    return MethodChoice(weights * (most / (norm + 1e-6)).clamp_max(1) if most > 0 else weights)


@register_method("imtlg", "features", "parameters")
def imtlg(given: Given) -> MethodChoice:
    """IMTL-G, impartial multi-task learning by gradients (Liu et al. 2021): equal projections on every gradient."""
    from torchjd.aggregation import IMTLGWeighting

    gramian = given.rows.gramian()
    size = gramian.diagonal().max()  # TorchJD's gives no weights to gradients longer than 1e12
    return MethodChoice(IMTLGWeighting()(gramian / size if size > 0 else gramian))


@register_method("alignedmtl", "features", "parameters", settings={"scale": Setting("min", choices=("min", "median", "rmse"))})
def alignedmtl(given: Given) -> MethodChoice:
    """Aligned-MTL, independent component alignment (Senushkin et al. 2023)."""
    from torchjd.aggregation import AlignedMTLWeighting

    return MethodChoice(AlignedMTLWeighting(scale_mode=given.settings["scale"])(given.rows.gramian()))


@register_method("fairgrad", "features", "parameters", settings={"alpha": rate(1.0)})
def fairgrad(given: Given) -> MethodChoice:
    """FairGrad (Ban and Ji 2024): G w = w ** (-1 / alpha)."""
    return MethodChoice(solved(fair, given.rows.gramian(), 1 / given.settings["alpha"]))


@register_method("upgrad", "features", "parameters", settings={"norm_eps": rate(1e-20), "reg_eps": rate(1e-4)})
def upgrad(given: Given) -> MethodChoice:
    """UPGrad, unconflicting projection of gradients (Quinton and Rey 2024): the mean of the rows, each projected onto the dual
    cone."""
    from torchjd.aggregation import UPGradWeighting

    projector: Any = DualCone(given.settings["norm_eps"], given.settings["reg_eps"])
    return MethodChoice(UPGradWeighting(projector=projector)(given.rows.gramian()))


@register_method("graddrop", "features", settings={"leak": Setting(0.0, high=1.0)}, linear=False, signs=True)
def graddrop(given: Given) -> MethodChoice:
    """GradDrop, gradient sign dropout (Chen et al. 2020, algorithm 1): each channel keeps one sign, drawn by its purity.

    The rows are gradients times the features' signs, summed over positions, [k, C]; the share `leak` of the others passes too.
    """
    rows, leak = given.rows.values, given.settings["leak"]
    purity = 0.5 * (1 + rows.sum(0) / (rows.abs().sum(0) + 1e-7))
    draw = torch.rand(purity.shape, generator=given.generator()).to(purity)
    kept = torch.where(purity > draw, rows > 0, (purity < draw) & (rows < 0)).to(rows)
    factors = leak + (1 - leak) * kept
    return MethodChoice(_mean(factors), factors=factors)


def _mean(factors: Tensor) -> Tensor:
    return factors.mean(1).to("cpu", torch.float64)
