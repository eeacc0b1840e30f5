"""What tasks share: positions stand for themselves, tasks keep their own, and each module does what its paper says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni.checkpoint.folder import load_folder, save_folder
from omni.config import DecoderConfig, ModelConfig, ProjectorConfig, from_dict, to_dict
from omni.encoder.whisper_config import WhisperConfig
from omni.errors import UserError
from omni.layout import Layout
from omni.model.multitask_projector import LTB, MTAN, PLE, SHARING, Bank, CrossStitch, DSelectK, Experts, Hard, MMoE
from omni.model.projector import Projector
from omni.model.speech_model import SpeechModel
from omni.tasks import TASKS
from omni.text import Tokenizer
from tests.close import assert_near

NAMES = ("hard", "mmoe", "cgc", "ple", "cross_stitch", "mtan", "ltb", "dselect_k")
TASK = torch.tensor([0, 2, 1, 0, 2, 2])


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return SHARING[name](6, 8, 3).eval()


def features() -> Tensor:
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", NAMES)
def test_positions_stand_for_themselves(name: str) -> None:
    """A batch is its positions, in any order."""
    module, x = made(name), features()
    whole = module(x, TASK)
    assert whole.shape == (6, 8)
    for i in range(6):
        assert_near(module(x[i : i + 1], TASK[i : i + 1]), whole[i : i + 1], 1e-5)
    assert module(x[:0], TASK[:0]).shape == (0, 8)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_takes_part_whichever_tasks_there_are(name: str) -> None:
    """DDP and FSDP want a gradient of each; that of a task that is not there is zero."""
    module = made(name).train()
    module(features(), torch.ones_like(TASK)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


def expert(experts: Experts, i: int, x: Tensor) -> Tensor:
    up = F.linear(x, experts.up.weight[i], experts.up.bias[i])
    return F.linear(F.gelu(up), experts.down.weight[i], experts.down.bias[i])


def test_mmoe_by_hand() -> None:
    module, x = made("mmoe"), features()
    assert isinstance(module, MMoE)
    for row, task, got in zip(x, TASK, module(x, TASK), strict=True):
        gate = F.linear(row, module.gates.weight[task], module.gates.bias[task]).softmax(-1)
        assert_near(got, sum(g * expert(module.experts, i, row) for i, g in enumerate(gate)), 1e-5)  # type: ignore[arg-type]


def shaken(module: nn.Module) -> Any:
    """Biases, gates and stitches do not stand at zero either."""
    g = torch.Generator().manual_seed(3)
    for p in module.parameters():
        p.data = p.data + 0.5 * torch.randn(p.shape, generator=g)
    return module.eval()


def mapped(bank: Bank, i: int, x: Tensor) -> Tensor:
    return F.linear(x, bank.weight[i], bank.bias[i])


def mixed(logits: Tensor, parts: list[Tensor]) -> Tensor:
    return torch.stack([w * part for w, part in zip(logits.softmax(-1), parts, strict=True)]).sum(0)


def test_hard_sharing_by_hand() -> None:
    """One network of two layers, whatever the task."""
    module, x = shaken(Hard(6, 8, 3)), features()
    assert_near(module(x, TASK), expert(module.shared, 0, x), 1e-5)


def test_ple_by_hand() -> None:
    """Progressive layered extraction (Tang et al. 2020), three layers of two experts each.

    A task's experts and gate read what that task's gate said last, the shared ones what the shared gate said, which mixes the
    experts of all tasks and the shared ones.
    """
    module, x = shaken(PLE(6, 8, 3, layers=3, shared=2, own=2)), features()
    for row, task, got in zip(x, TASK.tolist(), module(x, TASK), strict=True):
        shared, own = row, [row] * 3
        for i, gates in enumerate(module.gates):
            common = [expert(module.common[i], e, shared) for e in range(2)]
            private = [[expert(module.private[i], 2 * t + e, own[t]) for e in range(2)] for t in range(3)]
            own = [mixed(mapped(gates, t, own[t]), [*private[t], *common]) for t in range(3)]
            if i < 2:
                shared = mixed(module.mixers[i](shared), [*private[0], *private[1], *private[2], *common])
        assert_near(got, own[task], 1e-5)


def test_cross_stitch_by_hand() -> None:
    """Misra et al. 2016, eq. 1, after each layer's activation but the last: row s of a stitch is what tower s reads next."""
    module, x = shaken(CrossStitch(6, 8, 3, layers=3)), features()
    for row, task, got in zip(x, TASK.tolist(), module(x, TASK), strict=True):
        towers = [mapped(module.towers[0], t, row) for t in range(3)]
        for tower, alpha in zip(module.towers[1:], module.stitches, strict=True):
            said = [F.gelu(t) for t in towers]
            towers = [mapped(tower, s, alpha[s, 0] * said[0] + alpha[s, 1] * said[1] + alpha[s, 2] * said[2]) for s in range(3)]
        assert_near(got, towers[task], 1e-5)


def test_mtan_by_hand() -> None:
    """Liu, Johns and Davison 2019: a mask between 0 and 1 over the shared features of each layer.

    The first mask reads these alone, later ones also what the task has made of the layer before.
    """
    module, x = shaken(MTAN(6, 8, 3, layers=3)), features()
    for row, task, got in zip(x, TASK.tolist(), module(x, TASK), strict=True):
        shared, seen = row, torch.zeros(0)
        for layer, masks, outs in zip(module.shared, module.masks, module.outs, strict=True):
            shared = expert(layer, 0, shared)
            mask = mapped(masks, task, torch.cat([shared, seen])).sigmoid()
            seen = mapped(outs, task, mask * shared)
        assert_near(got, seen, 1e-5)


def test_a_branch_is_one_path() -> None:
    """Out of training every task takes its likeliest nodes; in training draws differ."""
    module, x = made("ltb"), features()
    assert isinstance(module, LTB)
    module.leaves.data[1, 2], module.parents.data[0, 2, 1] = 5.0, 5.0
    hidden = F.linear(x, module.nodes[0].weight[1], module.nodes[0].bias[1])
    wanted = F.linear(F.gelu(hidden), module.nodes[1].weight[2], module.nodes[1].bias[2])
    assert_near(module(x, TASK * 0 + 1), wanted, 1e-5)
    module.train()
    assert not module(x, TASK).allclose(module(x, TASK))


@pytest.mark.parametrize("experts", [4, 8])
def test_dselect_k_settles_on_k(experts: int) -> None:
    """Gates sum to 1; with digits beyond the steps' width at most two experts are left."""
    module = DSelectK(6, 8, 3, experts=experts)
    assert_near(module.gate().sum(1), torch.ones(3), 1e-5)
    assert (module.gate() > 0).all()
    module.digits.data = 2 * torch.randn(module.digits.shape, generator=torch.Generator().manual_seed(5)).sign()
    assert ((module.gate() > 0).sum(1) <= 2).all()
    assert_near(module.gate().sum(1), torch.ones(3), 1e-5)
    with pytest.raises(UserError, match=r"projector.settings.experts is 5; dselect_k .* give a power of two"):
        ProjectorConfig("dselect_k", settings={"experts": 5})
    with pytest.raises(UserError, match=r"projector.settings.experts is 1; .* give a power of two, 2 at least"):
        ProjectorConfig("dselect_k", settings={"experts": 1})


SHARED = ModelConfig(
    Layout.build([12, 12, 6, 8], 256, specials=8),
    WhisperConfig(width=16, heads=2, layers=1, window_seconds=2.0),
    ProjectorConfig("mmoe", stack=2, settings={"experts": 3}),
    DecoderConfig(width=32, layers=1, heads=4, kv_heads=2, mlp_width=48),
)
CLIPS = [4, 5, 3]


@pytest.mark.parametrize("name", NAMES)
def test_clips_by_name_are_positions_by_number(name: str) -> None:
    """What is served is what was trained: a name for each clip, or a number in the table of tasks for each feature."""
    torch.manual_seed(0)
    projector = Projector(ProjectorConfig(name, stack=2), 6, 8).eval()  # type: ignore[arg-type]
    frames = torch.randn(sum(CLIPS), 6, generator=torch.Generator().manual_seed(1))
    names = ["A1A2", "A1T1", "A1T2"]
    numbers = [list(TASKS).index(task) for task, n in zip(names, CLIPS, strict=True) for _ in range(-(-n // 2))]
    whole = projector(frames, CLIPS, torch.tensor(numbers))
    assert whole.shape == (7, 8) and whole.equal(projector(frames, CLIPS, names))
    alone = [projector(f, [n], [task]) for f, n, task in zip(frames.split(CLIPS), CLIPS, names, strict=True)]
    assert_near(torch.cat(alone), whole, 1e-5)


def test_a_task_must_be_given_and_known() -> None:
    projector, frames = Projector(replace(SHARED.projector, tasks=("A1T1", "A1A2")), 6, 8), torch.randn(4, 6)
    with pytest.raises(ValueError, match="gated by task"):
        projector(frames, [4])
    with pytest.raises(UserError, match="made for the tasks A1T1, A1A2; it has no part for A1T2"):
        projector(frames, [4], ["A1T2"])
    plain = Projector(ProjectorConfig("linear"), 6, 8)
    assert plain(frames, [4]).equal(plain(frames, [4], ["A1T2"]))


@pytest.mark.parametrize("name", NAMES)
def test_a_shared_model_is_saved_and_loaded(tmp_path: Path, name: str) -> None:
    """Its kind and settings stand in the configuration, and it is built without values first, as every folder is."""
    config = replace(SHARED, projector=ProjectorConfig(name, stack=2))  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = SpeechModel(config).eval()
    save_folder(tmp_path / "model", config, model.state_dict(), Tokenizer.bytes())
    loaded = load_folder(tmp_path / "model")
    assert loaded.config == config == from_dict(ModelConfig, to_dict(config))
    mels, task = torch.randn(1, config.encoder.n_mels, 20, generator=torch.Generator().manual_seed(1)), ["A1T2"]
    assert loaded.model.encode(mels, [20], [10], task).equal(model.encode(mels, [20], [10], task))
