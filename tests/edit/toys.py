"""Tiny models to edit, with a loss and logits each; and a program of two processes that shards one.

`python -m tests.edit.toys FOLDER NAME` (with RANK and WORLD_SIZE) writes what the sharded model says to FOLDER.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from omni.config import DecoderConfig, ModelConfig
from omni.edit.config import MendConfig, TransformConfig
from omni.edit.deltas import Delta, Edits, find_linears, mlp_linears, shape_of
from omni.edit.mend import Mend
from omni.encoder.whisper_config import WhisperConfig
from omni.layout import Layout
from omni.model.speech_model import SpeechModel
from tests.guarded import child

WORDS = 24
IDS = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gpt2() -> nn.Module:
    """Transposed weights (`Conv1D`), biases, trained positions."""
    config = GPT2Config(**IDS, n_positions=32, n_embd=16, n_layer=3, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = LlamaConfig(**IDS, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2)
    return LlamaForCausalLM(config)


def speech() -> nn.Module:
    """Our model: two audio streams and one of text, a block behind the text head."""
    return SpeechModel(
        ModelConfig(
            Layout.build([WORDS, WORDS], 256, specials=8),
            WhisperConfig(width=16, heads=2, layers=1, window_seconds=2.0),
            decoder=DecoderConfig(width=16, layers=4, heads=4, kv_heads=2, mlp_width=24, context=64, post_layers=1),
        )
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama, "speech": speech}


def build(name: str) -> nn.Module:
    """A model with weights large enough for an edit to show."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.2) if p.ndim > 1 else p.add_(torch.randn_like(p) * 0.1)
    return model


def set_checkpointing(model: nn.Module) -> None:
    """Recompute every block."""
    if isinstance(model, SpeechModel):
        model.set_checkpointing(True)
    else:
        model.train()  # transformers recomputes only then; the toys have no dropout
        model.gradient_checkpointing_enable({"use_reentrant": False})


def batch_of(name: str, seed: int, rows: int = 2) -> Tensor:
    """Ids [B, T], or [B, K, T] for the speech model."""
    shape = (rows, 3, 7) if name == "speech" else (rows, 7)
    return torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(seed))


def all_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """[B, T, V], all streams side by side."""
    if ids.ndim == 2:
        return model(ids).logits
    decoder = model.decoder  # through `forward` of the whole, as every wrapper has it
    return torch.cat(decoder.logits(model(ids)), dim=-1)


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """[N, V]."""
    return all_logits(model, ids).flatten(0, 1)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean cross-entropy of the next ids; the text's for the speech model, and half as much of its first audio stream."""
    logits = all_logits(model, ids)[:, :-1]
    if ids.ndim == 2:
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    text, audio = logits[..., -model.layout.text.vocabulary :], logits[..., : model.layout.audio[0].vocabulary]
    return F.cross_entropy(text.flatten(0, 1), ids[:, 2, 1:].flatten()) + 0.5 * F.cross_entropy(
        audio.flatten(0, 1), ids[:, 0, 1:].flatten()
    )


def some_edits(model: nn.Module, seed: int = 0, rank: int | None = 3) -> Edits:
    """Random edits of the default linears; `rank` None for dense ones."""
    g = torch.Generator().manual_seed(seed)
    deltas = {}
    for name, part in find_linears(model, mlp_linears(model)).items():
        inputs, outputs = shape_of(part)
        a = None if rank is None else torch.randn(rank, inputs, generator=g)
        deltas[name] = Delta(torch.randn(inputs if rank is None else rank, outputs, generator=g), a, torch.tensor(0.03))
    return Edits(deltas)


def some_mend(model: nn.Module, config: MendConfig | None = None) -> Mend:
    """A hypernetwork that is not the identity: no parameter stands at zero."""
    config = config or MendConfig(TransformConfig(rank=6), edit_lr=1e-2)
    torch.manual_seed(1)
    mend = Mend.of(model, config=config)
    with torch.no_grad():
        for name, p in mend.named_parameters():
            if name != "edit_lr":
                p.add_(torch.randn_like(p) * 0.2)
    return mend


def says(model: nn.Module, name: str) -> dict[str, Tensor]:
    """Edited logits, gradients through the edits, and the edit that a hypernetwork makes of this model."""
    from omni.edit.deltas import edited
    from omni.edit.mend import fit_step

    out = {}
    edits = some_edits(model).map(lambda t: t.clone().requires_grad_())
    ids = batch_of(name, 1)
    with edited(model, edits):
        logits = all_logits(model, ids)
        loss_of(model, ids).backward()
    out["logits"] = logits.detach()
    out.update({f"grad {n}": d.b.grad for n, d in edits.deltas.items() if d.b.grad is not None})
    model.zero_grad()
    mend = some_mend(model)
    losses = fit_step(model, mend, batch_of(name, 2), batch_of(name, 3), batch_of(name, 4), loss_of, logits_of)
    out["losses"] = torch.stack(losses)
    out.update({f"mend {n}": p.grad for n, p in mend.named_parameters() if p.grad is not None})
    made = mend.edit(model, batch_of(name, 2), loss_of)
    out.update({f"made {n}": d.weight() for n, d in made.deltas.items()})
    assert made.base is not None
    out["base"] = torch.tensor(list(made.base.values()))
    return out


def main(folder: Path, names: list[str]) -> None:
    """Shard models with FSDP2, let them speak, merge and revert."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from omni.edit.storage import merge, revert
    from train.distributed.fabric import leave

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in names:
        model = build(name)
        for part in model.modules():
            if isinstance(part, nn.ModuleList):
                for block in part:
                    fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        out = says(model, name)
        with torch.no_grad():
            merged = merge(model, some_edits(model).signed(model))
            out["merged"] = all_logits(model, batch_of(name, 1))
            revert(model, merged)
            out["reverted"] = torch.tensor(list((some_edits(model).signed(model).base or {}).values()))
        if dist.get_rank() == 0:
            torch.save(out, folder / f"{name}.pt")
        dist.barrier()
    leave()


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with child():
        main(Path(sys.argv[1]), sys.argv[2:])
