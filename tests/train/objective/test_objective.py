"""The objective against the plain one: all logits, then `F.cross_entropy`; packing, chunks, checkpointing (law 8)."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F

from omni.config import DecoderConfig, ModelConfig, ProjectorConfig
from omni.encoder.whisper_config import WhisperConfig
from omni.layout import IGNORE, Layout
from omni.lora.attach import add_adapter
from omni.lora.config import LoRAConfig
from omni.model.attention import _packed_attention
from omni.model.speech_model import SpeechModel
from omni.tasks import TASKS, Turn, example
from tests.close import assert_near
from tests.test_attention import varlen_reference
from train.data.batching.batch import Batch
from train.objective.config import ObjectiveConfig
from train.objective.cross_entropy import Heads, HeadTargets, _softmax, _softmax_without_writes, linear_cross_entropy
from train.objective.objective import HEADS, Objective, targets

MODELS = {
    "codec2": ModelConfig(
        Layout.build([12, 12, 6, 8], 20, specials=8),
        WhisperConfig(n_mels=80, width=16, heads=2, layers=2, window_seconds=2.0),
        ProjectorConfig("linear", stack=2),
        DecoderConfig(width=32, layers=2, heads=4, kv_heads=2, mlp_width=48),
        ctc=21,
    ),
    "mini-omni": ModelConfig(
        Layout.build([16] * 7, 24, specials=5, fill="sampled", features="replace"),
        WhisperConfig(n_mels=80, width=16, heads=2, layers=1, window_seconds=2.0),
        ProjectorConfig("gated", hidden=24),
        DecoderConfig(width=32, layers=2, heads=4, kv_heads=4, mlp_width=48, post_layers=1, tie_text=True),
    ),
}


@pytest.fixture(params=MODELS)
def model(request) -> SpeechModel:
    torch.manual_seed(0)
    return SpeechModel(MODELS[request.param])


def make_examples(model: SpeechModel, tasks: list[str]):
    """An example per task, with its clip: (columns, mel, frames, transcript, task)."""
    g = torch.Generator().manual_seed(1)
    out = []
    for i, task in enumerate(tasks):
        samples = 4000 + 1600 * i
        frames = model.config.encoder.frames(samples)
        turn = Turn(
            task,
            features=model.config.features(samples),
            question=[1, 2, 3][: 1 + i % 3],
            text=[4 + i, 5],
            codes=torch.stack([torch.randint(s.size, (2 + i,), generator=g) for s in model.layout.audio]),
        )
        mel = torch.randn(model.config.encoder.n_mels, samples // 160, generator=g)
        heard = TASKS[task].question == "audio"
        transcript = [1, 2, 2, 3] if model.config.ctc else []
        out.append((example(model.layout, [turn]), mel if heard else None, frames, transcript, list(TASKS).index(task)))
    return out


def pack(model: SpeechModel, rows: list[list], width: int):
    """Rows of examples, packed by hand and slowly."""
    layout, k = model.layout, len(model.layout)
    tokens = layout.ids("pad")[None, :, None].repeat(len(rows), 1, width)
    goals = torch.full((len(rows), k, width), IGNORE)
    index, segments = torch.full((len(rows), width), -1), torch.full((len(rows), width), -1)
    task = torch.full((len(rows), width), -1)
    mels, frames, transcripts, base = [], [], [], 0
    for r, row in enumerate(rows):
        at = 0
        for n, (columns, mel, count, transcript, which) in enumerate(row):
            piece = slice(at, at + len(columns))
            tokens[r, :, piece], goals[r, :, piece] = columns.tokens, columns.targets
            index[r, piece] = torch.where(columns.feature_index >= 0, columns.feature_index + base, -1)
            segments[r, piece], task[r, piece] = n, which
            base += sum(columns.features)
            if mel is not None:
                mels.append(mel)
                frames.append(count)
                transcripts.append(transcript)
            at += len(columns)
    longest = max((m.shape[1] for m in mels), default=0)
    padded = torch.zeros(len(mels), model.config.encoder.n_mels, longest)
    for i, m in enumerate(mels):
        padded[i, :, : m.shape[1]] = m
    return Batch(
        tokens, goals, index, segments, task, padded, [m.shape[1] for m in mels], frames, transcripts,
        sum(map(len, rows)), int((task >= 0).sum()), {},
    )  # fmt: skip


def plain(model: SpeechModel, batch, denominators) -> torch.Tensor:
    """All logits, then cross-entropy: the objective as one would first write it."""
    features = None
    if batch.frames:
        features = model.encode(batch.inputs, batch.input_lengths, batch.frames)
    hidden = model(batch.tokens, features, batch.feature_index, segments=batch.segments)
    total = torch.zeros(())
    for k, logits in enumerate(model.decoder.logits(hidden)):
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets[:, k].flatten(), ignore_index=IGNORE, reduction="sum")
        total = total + loss / denominators[k].clamp_min(1)
    return total


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


ALL = ["A1A2", "A1T1", "T1A2", "T1T2", "A1T2", "T1A1"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
def test_loss_and_gradients_equal_the_plain_objective(model, chunk):
    batch = pack(model, [make_examples(model, ALL[:3]), make_examples(model, ALL[3:])], 96)
    counts = targets(batch)
    twin = copy.deepcopy(model)
    wanted = plain(twin, batch, counts)
    wanted.backward()
    losses = Objective(model, ObjectiveConfig(chunk=chunk))(batch, counts)
    losses.total.backward()
    torch.testing.assert_close(losses.total, wanted, rtol=1e-5, atol=1e-6)
    ours, theirs = gradients(model), gradients(twin)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6, msg=name)
    assert float(losses.counts.sum()) == float(counts[:-HEADS].sum())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("window", [None, 7])
def test_sequences_without_a_mask_give_the_same_loss_and_gradients(model, window, monkeypatch):
    """As a GPU computes them, with a stand-in for its kernel."""
    model.decoder.config = dataclasses.replace(model.decoder.config, window=window)
    batch = pack(model, [make_examples(model, ALL[:3]), make_examples(model, ALL[3:])], 96)
    twin, asked = copy.deepcopy(model), []
    Objective(twin)(batch, targets(batch)).total.backward()
    monkeypatch.setattr("omni.model.decoder.takes_packed", lambda *of: True)
    monkeypatch.setattr("omni.model.decoder.causal_mask", None)
    monkeypatch.setattr("omni.model.attention._segment_attention", _packed_attention)

    def watched(*args, **options):
        asked.append(args)
        return varlen_reference(*args, **options)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", watched)
    Objective(model)(batch, targets(batch)).total.backward()
    ours, theirs = gradients(model), gradients(twin)
    assert len(asked) == len(model.decoder.blocks) + len(model.decoder.post_blocks)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_softmax_that_is_compiled_is_the_plain_one(dtype):
    logits = torch.randn(5, 33, generator=torch.Generator().manual_seed(0)).mul_(4).to(dtype)
    goal, inside = torch.tensor([[0], [32], [7], [7], [1]]), torch.tensor([[1.0], [0.5], [0.0], [2.0], [1.0]])
    for differentiated in (True, False):
        loss, grad = _softmax_without_writes(logits, goal, inside, differentiated)
        wanted, wanted_grad = _softmax(logits.clone(), goal, inside, differentiated)
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(grad, wanted_grad)


@pytest.mark.cuda
def test_compiled_losses_on_a_gpu():
    """Of several vocabularies and chunks, also one with a single row."""
    g, found = torch.Generator().manual_seed(0), []
    x, w = torch.randn(65, 32, generator=g), torch.randn(1000, 32, generator=g)
    goals = [torch.randint(n, (65,), generator=g).cuda() for n in (200, 200, 600)]
    for compiled in (False, True):
        h, audio, text = (t.bfloat16().cuda().requires_grad_() for t in (x, w[:400], w[400:]))
        at = torch.arange(65, device="cuda")
        wanted = HeadTargets((0, 200, 400), [at] * 3, goals, torch.ones(3, device="cuda"), 600 * 32, None, compiled)
        total, each = linear_cross_entropy(Heads(h, h, text, audio), wanted)
        total.backward()
        found.append((total, each, h.grad, audio.grad, text.grad))
    torch.testing.assert_close(found[1], found[0], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_on_heads_count_and_learn(model, dtype):
    """The heads are used by their weights here, by calls in the plain objective."""
    heads = ("decoder.*_head", "decoder.blocks.0.*")
    torch.manual_seed(2)
    add_adapter(model, LoRAConfig(heads, rank=3))
    for name, p in model.named_parameters():
        p.requires_grad_(".lora." in name)
        if name.endswith(".b"):
            p.data.normal_(std=0.3)
    batch = pack(model, [make_examples(model, ALL[:3]), make_examples(model, ALL[3:])], 96)
    counts = targets(batch)
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        wanted = plain(twin, batch, counts)
        losses = Objective(model, ObjectiveConfig(chunk=100))(batch, counts)
    wanted.backward()
    losses.total.backward()
    exact = dtype == torch.float32
    assert_near(losses.total, wanted, 1e-5 if exact else 1e-2)
    ours, theirs = gradients(model), gradients(twin)
    assert ours.keys() == theirs.keys() and any("audio_head.lora" in name for name in ours)
    for name in theirs:
        assert_near(ours[name], theirs[name], 1e-5 if exact else 0.05, name)


def test_packing_changes_nothing(model):
    """Law 8: examples packed into one row, spread over rows, or one by one, give the same loss and gradients."""
    examples = make_examples(model, ALL)
    ways = [[examples], [examples[:2], examples[2:3], examples[3:]], [[e] for e in examples]]
    seen = []
    for rows in ways:
        batch = pack(model, rows, 160 if len(rows) == 1 else 100)
        model.zero_grad()
        losses = Objective(model)(batch, targets(batch))
        losses.total.backward()
        seen.append((losses.total.detach(), gradients(model)))
    for total, grads in seen[1:]:
        torch.testing.assert_close(total, seen[0][0], rtol=1e-5, atol=1e-6)
        for name, value in seen[0][1].items():
            torch.testing.assert_close(grads[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_accumulation_and_checkpointing_change_nothing(model):
    """Law 8: micro-batches summed over global counts, with blocks recomputed, equal the one plain step."""
    examples = make_examples(model, ALL)
    whole = pack(model, [[e] for e in examples], 64)
    counts = targets(whole)
    objective = Objective(model, ObjectiveConfig(ctc_weight=0.3 if model.config.ctc else 0.0))
    objective(whole, counts).total.backward()
    wanted = gradients(model)
    for checkpointing in (False, True):
        model.set_checkpointing(checkpointing)
        model.zero_grad()
        for part in (examples[:2], examples[2:5], examples[5:]):
            objective(pack(model, [[e] for e in part], 64), counts).total.backward()
        for name, value in gradients(model).items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-6, msg=name)


def test_a_stream_without_any_target_is_zero_not_nan(model):
    """Cross-entropy's mean over nothing is nan (facts: autograd 7); and all parameters still take part."""
    batch = pack(model, [make_examples(model, ["T1T2"])], 40)
    losses = Objective(model)(batch, targets(batch))
    losses.total.backward()
    assert torch.isfinite(losses.total)
    assert float(losses.counts[:, :-1].sum()) == 0
    missing = [n for n, p in model.named_parameters() if p.grad is None]
    assert not missing, "DDP and FSDP want every parameter in every backward"


def test_loss_by_task_and_stream(model):
    batch = pack(model, [make_examples(model, ["A1A2", "A1T1"]), make_examples(model, ["A1A2"])], 64)
    losses = Objective(model)(batch, targets(batch))
    names = list(TASKS)
    for task in ("A1T2", "T1A2", "T1T2", "T1A1"):
        assert losses.counts[names.index(task)].sum() == 0
    assert losses.counts[names.index("A1T1"), -1] == 3  # two tokens and their end
    mean = losses.sums.sum(0) / losses.counts.sum(0).clamp_min(1)
    torch.testing.assert_close(mean.sum(), losses.total.detach() - 0, rtol=1e-4, atol=1e-5)


def test_stream_weights_scale_their_stream_only(model):
    streams = len(model.layout)
    batch = pack(model, [make_examples(model, ["A1A2"])], 64)
    alone = [
        Objective(model, ObjectiveConfig(tuple(float(i == k) for i in range(streams))))(batch, targets(batch)).total
        for k in range(streams)
    ]
    weights = tuple(0.5 + k for k in range(streams))
    mixed = Objective(model, ObjectiveConfig(weights))(batch, targets(batch)).total
    torch.testing.assert_close(mixed, sum(w * a for w, a in zip(weights, alone, strict=True)), rtol=1e-5, atol=1e-6)


def test_a_second_backward_is_refused_not_wrong():
    h, w = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    at = torch.arange(6)
    goals = HeadTargets((0,), [at], [at % 5], torch.ones(1), 10)
    total, _ = linear_cross_entropy(Heads(h, h, w, torch.randn(0, 4)), goals)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        total.backward()


def test_frozen_heads_cost_no_gradient(model):
    model.decoder.audio_head.weight.requires_grad_(False)
    batch = pack(model, [make_examples(model, ALL[:2])], 64)
    Objective(model)(batch, targets(batch)).total.backward()
    assert model.decoder.audio_head.weight.grad is None
    assert model.decoder.text_embedding.weight.grad is not None


def heads_gradients(dtype: torch.dtype, hidden, weight, goals, denominator: float, chunk: int, factor: float):
    """Gradients of states and weights, in fp32, of a loss in `dtype` that a scaler multiplies by `factor`."""
    h, w = (t.detach().to(dtype, copy=True).requires_grad_() for t in (hidden, weight))
    at, scale = torch.arange(len(goals)), torch.tensor([1 / denominator])
    wanted = HeadTargets((0,), [at], [goals], scale, chunk)
    total, _ = linear_cross_entropy(Heads(h, h, w, torch.randn(0, w.shape[1])), wanted)
    (total * factor).backward()
    assert h.grad.dtype == w.grad.dtype == dtype
    return h.grad.float() / factor, w.grad.float() / factor


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("dtype", "factor", "limit"), [(torch.float16, 2.0**16, 0.01), (torch.bfloat16, 1.0, 0.005)])
@pytest.mark.parametrize(("vocabulary", "positions"), [(4160, 64), (152_000, 4)])
@pytest.mark.parametrize("denominator", [64.0, 300_000.0])
def test_half_precision_gradients_do_not_vanish(dtype, factor, limit, vocabulary, positions, denominator):
    """However many targets the step has: fp16 ends at 6e-8, and its scaler's factor comes only in the backward pass."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(positions, 16, generator=g), torch.randn(vocabulary, 16, generator=g) * 0.3
    hidden, weight = hidden.to(dtype).float(), weight.to(dtype).float()
    goals = torch.randint(vocabulary, (positions,), generator=g)
    chunk = vocabulary * max(1, positions // 3)  # several, and a shorter last one
    exact = heads_gradients(torch.float32, hidden, weight, goals, denominator, chunk, 1.0)
    rough = heads_gradients(dtype, hidden, weight, goals, denominator, chunk, factor)
    for ours, wanted in zip(rough, exact, strict=True):
        assert float((ours - wanted).norm() / wanted.norm()) < limit


def test_many_chunks_in_half_precision_lose_nothing():
    """Sums over hundreds of chunks: kept in bf16, what is added last would be rounded away."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = (1 + torch.randn(600, 8, generator=g) * 0.1).bfloat16(), torch.randn(12, 8, generator=g).bfloat16()
    goals = torch.randint(12, (600,), generator=g)
    exact = heads_gradients(torch.float32, hidden.float(), weight.float(), goals, 600.0, 1 << 20, 1.0)
    rough = heads_gradients(torch.bfloat16, hidden.float(), weight.float(), goals, 600.0, 1, 1.0)
    assert float((rough[1] - exact[1]).norm() / exact[1].norm()) < 0.005


def test_a_module_in_bf16_divides_by_exact_counts(model):
    """257 is not among bf16's numbers, nor is the weight 0.3."""
    streams = len(model.layout)
    batch = pack(model, [make_examples(model, ["A1A2"])], 64)
    batch.inputs = batch.inputs.bfloat16()
    objective = Objective(model, ObjectiveConfig((0.3,) * streams)).to(torch.bfloat16)
    losses = objective(batch, torch.tensor([257] * (streams + HEADS)))
    torch.testing.assert_close(losses.total.detach(), losses.sums.sum() * (0.3 / 257), rtol=1e-5, atol=0)


def test_alignment_goes_first_and_leaves_the_rest_alone():
    torch.manual_seed(0)
    model = SpeechModel(MODELS["codec2"])
    objective = Objective(model, ObjectiveConfig(ctc_weight=1.0, ctc_final=0.2, align_first=0.25))
    batch = pack(model, [make_examples(model, ["A1T1", "A1A2"])], 64)
    first = objective(batch, targets(batch), 0.0)
    first.total.backward()
    torch.testing.assert_close(first.total, first.ctc_sum / first.ctc_count)
    assert model.encoder.whisper.conv1.weight.grad.abs().sum() > 0
    idle = objective.idle(0.0)
    assert {id(p) for p in idle} == {id(p) for p in [*model.decoder.parameters(), *model.projector.parameters()]}
    assert all(p.grad is not None and not p.grad.any() for p in idle)
    assert objective.idle(0.25) == []
    middle, plain = objective(batch, targets(batch), 0.5), Objective(model)(batch, targets(batch))
    torch.testing.assert_close(middle.total, plain.total + 0.6 * middle.ctc_sum / middle.ctc_count)


def test_alignment_does_not_go_first_where_nothing_that_hears_is_trained():
    torch.manual_seed(0)
    model = SpeechModel(MODELS["codec2"])
    for part in (model.encoder, model.alignment_head):
        part.requires_grad_(False)
    objective = Objective(model, ObjectiveConfig(ctc_weight=1.0, align_first=0.25))
    batch = pack(model, [make_examples(model, ["A1T1", "A1A2"])], 64)
    objective(batch, targets(batch), 0.0).total.backward()
    assert objective.idle(0.0) == [] and model.decoder.audio_head.weight.grad.any()
