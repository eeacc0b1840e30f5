"""Solves the small convex problems of balance methods exactly, in float64 on the CPU.

TorchJD solves them with cvxpy, ecos, clarabel, scipy or quadprog. With the few tasks of a step, all sets of active constraints
can be tried at once instead; problems without constraints are solved by a damped Newton iteration.

Dimensions: m tasks, c inequalities.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

_RIDGE = 1e-9  # relative to the matrix's mean eigenvalue: selects the solution of least norm among equal ones

Array = np.ndarray


def quadratic(q: Array, linear: Array, equal: tuple[Array, Array], least: tuple[Array, Array]) -> Array:
    """The x [n] that minimises x'Qx / 2 + l'x where E x = e and A x >= a; Q must be positive semidefinite.

    Every set of active inequalities gives one linear system; of the solutions that keep all constraints the best is the
    optimum (the Karush-Kuhn-Tucker conditions).
    """
    n, (e_matrix, e_right), (a_matrix, a_right) = len(q), equal, least
    e, c = len(e_right), len(a_right)
    scale = max(np.trace(q) / n, 1e-300)
    active = (np.arange(2**c)[:, None] >> np.arange(c)) & 1  # [2^c, c]
    system = np.zeros((2**c, n + e + c, n + e + c))
    right = np.zeros((2**c, n + e + c))
    system[:, :n, :n] = q / scale + _RIDGE * np.eye(n)
    system[:, :n, n : n + e], system[:, n : n + e, :n] = -e_matrix.T, e_matrix
    system[:, :n, n + e :] = -a_matrix.T * active[:, None, :]
    system[:, n + e :, :n] = a_matrix * active[:, :, None]
    system[:, n + e :, n + e :] = np.eye(c) * (1 - active)[:, :, None]  # an inactive constraint has no multiplier
    right[:, :n] = -linear / scale
    right[:, n : n + e] = e_right
    right[:, n + e :] = a_right * active
    twice = system[:, n:, n:]  # regularised: contradictory active sets become solvable, and are rejected as infeasible below
    twice += 1e-14 * np.eye(e + c)
    x = np.linalg.solve(system, right[..., None])[:, :n, 0]
    kept = np.abs(x @ e_matrix.T - e_right).max(1, initial=0) < 1e-7
    kept &= (x @ a_matrix.T - a_right).min(1, initial=0) > -1e-9
    value = 0.5 * np.einsum("ki,ij,kj->k", x, q / scale + _RIDGE * np.eye(n), x) + x @ linear / scale
    return x[np.where(kept, value, np.inf).argmin()]


def on_simplex(q: Array, linear: Array | None = None) -> Array:
    """The w [m] >= 0 with sum 1 that minimises w'Qw / 2 + l'w."""
    m = len(q)
    w = quadratic(q, np.zeros(m) if linear is None else linear, (np.ones((1, m)), np.ones(1)), (np.eye(m), np.zeros(m)))
    w = w.clip(min=0)
    return w / w.sum()


def cagrad(gramian: Array, c: float) -> Array:
    """Weights on the simplex of CAGrad's dual (Liu et al. 2021, algorithm 1).

    The least w'Gb + c sqrt(b'Gb) sqrt(w'Gw), b uniform. As sqrt(s) is the least (s / t + t) / 2 over t > 0, each t leaves a
    quadratic problem, and the right t is the norm that it leads to.
    """
    gramian = gramian / max(np.trace(gramian), 1e-300)
    mean = gramian.mean(1)
    radius = c * np.sqrt(max(mean.mean(), 0.0))
    if radius == 0:
        return on_simplex(1e-6 * gramian, mean)

    def solve(t: float) -> tuple[Array, float]:
        w = on_simplex(radius / t * gramian, mean)
        return w, np.sqrt(max(w @ gramian @ w, 0.0)) - t

    low, high = 1e-9, float(np.sqrt(gramian.diagonal().max())) + 1e-9
    w, below = solve(low)
    if below <= 0:  # a combination of the gradients vanishes
        return w
    above = solve(high)[1]
    for turn in range(200):
        t = (low * above - high * below) / (above - below) if turn % 3 else (low + high) / 2
        w, miss = solve(t)
        if abs(miss) < 1e-13 * t or high - low < 1e-15:
            break
        low, below, high, above = (t, miss, high, above) if miss > 0 else (low, below, t, miss)
    return w


def fair(gramian: Array, power: float) -> Array:
    """The w > 0 [m] with G w = w ** -power, by Newton's method on the convex function whose gradient is the difference.

    Nash-MTL (Navon et al. 2022, eq. 2) has power 1, FairGrad (Ban and Ji 2024, eq. 4) 1 / alpha. Where gradients oppose each
    other wholly there is no solution; a ridge in each gradient's own square, which lifts the least eigenvalue of their cosines
    to 1e-8, keeps w finite then, and small enough that its products with gradients cancel as they should.
    """
    m = len(gramian)
    size = np.trace(gramian) / m
    if not size > 0:  # all gradients are zero: any weights will do
        return np.ones(m)
    g = gramian / size
    length = np.sqrt(g.diagonal().clip(1e-26))
    ridge = max(1e-8 - np.linalg.eigvalsh(g / length[:, None] / length)[0], 0.0)
    g = g + ridge * np.diag(g.diagonal()) + 1e-13 * np.eye(m)
    # The solution for the normalised Gramian, times size ** (-1 / (1 + power)), is that for the given one.
    w = np.ones(m)

    def value(w: Array) -> float:
        barrier = np.log(w) if power == 1 else w ** (1 - power) / (1 - power)
        return float(w @ g @ w / 2 - barrier.sum())

    for _ in range(500):
        gradient = g @ w - w**-power
        step = np.linalg.solve(g + np.diag(power * w ** (-power - 1)), gradient)
        slope, length = gradient @ step, 1.0
        while (w - length * step).min() <= 0 or value(w - length * step) > value(w) - 1e-4 * length * slope + 1e-14 * abs(
            value(w)
        ):
            length /= 2
            if length < 1e-12:
                break
        if length < 1e-12:
            break
        w = w - length * step
        if np.abs(step / w).max() < 1e-13:
            break
    return w * size ** (-1 / (1 + power))


def dual_cone(U: Tensor, G: Tensor, norm_eps: float, reg_eps: float) -> Tensor:
    """A `DualConeProjector` of TorchJD: for each u [..., m] the v >= u that minimises v'Gv.

    Args:
        norm_eps: a Gramian of a smaller trace counts as zero.
        reg_eps: added to the diagonal of the Gramian, which is divided by its trace before.
    """
    g = to_array(G)
    m, trace = len(g), np.trace(g)
    g = (g / trace if trace >= norm_eps else 0 * g) + reg_eps * np.eye(m)
    none = (np.zeros((0, m)), np.zeros(0))
    return like(np.apply_along_axis(lambda u: quadratic(g, np.zeros(m), none, (np.eye(m), u)), -1, to_array(U)), U)


def to_array(tensor: Tensor) -> Array:
    return tensor.detach().cpu().double().numpy()


def like(array: Array, tensor: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(tensor)


def solved(function: Callable[..., Array], gramian: Tensor, *args: float) -> Tensor:
    """Call a solver with the Gramian as an array; its result is a tensor of the Gramian's dtype and device."""
    return like(function(to_array(gramian), *args), gramian)
