"""MEND: a hypernetwork that turns the gradient of one correction into an edit (Mitchell et al. 2022, arXiv 2110.11309).

    edit of a linear:  W += lr * sum over tokens of delta' x'^T,     (x', delta') = transform(x, delta)
    trained by:        c_edit * loss(rephrased | edit) + c_loc * KL(unrelated answers before || after the edit)

The gradient of a linear's weight is a sum over tokens of outer products of its input x and its output gradient delta. Both are
normalised by running statistics and go through small residual networks; their outer products are the edit. The base model is
never changed and never stored: it is passed in.

Source of formulas and defaults: eric-mitchell/mend @ e04fdb9, `algs/mend.py`, `nn.py` (IDMLP, LRLinear), `trainer.py`,
`config/alg/mend.yaml`. Statistics: Welford's, in the form that takes many samples at once (Chan, Golub and LeVeque 1979).

Dimensions: N tokens, D features, I inputs and O outputs of the edited linear, M linears that share a network, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni.config import from_dict
from omni.edit.config import MendConfig, TransformConfig
from omni.edit.deltas import Delta, Edits, edited, find_linears, mlp_linears, shape_of, signature, stack
from omni.edit.storage import FolderPath, read_tensors, write_tensors
from omni.errors import UserError

LossOf = Callable[[nn.Module, Any], Tensor]
"""Scalar loss of a model on a batch."""

LogitsOf = Callable[[nn.Module, Any], Tensor]
"""Logits [N, V] of a model where a batch has targets."""


class Mend(nn.Module):
    """The hypernetwork: transforms for named linears, and a trained factor for each. `shapes`: (I, O) of each linear by
    name; the order is that of `edit_lr`, and of the modes of a shared network."""

    def __init__(self, shapes: Mapping[str, tuple[int, int]], config: MendConfig | None = None) -> None:
        super().__init__()
        self.config, self.shapes = config or MendConfig(), dict(shapes)
        self.base: dict[str, int] | None = None  # checksum of each linear it was trained for, where known (`tie`)
        shared = self.config.shared
        keys = {name: f"{i}x{o}" if shared else name.replace(".", "#") for name, (i, o) in shapes.items()}
        members = {key: [name for name, own in keys.items() if own == key] for key in keys.values()}
        # The network of each linear, and its mode there.
        self.networks = {name: (key, members[key].index(name) if shared else None) for name, key in keys.items()}
        self.transforms = nn.ModuleDict()
        for key, names in members.items():
            modes, stages = len(names) if shared else None, range(2 if self.config.split else 1)
            made = (GradientTransform(*shapes[names[0]], self.config.transform, modes) for _ in stages)
            self.transforms[key] = nn.ModuleList(made)
        self.edit_lr = nn.Parameter(torch.full((len(shapes),), self.config.edit_lr))

    @classmethod
    def of(cls, model: nn.Module, linears: Sequence[str] | None = None, config: MendConfig | None = None) -> Mend:
        """Make a hypernetwork for a model's linears, by default those of `mlp_linears`; UserError where a name is none."""
        names = mlp_linears(model) if linears is None else linears
        return cls({name: shape_of(part) for name, part in find_linears(model, names).items()}, config)

    def tie(self, model: nn.Module) -> None:
        """Store checksums of a model's linears: `edit` refuses others; in a sharded model all processes must call it."""
        self.base = {name: signature(name, part) for name, part in find_linears(model, self.shapes).items()}

    def forward(self, factors: Mapping[str, Factors]) -> Edits:
        """Turn the factors of a gradient into edits, through which gradients flow back into the hypernetwork."""
        deltas = {}
        for name, lr in zip(self.shapes, self.edit_lr, strict=True):
            key, mode = self.networks[name]
            x, delta = factors[name]
            x, delta = x.to(lr.device), delta.to(lr.device)
            for stage in self.transforms[key].children():
                x, delta = stage(x, delta, mode)
            deltas[name] = Delta(b=delta, a=x, lr=lr)
        return Edits(deltas)

    def edit(self, model: nn.Module, batch: Any, loss_of: LossOf) -> Edits:
        """Compute the edit that makes the model answer as in `batch`, detached and signed for the model; statistics are not
        updated. UserError: a linear is not there, or has another shape, or other weights than those the editor is tied to."""
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
                return self(factors).map(Tensor.detach).signed(model)
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
        rephrased: other questions with the same answers, on which the edit is evaluated; None for `edit` itself, alone.
        locality: unrelated questions, whose answers should stay.
        beside: further corrections, each an edit of its own; `rephrased` asks them too.
    """
    with torch.no_grad():
        before = logits_of(model, locality)
    edits = stack([mend(gradient_factors(model, mend.shapes, correction, loss_of)) for correction in (edit, *beside)])
    trained = [p for p in mend.parameters() if p.requires_grad]
    with torch.enable_grad(), edited(model, edits):
        edit_loss = loss_of(model, edit if rephrased is None else rephrased)
        locality_loss = kl_divergence(before, logits_of(model, locality))
        total = mend.config.c_edit * edit_loss + mend.config.c_loc * locality_loss
        total.backward(inputs=trained)
    return FitLosses(total.detach(), edit_loss.detach(), locality_loss.detach())


def save_mend(folder: FolderPath, mend: Mend) -> None:
    """Write a hypernetwork with its statistics; UserError where the place cannot be written."""
    write_tensors(folder, "mend", mend.state_dict(), {"config": asdict(mend.config), "linears": mend.shapes, "base": mend.base})


def load_mend(folder: FolderPath) -> Mend:
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
    wide = torch.promote_types(before.dtype, torch.float32)
    log_p, log_q = before.to(wide).log_softmax(-1), after.to(wide).log_softmax(-1)
    each = (log_p.exp() * (log_p - log_q)).sum(-1)
    return each.sum() / max(1, len(each))


class Factors(NamedTuple):
    """x [N, I] and delta [N, O]: the gradient of the weight [O, I] is delta.T @ x."""

    x: Tensor
    delta: Tensor


def gradient_factors(
    model: nn.Module, linears: Iterable[str], batch: Any, loss_of: Callable[[nn.Module, Any], Tensor]
) -> dict[str, Factors]:
    """Factors of the gradient of `loss_of(model, batch)`, without graph; no parameter's `grad` is touched.

    The base may be frozen, sharded or quantised, and its blocks recomputed. A linear that is called several times gives the
    tokens of all its calls. Sharded processes must be given the same batch. UserError: a name is no linear of the model, or
    the loss does not depend on its output."""
    parts = find_linears(model, linears)
    calls: list[tuple[str, Tensor, Tensor]] = []
    recording = True
    with ExitStack() as stop, torch.enable_grad():
        for name, part in parts.items():

            def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor, name: str = name) -> None:
                if not out.requires_grad:  # a frozen base: the graph starts here, and again where it is recomputed
                    out.requires_grad_()
                if recording:
                    x = args[0] if args else next(iter(kwargs.values()))
                    calls.append((name, x.detach(), out))

            stop.callback(part.register_forward_hook(record, with_kwargs=True).remove)
        loss = loss_of(model, batch)
        recording = False
        grads: tuple[Tensor | None, ...] = ()
        if calls and loss.requires_grad:
            grads = torch.autograd.grad(loss, [out for _, _, out in calls], allow_unused=True)
    pairs = [(name, x, grad) for (name, x, _), grad in zip(calls, grads, strict=bool(grads)) if grad is not None]
    factors = {}
    for name in parts:
        mine = [(x.reshape(-1, x.shape[-1]), grad.detach().reshape(-1, grad.shape[-1])) for at, x, grad in pairs if at == name]
        if not mine:
            raise UserError(
                f"the loss does not depend on what {name} puts out: it may be used by its weight instead of being called; "
                "choose another linear"
            )
        factors[name] = Factors(torch.cat([x for x, _ in mine]), torch.cat([delta for _, delta in mine]))
    return factors


class Statistics(nn.Module):
    """Running mean and standard deviation of samples [N, D]; they never hold a graph."""

    mean: Tensor
    squares: Tensor
    count: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("squares", torch.zeros(size))  # summed squared distances from the mean
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def update(self, samples: Tensor) -> None:
        """Add samples [N, D] to the statistics."""
        if not len(samples):
            return
        samples = samples.detach().to(self.mean.dtype)
        here = samples.mean(0)
        apart, share = here - self.mean, len(samples) / (self.count + len(samples)).to(self.mean.dtype)
        self.squares += (samples - here).square().sum(0) + apart.square() * (self.count * share)
        self.mean += apart * share
        self.count += len(samples)

    def normalise(self, x: Tensor) -> Tensor:
        """(x - mean) / (standard deviation + 1e-7); gradients flow through x only."""
        return (x - self.mean) / ((self.squares / (self.count - 1)).sqrt() + 1e-7)


class LowRankLayer(nn.Module):
    """max(0, (u v x + bias) * scale_m + shift_m), plus x where it is initialised as the identity. x [N, D]."""

    def __init__(self, size: int, rank: int, init: Literal["id", "xavier"], modes: int | None) -> None:
        super().__init__()
        rank = min(rank, size)
        self.residual = init == "id"
        self.u = nn.Parameter(torch.zeros(size, rank))
        self.v = nn.Parameter(torch.randn(rank, size))
        if not self.residual:
            nn.init.xavier_uniform_(self.u, gain=nn.init.calculate_gain("relu"))
            nn.init.xavier_uniform_(self.v)
        self.bias = nn.Parameter(torch.zeros(size))
        self.scale = nn.Parameter(torch.ones(modes, size)) if modes else None
        self.shift = nn.Parameter(torch.zeros(modes, size)) if modes else None

    def forward(self, x: Tensor, mode: int | None = None) -> Tensor:
        y = F.linear(F.linear(x, self.v), self.u, self.bias)
        if mode is not None and self.scale is not None and self.shift is not None:
            y = y * self.scale[mode] + self.shift[mode]
        y = y.clamp(min=0)  # its gradient at 0 is 1; relu's is 0, so that training would not start
        return y + x if self.residual else y


class IDMLP(nn.Module):
    """Low-rank layers of one width, shared by `modes` linears, each with its own scale and shift."""

    def __init__(self, size: int, config: TransformConfig, modes: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LowRankLayer(size, config.rank, config.init, modes) for _ in range(config.hidden + 1))

    def forward(self, x: Tensor, mode: int | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mode)
        return x


class GradientTransform(nn.Module):
    """Maps factors x [N, I] and delta [N, O] of a gradient to those of an edit, in fp32 (fp64 for fp64 inputs).

    In training the statistics are first updated with the factors. They are detached for that, and only for that, so that two
    transforms in a row are both trained.
    """

    def __init__(self, inputs: int, outputs: int, config: TransformConfig, modes: int | None = None) -> None:
        super().__init__()
        self.inputs, self.outputs, self.norm = inputs, outputs, config.norm
        sides = config.sides
        if sides == "one_sided":
            sides = "delta_only" if inputs > outputs else "x_only"
        self.x_statistics, self.delta_statistics = Statistics(inputs), Statistics(outputs)
        self.both = IDMLP(inputs + outputs, config, modes) if sides == "combined" else None
        self.x_net = IDMLP(inputs, config, modes) if sides in ("separate", "x_only") else None
        self.delta_net = IDMLP(outputs, config, modes) if sides in ("separate", "delta_only") else None

    def forward(self, x: Tensor, delta: Tensor, mode: int | None = None) -> tuple[Tensor, Tensor]:
        """Transform the factors, without tokens whose x or delta is 0. UserError: the statistics have fewer than two tokens."""
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(x.dtype, torch.float32)
            x, delta = x.reshape(-1, self.inputs).to(wide), delta.reshape(-1, self.outputs).to(wide)
            used = (x != 0).any(1) & (delta != 0).any(1)
            x, delta = x[used], delta[used]
            if self.training:
                self.x_statistics.update(x)
                self.delta_statistics.update(delta)
            if self.norm:
                if int(self.x_statistics.count) < 2:
                    raise UserError(
                        f"the statistics of MEND rest on {int(self.x_statistics.count)} tokens; fit it first, and start with "
                        "an edit of two tokens or more"
                    )
                x, delta = self.x_statistics.normalise(x), self.delta_statistics.normalise(delta)
            if self.both is not None:
                x, delta = self.both(torch.cat([x, delta], dim=1), mode).split([self.inputs, self.outputs], dim=1)
            if self.x_net is not None:
                x = self.x_net(x, mode)
            if self.delta_net is not None:
                delta = self.delta_net(delta, mode)
            return x, delta
