"""Architectures of torchvision: classification, segmentation, video and detection, small."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import detection, segmentation, video

from tests.thorough.zoo.play import listed

__all__ = ["ARCHITECTURES"]

CLASSES = 5


def _classify(model: nn.Module) -> Tensor:
    found = model(torch.randn(2, 3, 64, 64))
    found = found if isinstance(found, Tensor) else found[0]  # some have a second head in training
    return F.cross_entropy(found, torch.randint(CLASSES, (2,)))


def _segment(model: nn.Module) -> Tensor:
    found: Tensor = model(torch.randn(2, 3, 32, 32))["out"]
    return F.cross_entropy(found, torch.randint(CLASSES, (2, 32, 32)))


def _watch(model: nn.Module) -> Tensor:
    found: Tensor = model(torch.randn(2, 3, 4, 32, 32))
    return F.cross_entropy(found, torch.randint(CLASSES, (2,)))


def _detect(model: nn.Module) -> Tensor:
    corner = 20 * torch.rand(2, 2, 2)
    boxes = torch.cat([corner, corner + 15 + 20 * torch.rand(2, 2, 2)], dim=2)
    labels, masks = torch.randint(1, CLASSES, (2, 2)), torch.randint(2, (2, 2, 64, 64), dtype=torch.uint8)
    targets = [{"boxes": boxes[i], "labels": labels[i], "masks": masks[i]} for i in range(2)]
    losses: dict[str, Tensor] = model([torch.rand(3, 64, 64) for _ in range(2)], targets)
    return torch.stack(list(losses.values())).sum()


def _detect_in_python(model: nn.Module) -> Tensor:
    """With the function that the library takes where its C++ operator is not there, and compiles itself."""
    operators = importlib.import_module("torchvision.ops.roi_align")
    with mock.patch.object(operators, "_has_ops", return_value=False):
        return _detect(model)


def _made(make: Callable[..., nn.Module], **options: Any) -> nn.Module:
    return make(weights=None, num_classes=CLASSES, **options)


def _detector(make: Callable[..., nn.Module], **options: Any) -> nn.Module:
    return _made(make, weights_backbone=None, **options)


_CLASSIFICATION: dict[str, dict[str, Any]] = {
    "resnet18": {}, "alexnet": {}, "mobilenet_v2": {}, "mobilenet_v3_small": {}, "shufflenet_v2_x0_5": {},
    "squeezenet1_1": {}, "efficientnet_b0": {}, "mnasnet0_5": {}, "regnet_y_400mf": {}, "densenet121": {},
    "googlenet": {"init_weights": False}, "swin_t": {},
}  # fmt: skip
_SMALL = {"min_size": 64, "max_size": 64}
_DETECTION: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "fasterrcnn_mobilenet_v3_large_320_fpn": (
        detection.fasterrcnn_mobilenet_v3_large_320_fpn,
        {**_SMALL, "rpn_post_nms_top_n_train": 20},
    ),
    "maskrcnn_resnet50_fpn": (detection.maskrcnn_resnet50_fpn, {**_SMALL, "rpn_post_nms_top_n_train": 20}),
    "ssdlite320_mobilenet_v3_large": (detection.ssdlite320_mobilenet_v3_large, {}),
    "retinanet_resnet50_fpn": (detection.retinanet_resnet50_fpn, _SMALL),
    "fcos_resnet50_fpn": (detection.fcos_resnet50_fpn, _SMALL),
}


def _table() -> dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]]:
    found: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {}
    for name, options in _CLASSIFICATION.items():
        found[name] = partial(_made, getattr(torchvision.models, name), **options), _classify
    for name in ("lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large"):
        found[name] = partial(_made, getattr(segmentation, name), weights_backbone=None), _segment
    found["r3d_18"] = partial(_made, video.r3d_18), _watch
    for name, (make, options) in _DETECTION.items():
        found[name] = partial(_detector, make, **options), _detect
    name = "fasterrcnn_mobilenet_v3_large_320_fpn"
    found[f"{name} with RoI align in Python"] = found[name][0], _detect_in_python
    return found


ARCHITECTURES = listed("torchvision", _table())
