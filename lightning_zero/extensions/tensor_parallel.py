"""Tensor parallelism beside ZeRO: a mesh of ranks, and a module's DTensors as parameters of this rank's own.

[Note: local parameters]
``parallelize_module`` makes DTensors of a module's parameters. ZeRO shards what is this rank's of each over the ranks
that have the same part: those of its data-parallel group. So the engine gets ordinary parameters, which are the local
tensors, and the module gets its DTensors back whenever it reads one: each such layer becomes an object of a subclass,
in which the names of its parameters are properties that make a DTensor of the local one. Autograd goes through that:
a gradient arrives in whatever placement torch has computed it in, ``_Shown`` brings it to the parameter's, and so it
is an ordinary tensor when the engine takes it.

[Note: who counts]
What the tensor group has split counts in a norm on each of its ranks; what all of them have alike counts on the first.

[Note: gradients that must agree]
A parameter that is no DTensor is the same on all ranks of a tensor group only as long as they compute the same gradient
for it. They do not where a norm between sequence-parallel layers is left out of the plan, or batches differ. The first
step compares them, by norms and products with random vectors: a twentieth of a norm is no rounding. Where a rank's
activations are split otherwise, or layers are called with its part of the batch, gradients are too. And where each uses
a part of what a layer gives all of them whole, as of keys with fewer heads than ranks, torch does not add these up. A
layer that takes its input for whole, and gets a part of the sequence, mixes positions: inputs are compared as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_zero._torch import forget_meshes, is_compiled_module, tree_leaves, untracked
from lightning_zero.comm.control import ControlGroup, naming_failures
from lightning_zero.comm.groups import connections, make_group
from lightning_zero.config import SessionSettings
from lightning_zero.engine import ZeroEngine
from lightning_zero.engine.guard import WRAPPERS
from lightning_zero.engine.tied import TiedLayer, use
from lightning_zero.errors import DivergenceError, ParameterAccessError, some
from lightning_zero.optim.hooks import is_hooked
from lightning_zero.optim.rules import optimizer_rule
from lightning_zero.plan.buckets import sent_buffers
from lightning_zero.plan.layout import Part
from lightning_zero.plan.tree import kind_of
from lightning_zero.shards.binding import binding_of
from lightning_zero.shards.slice import Slice, fingerprint

__all__ = [
    "adopt",
    "choosing",
    "compare_batches",
    "in_step",
    "localise",
    "look_at_buffers",
    "make_mesh",
    "mesh_sizes",
    "plan_alone",
    "take_local",
]

DATA, TENSOR = "data_parallel", "tensor_parallel"  # as Lightning's ModelParallelStrategy names them


def mesh_sizes(settings: SessionSettings, on_node: int, world_size: int) -> tuple[int, int]:
    """Ranks of a data-parallel and of a tensor-parallel group. ``"auto"`` for the latter: the ranks of a node.

    Raises:
        ValueError: if the world is not the product of both.
    """
    tensor, data = settings.tensor_parallel_size, settings.data_parallel_size
    within = min(on_node, world_size) if tensor == "auto" else cast(int, tensor)
    groups = world_size // within if data == "auto" else data
    if groups * within != world_size:
        raise ValueError(
            f"tensor_parallel_size={tensor!r} and data_parallel_size={data!r} make a mesh of {groups} x {within} "
            f"ranks, and {world_size} run. Take sizes whose product is {world_size}, or leave data_parallel_size out."
        )
    return groups, within


def make_mesh(device: torch.device, data: int, tensor: int, backend: str | None, timeout: timedelta) -> DeviceMesh:
    """The ranks as a mesh: those of a tensor-parallel group are neighbours. Collective: every rank.

    Made once per default group and settings, as ``Groups`` are. Torch would take the default group for a dimension of
    all ranks, in which nobody ends a wait when another rank has failed.
    """
    known, key = _MESHES.setdefault(dist.group.WORLD, {}), (data, tensor, timeout)
    if key not in known:
        forget_meshes()
        places = torch.arange(data * tensor).view(data, tensor)
        across = make_group(backend, timeout, DATA, places.T.tolist())
        within = make_group(backend, timeout, TENSOR, places.tolist())
        connections.of_users.add(across.group_name)
        connections.of_dtensors.add(within.group_name)
        known[key] = DeviceMesh.from_group([across, within], device.type, places, mesh_dim_names=(DATA, TENSOR))
    return known[key]


def plan_alone(module: nn.Module, data: int, tensor: int) -> None:
    """``localise`` without the other ranks, for a plan: on the meta device, a module has what the first of so many has.

    Its ``configure_model`` runs with a mesh of ranks that are not there, unless it is parallelised already.

    Raises:
        ValueError: as ``localise``.
        RuntimeError: if it is not parallelised, and this process is of a process group.
    """
    control = ControlGroup(None)
    there = next((one.device_mesh for one in module.parameters() if isinstance(one, DTensor)), None)
    if there is not None:
        localise(module, there, control)
        return
    if dist.is_initialized():
        raise RuntimeError("Parallelise the module for its plan, or make the plan before this process is of a group.")
    hook = sys.excepthook  # which torch replaces
    dist.init_process_group("fake", rank=0, world_size=data * tensor)
    try:
        vars(module)["_device_mesh"] = mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=(DATA, TENSOR))
        with torch.device("meta"):
            getattr(module, "configure_model", bool)()
        localise(module, mesh[TENSOR], control)
    finally:
        dist.destroy_process_group()
        forget_meshes()
        sys.excepthook = hook


def localise(module: nn.Module, group: DeviceMesh, control: ControlGroup) -> None:
    """Put this rank's local tensors in the place of a module's DTensors: see [Note: local parameters].

    What is no DTensor is the same on all ranks of a tensor group from here on: it gets the values of the first.
    Local tensors have memory of their own afterwards. Does nothing to a module where this was done.

    Raises:
        ValueError: on every rank, if nothing is parallelised, or something is so in a way that is not supported.

    Collective: every rank.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    split, refused = 0, ""
    for name, parameter in module.named_parameters():
        known: Part | None = getattr(parameter, "tensor_part", None)
        if known is not None:
            if known.ranks != group.size():
                refused = refused or f"'{name}' was split over {known.ranks} ranks before, and is not put together here"
        elif isinstance(parameter, DTensor):
            refused = refused or _problem(name, parameter, group)
        split += isinstance(parameter, DTensor) or (known is not None and known.dim is not None)
    if not split and not refused:
        refused = (
            f"{type(module).__name__} has no parameter that is a DTensor: each of the {group.size()} ranks of a tensor "
            "group would do the same work. Call `parallelize_module(self.net, self.device_mesh['tensor_parallel'], "
            "plan)` in `configure_model`, or leave tensor_parallel_size out"
        )
    problems = [text for text in control.gather_objects(refused) if text]
    if problems:
        raise ValueError(f"{problems[0]}.")
    for child in list(module.modules()):
        if isinstance(child, Metric) and child.process_group is None:
            child.dist_sync_fn = child.dist_sync_fn or partial(_states, group.size())
        for key, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(parameter, DTensor):
                if parameter not in made:
                    made[parameter] = _local(parameter, group)
                child._parameters[key] = made[parameter]
                _give_back(child, key)
            elif getattr(parameter, "tensor_part", None) is None:
                _send(parameter, group)
                whole = tuple(parameter.shape)
                parameter.tensor_part = Part(whole, None, 0, group.get_local_rank(), group.size())  # type: ignore[attr-defined]
            child._parameters[key].tensor_mesh = group  # type: ignore[union-attr]
    if made:
        _warn_of_ties(module)
        _look_at_calls(module, group.size())
    WRAPPERS[DTensor] = _inside


def _look_at_calls(module: nn.Module, ranks: int) -> None:
    """Have parallel layers refuse what DTensors do wrong: outputs in parts of several sizes, which the next layer takes
    all for one of its own rank's size, and second derivatives, of which collectives have none. And calls where they
    have no parts, or where each rank has a batch of its own."""
    shapes: dict[str, torch.Size] = {}
    compiled: bool | None = None  # whether parts of the module are, once asked

    def called(name: str, layer: Any, _: Any) -> None:
        own: Any = None if torch.compiler.is_compiling() else layer._parameters[layer._tensor_parallel[0]]
        if own is None or isinstance(own, DTensor):
            return
        binding, trainer = binding_of(own), vars(module).get("_trainer")
        if getattr(own, "tensor_spec", None) is None or (binding is not None and binding.held):
            raise ParameterAccessError(
                f"'{name}' is called inside `full_parameters`, or in a copy, and `parallelize_module` has it divide "
                "inputs for weights that are whole. Call the model itself, outside; or load its `state_dict()`, taken "
                "inside, into a new one that is not parallelised."
            )
        if trainer is not None and trainer.state.status == "running" and not hasattr(trainer.strategy, "_device_mesh"):
            raise ParameterAccessError(
                f"'{name}' is split over a tensor group, whose ranks would get different batches of "
                f"{type(trainer.strategy).__name__}. Give its Trainer a ZeroStrategy of this tensor_parallel_size."
            )

    def computed(name: str, _: nn.Module, __: Any, output: Any) -> None:  # before `parallelize_module` distributes it
        if not torch.compiler.is_compiling() and isinstance(output, DTensor):
            shapes[name] = output.shape

    def returned(name: str, _: nn.Module, __: Any, output: Any) -> Any:
        nonlocal compiled
        if torch.compiler.is_compiling() or not isinstance(output, Tensor):
            return None
        if output.requires_grad:
            output.register_hook(partial(once, name))
        for dim, (size, part) in enumerate(zip(shapes.pop(name, ()), output.shape, strict=False)):
            if size % ranks and part != size:  # of a DTensor both are of the whole
                raise ValueError(
                    f"The output of '{name}' has {size} places in dimension {dim}, which {ranks} ranks cannot share "
                    "equally. Make that size a multiple (pad the sequence), or do not split it (`Replicate()`)."
                )
        compiled = any(map(is_compiled_module, module.modules())) if compiled is None else compiled
        return _arrive(output) if compiled and hasattr(output, "wait") else None

    def once(name: str, _: Tensor) -> None:
        if torch.is_grad_enabled():
            raise ParameterAccessError(
                f"create_graph=True in a backward through '{name}', which tensor parallelism has split: gradients of "
                "gradients would lack what the other ranks add. Leave gradient penalties out, or tensor_parallel_size."
            )

    for name, layer in module.named_modules():
        if hasattr(layer, "_tensor_parallel"):
            layer.register_forward_pre_hook(partial(called, name), prepend=True)
            layer.register_forward_hook(partial(computed, name), prepend=True)
            layer.register_forward_hook(partial(returned, name))


def _warn_of_ties(module: nn.Module) -> None:
    """Name what begins as a copy of an embedding: it was tied to it, most likely, before ``parallelize_module``."""
    trained = {one: name for name, one in module.named_parameters() if one.requires_grad and not one.is_meta}
    for child in module.modules():
        ours: Any = child._parameters["weight"] if isinstance(child, nn.Embedding) else None
        name = trained.pop(ours, "")
        for theirs, other in trained.items() if name else ():
            part, its = ours.tensor_part, cast(Any, theirs).tensor_part
            if part.shape != its.shape or theirs.dtype != ours.dtype:
                continue
            here, there = (ours, theirs) if part.dim == its.dim else (its.of(ours), part.of(theirs))
            if torch.equal(here, there) and here.min() < here.max():
                rank_zero_warn(
                    f"'{name}' and '{other}' have the same values, and are two parameters: they will be trained "
                    "apart. If they were tied, `parallelize_module` has untied them. Tie them after it."
                )


def _states(tensor: int, state: Tensor, group: Any = None) -> list[Tensor]:
    """The states of a metric: of each tensor group that of the first rank. Collective: every rank."""
    return gather_all_tensors(state, group)[::tensor]


def take_local(optimizers: Sequence[Optimizer]) -> None:
    """Put local parameters in the place of DTensors in optimizers that were made before ``localise``. Local."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["params"] = [getattr(one, "_local_parameter", one) for one in group["params"]]


def adopt(optimizers: Sequence[Optimizer], engine: ZeroEngine) -> None:
    """Have optimizers take local parameters, and compare gradients in the first step of each: see [Note: gradients that
    must agree].

    Raises:
        ValueError: for an optimizer that steps on whole parameters, and has one that is split.
    """
    owned, outputs = {one.user: one for one in engine.shards.values()}, dict[str, list[float]]()
    watches = [] if all(map(is_hooked, optimizers)) else _watch(engine.module, outputs)
    if watches:
        _NOTED[engine] = outputs
    take_local(optimizers)
    for optimizer in optimizers:
        members = [one for group in optimizer.param_groups for one in group["params"]]
        split = [owned[one].name for one in members if one in owned and owned[one].spec.is_split]
        if split and optimizer_rule(optimizer) != "elementwise":
            raise ValueError(
                f"{type(optimizer).__name__} steps on whole parameters, and tensor parallelism has split "
                f"{some(map(repr, split))}. Give these to an optimizer that updates each element for itself (AdamW)."
            )
        alike = [owned[one] for one in members if one in owned and not owned[one].spec.is_split]
        if not is_hooked(optimizer):  # else it steps on from the fit before
            first = optimizer.register_step_pre_hook(lambda *_, alike=alike: _compare(alike, outputs, watches, engine))
            optimizer.register_step_post_hook(lambda *_, first=first: first.remove())


def _watch(module: nn.Module, seen: dict[str, list[float]]) -> list[Any]:
    """Note whole inputs of parallel layers, and gradients of whole outputs, until what is returned is removed."""
    names = {layer: name for name, layer in module.named_modules() if hasattr(layer, "_tensor_parallel")}
    shapes: dict[nn.Module, Any] = {}

    def given(layer: nn.Module, inputs: tuple[Any, ...]) -> None:  # as it computes with them
        for one in () if torch.compiler.is_compiling() else inputs:
            if isinstance(one, DTensor) and one.placements == (Replicate(),):
                note(f"The inputs of '{names[layer]}'", one._local_tensor)

    def first(layer: nn.Module, _: Any, output: Any) -> None:  # as it has computed it
        if not torch.compiler.is_compiling():
            shapes[layer] = output.shape if isinstance(output, DTensor) else None

    def last(layer: nn.Module, _: Any, output: Any) -> None:  # as it returns it
        plain = not torch.compiler.is_compiling() and isinstance(output, Tensor) and not isinstance(output, DTensor)
        if plain and output.requires_grad and output.shape == shapes.get(layer):
            output.register_hook(partial(note, f"The gradients of the output of '{names[layer]}'"))

    def note(name: str, tensor: Tensor | None) -> None:
        if tensor is not None:  # as of a compiled block
            seen[name] = _numbers(_sample(_arrived(tensor.detach())))

    handles: list[Any] = [layer.register_forward_pre_hook(given) for layer in names]
    handles += [layer.register_forward_hook(first, prepend=True) for layer in names]
    return handles + [layer.register_forward_hook(last) for layer in names]


def note_loss(engine: ZeroEngine, loss: Tensor) -> None:
    """Have the first step compare a loss, which all ranks of a tensor group compute. Local."""
    seen = _NOTED.get(engine)
    if seen is not None and not isinstance(loss, DTensor):
        norm, *products = _numbers(loss)  # a loss is small beside the numbers of which it is an average
        seen[f"The losses of backward {engine.progress.backwards + 1}"] = [
            20 * torch.finfo(loss.dtype).eps ** 0.75 * norm,
            *products,
        ]


def _compare(slices: Sequence[Slice], outputs: dict[str, list[float]], watches: list[Any], engine: ZeroEngine) -> None:
    """Raise ``DivergenceError`` if a gradient or an input differs in a tensor group. Collective: every rank."""
    while watches:
        watches.pop().remove()
    _NOTED.pop(engine, None)
    numbers = {f"The gradients of '{one.name}'": _numbers(one.gradient) for one in slices}
    total = sum(norm**2 for norm, *_ in numbers.values()) ** 0.5
    for one, found in zip(slices, numbers.values(), strict=True):
        found[0] += torch.finfo(one.user.dtype).eps ** 0.5 / 5 * total  # of which a twentieth is allowed
    rows = engine.control.gather_objects({**numbers, **outputs}, "gradients that tensor groups have alike")
    for first, rank in _with_first(len(rows), cast(Part, next(iter(engine.shards.values())).spec.part).ranks):
        for name, ours in rows[rank].items():
            if _differ(ours, rows[first].get(name, ours)):
                cause = (
                    "by the plan of `parallelize_module`. Gather what is split before it (`PrepareModuleInput`)."
                    if name.startswith("The inputs")
                    else "and each uses a part: its layer would get the gradient of one. Have it return a DTensor "
                    "(`use_local_output=False`): `output.to_local(grad_placements=[Partial()])` adds gradients up."
                    if name.startswith("The gradients of the output")
                    else "and each has computed it of parts: a penalty takes `layer.weight`, not `self.parameters()`, "
                    "layers return DTensors (`use_local_output=False`), and the sum needs `.full_tensor()`."
                    if name in outputs
                    else "and would train it apart. Each sees a part of what it is applied to: name its layer in the "
                    "plan of `parallelize_module` (a norm between sequence-parallel layers: `SequenceParallel()`)."
                )
                raise DivergenceError(
                    f"{name} on ranks {first} and {rank} differ. They are of one tensor group, whose "
                    f"ranks all have it whole, {cause} Or they got different batches or random numbers: a sampler of "
                    f"your own goes by `self.device_mesh['{DATA}'].get_local_rank()`."
                )


@contextmanager
def choosing() -> Iterator[None]:
    """In here layers show the parameters themselves, which optimizers take and param groups are chosen by."""
    global _choosing
    _choosing = True
    try:
        yield
    finally:
        _choosing = False


def in_step(engine: ZeroEngine, tensor: int) -> Callable[[str, Sequence[int]], list[list[int]]]:
    """``engine.agree`` about batches, which are the same on all ranks of a tensor group, or ``DivergenceError``."""

    def agree(place: str, values: Sequence[int]) -> list[list[int]]:
        rows = engine.agree(place, values)
        for first, rank in _with_first(len(rows), tensor):
            if rows[rank] != rows[first]:
                raise DivergenceError(
                    f"Ranks {first} and {rank} are of one tensor group and differ in {place}. They compute each layer "
                    "together, and need the same batches. Leave the sampler to the Trainer, or have yours go by "
                    f"`self.device_mesh['{DATA}']`: its size, and `get_local_rank()` in it."
                )
        return rows

    return agree


def compare_batches(engine: ZeroEngine, step: str, batch: Any, tensor: int) -> None:
    """Raise ``DivergenceError`` if the first batch of a step method is not the same on all ranks of a tensor group.

    ``batch`` is what the method gets; ``None`` on a rank without one. Collective: every rank.
    """
    known = _COMPARED.setdefault(engine, set())
    if step in known:
        return
    known.add(step)
    numbers = engine.control.gather_objects(fingerprint(*tree_leaves(batch)), f"the first batch of {step}")
    for first, rank in _with_first(len(numbers), tensor):
        if numbers[rank] != numbers[first]:
            raise DivergenceError(
                f"Ranks {first} and {rank} are of one tensor group, and got different batches in {step}. They compute "
                "each layer together, so their results would be mixed. Have a sampler of your own, and augmentations "
                f"in a dataset or its workers, go by `self.device_mesh['{DATA}'].get_local_rank()` in place of the "
                "rank."
            )


def _with_first(ranks: int, tensor: int) -> Iterator[tuple[int, int]]:
    """The first rank of its tensor group, and the rank, for each of so many."""
    return ((rank // tensor * tensor, rank) for rank in range(ranks))


_choosing = False
_MESHES: WeakKeyDictionary[Any, dict[Any, DeviceMesh]] = WeakKeyDictionary()  # of a default group
_COMPARED: WeakKeyDictionary[ZeroEngine, set[str]] = WeakKeyDictionary()  # step methods
_NOTED: WeakKeyDictionary[ZeroEngine, dict[str, list[float]]] = WeakKeyDictionary()  # what the first step is to compare


def _numbers(gradient: Tensor | None) -> list[float]:
    """The norm of a gradient, and products with two random vectors, by which gradients can be compared."""
    if gradient is None:
        return [0.0, 0.0, 0.0]
    values, generator = gradient.detach().double().cpu().flatten(), torch.Generator().manual_seed(0)
    products = [float(values @ torch.randn(values.numel(), generator=generator).double()) for _ in range(2)]
    return [float(values.norm()), *products]


def _differ(ours: list[float], others: list[float]) -> bool:
    """Whether these numbers of two tensors are no rounding apart."""
    return max(abs(a - b) for a, b in zip(ours[1:], others[1:], strict=True)) > 0.05 * ours[0]


def look_at_buffers(module: nn.Module, control: ControlGroup, tensor: int) -> None:
    """Warn of buffers that differ in a tensor group, before its first rank saves its own. Collective: every rank."""
    keys = ((f"{name}.{key}".lstrip("."), child) for name, child in module.named_modules() for key in child._buffers)
    saved = {name for name, child in keys if name.rpartition(".")[2] not in child._non_persistent_buffers_set}
    own = {name: _numbers(_sample(buffer)) for name, buffer in sent_buffers(module) if name in saved}
    rows = control.gather_objects(own, "buffers that tensor groups have alike")
    pairs = ((first, rank, name) for first, rank in _with_first(len(rows), tensor) for name in rows[rank])
    found = {n: (first, rank) for first, rank, n in pairs if _differ(rows[rank][n], rows[first].get(n, rows[rank][n]))}
    for name, (first, rank) in found.items():
        rank_zero_warn(
            f"The buffer '{name}' differs between ranks {first} and {rank} of a tensor group. A checkpoint has that of "
            f"rank {first} alone, and who resumes gets it on both. Register what each rank has a part of with "
            "`persistent=False`, in `configure_model`."
        )


def _sample(tensor: Tensor) -> Tensor:
    """1-D: some thousand of its elements, at the same places in tensors of the same shape."""
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // 4096)]


def join(one: Slice, local: Tensor) -> Tensor:
    """The whole tensor of which each rank of a tensor group has a part like this parameter. Collective: the group."""
    part, group = one.spec.part, one.user.tensor_mesh.get_group()  # type: ignore[attr-defined]
    with untracked():
        local = local.contiguous()
        parts = [torch.empty_like(local) for _ in range(part.ranks)]  # type: ignore[union-attr]
        with naming_failures(f"putting the parts of '{one.name}' together", dist.get_rank(), group):
            dist.all_gather(parts, local, group=group)
        return torch.cat(parts, part.dim)  # type: ignore[union-attr, arg-type]


def part_of_first(one: Slice, whole: Tensor) -> Tensor:
    """This rank's part of the whole tensor that the first rank of its tensor group has. Collective: the group."""
    group = one.user.tensor_mesh.get_group()  # type: ignore[attr-defined]
    with untracked():
        whole = whole.detach().clone(memory_format=torch.contiguous_format)
        with naming_failures(f"sending what was written to '{one.name}'", dist.get_rank(), group):
            dist.broadcast(whole, group=group, group_src=0)
        return one.part_of(whole)


def _problem(name: str, parameter: DTensor, group: DeviceMesh) -> str:
    """Why a DTensor cannot be a parameter here; empty if it can."""
    mesh, placements, ranks = parameter.device_mesh, parameter.placements, dist.get_process_group_ranks
    if mesh.ndim != 1 or ranks(mesh.get_group()) != ranks(group.get_group()):
        return (
            f"'{name}' is a DTensor on {mesh}, expected the tensor-parallel dimension of the strategy's mesh, "
            f"`self.device_mesh['{TENSOR}']`"
        )
    (placement,) = placements
    if not isinstance(placement, Shard | Replicate) or type(placement) not in (Shard, Replicate):
        return f"'{name}' is placed as {placement}: Shard and Replicate are supported"
    if isinstance(placement, Shard) and parameter.shape[placement.dim] % group.size():
        return (
            f"'{name}' has {parameter.shape[placement.dim]} rows in dimension {placement.dim}, which {group.size()} "
            "ranks cannot share equally. Make that size a multiple (a vocabulary is padded for that)"
        )
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return f"'{name}' has hooks, which its local tensor would lose: register them in `on_fit_start`"
    return ""


def _local(parameter: DTensor, group: DeviceMesh) -> nn.Parameter:
    """An ordinary parameter that has this rank's part of a DTensor."""
    (placement,), rank = parameter.placements, group.get_local_rank()
    data = parameter.to_local().detach().contiguous()
    data = data.clone() if data.untyped_storage().nbytes() > data.nbytes else data  # a part of the whole tensor
    local = nn.Parameter(data, requires_grad=parameter.requires_grad)
    vars(local).update(vars(parameter))
    dim = placement.dim % parameter.dim() if isinstance(placement, Shard) else None
    start = 0 if dim is None else rank * local.shape[dim]
    local.tensor_part = Part(tuple(parameter.shape), dim, start, rank, group.size())  # type: ignore[attr-defined]
    spec = parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
    local.tensor_spec = *spec, dict[torch.dtype, Any]()  # type: ignore[attr-defined]  # DTensors' specs, once made
    vars(parameter)["_local_parameter"] = local
    if dim is None:
        _send(local, group)
    return local


def _send(parameter: nn.Parameter, group: DeviceMesh) -> None:
    """Give all ranks of a tensor group the values of the first."""
    if not parameter.is_meta:
        dist.broadcast(parameter.detach(), group=group.get_group(), group_src=0)


# --------------------------------------------------------------------------------------- what the module reads


class _Shown(torch.autograd.Function):
    """A local tensor as a DTensor. Its gradient comes in the parameter's placement, and has arrived.

    ``DTensor.from_local`` does that too, in three times as long: it makes a spec each time.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: Any) -> Tensor:
        ctx.placements = spec.placements
        ctx.set_materialize_grads(False)
        return _as_dtensor(local, spec)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None if gradients[0] is None else _placed(gradients[0], ctx.placements)), None


class _LookUp(torch.autograd.Function):
    """``F.embedding`` of a part of the rows. It makes their gradient alone, where torch makes that of all rows."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: Any, indices: DTensor, padding: int | None) -> Tensor:
        ctx.padding, ctx.start, ctx.rows = padding, spec.mesh.get_local_rank() * len(local), len(local)
        ctx.save_for_backward(indices.to_local())
        ctx.set_materialize_grads(False)
        return nn.functional.embedding(indices, _as_dtensor(local, spec), padding)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), (indices,), rows = gradients, ctx.saved_tensors, ctx.rows
        if gradient is not None:
            places = indices - ctx.start
            others = (places < 0) | (places >= rows) | (indices == (-1 if ctx.padding is None else ctx.padding))
            places, gradient = places.masked_fill(others, rows), _placed(gradient, (Replicate(),))
            gradient = torch.ops.aten.embedding_dense_backward(gradient, places, rows, rows, False)  # without `rows`
        return gradient, None, None, None


class _Arrived(torch.autograd.Function):
    """What a layer returns, once it has arrived: compiled code gives what is under way a gradient of a wrong class."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        return _arrived(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _placed(gradient: DTensor, placements: Sequence[Placement]) -> Tensor:
    """The local tensor of a gradient that is placed so, once it has arrived."""
    if gradient.placements != placements:
        gradient = gradient.redistribute(placements=placements)
    return _arrived(gradient.to_local())


def _as_dtensor(local: Tensor, spec: Any) -> DTensor:
    """A DTensor of a fresh view of a local tensor, outside of autograd."""
    return DTensor(local.view_as(local), spec, requires_grad=local.requires_grad)


_shown, _look_up, _arrive = (cast(Any, one).apply for one in (_Shown, _LookUp, _Arrived))


def _arrived(tensor: Tensor) -> Tensor:
    wait: Callable[[], Tensor] | None = getattr(tensor, "wait", None)  # of an AsyncCollectiveTensor
    return tensor if wait is None else wait()


def _give_back(layer: nn.Module, key: str) -> None:
    """Have a layer show its parameter ``key`` as a DTensor."""
    kind: Any = kind_of(layer)
    layer.__class__ = _parallel_kind(kind, (*getattr(layer, "_tensor_parallel", ()), key))


@cache
def _parallel_kind(kind: type[nn.Module], keys: tuple[str, ...]) -> type[nn.Module]:
    """A class of modules of which these parameters are read as DTensors."""
    namespace: dict[str, Any] = {key: property(_reader(key), _refuse) for key in keys}
    namespace |= {"_ordinary": kind, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    namespace |= {"_tensor_parallel": keys, **(_EMBEDDING if kind is nn.Embedding else {})}
    return type(kind.__name__, (kind,), namespace)


def _refuse(layer: nn.Module, value: Any) -> None:
    raise ParameterAccessError(
        f"A tensor cannot take the place of a parameter of this {type(layer).__name__}, which tensor parallelism has "
        "split, as pruning and `weight_norm` have it. Leave the layer out of the plan of `parallelize_module`."
    )


def _reader(key: str) -> Callable[[nn.Module], Any]:
    def read(layer: nn.Module) -> Any:
        if key not in layer._parameters:
            raise AttributeError(key)
        local, spec = _read(layer, key)
        return local if spec is None else _shown(local, spec)

    return read


def _read(layer: nn.Module, key: str) -> tuple[Any, Any]:
    """A layer's parameter, and the spec of the DTensor to show in its place, if one is."""
    local: Any = layer._parameters[key]
    told, binding = getattr(local, "tensor_spec", None), binding_of(local)
    # The user's own, or whole in the user's hands, or to be chosen.
    if told is None or (binding is not None and binding.held) or _choosing:
        return local, None
    mesh, placements, shape, stride, made = told
    if torch.compiler.is_compiling():  # which knows this, and no spec
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride), None
    if local.dtype not in made:
        like = DTensor.from_local(local.detach(), mesh, placements, run_check=False, shape=shape, stride=stride)
        made[local.dtype] = like._spec
    spec, tied = made[local.dtype], vars(layer).get("forward")
    if isinstance(tied, TiedLayer) and tied.weight is local and local.requires_grad and torch.is_grad_enabled():
        local = use(local, tied.parts)
    return local, spec


def _embed(layer: Any, input: Any) -> Any:
    """The forward of an embedding."""
    (local, spec), whole = _read(layer, "weight"), isinstance(input, DTensor) and input.placements == (Replicate(),)
    switched = torch.compiler.is_compiling() or layer.sparse or layer.scale_grad_by_freq or layer.max_norm is not None
    if switched or not whole or spec is None or spec.placements != (Shard(0),):
        return nn.Embedding.forward(layer, input)
    return _look_up(local, spec, input, layer.padding_idx)


# Its output has a mask beside it until it is summed, which nothing may compile apart.
_EMBEDDING = {"forward": _embed, "__call__": torch.compiler.disable(nn.Module.__call__)}


def _inside(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The local tensor of a DTensor that autograd saves, and what makes a DTensor of it again."""
    whole = cast(DTensor, tensor)
    return whole._local_tensor, partial(_as_dtensor, spec=whole._spec)
