"""Modules built on the meta device: values from their own initialisation, alike on all ranks, a shard per rank."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_zero import CheckpointPolicy, ZeroStrategy, full_parameters
from lightning_zero.errors import MaterialiseError
from lightning_zero.meta import MetaValues
from lightning_zero.shards.binding import original_kind
from tests.helpers import split
from tests.helpers.rows import Row, in_one_world
from tests.helpers.training import make_trainer, quiet
from tests.helpers.world import run_world

WIDTH = 24
SEED = 11


# ---------------------------------------------------------------------------------------------------------------------
# A model with every kind of initialisation


class Rotary(nn.Module):
    """Buffers computed from numbers, one of them not in the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", torch.empty(16, WIDTH // 2), persistent=False)
        self.register_buffer("sin", torch.empty(16, WIDTH // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        frequencies = 1.0 / (10000 ** (torch.arange(0, WIDTH, 2).float() / WIDTH))
        angles = torch.outer(torch.arange(16).float(), frequencies)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        even, odd = x[..., ::2], x[..., 1::2]
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.cat([even * cos - odd * sin, even * sin + odd * cos], -1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.rotary = Rotary()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.mix(self.rotary(self.norm(x))))))


class Net(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, WIDTH, padding_idx=4)
        self.position = nn.Parameter(torch.empty(16, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 19, bias=False)
        self.apply(self._init_weights)
        self.head.weight = self.embedding.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.normal_(module.weight, std=0.3)
            nn.init.zeros_(module.bias)
        elif isinstance(module, Net):
            nn.init.trunc_normal_(module.position, std=0.02, a=-0.03, b=0.03)
        elif isinstance(module, Layer):  # the last word about what a child has
            nn.init.orthogonal_(module.mix.weight)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position[: ids.shape[-1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(SEED)
    return build()


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


def parts_on_meta() -> nn.Module:
    """Embedding and head are real, the layers are not, and one tensor of a layer is real again."""
    net = Net(layers=0)
    with torch.device("meta"):
        net.layers = nn.ModuleList(Layer() for _ in range(3))
    net.layers[1].up = nn.Linear(WIDTH, 3 * WIDTH)
    return net


def buffers_on_meta() -> nn.Module:
    net = Net()
    with torch.device("meta"):
        for layer in net.layers:
            layer.rotary = Rotary()
    return net


class Module(pl.LightningModule):
    """Built in ``configure_model``, once, however often Lightning asks."""

    def __init__(self, build: Callable[[], nn.Module], in_init: bool = False) -> None:
        super().__init__()
        self.net: nn.Module | None = seeded(build) if in_init else None
        self.build = [build]
        self.generator_state = torch.get_rng_state()
        self.seen: dict[str, Tensor] = {}
        self.built = 0

    def configure_model(self) -> None:
        if self.net is None:
            self.net = seeded(self.build[0])
            self.generator_state = torch.get_rng_state()
            self.built += 1

    def look(self) -> None:
        if not self.seen:
            with full_parameters(self):
                self.seen = values_of(self.net)

    def on_train_start(self) -> None:
        self.look()

    def loss(self, batch: Tensor) -> Tensor:
        ids = torch.randint(19, (4, 9), generator=torch.Generator().manual_seed(int(batch)))
        return F.cross_entropy(self.net(ids).flatten(0, 1), ids.flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), batch_size=4, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def values_of(module: nn.Module) -> dict[str, Tensor]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in named}


def unequal(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> list[str]:
    assert list(expected) == list(actual)
    return [name for name, value in expected.items() if not torch.equal(value, actual[name])]


def data(steps: int = 2) -> DataLoader:
    return DataLoader(range(steps), batch_size=None)


def strategy(stage: int, **options: Any) -> Any:
    return ZeroStrategy(stage=stage, units=("Layer",), **options)


# ---------------------------------------------------------------------------------------------------------------------
# Values


BUILDS = {"meta": on_meta, "parts": parts_on_meta, "buffers": buffers_on_meta}


def materialised(build: Callable[[], nn.Module]) -> nn.Module:
    """What a build becomes on one rank, with nothing else around."""
    net = seeded(build)
    root = nn.Module()
    root.net = net  # the values depend on paths
    meta = [(name, tensor) for name, tensor in root.named_parameters() if tensor.is_meta]
    values = MetaValues(root, [("", [name for name, _ in meta])])
    for name, tensor in meta:
        torch.utils.swap_tensors(tensor, nn.Parameter(values.take(name), tensor.requires_grad))
    values.place_buffers(torch.device("cpu"))
    assert values.problem() == ""
    assert not values.lost
    return net


def values_depend_on_seed_and_path_only(name: str, *stages: int) -> Row:
    """Neither on the stage nor on the number of ranks. Also the tie, the generator's state, and training."""
    build = BUILDS[name]

    def train(rank: int) -> list[Any]:
        found = []
        for stage in stages:
            module = Module(build)
            with quiet():
                make_trainer(strategy(stage)).fit(module, data(), data(1))
            with full_parameters(module):
                tied = module.net.head.weight is module.net.embedding.weight
                found.append((module.seen, module.generator_state, tied, values_of(module.net)))
        return found

    net = materialised(build)
    expected, state = values_of(net), torch.get_rng_state()
    after = trained_here(net, 1)
    for rank in (yield train):
        for seen, generator_state, tied, end in rank:
            assert unequal(expected, seen) == []
            assert torch.equal(generator_state, state)
            assert tied
            assert not any(tensor.is_meta for tensor in end.values())
            # Both ranks see the same data: the mean of two equal gradients is that gradient.
            assert unequal(after, end) == []


def trained_here(net: nn.Module, epochs: int) -> dict[str, Tensor]:
    """The values after as many epochs of two steps, without any strategy."""
    module = Module(lambda: net, in_init=True)
    for _ in range(epochs):
        optimizer = module.configure_optimizers()  # Lightning asks again
        for step in range(2):
            module.loss(torch.tensor(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return values_of(net)


def test_modules_initialise_themselves_children_first() -> None:
    net = materialised(on_meta)
    plain = seeded(Net)
    assert unequal(dict(plain.named_buffers()), dict(net.named_buffers())) == []
    for layer in net.layers:
        assert torch.allclose(layer.mix.weight @ layer.mix.weight.T, torch.eye(WIDTH), atol=1e-5)
        assert 0.2 < float(layer.up.weight.detach().std()) < 0.4
        assert not layer.down.bias.any()
        assert bool((layer.norm.weight == 1).all())
    assert float(net.position.detach().abs().max()) <= 0.03
    assert 0.8 < float(net.embedding.weight.detach().std()) < 1.2, "of a tied weight the first owner decides"
    assert not torch.equal(net.layers[0].up.weight, net.layers[1].up.weight)


def identity_and_attributes_of_meta_parameters_survive() -> Row:
    def train(rank: int) -> bool:
        module = Module(on_meta)
        before: dict[str, nn.Parameter] = {}

        def configure_model() -> None:
            Module.configure_model(module)
            module.net.position.is_position = True
            module.net.layers[0].norm.requires_grad_(False)
            before.update(module.net.named_parameters())

        module.configure_model = configure_model
        module.on_train_start = lambda: None
        with quiet():
            make_trainer(strategy(3)).fit(module, data(), data(1))
        after = dict(module.net.named_parameters())
        assert vars(module.net.position) == {"is_position": True}
        assert [name for name, p in after.items() if not p.requires_grad] == [
            "layers.0.norm.weight",
            "layers.0.norm.bias",
        ]
        return all(
            after[name] is parameter and original_kind(parameter) is nn.Parameter for name, parameter in before.items()
        )

    assert (yield train) == [True, True]


def rank_zero_decides_where_seeds_differ() -> Row:
    def train(rank: int) -> dict[str, Tensor]:
        def build() -> nn.Module:
            torch.manual_seed(SEED + rank)
            return on_meta()

        module = Module(build)
        with quiet():
            make_trainer(strategy(3)).fit(module, data(1), data(1))
        return module.seen

    expected = values_of(materialised(on_meta))
    for seen in (yield train):
        assert unequal(expected, seen) == []


def a_second_fit_goes_on_with_the_same_module(build: Callable[[], nn.Module]) -> Row:
    def train(rank: int) -> tuple[int, bool, dict[str, Tensor]]:
        module = Module(build)
        with quiet():
            trainer = make_trainer(strategy(3), max_epochs=1)
            trainer.fit(module, data(), data(1))
            engine = trainer.strategy.engine
            trainer.fit_loop.max_epochs = 2
            trainer.fit(module, data(), data(1))
        with full_parameters(module):
            return module.built, trainer.strategy.engine is engine, values_of(module.net)

    expected = trained_here(materialised(build), 2)
    for built, same, end in (yield train):
        assert (built, same) == (1, True)
        assert unequal(expected, end) == []


def validation_without_fit(stage: int) -> Row:
    def validate(rank: int) -> float:
        module = Module(on_meta)
        with quiet():
            (metrics,) = make_trainer(strategy(stage)).validate(module, data(), verbose=False)
        assert not any(p.is_meta for p in module.parameters())
        return float(metrics["loss"])

    plain = Module(lambda: materialised(on_meta), in_init=True).eval()
    with torch.no_grad():
        expected = float(torch.stack([plain.loss(torch.tensor(step)) for step in range(2)]).mean())
    assert (yield validate) == [pytest.approx(expected)] * 2


def in_16_bits_a_step_is_not_taken_for_writes_of_the_user(stage: int) -> Row:
    """Parameters that left the meta device shared one count of writes: a step on one unit seemed to write to all."""

    def run(rank: int) -> list[int]:
        module = Module(on_meta)
        with quiet():
            make_trainer(strategy(stage), precision="bf16-mixed").fit(module, data(), data(1))
        parameters = list(module.parameters())
        before = [parameter._version for parameter in parameters]
        torch.autograd.graph.increment_version(parameters[0])
        return [parameter._version - version for parameter, version in zip(parameters, before, strict=True)]

    for counted in (yield run):
        assert counted == [1] + [0] * (len(counted) - 1)


def init_module_makes_an_ordinary_module() -> Row:
    def train(rank: int) -> dict[str, Tensor]:
        with quiet():
            trainer = make_trainer(strategy(3, process_group_backend="gloo"))
            warnings.filterwarnings("ignore", ".*cannot fully support proper instantiation.*")
            with trainer.init_module():
                module = Module(Net, in_init=True)
            assert not any(p.is_meta for p in module.parameters())
            trainer.fit(module, data(1), data(1))
        return module.seen

    for seen in (yield train):
        assert unequal(values_of(seeded(Net)), seen) == []


# ---------------------------------------------------------------------------------------------------------------------
# What cannot be materialised


class Bare(nn.Module):
    """Owns a parameter and two buffers, and says nowhere what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mask", torch.ones(WIDTH), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.mask


def with_bare() -> nn.Module:
    net = on_meta()
    with torch.device("meta"):
        net.layers.append(Bare())
    return net


def refused(build: Callable[[], nn.Module], stage: int, **options: Any) -> Callable[[int], str]:
    """What a rank does to be told why the model cannot be made."""

    def fit(rank: int) -> str:
        module = Module(build)
        with quiet():
            try:
                make_trainer(strategy(stage, **options)).fit(module, data(), data(1))
            except MaterialiseError as error:
                return str(error)
        return ""

    return fit


def what_nobody_initialises_is_refused_by_name_on_every_rank(stage: int) -> Row:
    for message in (yield refused(with_bare, stage)):
        for name in ("scale", "count", "mask"):
            assert f"'net.layers.3.{name}'" in message
        assert "Bare does not initialise it" in message
        assert "`reset_parameters()`" in message
        assert "`_init_weights(module)`" in message


def a_file_brings_what_nobody_initialises_but_not_what_it_lacks(tmp_path: Path) -> Row:
    plain = Module(lambda: Net(), in_init=True)
    plain.net.layers.append(Bare())
    torch.save({"state_dict": plain.state_dict()}, tmp_path / "all.ckpt")
    for message in (
        yield refused(with_bare, 3, checkpoint=CheckpointPolicy(initial_weights=str(tmp_path / "all.ckpt")))
    ):
        assert "'net.layers.3.mask'" in message, "which is not in the file"
        assert "scale" not in message
        assert "count" not in message


class Filled(Bare):
    def reset_parameters(self) -> None:
        self.mask.fill_(1)


def a_checkpoint_brings_what_nobody_initialises(tmp_path: Path) -> Row:
    def build() -> nn.Module:
        net = on_meta()
        with torch.device("meta"):
            net.layers.append(Filled())
        return net

    plain = Module(lambda: Net(), in_init=True)
    plain.net.layers.append(Filled())
    torch.save({"state_dict": plain.state_dict()}, tmp_path / "all.ckpt")
    policy = CheckpointPolicy(initial_weights=str(tmp_path / "all.ckpt"))

    def train(rank: int) -> dict[str, Tensor]:
        module, again = Module(build), Module(build)
        with quiet():
            trainer = make_trainer(strategy(3, checkpoint=policy), max_epochs=1)
            trainer.fit(module, data(1), data(1))
            trainer.save_checkpoint(tmp_path / "saved.ckpt")
            make_trainer(strategy(3), max_epochs=2).fit(again, data(1), data(1), ckpt_path=tmp_path / "saved.ckpt")
        return module.seen

    for seen in (yield train):
        assert unequal(values_of(plain.net), seen) == []


def an_error_of_a_module_is_raised_on_every_rank() -> Row:
    class Failing(nn.Linear):
        def reset_parameters(self) -> None:
            if not self.weight.is_meta:
                raise KeyError("no such number")

    def build() -> nn.Module:
        net = on_meta()
        with torch.device("meta"):
            net.layers[1].mix = Failing(WIDTH, WIDTH)
        return net

    for message in (yield refused(build, 3)):
        assert "KeyError while 'net.layers.1.mix' (Failing) was initialised: 'no such number'" in message


def what_a_constructor_writes_is_refused_by_name() -> Row:
    def build() -> nn.Module:
        net = on_meta()
        with torch.no_grad():
            net.layers[2].down.weight.mul_(0.5)
        return net

    for message in (yield refused(build, 3)):
        assert "'net.layers.2.down.weight': on the meta device, and written to by other code" in message


def what_is_written_to_another_unit_is_refused_by_name() -> Row:
    class Around(Net):
        def reset_parameters(self) -> None:
            if hasattr(self, "head"):
                self.layers[1].up.bias.fill_(1)

    def build() -> nn.Module:
        with torch.device("meta"):
            return Around()

    for message in (yield refused(build, 3)):
        assert "'net.layers.1.up.bias': on the meta device, and written to by other code" in message


def a_hook_on_a_meta_parameter_is_not_lost_silently() -> Row:
    def fit(rank: int) -> str:
        module = Module(on_meta)

        def configure_model() -> None:
            Module.configure_model(module)
            module.net.layers[1].up.weight.register_hook(lambda gradient: gradient * 2)

        module.configure_model = configure_model
        with quiet(), pytest.raises(MaterialiseError, match=r"net\.layers\.1\.up\.weight"):
            make_trainer(strategy(3)).fit(module, data(), data(1))
        return "refused"

    assert (yield fit) == ["refused"] * 2


# ---------------------------------------------------------------------------------------------------------------------
# Memory


class LiveBytes(TorchDispatchMode):
    """The largest number of bytes that new CPU storages held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Any] = {}
        self.peak = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self.known[storage._cdata] = torch.multiprocessing.reductions.StorageWeakRef(storage)
                self.largest = max(self.largest, storage.nbytes())
        if self.alive() > self.peak:
            gc.collect()  # what is only held by a cycle does not count, whenever Python gets to it
            time.sleep(0.005)  # nor what a thread of gloo, whose work is done, has yet to let go
            self.peak = max(self.peak, self.alive())
        return result

    def alive(self) -> int:
        self.known = {key: weak for key, weak in self.known.items() if not weak.expired()}
        return sum(self.size(weak) for weak in self.known.values())

    @staticmethod
    def size(weak: Any) -> int:
        storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
        return 0 if storage is None else storage.nbytes()


def each_rank_holds_its_shard_and_at_most_one_unit() -> Row:
    """10 layers of 4 * (2 * 24 + 72 * 24 + 72 + 24 * 72 + 24 + 24 * 24) = 16.7 kB parameters each, 167 kB together."""
    layers = 10

    def build() -> nn.Module:
        with torch.device("meta"):
            return Net(layers)

    def setup(rank: int) -> tuple[int, int, int, int]:
        gc.freeze()  # what was imported need not be looked through again and again
        module = Module(build)
        with quiet():
            trainer = make_trainer(strategy(3))
            with LiveBytes() as live:
                trainer.validate(module, data(1), verbose=False)
        plan = trainer.strategy.engine.plan
        kept = sum(4 * shard.data.numel() for shard in trainer.strategy.engine.shards.values())
        slots = sum(plan.slots)
        return live.peak, live.largest, kept, slots

    layer = sum(4 * p.numel() for p in Layer().parameters())
    everything = sum(4 * p.numel() for p in seeded(lambda: Net(layers)).parameters())
    assert 16_000 < layer < 17_500
    for peak, largest, kept, slots in (yield setup):
        assert kept <= everything // 2 + 64 * 4 * 40  # alignment
        assert largest < 1.5 * layer
        # Activations and generator states of the replay come on top, and stay below two layers.
        assert peak <= kept + slots + 2 * layer + 60_000
        assert peak < 0.9 * everything + 60_000


def a_compiled_block_on_the_meta_device() -> Row:
    def build() -> nn.Module:
        net = on_meta()
        net.layers[1].compile(backend="eager")
        return net

    def train(rank: int) -> dict[str, Tensor]:
        module = Module(build)
        with quiet():
            make_trainer(strategy(3)).fit(module, data(1), data(1))
        return module.seen

    expected = values_of(materialised(on_meta))
    for seen in (yield train):
        assert unequal(expected, seen) == []


def test_values_of_modules_on_meta(tmp_path: Path) -> None:
    in_one_world(
        2,
        values_depend_on_seed_and_path_only("meta", 1, 2, 3),
        values_depend_on_seed_and_path_only("parts", 3),
        values_depend_on_seed_and_path_only("buffers", 1, 3),
        *map(in_16_bits_a_step_is_not_taken_for_writes_of_the_user, (1, 3)),
        identity_and_attributes_of_meta_parameters_survive(),
        rank_zero_decides_where_seeds_differ(),
        *map(a_second_fit_goes_on_with_the_same_module, (Net, on_meta)),
        *map(validation_without_fit, (1, 3)),
        init_module_makes_an_ordinary_module(),
        a_compiled_block_on_the_meta_device(),
        a_checkpoint_brings_what_nobody_initialises(tmp_path),
        each_rank_holds_its_shard_and_at_most_one_unit(),
    )


def test_what_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    in_one_world(
        2,
        *map(what_nobody_initialises_is_refused_by_name_on_every_rank, (1, 3)),
        a_file_brings_what_nobody_initialises_but_not_what_it_lacks(tmp_path),
        an_error_of_a_module_is_raised_on_every_rank(),
        what_a_constructor_writes_is_refused_by_name(),
        what_is_written_to_another_unit_is_refused_by_name(),
        a_hook_on_a_meta_parameter_is_not_lost_silently(),
    )


class OnMeta(split.Split):
    """``self.scale``, which no module initialises, is on the CPU."""

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = split.Net()
            self.net.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
            self.net.seen = torch.zeros(2)
            if (mesh := getattr(self, "device_mesh", None)) is not None:
                parallelize_module(self.net, mesh["tensor_parallel"], split.plan_of(self.net))


def test_parts_of_split_layers_have_the_values_of_the_whole(tmp_path: Path) -> None:
    """Tensor parallelism gives each rank its part of what the same module gets without it."""

    def rank(_: int) -> None:
        for name, layout in {
            "whole": split.Layout(3, 2),
            "zero1": split.Layout(1, 1, 2),
            "zero3": split.Layout(3, 1, 2),
        }.items():
            torch.manual_seed(SEED)
            split.fit(layout, OnMeta(), 1, begun=tmp_path / name)

    run_world(2, rank, timeout=60)
    for name in ("zero1", "zero3"):
        split.same(split.contents(tmp_path / "whole"), split.contents(tmp_path / name))
