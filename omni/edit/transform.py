"""The networks that MEND trains: maps from the factors of a gradient to the factors of an edit (Mitchell et al. 2022).

The gradient of a linear's weight is a sum over tokens of outer products of its input x and its output gradient delta. Both are
normalised by running statistics and go through small residual networks; their outer products are the edit.

Formulas: eric-mitchell/mend @ e04fdb9, `nn.py` (IDMLP, LRLinear) and `algs/mend.py` (GradientTransform). Statistics: Welford's,
in the form that takes many samples at once (Chan, Golub and LeVeque 1979).

Dimensions: N tokens, D features, I inputs and O outputs of the edited linear, M linears that share a network.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni.edit.config import TransformConfig
from omni.errors import UserError


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
        side = config.side(inputs, outputs)
        self.x_statistics, self.delta_statistics = Statistics(inputs), Statistics(outputs)
        self.both = IDMLP(inputs + outputs, config, modes) if side == "combined" else None
        self.x_net = IDMLP(inputs, config, modes) if side in ("separate", "x") else None
        self.delta_net = IDMLP(outputs, config, modes) if side in ("separate", "delta") else None

    def forward(self, x: Tensor, delta: Tensor, mode: int | None = None) -> tuple[Tensor, Tensor]:
        """Transform the factors without tokens whose x or delta is zero.

        Raises:
            UserError: the statistics have fewer than two tokens.
        """
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
