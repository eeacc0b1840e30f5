"""Filling rows of a fixed length with whole examples.

A row starts with the example that has waited longest and takes, of the others in the buffer, those whose lengths fill the rest
best: the exact solution of the subset-sum problem, with sets of reachable sums as the bits of Python's integers (a microsecond
an example). Among equally full choices older examples go first, so nothing waits for long and the order stays close to that of
the draws.
"""

from __future__ import annotations

from collections.abc import Sequence


def choose(lengths: Sequence[int], room: int) -> list[int]:
    """Which examples fill a row of `room` positions best, as ascending indices; the first, oldest one is always among them.

    `lengths` are positive and each at most `room`.
    """
    mask = (1 << (room + 1)) - 1
    # reachable[i]: bit s is set where examples i, i + 1, ... have a subset of summed length s.
    reachable = [1] * (len(lengths) + 1)
    for i in range(len(lengths) - 1, 0, -1):
        reachable[i] = (reachable[i + 1] | reachable[i + 1] << lengths[i]) & mask
    rest = (reachable[1] & ((1 << (room - lengths[0] + 1)) - 1)).bit_length() - 1
    chosen = [0]
    for i in range(1, len(lengths)):
        if lengths[i] <= rest and reachable[i + 1] >> (rest - lengths[i]) & 1:
            chosen.append(i)
            rest -= lengths[i]
    return chosen
