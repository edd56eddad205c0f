"""Every callback that Lightning ships, tuners, profilers and what is made of a module after a fit."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero import full_gradients, full_parameters
from tests.helpers.cases import WIDTH
from tests.helpers.runs import Memory, Net, batches, made
from tests.helpers.training import make_trainer
from tests.thorough.features.feature import Feature, Refusal
from tests.thorough.features.optimization import BY_SUM

__all__ = ["FEATURES"]

Make = Callable[[], Strategy]


def having(make_callback: Callable[[Path], Any], look: Callable[[Any, Any], Any] | None = None, **options: Any) -> Any:
    """A fit of three epochs with a callback, and what there is to see of that afterwards."""

    def play(make: Make, folder: Path) -> Any:
        callback, module = make_callback(folder), options.get("net", Net)()
        settings = {"max_epochs": 3, "default_root_dir": folder, "logger": Memory(), "log_every_n_steps": 1}
        settings |= {key: value for key, value in options.items() if key != "net"}
        trainer = make_trainer(make(), callbacks=[callback], **settings)
        trainer.fit(module, batches(4), batches(1))
        return {"made": made(module, trainer), "seen": None if look is None else look(callback, trainer)}

    return play


class Parts(Net):
    """With a backbone, for what freezes and prunes; its head is trained from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.model.layers

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


class Thawing(callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.backbone)  # type: ignore[arg-type]

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.01)  # type: ignore[arg-type]


def thawing(make_callback: Callable[[], Any]) -> Any:
    """DDP averages no gradients of what was frozen when it wrapped the module: there it is thawed from the start."""

    def play(make: Make, folder: Path) -> Any:
        module, callback = Parts(), make_callback()
        trainer = make_trainer(make(), callbacks=[callback], max_epochs=3)
        trainer.fit(module, batches(3))
        trainer.save_checkpoint(folder / "thawed.ckpt")
        resumed = make_trainer(make(), callbacks=[make_callback()], max_epochs=4)
        resumed.fit(Parts(), batches(3), ckpt_path=folder / "thawed.ckpt")
        optimizers = [t.optimizers[0] for t in (trainer, resumed)]
        groups = [[len(group["params"]) > 0 for group in optimizer.param_groups] for optimizer in optimizers]
        states = [len(optimizer.state_dict()["state"]) for optimizer in optimizers]
        return [groups, states, trainer.global_step, resumed.global_step]

    return play


class Written(callbacks.BasePredictionWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__("batch_and_epoch")
        self.folder = folder

    def write_on_batch_end(self, *args: Any) -> None:
        torch.save(args[2], self.folder / f"{dist.get_rank()} {args[5]}.pt")

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        torch.save((predictions, batch_indices), self.folder / f"{dist.get_rank()}.pt")


def predictions(make: Make, folder: Path) -> Any:
    trainer = make_trainer(make(), callbacks=[Written(folder)])
    trainer.predict(Net(), batches(3), return_predictions=False)
    return [torch.load(path) for path in sorted(folder.glob(f"{dist.get_rank()}*.pt"))]


def _checkpoints(callback: Any, trainer: Any) -> Any:
    best = [Path(callback.best_model_path).name, Path(callback.last_model_path).name]
    return [best, sorted(Path(path).name for path in callback.best_k_models), float(callback.best_model_score)]


def interrupted(make: Make, folder: Path) -> Any:
    class Breaking(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                raise ValueError("on purpose")

    module, keeper = Breaking(), callbacks.OnExceptionCheckpoint(folder, filename="broken")
    trainer = make_trainer(make(), callbacks=[keeper], enable_checkpointing=True)
    try:
        trainer.fit(module, batches(4))
    except ValueError as error:
        dist.barrier()
        resumed, module = make_trainer(make()), Net()
        resumed.fit(module, batches(4), ckpt_path=folder / "broken.ckpt")
        return [str(error), made(module, resumed)]
    return "no error"


class Batched(Net):
    """With a batch size and a learning rate to be found."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size, self.lr = 2, 0.01

    def train_dataloader(self) -> Any:
        return DataLoader(
            torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3)), batch_size=self.batch_size
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def batch_size_found(make: Make, folder: Path) -> Any:
    said = []
    for find in (lambda trainer: Tuner(trainer).scale_batch_size(Batched()), lambda trainer: trainer.fit(Batched())):
        try:
            find(make_trainer(make(), callbacks=[callbacks.BatchSizeFinder()]))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    assert len(said) == 2, said
    return said


def rate_found(make: Make, folder: Path) -> Any:
    module = Batched()
    trainer = make_trainer(make(), max_epochs=1, default_root_dir=folder)
    found = Tuner(trainer).lr_find(module, num_training=12, max_lr=0.5)
    assert found is not None
    trainer.fit(module)
    return [found.results, found.suggestion(), module.lr, made(module, trainer)]


def profiled(profiler: str) -> Any:
    """The names of what is timed by Lightning itself, and the numbers of the run."""

    def play(make: Make, folder: Path) -> Any:
        module, trainer = Net(), make_trainer(make(), profiler=profiler, default_root_dir=folder)
        trainer.fit(module, batches(3), batches(1))
        return made(module, trainer)

    return play


def fitted(make: Make) -> Net:
    module, trainer = Net(), make_trainer(make())
    trainer.fit(module, batches(2))
    return module


def copied(make: Make, folder: Path) -> Any:
    module = fitted(make)
    with full_parameters(module):
        saved = io.BytesIO()
        torch.save(module.model, saved)
        saved.seek(0)
        made = [
            copy.deepcopy(module.model),
            pickle.loads(pickle.dumps(module.model)),
            torch.load(saved, weights_only=False),
        ]
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
    return [[plain(x) for plain in made], [sorted(plain.state_dict().items()) for plain in made]]


def exported(make: Make, folder: Path) -> Any:
    module = fitted(make)
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
    with full_parameters(module):
        traced = module.to_torchscript(folder / f"{dist.get_rank()}.pt", method="trace", example_inputs=x)
        program = torch.export.export(module.model, (x,))
        torch.export.save(program, folder / f"{dist.get_rank()}.pt2")
        inside = [traced(x), program.module()(x)]
    del traced, program
    loaded = [
        torch.jit.load(folder / f"{dist.get_rank()}.pt"),
        torch.export.load(folder / f"{dist.get_rank()}.pt2").module(),
    ]
    return inside + [program(x) for program in loaded]


def bare_copy(make: Make, folder: Path) -> Any:
    return sorted(copy.deepcopy(fitted(make)).state_dict().items())


class Custom(callbacks.Callback):
    """What people write: norms of gradients and weights, and a state in the checkpoint."""

    def __init__(self) -> None:
        self.norms: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        with full_gradients(pl_module), full_parameters(pl_module):
            self.norms += [p.grad.norm() for p in pl_module.parameters() if p.grad is not None]
            self.norms += [p.detach().norm() for p in pl_module.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"norms": self.norms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.norms = state["norms"]


def own_callback(make: Make, folder: Path) -> Any:
    callback = Custom()
    first = make_trainer(make(), callbacks=[callback], max_epochs=1)
    first.fit(Net(), batches(3))
    first.save_checkpoint(folder / "saved.ckpt")
    again = Custom()
    trainer = make_trainer(make(), callbacks=[again], max_epochs=2)
    trainer.fit(Net(), batches(3), ckpt_path=folder / "saved.ckpt")
    assert len(again.norms) == 2 * len(callback.norms)
    return again.norms


def _rate(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    for group in trainer.optimizers[0].param_groups:
        group["lr"] *= 0.5


def histograms(make: Make, folder: Path) -> Any:
    module = fitted(make)
    with full_parameters(module):
        return [torch.histogram(p.detach(), 5) for p in module.parameters()]


def bare_histograms(make: Make, folder: Path) -> Any:
    return [torch.histogram(p.detach(), 5) for p in fitted(make).parameters()]


class Spikes(callbacks.SpikeDetection):
    """Notes what it would end the run for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(window=2, rtol=0.0, atol=1e-6, exclude_batches_path=folder / "skip.json")
        self.found: list[int] = []

    def _handle_spike(self, fabric: Any, batch_idx: int) -> None:
        self.found.append(batch_idx)


_SAVE = {"save_last": True, "save_top_k": 2, "monitor": "val_loss", "filename": "{epoch}-{val_loss:.4f}"}
_LOTTERY = {"use_lottery_ticket_hypothesis": False, "parameter_names": ["weight"]}
_NAMED = "the values are not in memory: do it inside `full_parameters`"
IMPLICIT: Any = {"refused": {3: Refusal("full_parameters", _NAMED)}, "alone": True}


def _pruning(folder: Path) -> Any:
    pruning = callbacks.ModelPruning("l1_unstructured", amount=0.3, **_LOTTERY)  # type: ignore[arg-type]
    pruning.filter_parameters_to_prune = lambda found=(): [  # type: ignore[method-assign]
        pair for pair in found if pair[0].weight.ndim > 1
    ]
    return pruning


FEATURES = {
    "Callbacks": [
        Feature(
            "`ModelCheckpoint`: the best, the last, their names",
            having(
                lambda folder: callbacks.ModelCheckpoint(folder, **_SAVE),
                _checkpoints,
                enable_checkpointing=True,
            ),
        ),  # type: ignore[arg-type]
        Feature("`OnExceptionCheckpoint`, and resuming from it", interrupted),
        Feature(
            "`EarlyStopping`",
            having(
                lambda _: callbacks.EarlyStopping("val_loss", patience=0, min_delta=1.0),
                lambda c, t: [c.stopped_epoch, c.wait_count],
            ),
        ),
        Feature(
            "`LearningRateMonitor`",
            having(lambda _: callbacks.LearningRateMonitor(log_weight_decay=True), lambda c, t: [c.lrs, t.logger.rows]),
        ),
        Feature(
            "`GradientAccumulationScheduler`",
            having(lambda _: callbacks.GradientAccumulationScheduler({0: 1, 1: 2})),
            **BY_SUM,
        ),
        Feature(
            "`StochasticWeightAveraging`",
            having(lambda _: callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1)),
        ),
        Feature("`WeightAveraging`", having(lambda _: callbacks.WeightAveraging())),
        Feature("`EMAWeightAveraging`", having(lambda _: callbacks.EMAWeightAveraging(decay=0.9))),
        Feature(
            "`BaseFinetuning`",
            thawing(Thawing),
            why="groups, states and steps; gradients of thawed parameters are averaged, which DDP does not do",
        ),
        Feature(
            "`BackboneFinetuning`", thawing(lambda: callbacks.BackboneFinetuning(1, verbose=False)), why="likewise"
        ),
        Feature("`ModelPruning`", having(_pruning), why="without lottery tickets, which are refused"),
        Feature("`Callback` with hooks and a state, in checkpoints", own_callback),
        Feature("`LambdaCallback`", having(lambda _: callbacks.LambdaCallback(on_train_epoch_end=_rate))),
        Feature("`Timer`", having(lambda _: callbacks.Timer("00:00:10:00"), lambda c, t: c.time_elapsed() > 0)),
        Feature("`DeviceStatsMonitor`", having(lambda _: callbacks.DeviceStatsMonitor(cpu_stats=False))),
        Feature(
            "`ThroughputMonitor`",
            having(
                lambda _: callbacks.ThroughputMonitor(batch_size_fn=lambda batch: 1, window_size=4),
                lambda c, t: sorted({key for _, row in t.logger.rows for key in row}),
            ),
        ),
        Feature("`SpikeDetection`", having(Spikes, lambda c, t: c.found)),
        Feature("`TQDMProgressBar`", having(lambda _: callbacks.TQDMProgressBar(), enable_progress_bar=True)),
        Feature("`RichProgressBar`", having(lambda _: callbacks.RichProgressBar(), enable_progress_bar=True)),
        Feature("`ModelSummary`", having(lambda _: callbacks.ModelSummary(2), enable_model_summary=True)),
        Feature("`RichModelSummary`", having(lambda _: callbacks.RichModelSummary(2), enable_model_summary=True)),
        Feature("`BasePredictionWriter`", predictions),
        Feature("`BatchSizeFinder`", batch_size_found, why="Lightning refuses it with every distributed strategy"),
        Feature("`LearningRateFinder`", rate_found),
    ],
    "Profilers": [
        Feature("`SimpleProfiler`", profiled("simple")),
        Feature("`AdvancedProfiler`", profiled("advanced")),
        Feature("`PyTorchProfiler`", profiled("pytorch")),
    ],
    "What is made of a fitted module": [
        Feature("`copy.deepcopy`, `pickle`, `torch.save` inside `full_parameters`", copied),
        Feature("`to_torchscript`, `torch.export` inside `full_parameters`", exported),
        Feature("`copy.deepcopy` outside of `full_parameters`", bare_copy, **IMPLICIT),
        Feature("histograms and norms of weights inside `full_parameters`", histograms),
        Feature(
            "histograms and norms of weights between steps, outside of `full_parameters`", bare_histograms, **IMPLICIT
        ),
    ],
}
