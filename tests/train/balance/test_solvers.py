"""The small convex problems against brute force, closed forms and the conditions of an optimum."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from train.balance.solvers import cagrad, dual_cone, fair, on_simplex, quadratic


def gramian(m: int, seed: int, width: int = 6) -> np.ndarray:
    rows = np.random.default_rng(seed).normal(size=(m, width)) + 0.3
    return rows @ rows.T


def grid(m: int, parts: int) -> np.ndarray:
    """Points of the simplex."""
    cuts = np.array([c for c in itertools.product(range(parts + 1), repeat=m - 1) if sum(c) <= parts])
    return np.concatenate([cuts, parts - cuts.sum(1, keepdims=True)], axis=1) / parts


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("m", [2, 3, 4])
def test_least_norm_on_the_simplex(m: int, seed: int) -> None:
    """No point of a fine grid is better, and the optimum's condition holds: every gradient has at least its square norm."""
    g = gramian(m, seed)
    w = on_simplex(g)
    assert w.min() >= 0 and w.sum() == pytest.approx(1, abs=1e-12)
    points = grid(m, 30)
    assert w @ g @ w <= np.einsum("ki,ij,kj->k", points, g, points).min() + 1e-9
    assert (g @ w).min() >= w @ g @ w - 1e-7 * np.trace(g)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("c", [0.2, 0.5, 1.5])
def test_cagrad_is_the_least_of_its_dual(seed: int, c: float) -> None:
    g, points = gramian(3, seed), grid(3, 150)

    def value(w: np.ndarray) -> np.ndarray:
        return w @ g.mean(1) + c * np.sqrt(g.mean()) * np.sqrt(np.einsum("...i,ij,...j->...", w, g, w))

    assert value(cagrad(g, c)) <= value(points).min() + 1e-9 * np.trace(g)
    assert value(cagrad(g, c)) == pytest.approx(value(points).min(), rel=1e-3)
    assert cagrad(1e6 * g, c) == pytest.approx(cagrad(g, c), abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("power", [1.0, 0.5, 2.0, 10.0])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_fair_solves_its_equation(seed: int, power: float, size: float) -> None:
    g = size * gramian(4, seed)
    w = fair(g, power)
    assert w.min() > 0
    assert g @ w == pytest.approx(w**-power, rel=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_dual_cone(seed: int) -> None:
    """v >= u, G v >= 0, and one of both is tight for each task: the conditions of the projection."""
    g = torch.from_numpy(gramian(4, seed))
    u = torch.rand(4, generator=torch.Generator().manual_seed(seed)).double()
    v = dual_cone(u[None], g, 1e-4, 0.0)[0]
    assert (v - u).min() >= -1e-8
    assert (g @ v).min() >= -1e-6
    assert ((v - u) * (g @ v)).abs().max() < 1e-6


def test_quadratic_between_two_walls() -> None:
    """x^2 + y^2 with x + y = 1, x >= 0.8, y >= -1: the wall decides."""
    x = quadratic(
        np.eye(2), np.zeros(2), (np.ones((1, 2)), np.ones(1)), (np.eye(2), np.array([0.8, -1.0]))
    )  # fmt: skip
    assert x == pytest.approx([0.8, 0.2], abs=1e-8)
