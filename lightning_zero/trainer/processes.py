"""The processes of a run: their devices and ranks, who starts them, and the collectives of Lightning and of Fabric."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from lightning_zero._torch import prefix_store, tcp_store
from lightning_zero.comm.control import current_watch, naming_failures, raise_failure, watch_ranks
from lightning_zero.comm.groups import Groups, joining, order_launches, orders_differ, shard_span
from lightning_zero.config import SessionSettings, TimeoutLike, validate_timeout
from lightning_zero.debug import full_parameters
from lightning_zero.engine import ZeroEngine
from lightning_zero.errors import ZeroError, point_to_page
from lightning_zero.optim.sharded import ShardedOptimizer
from lightning_zero.registry import extension
from lightning_zero.session.session import ZeroSession
from lightning_zero.session.state import OptimizerState
from lightning_zero.trainer.precision import unwrapped

__all__ = ["DEFAULT_TIMEOUT", "Processes", "StartMethod", "leave_group_of_one"]

_OF_TRANSPORT = re.compile(
    r"gloo/|NCCL|ProcessGroup|Broken pipe|Connection (was likely |reset by peer|closed by peer)|Timed out waiting"
)
DEFAULT_TIMEOUT = default_pg_timeout
StartMethod = Literal["popen", "spawn", "fork"]
_NOT_SET_UP = (
    "The strategy is not set up in this process: its engine exists from `Trainer.fit` (or validate) on, or from "
    "`fabric.setup(model, optimizer)` on, and with start_method='fork' or 'spawn' only in the processes that run it, "
    "which end with it. Save in a callback (ModelCheckpoint), or take `state_dict()` of the module, which has its "
    "weights. With Fabric do all of it in the function that `fabric.launch` is given."
)
_HOW_MANY = (
    "Start as many processes as devices times nodes, or let the Trainer (or Fabric) start them. In a worker of Ray "
    "Train, use lightning_zero.ray.RayZeroStrategy with plugins=[RayLightningEnvironment()]."
)


def leave_group_of_one() -> None:
    """End the process group of a run with one process: what is forked then would take it for its own."""
    if dist.is_initialized() and dist.get_world_size() == 1:
        dist.destroy_process_group()


class _Workers(_MultiProcessingLauncher):
    """Lightning's, whose processes end with a run, and hand the first one's module over: with whole weights."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """As Lightning has it."""
        leave_group_of_one()
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        with full_parameters(trainer.lightning_module):
            return super()._collect_rank_zero_results(trainer, results)


class Processes:
    """One process for each device, in one group: what Lightning asks any such strategy about them, and their session.

    To be put before a ``ParallelStrategy``: the Trainer and Fabric have one each, with these attributes.
    """

    num_nodes: int
    _workers: Any = _Workers
    _session: ZeroSession | None = None
    _device_mesh: Any = None
    parallel_devices: list[torch.device] | None
    cluster_environment: ClusterEnvironment | None
    local_rank: int
    global_rank: int
    node_rank: int
    world_size: int

    def __init__(
        self,
        settings: SessionSettings,
        process_group_backend: str | None,
        start_method: StartMethod | None,
        timeout: TimeoutLike,
        **devices: Any,
    ) -> None:
        super().__init__(**devices)
        self.settings, self.process_group_backend = settings, process_group_backend
        self._start_method, self._timeout = start_method, validate_timeout(timeout)

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        if self.parallel_devices is None:
            raise RuntimeError("The Trainer (or Fabric) has not assigned devices to the strategy yet.")
        place = self.local_rank if self.num_ranks == self.num_nodes * self.num_processes else 0
        if place >= self.num_processes:
            raise RuntimeError(f"This process has local rank {place}, but devices={self.num_processes}. {_HOW_MANY}")
        return self.parallel_devices[place]

    @property
    def num_processes(self) -> int:
        """How many processes run on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def num_ranks(self) -> int:
        """How many processes run on all machines: as many as were asked for, or as others gave one device each."""
        asked, environment = self.num_nodes * self.num_processes, self.cluster_environment
        if asked != 1 or environment is None or not environment.creates_processes_externally:
            return asked
        return environment.world_size()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How the data are shared out."""
        together = self._mesh_sizes()[1]
        return {"num_replicas": self.num_ranks // together, "rank": self.global_rank // together}

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Lightning's plain IO; sharded directories do not go through it."""
        return super().checkpoint_io  # type: ignore[misc, no-any-return]

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        if io is not None:
            what = "writes sharded directories itself and takes no checkpoint plugin"
            raise ValueError(f"{type(self).__name__} {what}, got {type(io).__name__}.")

    def _configure_launcher(self) -> None:
        environment, several = self.cluster_environment, self.num_processes * self.num_nodes > 1
        method = self._start_method or ("fork" if several and _IS_INTERACTIVE else "popen")
        if method not in get_args(StartMethod):
            known = ", ".join(get_args(StartMethod))
            raise ValueError(f"start_method must be one of {known}, or None, got {method!r}.")
        if environment is None:
            return
        others = environment.creates_processes_externally and type(environment) is not LightningEnvironment
        if method != "popen" and not others:
            self._launcher: Any = self._workers(self, method)
        elif several or not _IS_INTERACTIVE:  # a notebook is no script to run again, and its one process needs nobody
            # Also where others start the processes: the launcher then only shares the cores out among them.
            self._launcher = _SubprocessScriptLauncher(environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment who this process is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_ranks)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        """Join the process group. Collective: every rank."""
        super().setup_environment()  # type: ignore[misc]
        self.set_world_ranks()
        device = self.root_device
        self.process_group_backend = self.process_group_backend or _get_default_process_group_backend_for_device(device)
        if self.cluster_environment is None:
            raise RuntimeError(
                f"{type(self).__name__} has no cluster environment: it gets one in Trainer(strategy=...) or "
                "Fabric(strategy=...)."
            )
        order_launches(device)
        if not dist.is_initialized():
            options: dict[str, Any] = {"timeout": self._timeout}
            options |= {} if device.type == "cpu" else {"device_id": device}
            options |= _store_of_this_attempt(self._timeout)
            with joining(self.num_ranks, self.process_group_backend):
                _init_dist_connection(self.cluster_environment, self.process_group_backend, **options)
        if (watch := watch_ranks()) is not None:
            watch.begins_anew()
        if dist.get_world_size() != self.num_ranks:
            raise RuntimeError(
                f"The process group has {dist.get_world_size()} ranks, but devices={self.num_processes} and "
                f"num_nodes={self.num_nodes} ask for {self.num_ranks}. {_HOW_MANY}"
            )
        if self.settings.tensor_parallel_size is not None:
            make_mesh, settings = extension("tensor_parallel").make_mesh, (self.process_group_backend, self._timeout)
            self._device_mesh = make_mesh(device, *self._mesh_sizes(), *settings)

    def _mesh_sizes(self) -> tuple[int, int]:
        """Ranks of a data-parallel and of a tensor-parallel group; ``ValueError`` if all ranks are no such mesh."""
        if self.settings.tensor_parallel_size is None:
            return self.num_ranks, 1
        mesh_sizes = extension("tensor_parallel").mesh_sizes
        return mesh_sizes(self.settings, self.num_processes, self.num_ranks)  # type: ignore[no-any-return]

    @property
    def device_mesh(self) -> Any:
        """The ``DeviceMesh`` of the ranks, with the dimensions ``data_parallel`` and ``tensor_parallel``.

        Raises ``RuntimeError`` without ``tensor_parallel_size``, and before the processes run.
        """
        if self._device_mesh is None:
            raise RuntimeError(
                "There is no device mesh: it is made with ZeroStrategy(tensor_parallel_size=...), when the processes "
                "run, for `configure_model`."
            )
        return self._device_mesh

    def _begin_session(self) -> ZeroSession:
        """What runs, from the first time that it is asked for. Collective then: every rank."""
        if self._session is None:
            if not dist.is_initialized():
                raise RuntimeError(_NOT_SET_UP)
            data, tensor = self._mesh_sizes()
            span = shard_span(self.settings.shard_within, self.num_processes // tensor, data)
            apart = orders_differ(self.root_device, self.settings.placement.shards_parameters)
            groups = Groups.create(self.process_group_backend, self._timeout, apart, span, tensor)
            self._session = ZeroSession(self.settings, groups, self.root_device, self.num_processes)
        return self._session

    def _localise(self, module: nn.Module) -> None:
        """Let a module that is parallelised have parameters of this rank's own. Collective: every rank.

        Raises ``ValueError`` if an earlier run has split it, and this one has no tensor groups.
        """
        if (mesh := self._device_mesh) is not None:
            extension("tensor_parallel").localise(module, mesh["tensor_parallel"], self.session.groups.control)
            return
        parts = {name: getattr(one, "tensor_part", None) for name, one in module.named_parameters()}
        for name, part in parts.items():
            if part is not None and part.dim is not None and part.ranks > 1:
                raise ValueError(
                    f"'{name}' was split over tensor groups of {part.ranks} ranks before. Give tensor_parallel_size="
                    f"{part.ranks} to this strategy too, or load a checkpoint into a new module."
                )

    def _adopt(self, optimizers: Sequence[Optimizer]) -> None:
        """Let optimizers of a module that is parallelised have these parameters. Local."""
        if self._device_mesh is not None:
            extension("tensor_parallel").adopt(optimizers, self.engine)

    @property
    def session(self) -> ZeroSession:
        """What runs, without Lightning; RuntimeError before the strategy was set up."""
        if self._session is None:
            raise RuntimeError(_NOT_SET_UP)
        return self._session

    @property
    def engine(self) -> ZeroEngine:
        """The engine of the running module."""
        return self.session.engine

    def adapter(self, optimizer: Optimizer) -> ShardedOptimizer:
        """The sharded view of one of the run's optimizers; ValueError if it is none of them."""
        try:
            return self.session.adapter(unwrapped(optimizer))
        except KeyError:
            raise ValueError(
                f"{type(optimizer).__name__} is not an optimizer of this run. Return it from configure_optimizers, and "
                "in mid-fit call `trainer.strategy.setup_optimizers(trainer)` on every rank. In Fabric use what "
                "`fabric.setup(model, optimizer)` or `fabric.setup_optimizers(optimizer)` returns, on every rank."
            ) from None

    def _state_of(self, optimizer: Optimizer) -> OptimizerState:
        return self.session.optimizer_state(self.adapter(optimizer).optimizer)

    def tell_failure(self, error: BaseException) -> None:
        """Tell the other ranks of an error that ends this rank's run, and the user what is known of theirs. Local."""
        watch = current_watch()
        if watch is None:
            return
        if isinstance(error, RuntimeError) and not isinstance(error, ZeroError) and _OF_TRANSPORT.search(str(error)):
            try:
                raise_failure("a collective", self.global_rank, error)
            except ZeroError as named:
                error.args = (str(named), *error.args[1:])
                point_to_page(error, type(named))
        watch.failed(error)

    # -------------------------------------------------------------- collectives

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks. Collective: every rank."""
        if dist.is_initialized():
            with naming_failures(f"the barrier '{name}'" if name else "a barrier", self.global_rank, dist.group.WORLD):
                dist.barrier(device_ids=[self.root_device.index] if dist.get_backend() == "nccl" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Give rank ``src``'s object to all ranks. Collective: every rank."""
        objects = [obj]
        if dist.is_initialized():
            with naming_failures(f"a broadcast from rank {src}", self.global_rank, dist.group.WORLD):
                dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks; anything else is returned as it is. Collective: every rank."""
        if not isinstance(tensor, Tensor):
            return tensor
        if group is None and self._device_mesh is not None:  # ranks of a tensor group have the same
            group = self._device_mesh["data_parallel"].get_group()
            tensor = getattr(tensor, "full_tensor", lambda: tensor)()  # of a DTensor, as of losses of split logits
        carrier = group or dist.group.WORLD
        with naming_failures("the reduction of a value (`sync_dist=True`, say)", self.global_rank, carrier):
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks say so, or any of them. Collective: every rank."""
        told = self.reduce(torch.tensor(int(decision), device=self.root_device), dist.group.WORLD, "sum")
        return bool(told == self.num_ranks) if all else bool(told)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """A tensor of each rank, along a new first dimension. Collective: every rank."""
        with naming_failures("an all_gather", self.global_rank, group or dist.group.WORLD):
            gathered: Tensor = super().all_gather(tensor, group, sync_grads)  # type: ignore[misc]
            return gathered


def _store_of_this_attempt(timeout: timedelta | None) -> dict[str, Any]:
    """For ``init_process_group``, after torchrun has started the ranks again (``--max-restarts``).

    It keeps one store for all attempts (https://github.com/pytorch/pytorch/issues/135712), where ranks would find the
    addresses of those that have died. Agents of several nodes count attempts differently: there torch makes the store.
    """
    told = os.environ.get
    attempt = told("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or told("TORCHELASTIC_USE_AGENT_STORE") != "True" or told("GROUP_WORLD_SIZE") != "1":
        return {}
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = tcp_store(*place, is_master=False, timeout=timeout or DEFAULT_TIMEOUT)
    return {"store": prefix_store(f"lightning_zero/attempt {attempt}", store)}
