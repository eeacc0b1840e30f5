"""Generation on a real GPU: captured steps against plain ones, what waits for it, and what a compiled step takes of its memory.

What these check runs in tests/generate/test_cuda_path.py and test_waits.py with stand-ins, where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import wraps
from typing import Any

import pytest
import torch

from omni.edit.deltas import Delta, Edits
from omni.encoder.base import build_encoder
from omni.generate.runner import Runner
from omni.generate.speech_lm import SpeechLM
from omni.layout import Layout
from omni.model.decoder import Hidden
from tests.close import assert_near
from tests.encoder.test_chunked import CONFIGS, SAMPLES, drawn, listen, sound
from tests.generate.conftest import LAYOUTS, make_lm, make_model
from tests.generate.listening_toys import equal_conversations, listener
from tests.generate.test_cuda_path import CHANGES, SAMPLINGS, adapter, answers, batch, talk
from tests.generate.test_runner import start

pytestmark = pytest.mark.cuda
BETWEEN_STEPS = ("_forward", "begin", "leave")
"""Methods of a runner in which nothing may wait for the device."""


def without_waits(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method with an error for whatever in it waits for the device."""

    @wraps(method)
    def strict(*args: Any, **values: Any) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return method(*args, **values)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return strict


def lms(layout: Layout, device: str = "cuda") -> tuple[SpeechLM, SpeechLM]:
    """Two of the same weights: one whose steps are captured, and one whose steps are not."""
    made = [make_lm(layout) for _ in range(2)]
    both = [
        SpeechLM(lm.model.to(device), lm.tokenizer, lm.codec, graph=graph)
        for lm, graph in zip(made, (None, False), strict=True)
    ]
    return both[0], both[1]


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BETWEEN_STEPS:
        monkeypatch.setattr(Runner, name, without_waits(getattr(Runner, name)))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("assist", [False, True])
def test_captured_equals_plain_and_nothing_waits(layout: Layout, sampling, assist: bool, strict: None) -> None:
    lm, plain = lms(layout)
    assert talk(lm, sampling, assist) == talk(plain, sampling, assist)
    assert batch(lm, sampling) == batch(plain, sampling)


def test_changes_of_adapters_are_heard() -> None:
    lm, plain = lms(LAYOUTS["pad"])
    for each in (lm, plain):
        adapter(each.model, 1)
        each.model.to("cuda")
    for change in CHANGES:
        for each in (lm, plain):
            change(each.model)
            each.model.to("cuda")
        assert answers(lm) == answers(plain)


def test_sessions_with_edits_one_after_another() -> None:
    lm, plain = lms(LAYOUTS["pad"])
    width = lm.config.decoder.width
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        factors = (torch.randn(2, size, generator=g).cuda() for size in (48, width))
        edits = Edits({"decoder.blocks.1.mlp.gate": Delta(*factors)})
        assert answers(lm, edits=edits) == answers(plain, edits=edits)


def test_threads_capture_one_at_a_time() -> None:
    lm, plain = lms(LAYOUTS["pad"])
    wanted = answers(plain)
    with ThreadPoolExecutor(4) as pool:
        assert all(said == wanted for said in pool.map(lambda _: answers(lm), range(12)))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_sound_heard_in_pieces_gives_the_frames_of_the_whole(name: str) -> None:
    encoder = build_encoder(CONFIGS[name]).eval()
    far = deepcopy(encoder).cuda()
    for samples in SAMPLES:
        audio = sound(samples)
        wanted, _ = encoder.encode([audio])
        assert_near(far.encode([audio.cuda()])[0].cpu(), wanted, 1e-4, what=f"{samples} samples")
        assert_near(torch.cat(listen(far, audio.cuda(), drawn(samples, 20_000, samples))).cpu(), wanted, 1e-4)


@pytest.mark.parametrize("wait", [True, False])
def test_a_question_heard_while_it_comes_is_answered_as_the_whole(wait: bool) -> None:
    lm = listener()
    lm = SpeechLM(lm.model.cuda(), lm.tokenizer, lm.codec)
    equal_conversations(lm, wait)
    lm.engine.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")
def test_a_model_on_a_second_gpu() -> None:
    wanted = answers(lms(LAYOUTS["pad"])[0])
    assert answers(lms(LAYOUTS["pad"], "cuda:1")[0]) == wanted


@pytest.fixture(params=[8, 64])
def compiled(request: pytest.FixtureRequest) -> Iterator[Runner]:
    model = make_model(LAYOUTS["pad"], context=4096, layers=6, head_dim=request.param).cuda().requires_grad_(False)
    yield Runner(model, 64, 4096, graph=False, compile=True)
    torch._dynamo.reset()


@torch.inference_mode()
def test_a_compiled_step_takes_no_memory_of_the_cache_s_size(compiled: Runner) -> None:
    model = compiled.model
    hidden = Hidden(*[torch.randn(64, 1, model.config.decoder.width, device="cuda")] * 2)
    compiled.begin(range(64), hidden, [start(model.layout, 0)] * 64)
    compiled.step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    compiled.step()
    layer = compiled.cache.keys[0].nbytes
    assert torch.cuda.max_memory_allocated() - before < 3 * layer  # attention in fp32 copies keys and values of one layer
