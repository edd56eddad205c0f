"""Architectures of diffusers: denoisers and autoencoders, small, from their own configurations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.thorough.zoo.play import listed

__all__ = ["ARCHITECTURES"]


def _denoise(model: nn.Module) -> Tensor:
    noise = torch.randn(2, 3, 16, 16)
    return F.mse_loss(model(noise, torch.randint(50, (2,))).sample, noise)


def _of_text(model: nn.Module) -> Tensor:
    noise = torch.randn(2, 4, 16, 16)
    return F.mse_loss(model(noise, torch.randint(50, (2,)), torch.randn(2, 5, 16)).sample[:, :4], noise)


def _of_classes(model: nn.Module) -> Tensor:
    noise = torch.randn(2, 4, 8, 8)
    times, labels = torch.randint(50, (2,)), torch.randint(4, (2,))
    return F.mse_loss(model(noise, timestep=times, class_labels=labels).sample[:, :4], noise)


def _reconstruct(model: nn.Module) -> Tensor:
    images = torch.randn(2, 3, 16, 16)
    found: Any = model(images)
    loss = F.mse_loss(found.sample, images)
    return loss + found.commit_loss.mean() if getattr(found, "commit_loss", None) is not None else loss


def _sd3(model: nn.Module) -> Tensor:
    noise = torch.randn(2, 4, 8, 8)
    text, pooled = torch.randn(2, 5, 16), torch.randn(2, 16)
    found: Any = model(noise, encoder_hidden_states=text, pooled_projections=pooled, timestep=torch.randint(50, (2,)))
    return F.mse_loss(found.sample, noise)


def _sequence(model: nn.Module) -> Tensor:
    signal = torch.randn(2, 4, 16)
    return F.mse_loss(model(signal, torch.randint(50, (2,))).sample, signal)


def _prior(model: nn.Module) -> Tensor:
    image, text = torch.randn(2, 8), torch.randn(2, 5, 8)
    found: Any = model(image, torch.randint(50, (2,)), proj_embedding=torch.randn(2, 8), encoder_hidden_states=text)
    return F.mse_loss(found.predicted_image_embedding, image)


_BLOCKS: dict[str, Any] = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}
_DOWN, _UP = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
_ENCODER = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
_HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
_MODELS: dict[str, tuple[str, dict[str, Any], Callable[[nn.Module], Tensor]]] = {
    "UNet2DModel": (
        "UNet2DModel",
        {**_BLOCKS, "attention_head_dim": 8, "down_block_types": _DOWN, "up_block_types": _UP, "sample_size": 16},
        _denoise,
    ),
    "UNet2DConditionModel": (
        "UNet2DConditionModel",
        {
            **_BLOCKS,
            "attention_head_dim": 8,
            "cross_attention_dim": 16,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "dropout": 0.1,
        },
        _of_text,
    ),
    "UNet1DModel": (
        "UNet1DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "block_out_channels": (16, 32),
            "layers_per_block": 1,
            "time_embedding_type": "positional",
            "out_block_type": "OutConv1DBlock",
            "mid_block_type": "MidResTemporalBlock1D",
            "down_block_types": ("DownResnetBlock1D",) * 2,
            "up_block_types": ("UpResnetBlock1D",),
            "act_fn": "mish",
            "use_timestep_embedding": True,
            "norm_num_groups": 4,
        },
        _sequence,
    ),
    "DiTTransformer2DModel": (
        "DiTTransformer2DModel",
        {**_HEADS, "in_channels": 4, "sample_size": 8, "num_embeds_ada_norm": 50, "dropout": 0.1},
        _of_classes,
    ),
    "PixArtTransformer2DModel": (
        "PixArtTransformer2DModel",
        {**_HEADS, "in_channels": 4, "sample_size": 16, "cross_attention_dim": 16, "caption_channels": 16},
        lambda model: F.mse_loss(
            model(
                torch.randn(2, 4, 16, 16),
                encoder_hidden_states=torch.randn(2, 5, 16),
                timestep=torch.randint(50, (2,)),
                added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            ).sample,
            torch.zeros(2, 8, 16, 16),
        ),
    ),
    "SD3Transformer2DModel": (
        "SD3Transformer2DModel",
        {
            **_HEADS,
            "sample_size": 8,
            "in_channels": 4,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 16,
            "out_channels": 4,
        },
        _sd3,
    ),
    "PriorTransformer": (
        "PriorTransformer",
        {**_HEADS, "embedding_dim": 8, "num_embeddings": 5, "additional_embeddings": 4, "dropout": 0.1},
        _prior,
    ),
    "AutoencoderKL": ("AutoencoderKL", {**_BLOCKS, **_ENCODER}, _reconstruct),
    "AutoencoderTiny": (
        "AutoencoderTiny",
        {
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "num_encoder_blocks": (1, 2),
            "num_decoder_blocks": (2, 1),
        },
        _reconstruct,
    ),
    "VQModel": ("VQModel", {**_BLOCKS, **_ENCODER, "num_vq_embeddings": 16, "latent_channels": 3}, _reconstruct),
}


def _build(model: str, options: dict[str, Any]) -> nn.Module:
    built: nn.Module = getattr(diffusers, model)(**options)
    return built


ARCHITECTURES = listed(
    "diffusers", {name: (partial(_build, model, options), loss) for name, (model, options, loss) in _MODELS.items()}
)
