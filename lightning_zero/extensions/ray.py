"""Ray Train: the strategy for a Trainer in each of its workers."""

from __future__ import annotations

from typing import Any

import torch

from lightning_zero.trainer.strategy import ZeroStrategy

__all__ = ["RayZeroStrategy"]


class RayZeroStrategy(ZeroStrategy):
    """``ZeroStrategy`` with the processes and devices of Ray Train, in the function that a ``TorchTrainer`` is given.

    ``Trainer(strategy=RayZeroStrategy(stage=3), devices="auto", plugins=[RayLightningEnvironment()])``, and then
    ``prepare_trainer``, as with ``RayDDPStrategy``. Ray makes the default process group: its backend and its timeout
    are those of Ray's ``TorchConfig``, ``process_group_backend`` and ``timeout`` are for the groups of the strategy.

    Raises:
        ModuleNotFoundError: if Ray Train is not installed.
        ValueError: if a setting is not usable.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            from ray.train.lightning import RayDDPStrategy
        except ImportError as error:
            raise ModuleNotFoundError(
                f"RayZeroStrategy needs Ray Train ({error}): pip install 'lightning-zero[ray]'."
            ) from error

        # `prepare_trainer` takes subclasses of Ray's own strategies only. This one is then to Lightning a DDPStrategy,
        # about which it asks where modules are compiled; those of the other two get precision plugins of their own.
        RayDDPStrategy.register(type(self))
        super().__init__(*args, **kwargs)

    def setup_environment(self) -> None:
        """Join the process group. Collective: every rank.

        Raises:
            ValueError: if Ray would report checkpoints that are still being written.
        """
        from ray.train.lightning import RayTrainReportCallback

        callbacks = self._module.trainer.callbacks  # type: ignore[attr-defined]
        if self.settings.checkpoint.async_save and any(isinstance(c, RayTrainReportCallback) for c in callbacks):
            raise ValueError(
                "RayTrainReportCallback reports a checkpoint as soon as it is saved, and with "
                "CheckpointPolicy(async_save=True) it is written later. Leave async_save out, or save with "
                "ModelCheckpoint in a folder that all workers share."
            )
        super().setup_environment()

    @property
    def root_device(self) -> torch.device:
        """The device that Ray gave to this worker."""
        from ray.train.torch import get_device

        return torch.device(get_device())

    @property
    def num_processes(self) -> int:
        """How many workers run on this machine."""
        from ray.train import get_context

        return int(get_context().get_local_world_size())

    @property
    def num_ranks(self) -> int:
        """How many workers there are, as ``RayLightningEnvironment`` knows."""
        return self.world_size
