"""Ray Train: ``RayZeroStrategy``, which is in the extension ``ray``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_zero.trainer.strategy import ZeroStrategy as RayZeroStrategy
else:

    def __getattr__(name: str) -> Any:
        if name != "RayZeroStrategy":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from lightning_zero.registry import extension

        return extension("ray").RayZeroStrategy


__all__ = ["RayZeroStrategy"]
