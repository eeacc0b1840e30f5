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

_TOKENS = re.compile(rf"(?<=[.'])({'|'.join(TOKENS)})(?='\]$|$)")
"""Matches the name of ids at the end of a path in a batch."""


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
    masked = f"pad and eos are both {eos}, and padding is masked by its id"
    why = masked if pad == eos else f"eos {eos} follows, with label {ignore}"
    what = f"{len(wrong)} of {len(tokens)} rows train no end ({why}): the model will not stop"
    where = f"labels of rows {some([str(row) for row in wrong])}; row {wrong[0]}, column {int(end[wrong[0]]) - shift}"
    return [Finding("label_end", what, REMEDY_END, tensor=where)]


def check_targets(counts: Tensor, names: Sequence[str]) -> list[Finding]:
    """Finds streams or tasks without any target.

    Args:
        counts: targets of each stream (or task) [N].

    Raises:
        ValueError: there are not as many names as counts.
    """
    numbers = counts.tolist()
    empty = [str(name) for name, count in zip(names, numbers, strict=True) if not count]
    if not empty:
        return []
    what = f"{some(empty)} got no target: a mean over nothing is nan"
    remedy = "sum the losses and divide by a count of at least 1, counted over the whole step; look at the data if it stays so"
    return [Finding("no_target", what, remedy, tensor=f"counts {numbers} of {some([str(n) for n in names], 12)}")]


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
    found = {path: t for path, t in tensors_in(batch) if t.ndim == 2 and t.dtype in (torch.int64, torch.int32)}
    for path, tokens in found.items():
        beside = [found.get(_TOKENS.sub(name, path)) for name in LABELS if _TOKENS.search(path)]
        for labels in [t for t in beside if t is not None][:1]:
            if tokens.shape == labels.shape and tokens.device == labels.device:
                yield tokens, labels
