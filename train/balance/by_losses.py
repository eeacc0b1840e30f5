"""Methods that use losses alone. Each gives the weights of the present tasks, [k]."""

from __future__ import annotations

import torch
from torch import Tensor

from train.balance.given import Given, MethodChoice
from train.balance.registry import Setting, rate, register_method

TINY = 1e-20


@register_method("equal", "loss", ahead=True)
def equal(given: Given) -> MethodChoice:
    return MethodChoice(torch.ones_like(given.losses))


@register_method("uncertainty", "loss", settings={"lr": rate(1e-3), "initial": Setting(-0.5, low=-20.0, high=20.0)}, ahead=True)
def uncertainty(given: Given) -> MethodChoice:
    """Kendall, Gal and Cipolla 2018: L / (2 s) + log(s) / 2 with a variance s per task, whose logarithm is trained by Adam."""
    initial, lr = given.settings["initial"], given.settings["lr"]
    weights = (-given.get("log_variance", initial)).exp() / 2
    given.adam("log_variance", 0.5 - weights * given.losses, initial, lr)
    return MethodChoice(weights)


@register_method("dwa", "loss", settings={"temperature": rate(2.0), "window": Setting(100, low=1)}, ahead=True)
def dwa(given: Given) -> MethodChoice:
    """Dynamic weight average (Liu, Johns and Davison 2019, eq. 7) over windows of steps instead of epochs.

    m softmax(r / T), r being a task's mean loss of the last window over that of the one before; a task's windows are counted
    in the steps it takes part in. Weights are relative to all tasks; r is 1 before two windows have passed.
    """
    window = given.settings["window"]
    total, seen = given.get("sum", 0.0), given.get("seen", 0.0)
    last, before = given.get("last", 0.0), given.get("before", 0.0)
    given.get("ratio", 1.0)
    weights = relative(given.state.values["ratio"], given.settings["temperature"])[given.present]
    total, seen = total + given.losses, seen + 1
    full = seen >= window
    before = torch.where(full, last, before)
    last = torch.where(full, total / seen, last)
    known = full & (before > 0)
    given.set("ratio", torch.where(known, last / before.clamp_min(TINY), given.get("ratio", 1.0)))
    given.set("last", last)
    given.set("before", before)
    given.set("sum", torch.where(full, 0.0, total))
    given.set("seen", torch.where(full, 0.0, seen))
    return MethodChoice(weights)


def relative(ratio: Tensor, temperature: float) -> Tensor:
    """DWA's weights of all tasks [m], from the ratios [m] of their mean losses."""
    return len(ratio) * (ratio / temperature).softmax(0)


@register_method("random", "loss", ahead=True)
def random(given: Given) -> MethodChoice:
    """Random loss weighting (Lin et al. 2022): the softmax of a normal draw, of all tasks."""
    return MethodChoice(drawn(given.state.tasks, given.key)[given.present])


def drawn(tasks: int, key: int) -> Tensor:
    """Draw the random weights of a step, [m]."""
    return torch.randn(tasks, generator=torch.Generator().manual_seed(key)).double().softmax(0)


@register_method("geometric", "loss")
def geometric(given: Given) -> MethodChoice:
    """Geometric loss strategy (Chennupati et al. 2019): the gradient of the geometric mean by each loss."""
    k = len(given.losses)
    mean = given.losses.clamp_min(TINY).log().mean().exp()
    return MethodChoice(mean / (k * given.losses.clamp_min(TINY)))


@register_method("stch", "loss", settings={"mu": rate(1.0), "warmup": Setting(100, low=1)})
def stch(given: Given) -> MethodChoice:
    """Smooth Tchebycheff scalarization (Lin et al. 2024): the gradient of k mu log sum exp(log(L / N) / mu).

    N is the mean loss of a task's first `warmup` steps, in which log L is trained instead.
    """
    mu, warmup = given.settings["mu"], given.settings["warmup"]
    steps, nadir = given.count(), given.get("nadir", 0.0)
    warm = steps <= warmup
    given.set("nadir", torch.where(warm, nadir + (given.losses - nadir) / steps, nadir))
    losses = given.losses.clamp_min(TINY)
    share = torch.zeros_like(losses)
    share[~warm] = ((losses / nadir.clamp_min(TINY)).log() / mu)[~warm].softmax(0) * int((~warm).sum())
    return MethodChoice(torch.where(warm, 1.0, share) / losses)


def famo_after(given: Given) -> None:
    """Train the logits by Adam, by the decrease of each log loss; `given.losses` are the same batch's after the step."""
    z = given.get("logits", 0.0).softmax(0)
    fallen = (given.get("previous", 0.0) + 1e-8).log() - (given.losses + 1e-8).log()
    gradient = z * (fallen - (z * fallen).sum())
    given.adam("logits", gradient, 0.0, given.settings["lr"], given.settings["weight_decay"])


@register_method(
    "famo",
    "loss",
    settings={"lr": rate(0.025), "weight_decay": Setting(1e-3), "look": Setting("next", choices=("next", "same"))},
    after=famo_after,
    again=lambda settings: settings["look"] == "same",
)
def famo(given: Given) -> MethodChoice:
    """FAMO (Liu et al. 2023, algorithm 2): the gradient of the log losses under softmax weights, normalized.

    The logits are trained by `famo_after`, once the losses after the step are known.
    """
    z = given.get("logits", 0.0).softmax(0)
    ratio = z / (given.losses + 1e-8)
    given.get("previous", 0.0)
    given.set("previous", given.losses)
    return MethodChoice(ratio / ratio.sum())
