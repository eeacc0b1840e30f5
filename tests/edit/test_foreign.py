"""Archives as eric-mitchell/mend and EasyEdit save them; `tests/parity/mend.py` compares with the first one's own code."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from omni.edit.config import MendConfig, TransformConfig
from omni.edit.deltas import mlp_linears
from omni.edit.foreign import read_editor
from omni.errors import UserError
from tests.edit.toys import batch_of, build, loss_of, some_mend

NETS = {"both": "mlp", "x_net": "mlp1", "delta_net": "mlp2"}
TAILS = {"scale": "mode_scale.weight", "shift": "mode_shift.weight"}


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("echo run",)


def their_state(mend: Any, prefix: str = "mend") -> dict[str, Any]:
    """The tensors of a hypernetwork by their names, with the configuration of a language model among them."""
    out: dict[str, Any] = {"edit_lrs": mend.edit_lr.detach()}
    for key, stages in mend.transforms.items():
        group = f"{prefix}.({', '.join(key.split('x'))})" if mend.config.shared else f"{prefix}.{their(key)}#weight"
        for side, letter in (("x", "u"), ("delta", "v")):
            s = getattr(stages[0], f"{side}_statistics")
            out[f"{group}.{letter}_mean"], out[f"{group}.{letter}_s"] = s.mean, s.squares
            out[f"{group}.{letter}_std"] = (s.squares / (s.count - 1)).sqrt()
            out[f"{group}.k"] = s.count.float().reshape(1) if s.count else torch.full((1,), float("nan"))
        for name, p in stages[0].named_parameters():
            net, _, number, last = name.split(".")
            out[f"{group}.{NETS[net]}.layers.{number}.{TAILS.get(last, last)}"] = p.detach()
    return {**out, "model_config": LlamaConfig()}


def their(name: str) -> str:
    for a, b in (("decoder", "model"), ("blocks", "layers"), ("up", "up_proj"), ("down", "down_proj")):
        name = name.replace(a, b)
    return name


@pytest.fixture
def speech() -> nn.Module:
    return build("speech")


def write(path: Path, state: dict[str, Any], **more: Any) -> Path:
    saved = {"model": state, "opt": {"state": {}}, "lr_opt": None, "val_stats": {"edit/acc_val": 0.5}, "step": 7}
    torch.save(saved | more, path)
    return path


def settings(path: Path, speech: nn.Module, flat: bool, **changes: Any) -> Path:
    """`config.json` of mend, or EasyEdit's YAML."""
    names = {"inner_params": [f"{their(name)}.weight" for name in mlp_linears(speech)]}
    mend = {"norm": True, "init": "id", "mlp_class": "IDMLP", **changes}
    data = {**names, **mend} if flat else {"model": {"name": "x", **names}, "mend": mend}
    path.write_text(json.dumps({**data, "edit_lr": 1e-3, "cedit": 0.2, "cloc": 3.0}))
    return path


@pytest.mark.sampled(3)
@pytest.mark.parametrize("flat", [True, False], ids=["EasyEdit", "mend"])
@pytest.mark.parametrize("sides", ["combined", "separate", "one_sided", "x_only", "delta_only"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "alone"])
def test_an_archive_is_read_by_our_names(speech, sides, shared, flat, tmp_path):
    mend = some_mend(speech, MendConfig(TransformConfig(sides, hidden=2, rank=5), shared=shared))
    mend.edit_lr.data = torch.rand(6)
    for seed in range(2):
        from omni.edit.mend import gradient_factors

        mend(gradient_factors(speech, mend.shapes, batch_of("speech", seed), loss_of))
    archive = write(tmp_path / "a", their_state(mend, "gtn" if flat else "mend"))
    read = read_editor(archive, speech, settings=settings(tmp_path / "s", speech, flat))
    wanted: dict[str, Tensor] = mend.state_dict()
    assert read.shapes == mend.shapes and read.state_dict().keys() == wanted.keys()
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
    assert (read.config.c_edit, read.config.c_loc, read.config.edit_lr) == (0.2, 3.0, 1e-3)
    a, b = (m.edit(speech, batch_of("speech", 9), loss_of) for m in (mend, read))
    assert all(torch.equal(a.deltas[n].weight(), b.deltas[n].weight()) for n in a.deltas)


def test_names_may_be_given_or_stand_in_the_archive(speech, tmp_path):
    alone = some_mend(speech, MendConfig(TransformConfig(rank=5), shared=False))
    assert read_editor(write(tmp_path / "a", their_state(alone)), speech).shapes == alone.shapes
    shared = write(tmp_path / "b", their_state(some_mend(speech, MendConfig(TransformConfig(rank=5)))))
    with pytest.raises(UserError, match=r"linears.*config.json"):
        read_editor(shared, speech)
    read = read_editor(shared, speech, settings=settings(tmp_path / "s", speech, True))
    assert list(read.shapes) == mlp_linears(speech)
    statistics = next(iter(read.transforms.values()))[0].x_statistics  # never fed: nan there
    assert int(statistics.count) == 0 and not statistics.mean.any()


def test_nothing_in_an_archive_is_run(speech, tmp_path, capfd):
    """A configuration of transformers is passed over; any other object is refused."""
    state = their_state(some_mend(speech, MendConfig(TransformConfig(rank=5), shared=False)))
    with pytest.raises(UserError, match=r"which could run code: nothing was run"):
        read_editor(write(tmp_path / "a", state, evil=Evil()), speech)
    with pytest.raises(UserError, match=r"which could run code: nothing was run"):
        read_editor(write(tmp_path / "a", state | {"model_config": Path("x")}), speech)
    assert "run" not in capfd.readouterr().out
