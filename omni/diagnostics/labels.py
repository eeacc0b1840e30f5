"""Checks of a batch: labels in which the end is never trained, and streams or tasks without a target."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from omni.diagnostics.findings import Finding, some
from omni.diagnostics.held import tensors_in

TOKENS = ("input_ids", "tokens", "inputs", "ids")
LABELS = ("labels", "label", "targets", "target")
"""Usual names of ids and of their labels in a batch."""

REMEDY_END = (
    "mask by length, not by id: labels[time >= length] = ignore, with the first end counted in; or give padding an id of its "
    "own"
)

_LAST = re.compile(r"(.*)(?:\['(\w+)'\]|\.(\w+))")
"""Splits the path of a tensor in a batch into the part before the last name, and that name."""


def check_labels(tokens: Tensor, labels: Tensor, eos: int, pad: int, ignore: int = -100) -> list[Finding]:
    """Checks that the end of each sequence is trained where it follows trained tokens.

    Args:
        tokens, labels: ids [B, T]; a label is at the time step of its token, or one before it (shifted already).
        eos, pad: ids that end and fill a sequence; they are equal in some tokenizers.
        ignore: the label that is left out of the loss.

    Raises:
        ValueError: shapes differ or are not [B, T].
    """
    if tokens.shape != labels.shape or tokens.ndim != 2:
        raise ValueError(f"tokens {tuple(tokens.shape)} and labels {tuple(labels.shape)} must both be [B, T]")
    trained = labels != ignore
    at = trained & (tokens == labels)
    before = trained[:, :-1] & (tokens[:, 1:] == labels[:, :-1])
    shift = int(before.sum() > at.sum())
    time = torch.arange(tokens.shape[1], device=tokens.device)
    last = torch.where(trained, time, -1).amax(1)  # the last time step with a label; -1 where nothing is trained
    end = last + shift + 1  # time step of the token after it
    inside = (last >= 0) & (end < tokens.shape[1])
    follows = tokens.gather(1, end.clamp(0, tokens.shape[1] - 1)[:, None])[:, 0]
    taught = labels.gather(1, last.clamp_min(0)[:, None])[:, 0]
    wrong = (inside & (follows == eos) & (taught != eos)).nonzero()[:, 0].tolist()
    if not wrong:
        return []
    why = (
        f"pad and eos are both {eos}, and padding is masked by its id"
        if pad == eos
        else f"eos {eos} follows, with label {ignore}"
    )
    return [
        Finding(
            "label_end",
            f"{len(wrong)} of {len(tokens)} rows train no end ({why}): the model will not stop",
            REMEDY_END,
            tensor=f"labels of rows {some([str(row) for row in wrong])}; row {wrong[0]}, column {int(end[wrong[0]]) - shift}",
        )
    ]


def check_targets(counts: Tensor, names: Sequence[str] | tuple[Sequence[str], Sequence[str]]) -> list[Finding]:
    """Finds streams or tasks without any target.

    Args:
        counts: targets of each stream (or task) [N], or of each task and stream [M, N].
        names: their names; for [M, N] two lists.

    Raises:
        ValueError: as many names as counts are needed.
    """
    if counts.ndim == 2:
        rows, columns = names
        return check_targets(counts.sum(1), list(rows)) + check_targets(counts.sum(0), list(columns))
    if counts.ndim != 1 or len(names) != len(counts):
        raise ValueError(f"counts have shape {tuple(counts.shape)}, names are {len(names)}: one name for each count is needed")
    empty = [str(name) for name, count in zip(names, counts.tolist(), strict=True) if not count]
    if not empty:
        return []
    return [
        Finding(
            "no_target",
            f"{some(empty)} got no target: a mean over nothing is nan",
            "sum the losses and divide by a count of at least 1, counted over the whole step; look at the data if it stays so",
            tensor=f"counts {counts.tolist()} of {some([str(n) for n in names], 12)}",
        )
    ]


def untrained_ends(batch: Any, end: int) -> tuple[list[Finding], bool]:
    """Checks whether labels in a batch mask every end; also returns whether the end is trained in any.

    A finding needs both: no label is the end, and an end follows trained tokens. So rows that are cut off, or some rows that
    leave their end out on purpose, give none.
    """
    pairs = list(_pairs(batch))
    if any(bool((labels == end).any()) for _, labels in pairs):
        return [], True
    found: list[Finding] = []
    for tokens, labels in pairs:
        twice = (tokens[:, 1:] == end) & (tokens[:, :-1] == end)
        found += check_labels(tokens, labels, end, end if bool(twice.any()) else -1)
    return found[:1], False


def _pairs(batch: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of ids and labels of one shape [B, T] in the same container."""
    beside: dict[str, dict[str, Tensor]] = {}
    for path, tensor in tensors_in(batch):
        match = _LAST.fullmatch(path)
        if match is not None and tensor.ndim == 2 and tensor.dtype in (torch.int64, torch.int32):
            beside.setdefault(match[1], {})[match[2] or match[3]] = tensor
    for named in beside.values():
        tokens = next((named[name] for name in TOKENS if name in named), None)
        labels = next((named[name] for name in LABELS if name in named), None)
        if tokens is not None and labels is not None and tokens.shape == labels.shape and tokens.device == labels.device:
            yield tokens, labels
