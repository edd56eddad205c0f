"""A byte-level GPT trained on source code that every machine already has: Python's own standard library.

    python examples/language_model.py fit --config configs/zero3.yaml

Nothing is downloaded. The files of the standard library are split into training and validation files by a hash of
their names; ``--data.path FOLDER`` trains on a folder of your own instead. After training the script prints how many
bits the model needs for a byte of the validation files beside what a unigram model (the frequencies of the 256 byte
values in the training files) needs for the same bytes, and a sample of the text it writes.

Every option is listed by ``python examples/language_model.py fit --help``; any of them can be given on the command line
after the configuration, for example ``--trainer.strategy zero1 --trainer.accelerator gpu --model.dim 512``.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from lightning_zero import ZeroCLI

VOCABULARY = 256  # the values of a byte
END_OF_FILE = 0  # separates files; the byte 0 does not occur in source code


# --------------------------------------------------------------------------------------------------------------- data


def in_validation(relative_path: Path, share: float) -> bool:
    """Whether a file belongs to the validation files: decided by its name alone, so alike on every machine and rank."""
    digest = hashlib.sha256(relative_path.as_posix().encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def as_bytes(files: Sequence[Path]) -> Tensor:
    """The files one after the other as a 1-D ``uint8`` tensor, each ended by ``END_OF_FILE``."""
    joined = bytearray()
    for file in files:
        joined += file.read_bytes()
        joined.append(END_OF_FILE)
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)


class Windows(Dataset[Tensor]):
    """Consecutive windows of ``window + 1`` bytes; neighbours share one byte, so that each byte is predicted once."""

    def __init__(self, text: Tensor, window: int) -> None:
        self.text = text
        self.window = window

    def __len__(self) -> int:
        return max(0, len(self.text) - 1) // self.window

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.window
        return self.text[start : start + self.window + 1]


class SourceText(LightningDataModule):
    """Text files as bytes, held in memory once per process, cut into windows of fixed length.

    The Trainer puts a distributed sampler around the windows: each process sees its own part, in an order that depends
    on the seed and the epoch only.

    Args:
        path: Folder with text files, searched recursively. The standard library of this Python if not given.
        suffixes: Endings of the files to read.
        exclude: Names of folders to leave out, wherever they are below ``path``.
        window: Bytes the model sees at once.
        batch_size: Windows per step and process.
        validation_share: Share of the files to validate on, between 0 and 1. A file's name decides where it belongs.
        validation_windows: Number of windows to validate on, spread evenly over the validation files.
    """

    def __init__(
        self,
        path: str | None = None,
        suffixes: Sequence[str] = (".py",),
        exclude: Sequence[str] = (
            "site-packages",
            "dist-packages",
            "test",
            "tests",
            "idle_test",
            "encodings",  # tables
            "pydoc_data",  # one large text
        ),
        window: int = 256,
        batch_size: int = 4,
        validation_share: float = 0.1,
        validation_windows: int = 256,
    ) -> None:
        super().__init__()
        if not 0.0 < validation_share < 1.0:
            raise ValueError(f"data.validation_share must be between 0 and 1, got {validation_share}")
        if min(window, batch_size, validation_windows) < 1:
            raise ValueError("data.window, data.batch_size and data.validation_windows must be at least 1")
        self.path = Path(path if path is not None else sysconfig.get_paths()["stdlib"])
        self.suffixes = tuple(suffixes)
        self.exclude = frozenset(exclude)
        self.window = window
        self.batch_size = batch_size
        self.validation_share = validation_share
        self.validation_windows = validation_windows

    def files(self) -> tuple[list[Path], list[Path]]:
        """Training files and validation files, in alphabetical order.

        Raises:
            ValueError: if one of the two is empty.
        """
        training: list[Path] = []
        validation: list[Path] = []
        for file in sorted(self.path.rglob("*")):
            relative = file.relative_to(self.path)
            if file.suffix not in self.suffixes or self.exclude.intersection(relative.parts[:-1]) or not file.is_file():
                continue
            (validation if in_validation(relative, self.validation_share) else training).append(file)
        if not training or not validation:
            raise ValueError(
                f"{self.path} holds {len(training)} training and {len(validation)} validation files ending in "
                f"{', '.join(self.suffixes)}; both must be at least 1. Check --data.path and --data.suffixes; with few "
                f"files, another --data.validation_share (now {self.validation_share}) moves some to the other side."
            )
        return training, validation

    def setup(self, stage: str) -> None:
        """Read the files, unless an earlier stage has done so."""
        if hasattr(self, "training"):
            return
        training, validation = self.files()
        self.text = as_bytes(training)
        self.training = Windows(self.text, self.window)
        held_out = Windows(as_bytes(validation), self.window)
        self.held_out_bytes = len(held_out.text)
        count = min(self.validation_windows, len(held_out))
        spread = [index * len(held_out) // count for index in range(count)] if count else []
        self.validation: Dataset[Tensor] = torch.utils.data.Subset(held_out, spread)
        if not len(self.training) or not spread:
            raise ValueError(
                f"{self.path} holds {len(self.text)} training and {self.held_out_bytes} validation bytes: not one "
                f"window of data.window={self.window} bytes in one of the two"
            )

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Batches of ``(batch_size, window + 1)`` bytes in an order of their own in each epoch."""
        return self._loader(self.training, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Batches of at most ``(batch_size, window + 1)`` bytes in a fixed order."""
        return self._loader(self.validation, shuffle=False)

    def _loader(self, windows: Dataset[Tensor], *, shuffle: bool) -> DataLoader[Tensor]:
        # No worker processes: a window is a slice of a tensor in memory, and sending it from another process costs more
        # than taking it.
        return DataLoader(windows, self.batch_size, shuffle=shuffle, drop_last=shuffle)


# -------------------------------------------------------------------------------------------------------------- model


class BitsPerByte(Metric):
    """Mean number of bits a model needs per byte, over everything seen on all processes since the last reset."""

    higher_is_better = False
    is_differentiable = False
    full_state_update = False

    nats: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("nats", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, nats: Tensor) -> None:
        """Add one value per byte: minus the natural logarithm of the probability that the model gave to it."""
        self.nats += nats.detach().double().sum()
        self.count += nats.numel()

    def compute(self) -> Tensor:
        """Bits per byte, a ``float32`` scalar."""
        return (self.nats / self.count / math.log(2.0)).float()


class Rotary(nn.Module):
    """Rotary position embedding. Its angles are ``float32`` buffers, whatever precision the weights have.

    Source: RoFormer (arXiv:2104.09864).
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, context: int) -> None:
        super().__init__()
        frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate queries or keys of shape ``(batch, heads, time, head_dim)``; same shape and dtype."""
        time = x.shape[-2]
        cos, sin = self.cos[:time], self.sin[:time]
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Block(nn.Module):
    """Pre-norm transformer block: causal attention, then a GELU network, each added to its input."""

    def __init__(self, dim: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.rotary = Rotary(dim // heads, context)
        self.attention_out = nn.Linear(dim, dim, bias=False)
        self.network_norm = nn.LayerNorm(dim)
        self.network_in = nn.Linear(dim, 4 * dim, bias=False)
        self.network_out = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, time, dim)`` to the same shape."""
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(self.rotary(query), self.rotary(key), value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(-2))
        return x + self.network_out(F.gelu(self.network_in(self.network_norm(x))))


class ByteModel(LightningModule):
    """What language models over bytes have in common: their training. A subclass makes the layers.

    Args:
        context: Most bytes the model can see.
        learning_rate: Highest learning rate, reached at the end of the warm-up.
        weight_decay: AdamW's weight decay, for matrices only.
        warmup_steps: Steps of linear warm-up; from there the learning rate falls to a tenth along a cosine.
    """

    embedding: nn.Embedding
    blocks: nn.ModuleList
    norm: nn.Module
    head: nn.Linear

    def __init__(self, context: int, learning_rate: float, weight_decay: float, warmup_steps: int) -> None:
        super().__init__()
        self.context = context
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.val_bits_per_byte = BitsPerByte()

    def _initialize(self, into_residual: Sequence[nn.Linear]) -> None:
        """Small normal weights; what is added to the residual stream is smaller the more blocks add to it (GPT-2)."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        for linear in into_residual:
            nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * len(self.blocks)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes ``(batch, time)`` of any integer dtype to the logits of the next byte, ``(batch, time, 256)``."""
        x = self.embedding(tokens.int())
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def _nats(self, windows: Tensor) -> Tensor:
        """Minus the logarithm of the probability of each byte but the first of each window, ``float32``, 1-D."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten().long(), reduction="none")

    def training_step(self, windows: Tensor, batch_idx: int) -> Tensor:
        """Mean loss of one batch of windows."""
        loss = self._nats(windows).mean()
        # This process's own batch: a mean over processes would cost a collective in every step.
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, windows: Tensor, batch_idx: int) -> None:
        """Add one batch of windows to the validation loss and to the bits per byte."""
        nats = self._nats(windows)
        self.val_bits_per_byte.update(nats)
        self.log("val/loss", nats.mean(), batch_size=len(windows), sync_dist=True)
        self.log("val/bits_per_byte", self.val_bits_per_byte, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW with weight decay for matrices only, warm-up and cosine per step."""
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))
        steps = int(self.trainer.estimated_stepping_batches)

        def factor(step: int) -> float:
            if step < self.warmup_steps:
                return (step + 1) / self.warmup_steps
            progress = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
            return 0.1 + 0.45 * (1.0 + math.cos(math.pi * min(1.0, progress)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ByteGPT(ByteModel):
    """A GPT over bytes.

    Args:
        dim: Width of the model, a multiple of ``2 * heads``.
        layers: Number of transformer blocks.
        heads: Attention heads per block.
        context: Most bytes the model can see. Taken from ``data.window``.
        tied: Use the embedding's weights in the output layer too.
        learning_rate: Highest learning rate, reached at the end of the warm-up.
        weight_decay: AdamW's weight decay, for matrices only.
        warmup_steps: Steps of linear warm-up; from there the learning rate falls to a tenth along a cosine.
    """

    def __init__(
        self,
        dim: int = 128,
        layers: int = 6,
        heads: int = 4,
        context: int = 256,
        tied: bool = False,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 50,
    ) -> None:
        super().__init__(context, learning_rate, weight_decay, warmup_steps)
        if dim % (2 * heads):
            raise ValueError(f"model.dim must be a multiple of 2 * model.heads, got dim={dim} and heads={heads}")
        self.save_hyperparameters()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, context) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self._initialize([linear for block in self.blocks for linear in (block.attention_out, block.network_out)])
        if tied:
            self.head.weight = self.embedding.weight


@torch.no_grad()
def generate(model: ByteModel, prompt: bytes, length: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
    """Continue ``prompt`` by ``length`` bytes drawn from the model, and return both.

    The model runs exactly ``length`` times, whatever it writes.

    Collective: under a strategy that shards parameters, every process must call this with the same arguments, because
    each run of the model gathers them.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor(list(prompt), dtype=torch.uint8)
    for _ in range(length):
        logits = model(tokens[None, -model.context :].to(model.device))[0, -1]
        probabilities = torch.softmax(logits.float().cpu() / temperature, dim=-1)
        tokens = torch.cat((tokens, torch.multinomial(probabilities, 1, generator=generator).to(torch.uint8)))
    return bytes(tokens.tolist())


# ------------------------------------------------------------------------------------------------------------- report


class Report(Callback):
    """Says at the end of training what was learnt: bits per byte beside a unigram model's, and a sample.

    Args:
        prompt: Beginning of the sample.
        length: Bytes to write after it; 0 for no sample.
        temperature: Below 1 the likelier bytes are preferred.
        seed: Seed of the sample.
    """

    def __init__(
        self, prompt: str = "def read(self, ", length: int = 300, temperature: float = 0.7, seed: int = 0
    ) -> None:
        self.prompt = prompt
        self.length = length
        self.temperature = temperature
        self.seed = seed

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the bytes of the training files; forget what the last validation added."""
        counts = torch.bincount(trainer.datamodule.text, minlength=VOCABULARY).double() + 1.0  # no probability is 0
        self.unigram_nats = -torch.log(counts / counts.sum()).to(pl_module.device, torch.float32)
        self.unigram = BitsPerByte().to(pl_module.device)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Tensor | Mapping[str, Any] | None,
        batch: Tensor,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Let the unigram model predict the very bytes that the model predicted."""
        self.unigram.update(self.unigram_nats[batch[:, 1:].int()])

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the unigram model's bits per byte beside the model's."""
        pl_module.log("val/unigram_bits_per_byte", self.unigram.compute(), sync_dist=True)
        self.validated_step = trainer.global_step

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the report on the first process.

        Collective: every process, for the sample.
        """
        sample = self._sample(trainer, pl_module) if self.length else ""
        model = trainer.callback_metrics.get("val/bits_per_byte")
        unigram = trainer.callback_metrics.get("val/unigram_bits_per_byte")
        if not trainer.is_global_zero:
            return
        if model is not None and unigram is not None:
            print(
                f"\nValidation bits per byte after {self.validated_step} steps: {model:.3f}\n"
                f"A unigram model on the same bytes: {unigram:.3f}\n"
                f"Lower by: {unigram - model:.3f} bits per byte ({1 - model / unigram:.0%})"
            )
        if sample:
            print(f"\nA sample:\n{'-' * 80}\n{sample}\n{'-' * 80}")
        checkpoint = getattr(trainer.checkpoint_callback, "best_model_path", "")
        if checkpoint:
            print(f"\nCheckpoint: {checkpoint}")

    def _sample(self, trainer: Trainer, pl_module: LightningModule) -> str:
        was_training = pl_module.training
        pl_module.eval()
        with trainer.precision_plugin.forward_context():
            text = generate(pl_module, self.prompt.encode(), self.length, temperature=self.temperature, seed=self.seed)
        pl_module.train(was_training)
        return text.split(bytes([END_OF_FILE]))[0].decode(errors="replace")


class LanguageModelCLI(ZeroCLI):
    """The command line of this example."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``--report.*``, and let the model see what the data holds."""
        parser.add_lightning_class_args(Report, "report")
        parser.link_arguments("data.window", "model.context")


def main(model: type[ByteModel] = ByteGPT) -> None:
    """Run the command line of an example that trains such a model."""
    # Windows are slices of a tensor in memory: there is nothing for worker processes to do (`SourceText._loader`).
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # Raised inside Lightning 2.6 with torch 2.13.
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    LanguageModelCLI(model, SourceText, seed_everything_default=1234, auto_configure_optimizers=False)


if __name__ == "__main__":
    main()
