"""`python -m tests.parity.mend CHECKOUT`: our MEND against eric-mitchell/mend's own code.

A hypernetwork is made by the checkout's classes, fed a few times so that it has statistics, given random weights and saved as
its trainer saves it; ours reads that archive (`omni.edit.foreign`). Then each side says what it makes of the same model and the
same corrections: transformed factors, statistics, edited logits, both losses, gradients of the outer loss, and the edit in
evaluation. All of it is said twice: in fp32, where a change of weights rounds otherwise than one of activations, and in fp64.

Settings:

    shared     GPT-2 (transposed weights), networks shared by shape, x and delta side by side: the released configuration
    alone      Llama, a network per linear, one for x and one for delta
    one sided  Llama, only the smaller side is transformed
    x only, delta only, not normalised, xavier: the others

`higher`, which it imports, is stood in for by `torch.func.functional_call`, and `hydra` by an empty module.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from omni.edit.deltas import edited, find_linears, is_transposed, mlp_linears
from omni.edit.foreign import read_editor
from omni.edit.mend import fit_step, gradient_factors
from tests.edit.toys import build
from tests.parity import report

BOUNDS = {torch.float32: 1e-4, torch.float64: 1e-6}

DEFAULTS = {
    "combine": True, "one_sided": False, "x_only": False, "delta_only": False, "norm": True, "shared": True, "init": "id",
    "n_hidden": 1, "rank": 12, "act": "relu", "mlp_class": "IDMLP", "hidden_dim": None,
}  # fmt: skip

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "shared": ("gpt2", {}),
    "alone": ("llama", {"combine": False, "shared": False}),
    "one sided": ("llama", {"combine": False, "one_sided": True, "n_hidden": 2}),
    "x only": ("gpt2", {"combine": False, "x_only": True}),
    "delta only": ("gpt2", {"combine": False, "delta_only": True, "shared": False}),
    "not normalised": ("llama", {"norm": False, "rank": 1000}),
    "xavier": ("llama", {"init": "xavier"}),
}
"""Model and changes of the checkout's configuration."""


class Functional:
    """What the checkout needs of `higher`: a model that runs with given parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.params: dict[str, Tensor] = dict(model.named_parameters())
        self.handles: list[Any] = []  # hooked already

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.params.items())

    def update_params(self, new: Sequence[Tensor]) -> None:
        self.params = dict(zip(self.params, new, strict=True))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(self.model, self.params, args, kwargs)


def open_checkout(path: Path) -> dict[str, Any]:
    """Import what is compared; SystemExit where the path is none. Nothing is written into it."""
    if not (path / "algs" / "mend.py").is_file():
        raise SystemExit(f"{path} is no checkout of eric-mitchell/mend: it has no algs/mend.py")
    higher, patch = ModuleType("higher"), ModuleType("higher.patch")
    patch._MonkeyPatchBase = Functional  # type: ignore[attr-defined]
    patch.monkeypatch = lambda model, in_place: Functional(model)  # type: ignore[attr-defined]
    higher.patch = patch  # type: ignore[attr-defined]
    sys.modules.update({"higher": higher, "higher.patch": patch, "hydra": ModuleType("hydra")})
    sys.path.insert(0, str(path))
    sys.dont_write_bytecode = True
    modules = {
        name: importlib.import_module(name) for name in ("nn", "losses", "hooks", "utils", "editable_model", "algs.mend")
    }
    for name, module in modules.items():
        if not str(module.__file__).startswith(str(path)):
            raise SystemExit(f"{name} was imported from {module.__file__}, not from {path}")
    return modules


class Torch(ModuleType):
    """torch, with another type for the fp32 that the checkout casts to."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__("torch")
        self.float32 = dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def make_theirs(modules: dict[str, Any], model: nn.Module, names: Sequence[str], changes: dict[str, Any]) -> Any:
    """Its MEND with random weights."""
    settings = SimpleNamespace(
        edit_lr=1e-2,
        model=SimpleNamespace(name="gpt2", inner_params=[f"{name}.weight" for name in names]),
        mend=SimpleNamespace(**DEFAULTS | changes),
    )
    theirs = modules["algs.mend"].MEND(model, settings, lambda: copy.deepcopy(model))
    torch.manual_seed(3)
    with torch.no_grad():
        for p in theirs.outer_parameters():
            p.add_(torch.randn_like(p) * (0.1 if p.ndim > 1 else 0.01))
    return theirs


def batch(seed: int) -> dict[str, Tensor]:
    """Ids [2, 7] with a prompt that is no target."""
    ids = torch.randint(24, (2, 7), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def loss_of(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy at the targets."""
    logits = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), given["labels"][:, 1:].flatten())


def logits_of(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    return model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits.flatten(0, 1)


def line(kind: str, what: str) -> str:
    """A name of the report: its kind, a space, and the rest without any."""
    return f"{kind} {what.replace(' ', '')}"


def theirs(modules: dict[str, Any], mend: Any) -> Iterator[tuple[str, Any]]:
    """What the checkout says: a step of its trainer (`EditTrainer.edit_step`), then an edit in evaluation."""
    logits: Callable[..., Tensor] = modules["utils"]._logits
    names = mend.config.model.inner_params
    mend.train()
    mend.model.eval()
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [
        net.register_forward_hook(lambda _, args, out, key=key: seen.update({f"{key}{args[2:]}": out}))
        for key, net in mend.mend.items()
    ]
    before = logits(mend.model(**batch(13))).detach()
    after, _ = mend.edit(batch(11))
    for key, (x, delta) in seen.items():
        yield line("factors", f"{key}.x"), x.detach()
        yield line("factors", f"{key}.delta"), delta.detach()
    for handle in handles:
        handle.remove()
    for key, net in mend.mend.items():
        for name in ("u_mean", "u_std", "v_mean", "v_std", "k"):
            yield line("statistics", f"{key}.{name}"), getattr(net, name).clone()
    yield "logits edited", logits(after.model(**batch(12))).detach().flatten(0, 1)
    edit_loss = mend.edit_loss_fn(logits(after.model(**batch(12))), batch(12)["labels"])["nll"]
    locality = modules["losses"].kl_loc_loss(before, logits(after.model(**batch(13))), mask=batch(13)["attention_mask"])
    yield "losses edit", edit_loss.detach()
    yield "losses locality", locality.detach()
    outer = mend.outer_parameters()
    grads = torch.autograd.grad(0.1 * edit_loss + 1.0 * locality, outer, allow_unused=True)
    by_id = {id(p): grad for p, grad in zip(outer, grads, strict=True)}
    for name, p in [*mend.mend.named_parameters(), ("edit_lrs", mend.edit_lrs)]:
        grad = by_id[id(p)]
        yield line("gradients", name), torch.zeros_like(p) if grad is None else grad
    mend.eval()
    made, _ = mend.edit(batch(14))
    base = dict(mend.model.named_parameters())
    for name in names:
        yield f"edit {name}", (made.model.params[name] - base[name]).detach()


def ours(model: nn.Module, archive: Path, settings: Path, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """What our code says of the same; names as in `theirs`."""
    mend = read_editor(archive, model, settings=settings, rename=str).to(next(model.parameters()).dtype)
    shared = mend.config.shared

    def their(key: str) -> str:
        return f"({', '.join(key.split('x'))})" if shared else f"{key}#weight"

    mend.train()
    twin = copy.deepcopy(mend)
    factors = gradient_factors(model, mend.shapes, batch(11), loss_of)
    edits = twin(factors)
    for name, (key, mode) in mend.networks.items():
        a = edits.deltas[name].a
        assert a is not None
        arguments = f"{their(key)}{(mode,) if shared else ()}"
        yield line("factors", f"{arguments}.x"), a.detach()
        yield line("factors", f"{arguments}.delta"), edits.deltas[name].b.detach()
    for key, stages in twin.transforms.items():
        for side, letter in (("x", "u"), ("delta", "v")):
            s = getattr(stages[0], f"{side}_statistics")  # type: ignore[index]
            yield line("statistics", f"{their(key)}.{letter}_mean"), s.mean
            yield line("statistics", f"{their(key)}.{letter}_std"), (s.squares / (s.count - 1)).sqrt()
        yield line("statistics", f"{their(key)}.k"), s.count.float().reshape(1)
    with torch.no_grad(), edited(model, edits):
        yield "logits edited", logits_of(model, batch(12))
    losses = fit_step(model, mend, batch(11), batch(12), batch(13), loss_of, logits_of)
    yield "losses edit", losses.edit
    yield "losses locality", losses.locality
    nets = {"both": "mlp", "x_net": "mlp1", "delta_net": "mlp2"}
    tails = {"scale": "mode_scale.weight", "shift": "mode_shift.weight"}
    for name, p in mend.named_parameters():
        if name == "edit_lr":
            their_name = "edit_lrs"
        else:
            _, key, _, net, rest = name.split(".", 4)
            head, _, last = rest.rpartition(".")
            their_name = f"{their(key)}.{nets[net]}.{head}.{tails.get(last, last)}"
        yield line("gradients", their_name), torch.zeros_like(p) if p.grad is None else p.grad
    made = mend.edit(model, batch(14), loss_of)
    for name, part in find_linears(model, names).items():
        change = made.deltas[name].weight()
        yield f"edit {name}.weight", change.T if is_transposed(part) else change


def run(modules: dict[str, Any], setting: str) -> bool:
    name, changes = SETTINGS[setting]
    model = build(name)
    names = mlp_linears(model)
    modules["algs.mend"].torch = modules["losses"].torch = torch
    mend = make_theirs(modules, copy.deepcopy(model), names, changes)
    mend.train()
    for seed in (1, 2, 3):
        mend.edit(batch(seed))
    good = True
    with tempfile.TemporaryDirectory() as folder:
        archive, config = Path(folder) / "gpt2.1", Path(folder) / "config.json"
        counters = {"opt": torch.optim.Adam(mend.outer_parameters()).state_dict(), "lr_opt": None, "val_stats": {}, "step": 0}
        torch.save({"model": mend.state_dict(), **counters}, archive)
        config.write_text(
            json.dumps({"edit_lr": 1e-2, "model": {"inner_params": mend.config.model.inner_params}, "mend": DEFAULTS | changes})
        )
        for dtype, bound in BOUNDS.items():
            report.BOUND = bound
            modules["algs.mend"].torch = modules["losses"].torch = Torch(dtype)
            said = dict(ours(model.to(dtype), archive, config, names))
            twin = copy.deepcopy(mend).to(dtype)
            modules["hooks"].hook_model(twin.model, mend.config.model.inner_params)
            title = f"{setting} ({name}, {str(dtype).split('.')[1]}, bound {bound:.0e})"
            good &= report.show(title, report.compare(theirs(modules, twin), said))
    return good


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity.mend", description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of eric-mitchell/mend")
    parser.add_argument("--only", choices=SETTINGS, help="one of the settings")
    options = parser.parse_args(list(argv))
    logging.disable()
    modules = open_checkout(options.checkout.resolve())
    print(f"{options.checkout}: differences beside the largest number of a tensor")
    print("  note: `higher` is stood in for by torch.func.functional_call, `hydra` by an empty module")
    good = True
    for setting in SETTINGS if options.only is None else [options.only]:
        good &= run(modules, setting)
    print("\nall equal" if good else "\nsome differ: see MISS above")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
