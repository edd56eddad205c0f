"""Recipes: language models of Hugging Face and image models of timm, trained on files of your own.

    python examples/recipes.py fit --config configs/recipes/full_fine_tuning.yaml \
        --model.model_name_or_path MODEL --data.path FOLDER

The files in ``configs/recipes`` say how to run each, and what to change. ``data.batch_size`` is that of a step, which
all ranks share. A run that was stopped goes on with the rows of its next step, on any other number of ranks too.
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_zero import ZeroCLI, ZeroStrategy


def usage_error(message: str) -> SystemExit:
    """What ends the program with a message and no traceback."""
    return SystemExit(f"recipes.py: error: {message}")


class StepSampler(DistributedSampler[Any]):
    """Chooses the rows of a step by the seed and the number of steps before it, whatever the number of ranks.

    An epoch begins, or goes on, at the Trainer's present step. Rows that do not fill a step are left out.
    """

    def __init__(self, rows: Any, batch_size: int, trainer: Trainer) -> None:
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))  # what `seed_everything` was given
        super().__init__(rows, seed=seed, **trainer.distributed_sampler_kwargs)
        self.trainer, self.batch_size = trainer, batch_size
        self.used = len(rows) // batch_size * batch_size

    def __iter__(self) -> Iterator[int]:
        """This rank's rows, to the end of the epoch."""
        epoch, first = divmod(self.trainer.global_step * self.batch_size, self.used)
        order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(self.seed + epoch))
        return iter(order[first + self.rank : self.used : self.num_replicas].tolist())

    def __len__(self) -> int:
        return self.used // self.num_replicas


class RecipeData(LightningDataModule):
    """Loaders for ``training`` and ``validation``, datasets which a subclass makes."""

    training: Any
    validation: Any

    def __init__(self, path: str | None, batch_size: int, workers: int = 0) -> None:
        super().__init__()
        if path is None or not Path(path).is_dir():
            raise usage_error("give --data.path FOLDER" if path is None else f"data.path={path!r} is not a folder")
        self.path, self.batch_size, self.workers = Path(path), batch_size, workers

    def train_dataloader(self) -> DataLoader[Any]:
        """This rank's part of each step, in as many batches as are accumulated."""
        if len(self.training) < self.batch_size:
            have = f"{self.path} has {len(self.training)} rows to train on"
            raise usage_error(f"{have}, fewer than data.batch_size={self.batch_size}")
        return self._loader(self.training, StepSampler(self.training, self.batch_size, self.trainer))

    def val_dataloader(self) -> DataLoader[Any]:
        """The validation rows in a fixed order, which the Trainer shares out."""
        return self._loader(self.validation)

    def _loader(self, rows: Any, sampler: StepSampler | None = None) -> DataLoader[Any]:
        parts = self.trainer.distributed_sampler_kwargs["num_replicas"] * self.trainer.accumulate_grad_batches
        if self.batch_size % parts:
            why = "the number of ranks times trainer.accumulate_grad_batches"
            raise usage_error(f"data.batch_size={self.batch_size} is not a multiple of {parts}, {why}")
        pin = torch.cuda.is_available()
        return DataLoader(rows, self.batch_size // parts, sampler=sampler, num_workers=self.workers, pin_memory=pin)


class TextFolder(RecipeData):
    """The text files of a folder as tokens, one file after the other, cut into windows.

    Args:
        path: Folder with text files in UTF-8, searched recursively. Each is tokenized at once.
        tokenizer: Folder or name of a tokenizer, or ``bytes``. By default that of ``model.model_name_or_path``.
        suffixes: Endings of the files to read.
        window: Tokens that the model sees at once.
        batch_size: Windows in a step, over all ranks.
        validation_share: Share of the windows to validate on: the last ones.
        cache: Folder for the tokens, which all ranks of a machine map into their memory.
    """

    def __init__(
        self,
        path: str | None = None,
        tokenizer: str | None = None,
        suffixes: Sequence[str] = (".txt",),
        window: int = 1024,
        batch_size: int = 32,
        validation_share: float = 0.02,
        cache: str = "runs/tokens",
    ) -> None:
        super().__init__(path, batch_size)
        self.files = sorted(file for file in self.path.rglob("*") if file.suffix in suffixes and file.is_file())
        if not self.files:
            raise usage_error(f"no file in {path!r} ends in {', '.join(suffixes)}: see --data.path and --data.suffixes")
        self.tokenizer, self.window, self.validation_share, self.cache = tokenizer, window, validation_share, cache

    def tokens(self) -> Path:
        """The file of the tokens: another one for other text, or another tokenizer."""
        sources = [*self.files, *sorted(Path(str(self.tokenizer)).glob("*token*"))]
        states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in sources]
        return Path(self.cache, hashlib.sha256(repr((self.tokenizer, states)).encode()).hexdigest()[:16])

    def prepare_data(self) -> None:
        """Tokenize the text, unless that was done. On one rank of each machine."""
        if self.tokens().exists():
            return
        encode = self._encoder()
        Path(self.cache).mkdir(parents=True, exist_ok=True)
        partial = Path(self.cache, f"partial-{os.getpid()}")
        with partial.open("wb") as out:
            for file in self.files:
                ids = encode(file.read_text(encoding="utf-8", errors="replace"))
                torch.tensor(ids, dtype=torch.int32).numpy().tofile(out)
        partial.replace(self.tokens())

    def _encoder(self) -> Callable[[str], list[int]]:
        if self.tokenizer == "bytes":
            return lambda text: [*text.encode(), 0]
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return lambda text: tokenizer(text, verbose=False)["input_ids"] + end

    def setup(self, stage: str) -> None:
        """Map the tokens into memory, a row for each window."""
        count = self.tokens().stat().st_size // torch.int32.itemsize
        tokens = torch.from_file(str(self.tokens()), size=count, dtype=torch.int32)
        windows = tokens[: count // self.window * self.window].view(-1, self.window)
        first = len(windows) - math.ceil(self.validation_share * len(windows))
        self.training, self.validation = windows[:first], windows[first:]


class ImageFolders(RecipeData):
    """The images in ``path/train/CLASS`` and ``path/val/CLASS``, in the size and colors that the model expects.

    Args:
        path: Folder with ``train`` and ``val``.
        batch_size: Images in a step, over all ranks.
        workers: Processes of each rank that load images.
        augment: timm's name for random changes to the training images, or ``null``.
    """

    def __init__(
        self,
        path: str | None = None,
        batch_size: int = 256,
        workers: int = 4,
        augment: str | None = "rand-m9-mstd0.5-inc1",
    ) -> None:
        super().__init__(path, batch_size, workers)
        self.augment = augment

    def setup(self, stage: str) -> None:
        """Find the images."""
        import timm
        from torchvision.datasets import ImageFolder

        model = self.trainer.lightning_module.hparams
        expected = timm.get_pretrained_cfg(model.model_name).to_dict()
        size = timm.data.resolve_data_config(model.model_args, expected)
        train = timm.data.create_transform(**size, is_training=True, auto_augment=self.augment)
        self.training = ImageFolder(self.path / "train", train)
        self.validation = ImageFolder(self.path / "val", timm.data.create_transform(**size))
        for images in (self.training, self.validation):
            if len(images.classes) != model.num_classes:
                have = f"{images.root} has {len(images.classes)} folders, of a class each"
                raise usage_error(f"{have}; model.num_classes is {model.num_classes}")


class Recipe(LightningModule):
    """A model trained by AdamW, with weight decay for matrices only; warm-up, then a cosine down to a tenth.

    Args:
        learning_rate: The highest, at the end of the warm-up.
        weight_decay: That of AdamW.
        warmup_steps: Steps of linear warm-up.
    """

    def __init__(self, learning_rate: float = 1e-5, weight_decay: float = 0.0, warmup_steps: int = 100) -> None:
        super().__init__()
        self.save_hyperparameters()  # those of the subclass too
        self.net: Any = None

    def on_train_start(self) -> None:
        """Refuse to go on with a part of a step."""
        parts = self.trainer.accumulate_grad_batches
        if (ready := self.trainer.fit_loop.epoch_loop.batch_progress.current.ready) % parts:
            raise usage_error(f"trainer.accumulate_grad_batches={parts} does not divide the {ready} batches before")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of one batch."""
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the mean loss of all batches."""
        self.log("val/loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def loss(self, batch: Any) -> Tensor:
        """The mean loss of a batch."""
        raise NotImplementedError

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW and its schedule."""
        trained, warmup = [p for p in self.parameters() if p.requires_grad], self.hparams.warmup_steps
        matrices, others = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": self.hparams.weight_decay}]
        groups += [{"params": others, "weight_decay": 0.0}] if others else []
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate)
        # `estimated_stepping_batches` would start to load before the Trainer knows at which step it resumes.
        data, steps = self.trainer.datamodule, self.trainer.max_steps
        if steps < 0:
            steps = self.trainer.max_epochs * (len(data.training) // data.batch_size)

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            progress = min(1.0, (step - warmup) / max(1, steps - warmup))
            return 0.55 + 0.45 * math.cos(math.pi * progress)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class CausalLM(Recipe):
    """A causal language model of Hugging Face, or adapters of it.

    Args:
        model_name_or_path: Folder with safetensors, or a name on the Hugging Face hub.
        lora: Arguments of peft's ``LoraConfig``. Without them all weights are trained.
        dtype: Of the model's weights. Adapters have float32.
        optimization: As for ``Recipe``.
    """

    def __init__(
        self,
        model_name_or_path: str | None = None,
        lora: dict[str, Any] | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        **optimization: Any,
    ) -> None:
        super().__init__(**optimization)
        if model_name_or_path is None:
            raise usage_error("give --model.model_name_or_path FOLDER, or a name on the Hugging Face hub")

    def configure_model(self) -> None:
        """Build the model without weights: each rank reads its own part of them (see ``RecipeCLI``)."""
        if self.net is not None:
            return
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(self.hparams.model_name_or_path)
        with torch.device("meta"):
            net = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, self.hparams.dtype))
        self.net = net if self.hparams.lora is None else with_adapters(net, self.hparams.lora)

    def loss(self, batch: Tensor) -> Tensor:
        """The mean over all tokens of a batch of windows."""
        return self.net(input_ids=batch.long(), labels=batch.long(), use_cache=False).loss


def with_adapters(model: Any, settings: dict[str, Any]) -> Any:
    """Freeze a model on the meta device, and add LoRA adapters that have values."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.lora_A.to_empty(device="cpu")
            layer.lora_B.to_empty(device="cpu")
            layer.reset_lora_parameters("default", settings.get("init_lora_weights", True))
    return model


class ImageClassifier(Recipe):
    """A model of timm for images.

    Args:
        model_name: One of ``timm.list_models()``.
        num_classes: Number of classes.
        model_args: More arguments of ``timm.create_model``.
        label_smoothing: Share of each label that all classes get.
        optimization: As for ``Recipe``.
    """

    def __init__(
        self,
        model_name: str,
        num_classes: int,
        model_args: dict[str, Any],
        label_smoothing: float = 0.0,
        **optimization: Any,
    ) -> None:
        super().__init__(**optimization)

    def configure_model(self) -> None:
        """Build the model, with its weights."""
        import timm

        if self.net is None:
            given = self.hparams
            self.net = timm.create_model(given.model_name, num_classes=given.num_classes, **given.model_args)

    def loss(self, batch: Any) -> Tensor:
        """The mean over a batch of images and labels."""
        images, labels = batch
        logits = self.net(images)
        if not self.training:
            self.log("val/accuracy", (logits.argmax(-1) == labels).float().mean(), prog_bar=True, sync_dist=True)
        return F.cross_entropy(logits, labels, label_smoothing=self.hparams.label_smoothing * self.training)


class RecipeCLI(ZeroCLI):
    """``ZeroCLI`` that has the strategy read the weights of a language model, and the data use its tokenizer."""

    def after_instantiate_classes(self) -> None:
        """Find the model's folder. One on the Hugging Face hub is downloaded, unless that was done."""
        if not isinstance(strategy := self.trainer.strategy, ZeroStrategy):
            raise usage_error("trainer.strategy: give one of lightning_zero, such as zero3")
        if not isinstance(self.model, CausalLM):
            if getattr(self.datamodule, "tokenizer", "") is None:
                raise usage_error("give --data.tokenizer FOLDER or NAME, or bytes")
            return
        name = folder = self.model.hparams.model_name_or_path
        if not Path(name).is_dir():
            from huggingface_hub import snapshot_download

            try:
                folder = snapshot_download(name, allow_patterns=["*.safetensors*", "*.json", "*.model", "*.txt"])
            except Exception as error:
                what = f"model.model_name_or_path={name!r} is not a folder, and the Hugging Face hub gave none"
                raise usage_error(f"{what}: {error}") from None
        self.datamodule.tokenizer = self.datamodule.tokenizer or folder
        policy = replace(strategy.settings.checkpoint, initial_weights=folder)
        strategy.settings = replace(strategy.settings, checkpoint=policy)


def main() -> None:
    """Run the command line."""
    # Windows are slices of a tensor in memory: there is nothing for worker processes to do.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # Raised inside Lightning 2.6 with torch 2.13.
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    # A rank that has one row less for the validation than others repeats one.
    warnings.filterwarnings("ignore", message=".*Using `DistributedSampler` with the dataloaders.*")
    # `StepSampler` goes on in the middle of an epoch.
    warnings.filterwarnings("ignore", message=".*ended before the epoch ended and your dataloader is not resumable.*")
    RecipeCLI(seed_everything_default=1234, auto_configure_optimizers=False, load_from_checkpoint_support=False)


if __name__ == "__main__":
    from recipes import main  # this file under its name, which configurations have

    main()
