"""MEND: a hypernetwork that turns the gradient of one correction into an edit (Mitchell et al. 2022, arXiv 2110.11309).

    edit of a linear:  W += lr * sum over tokens of delta' x'^T,     (x', delta') = transform(x, delta)
    trained by:        c_edit * loss(rephrased | edit) + c_loc * KL(unrelated answers before || after the edit)

Source of formulas and defaults: eric-mitchell/mend @ e04fdb9, `algs/mend.py`, `trainer.py`, `config/alg/mend.yaml`. The base
model is never changed and never stored: it is passed in.

Dimensions: N tokens, I inputs, O outputs, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from omni.config import from_dict
from omni.edit.config import MendConfig
from omni.edit.deltas import Delta, Edits, edited, stack
from omni.edit.factors import Factors, gradient_factors
from omni.edit.linears import find_linears, mlp_linears, shape_of, signature
from omni.edit.storage import Place, read_tensors, write_tensors
from omni.edit.transform import GradientTransform
from omni.errors import UserError

LossOf = Callable[[nn.Module, Any], Tensor]
"""Scalar loss of a model on a batch."""

LogitsOf = Callable[[nn.Module, Any], Tensor]
"""Logits [N, V] of a model where a batch has targets."""


class Mend(nn.Module):
    """The hypernetwork: transforms for named linears, and a trained factor for each.

    Args:
        shapes: (I, O) of each linear by name; the order is that of `edit_lr`, and of the modes of a shared network.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, int]], config: MendConfig | None = None) -> None:
        super().__init__()
        if not shapes:
            raise UserError("MEND is given no linears to edit")
        self.config, self.shapes = config or MendConfig(), dict(shapes)
        self.base: dict[str, int] | None = None  # checksum of each linear it was trained for, where known (`tie`)
        self.places: dict[str, tuple[str, int | None]] = {}  # network of each linear, and its mode there
        modes: dict[str, int] = {}
        for name, (inputs, outputs) in shapes.items():
            key = f"{inputs}x{outputs}" if self.config.shared else name.replace(".", "#")
            self.places[name] = key, modes.get(key, 0) if self.config.shared else None
            modes[key] = modes.get(key, 0) + 1
        self.transforms = nn.ModuleDict()
        for name, (key, _) in self.places.items():
            if key not in self.transforms:
                number = modes[key] if self.config.shared else None
                self.transforms[key] = nn.ModuleList(
                    GradientTransform(*shapes[name], self.config.transform, number)
                    for _ in range(2 if self.config.split else 1)
                )
        self.edit_lr = nn.Parameter(torch.full((len(shapes),), self.config.edit_lr))

    @classmethod
    def of(cls, model: nn.Module, linears: Sequence[str] | None = None, config: MendConfig | None = None) -> Mend:
        """Make a hypernetwork for a model's linears, by default those of `mlp_linears`; UserError where a name is none."""
        names = mlp_linears(model) if linears is None else linears
        return cls({name: shape_of(part) for name, part in find_linears(model, names).items()}, config)

    def tie(self, model: nn.Module) -> None:
        """Store checksums of a model's linears, so that `edit` refuses any others; in a sharded model all processes must call
        it."""
        self.base = {name: signature(name, part) for name, part in find_linears(model, self.shapes).items()}

    def forward(self, factors: Mapping[str, Factors]) -> Edits:
        """Turn the factors of a gradient into edits, through which gradients flow back into the hypernetwork."""
        deltas = {}
        for name, lr in zip(self.shapes, self.edit_lr, strict=True):
            key, mode = self.places[name]
            x, delta = factors[name]
            x, delta = x.to(lr.device), delta.to(lr.device)
            for stage in self.transforms[key].children():
                x, delta = stage(x, delta, mode)
            deltas[name] = Delta(b=delta, a=x, lr=lr)
        return Edits(deltas)

    def edit(self, model: nn.Module, batch: Any, loss_of: LossOf) -> Edits:
        """Compute the edit that makes the model answer as in `batch`, detached and signed for the model; statistics are not
        updated.

        Raises:
            UserError: a linear is not there, or has another shape, or other weights than those the editor is tied to.
        """
        for name, part in find_linears(model, self.shapes).items():
            if shape_of(part) != self.shapes[name]:
                theirs, own = (" to ".join(map(str, shape)) for shape in (shape_of(part), self.shapes[name]))
                raise UserError(
                    f"the editor changes {name} from {own} features, the model's linear goes from {theirs}; it was trained for "
                    "another model"
                )
            if self.base is not None and signature(name, part) != self.base[name]:
                raise UserError(
                    f"the editor was trained for other weights of {name} than the model holds; take the model it was "
                    "trained for, or train an editor for this one"
                )
        training = self.training
        self.eval()
        try:
            factors = gradient_factors(model, self.shapes, batch, loss_of)
            with torch.no_grad():
                return self(factors).detach().signed(model)
        finally:
            self.train(training)


class FitLosses(NamedTuple):
    """Losses of a step, detached."""

    total: Tensor
    edit: Tensor
    locality: Tensor


def fit_step(
    model: nn.Module,
    mend: Mend,
    edit: Any,
    rephrased: Any | None,
    locality: Any,
    loss_of: LossOf,
    logits_of: LogitsOf,
    beside: Sequence[Any] = (),
) -> FitLosses:
    """Computes the losses of one correction, or of several that are applied together, and adds their gradients to the
    hypernetwork's parameters only. The optimizer's step is the caller's; the graph is freed when this returns.

    Args:
        edit: the correction, as it will be given.
        rephrased: other questions with the same answers, on which the edit is evaluated; None for `edit` itself.
        locality: unrelated questions, whose answers should stay.
        beside: further corrections, each an edit of its own; `rephrased` asks them too.

    Raises:
        ValueError: `beside` without `rephrased`.
    """
    if beside and rephrased is None:
        raise ValueError("several corrections are judged on `rephrased`, which asks all of them; it is None")
    with torch.no_grad():
        before = logits_of(model, locality)
    edits = stack([mend(gradient_factors(model, mend.shapes, one, loss_of)) for one in (edit, *beside)])
    trained = [p for p in mend.parameters() if p.requires_grad]
    with torch.enable_grad(), edited(model, edits):
        edit_loss = loss_of(model, edit if rephrased is None else rephrased)
        locality_loss = kl_divergence(before, logits_of(model, locality))
        total = mend.config.c_edit * edit_loss + mend.config.c_loc * locality_loss
        total.backward(inputs=trained)
    return FitLosses(total.detach(), edit_loss.detach(), locality_loss.detach())


def save_mend(folder: Place, mend: Mend) -> None:
    """Write a hypernetwork with its statistics; UserError where the place cannot be written."""
    write_tensors(folder, "mend", mend.state_dict(), {"config": asdict(mend.config), "linears": mend.shapes, "base": mend.base})


def load_mend(folder: Place) -> Mend:
    """Read a hypernetwork; UserError where the folder is broken."""
    state, facts = read_tensors(folder, "mend")
    config = from_dict(MendConfig, facts.get("config", {}), f"{folder}/mend.json: config")
    try:
        mend = Mend({name: (int(i), int(o)) for name, (i, o) in facts["linears"].items()}, config)
        mend.load_state_dict(state)
        if facts.get("base") is not None:
            mend.base = {name: int(facts["base"][name]) for name in mend.shapes}
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(f"{folder}/mend.json does not fit its tensors ({error}); fetch or make the folder again") from error
    return mend


def kl_divergence(before: Tensor, after: Tensor) -> Tensor:
    """Mean over positions of KL(before || after) in nats, logits [N, V] each; a gradient flows through both. 0 without
    positions. Measures how far unrelated answers move (Mitchell et al. 2022, section 4)."""
    if before.shape != after.shape or before.ndim != 2:
        raise ValueError(f"logits before and after must both be [N, V], not {list(before.shape)} and {list(after.shape)}")
    wide = torch.promote_types(before.dtype, torch.float32)
    log_p, log_q = before.to(wide).log_softmax(-1), after.to(wide).log_softmax(-1)
    each = (log_p.exp() * (log_p - log_q)).sum(-1)
    return each.sum() / max(1, len(each))
