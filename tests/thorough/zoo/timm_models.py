"""Architectures of timm, the small ones of a family."""

from __future__ import annotations

from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.thorough.zoo.play import listed

__all__ = ["ARCHITECTURES"]

CLASSES = 5
# Those with one size of image are built for a small one, and with little depth where that can be chosen.
_SIZED = {"img_size": 64, "drop_path_rate": 0.1}
_DROPPED = {"drop_path_rate": 0.1}
_MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {**_SIZED, "depth": 3}, "deit_tiny_distilled_patch16_224": {**_SIZED, "depth": 3},
    "cait_xxs24_224": {**_SIZED, "depth": 3}, "beit_base_patch16_224": {**_SIZED, "depth": 2},
    "mixer_s32_224": _SIZED, "gmlp_ti16_224": _SIZED, "convmixer_768_32": {},
    "convnextv2_atto": _DROPPED, "resnet10t": _DROPPED, "resnest14d": _DROPPED, "regnetx_002": _DROPPED,
    "nf_regnet_b0": _DROPPED, "efficientnet_lite0": _DROPPED, "mobilenetv4_conv_small": _DROPPED, "ghostnet_050": {},
    "hardcorenas_a": _DROPPED, "edgenext_xx_small": _DROPPED, "poolformer_s12": _DROPPED, "repvgg_a0": _DROPPED,
    "levit_128s": _SIZED, "xcit_nano_12_p16_224": _DROPPED, "efficientformerv2_s0": _SIZED, "fastvit_t8": _DROPPED,
    "mobileone_s0": _DROPPED, "dla46_c": {},
}  # fmt: skip


def _build(name: str, options: dict[str, Any]) -> nn.Module:
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    return model


def _classify(model: nn.Module) -> Tensor:
    found = model(torch.randn(2, 3, 64, 64))
    found = found if isinstance(found, Tensor) else sum(found)  # a distilled one has two heads
    return F.cross_entropy(found, torch.randint(CLASSES, (2,)))


ARCHITECTURES = listed("timm", {name: (partial(_build, name, options), _classify) for name, options in _MODELS.items()})
