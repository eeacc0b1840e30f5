"""What a head `tokens` reads in a clip: the likeliest readings, by a search of prefixes, and the language model's choice.

The head hears, and knows no sentences; the language model knows sentences. Of the readings that sounded most alike that one is
taken whose weighted sum of both log probabilities is largest (shallow fusion: Gulcehre et al. 2015, arXiv:1503.03535).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from omni.model.decoder import Decoder, Hidden
from omni.tasks import written

LOOKED_AT, WIDTH, MARGIN, CLOSE = 8, 64, 9.0, 6.0
"""Tokens of a position that the search looks at, readings that it keeps, how far below the likeliest a token is given up, and a
reading at the end."""
PRIOR, PER_TOKEN = 0.5, 3.0
"""Weight of the language model's log probability, and what each token adds, as a longer reading is the less likely one."""

Ids = tuple[int, ...]


def readings(logits: Tensor, ids: Tensor, blank: Tensor) -> dict[Ids, float]:
    """The likeliest readings of a clip by CTC and, but for a constant, their log probabilities (prefix search: Hannun et al.
    2014, arXiv:1408.2873).

    Args:
        logits: of the likeliest tokens of each position, falling [N, k]; `ids`: these [N, k].
        blank: logit of no token [N].
    """
    beam: dict[Ids, tuple[float, float]] = {(): (0.0, -math.inf)}  # that end in a blank, and in their last token
    for none, scores, tokens in zip(blank.tolist(), logits.tolist(), ids.tolist(), strict=True):
        near = [(score, i) for score, i in zip(scores, tokens, strict=True) if score > max(none, scores[0]) - MARGIN]
        ends: dict[Ids, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        for prefix, (quiet, loud) in beam.items():
            both = _log_sum((quiet, loud))
            ends[prefix][0].append(both + none)
            for score, i in near:
                again, longer = prefix[-1:] == (i,), (*prefix, i)
                ends[longer][1].append(score + (quiet if again else both))
                if again:
                    ends[prefix][1].append(score + loud)
        summed = {prefix: (_log_sum(quiet), _log_sum(loud)) for prefix, (quiet, loud) in ends.items()}
        beam = dict(sorted(summed.items(), key=lambda item: _log_sum(item[1]), reverse=True)[:WIDTH])
    candidates = {prefix: _log_sum(parts) for prefix, parts in beam.items()}
    return {prefix: score for prefix, score in candidates.items() if score >= max(candidates.values()) - CLOSE}


def _log_sum(values: Iterable[float]) -> float:
    known = [value for value in values if value > -math.inf]
    return max(known) + math.log(sum(math.exp(value - max(known)) for value in known)) if known else -math.inf


def choose(decoder: Decoder, candidates: dict[Ids, float]) -> Ids:
    """The one of `readings` that the head and the language model find likeliest together."""
    first, texts = max(candidates, key=candidates.__getitem__), [ids for ids in candidates if ids]
    if not first or len(texts) == 1:
        return first
    known = dict(zip(texts, log_probabilities(decoder, texts), strict=True))
    return max(texts, key=lambda ids: candidates[ids] + PRIOR * known[ids] + PER_TOKEN * len(ids))


@torch.no_grad()
def log_probabilities(decoder: Decoder, texts: Sequence[Ids]) -> list[float]:
    """Log probability of each of these texts as a written question, up to its end; what begins alike is run once."""
    layout, device = decoder.layout, decoder.norm.weight.device
    before, after = layout.chat.question if layout.chat else ((layout.text.special("input"),), (layout.text.special("end"),))
    whole = [(*before, *ids, *after[:1]) for ids in texts]
    nodes = {part: n for n, part in enumerate(dict.fromkeys(ids[:k] for ids in whole for k in range(1, len(ids))))}
    seen = torch.eye(len(nodes), dtype=torch.bool)
    for part, n in nodes.items():
        if len(part) > 1:
            seen[n] |= seen[nodes[part[:-1]]]
    columns = written(layout, [part[-1] for part in nodes]).tokens
    hidden = decoder.read_tree(columns.to(device), seen.to(device))
    steps = [[(nodes[ids[:k]], ids[k]) for k in range(1, len(ids))] for ids in whole]
    pairs = list(dict.fromkeys(chain(*steps)))
    logs = list[Tensor]()
    for part in torch.tensor(pairs, device=device).split(256):  # no memory of every node times the vocabulary
        own = hidden[part[:, 0]]
        logits = decoder.text_logits(Hidden(own, own)).float()
        logs.append(logits.gather(1, part[:, 1:])[:, 0] - logits.logsumexp(-1))
    known = dict(zip(pairs, torch.cat(logs).tolist(), strict=True))
    return [sum(known[pair] for pair in text) for text in steps]
