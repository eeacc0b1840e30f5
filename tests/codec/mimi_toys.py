"""Small random Mimis in the original's own format, written by transformers, and what they are fed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MimiConfig as ReferenceConfig
from transformers import MimiModel

# kyutai/mimi made small, and one with everything that it leaves out. Windows of 5 and 4 frames.
PLAIN: dict[str, Any] = dict(
    hidden_size=32,
    num_filters=4,
    upsampling_ratios=[3, 2],
    codebook_size=16,
    codebook_dim=8,
    vector_quantization_hidden_dimension=8,
    num_quantizers=16,
    upsample_groups=32,
    num_hidden_layers=2,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=4,
    sliding_window=10,
)
ODD: dict[str, Any] = PLAIN | dict(
    frame_rate=1000.0,  # of 4000 positions/s: four make a frame
    sampling_rate=16000,
    upsampling_ratios=[2, 2],
    num_residual_layers=2,
    use_conv_shortcut=True,
    pad_mode="replicate",
    codebook_dim=32,
    vector_quantization_hidden_dimension=32,  # as large as hidden_size: no projections
    num_quantizers=9,
    num_semantic_quantizers=2,
    upsample_groups=8,
    num_key_value_heads=2,
    head_dim=6,
    attention_bias=True,
    rope_parameters={"rope_type": "default", "rope_theta": 50.0},
    sliding_window=15,
    kernel_size=5,
    last_kernel_size=5,
)


def save(config: dict[str, Any], folder: Path, gain: float = 0.02) -> None:
    """A folder in the original's format whose every tensor matters; `gain` scales the sound."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: Any = MimiModel(ReferenceConfig(**config))
        for name, tensor in model.named_parameters():
            if name.endswith(".scale"):
                tensor.uniform_(0.3, 1.0)
            else:
                tensor.add_(torch.randn_like(tensor) * 0.1)
        for name, tensor in model.named_buffers():
            if name.endswith("embed_sum"):
                tensor.normal_()[3] *= 1e-5
            elif name.endswith("cluster_usage"):
                tensor.uniform_(0.5, 2.0)
                tensor[3] = 0  # a code that training never used: divided by 1e-5
        model.decoder.decoder_seanet.layers[-1].conv.weight.mul_(gain)
        model.encoder.downsample.conv.weight.mul_(0.1)  # latents of the size of the codebooks' entries
        model.save_pretrained(folder)


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("opened", "w"))


def random_sound(samples: int, seed: int = 0) -> Tensor:
    return torch.randn(samples, generator=torch.Generator().manual_seed(seed)) / 3
