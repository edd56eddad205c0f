"""Fine-tunes the model of ``language_model.py`` on other text: the base is frozen, a few adapters beside it learn.

    python examples/language_model.py fit --config configs/zero3.yaml
    python examples/fine_tune.py fit --config configs/fine_tune.yaml

The first command trains the base and leaves a sharded checkpoint, from which the second one takes its first weights:
every process reads its own part of them. The base has learnt Python code without the tables in the standard library's
``encodings``; these are what it is fine-tuned on. (``--data.path FOLDER`` takes a folder of your own.) Its checkpoints
hold the adapters alone. At the end the script prints the validation loss before and after, the sizes of both
checkpoints, and what the base with its adapters writes when it is loaded into one process.

Options follow the configuration on the command line; another base, for example, is chosen by
``--trainer.strategy.init_args.checkpoint.initial_weights PATH``.
"""

from __future__ import annotations

import math
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningArgumentParser
from torch import Tensor, nn

from lightning_zero import ZeroCLI, load_from_checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the base's model and data are in the other example

from examples.language_model import END_OF_FILE, ByteGPT, SourceText, generate


class PackageText(SourceText):
    """The text of one package of the standard library.

    Args:
        package: Name of the package, unless there is a path.
        path: Folder with text files, searched recursively.
        suffixes: Endings of the files to read.
        window: Bytes the model sees at once.
        batch_size: Windows per step and process.
        validation_share: Share of the files to validate on, between 0 and 1. A file's name decides where it belongs.
        validation_windows: Number of windows to validate on, spread evenly over the validation files.
    """

    def __init__(
        self,
        package: str = "encodings",
        path: str | None = None,
        suffixes: Sequence[str] = (".py",),
        window: int = 256,
        batch_size: int = 4,
        validation_share: float = 0.1,
        validation_windows: int = 128,
    ) -> None:
        path = path if path is not None else str(Path(sysconfig.get_paths()["stdlib"]) / package)
        super().__init__(path, suffixes, (), window, batch_size, validation_share, validation_windows)


class LowRankLinear(nn.Linear):
    """A linear layer that stays as it is, plus the product of two thin matrices, which is what learns.

    The layer's own weight keeps its name, so that a checkpoint of the base fits as it is. ``up`` begins at zero: before
    the first step the layer computes what the base does.

    Source: LoRA (arXiv:2106.09685).
    """

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``."""
        return super().forward(x) + F.linear(F.linear(x, self.down), self.up)


class FineTunedGPT(ByteGPT):
    """The base, frozen, with a trainable addition to every linear layer of its blocks.

    Args:
        rank: Rows of the thin matrices. They take about ``rank / dim`` of the memory of the layers they are added to.
        base: What the base was built with.
    """

    def __init__(self, rank: int = 8, **base: Any) -> None:
        super().__init__(**base)
        self.requires_grad_(False)
        for block in self.blocks:
            for name, layer in list(block.named_children()):
                if isinstance(layer, nn.Linear):
                    setattr(block, name, LowRankLinear(layer, rank))


@torch.no_grad()
def bits_per_byte(model: ByteGPT, data: SourceText) -> float:
    """The validation loss of an ordinary module, in this process alone."""
    nats = torch.cat([model._nats(windows) for windows in data.val_dataloader()])
    return float(nats.double().mean() / math.log(2.0))


def mebibytes(checkpoint: str) -> str:
    """The size of a checkpoint: of a file, or of all files of a folder."""
    path = Path(checkpoint)
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return f"{sum(file.stat().st_size for file in files) / 2**20:.2f} MiB"


class FineTuneCLI(ZeroCLI):
    """The command line of this example."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the sample's settings, and let the model see what the data holds."""
        parser.add_argument("--sample.prompt", type=str, default="decoding_table = (", help="Beginning of the sample.")
        parser.add_argument("--sample.length", type=int, default=300, help="Bytes to write after it; 0 for no sample.")
        parser.link_arguments("data.window", "model.context")

    def before_fit(self) -> None:
        """Validate the base. Collective: every process.

        Raises:
            SystemExit: if no base is configured.
        """
        checkpoint = getattr(getattr(self.config.fit.trainer.strategy, "init_args", None), "checkpoint", None)
        self.base = getattr(checkpoint, "initial_weights", None)
        if not self.base:
            raise SystemExit(
                "fine_tune.py: error: which checkpoint to start from? Use configs/fine_tune.yaml, or set "
                "trainer.strategy.init_args.checkpoint.initial_weights as it does."
            )
        self.before = self._validated()

    def after_fit(self) -> None:
        """Print on the first process what came of it. Collective: every process, to validate."""
        after = self._validated()
        if not self.trainer.is_global_zero:
            return
        sample = self.config.fit.sample
        adapters = self.trainer.checkpoint_callback.best_model_path
        trained = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        every = sum(parameter.numel() for parameter in self.model.parameters())
        print(
            f"\nTrained {trained} of {every} parameters ({trained / every:.1%}) in {self.trainer.global_step} steps.\n"
            f"Validation bits per byte before: {self.before:.3f}\n"
            f"Validation bits per byte after: {after:.3f}\n"
            f"Checkpoint of the adapters: {adapters} ({mebibytes(adapters)})\n"
            f"Checkpoint of the base: {self.base} ({mebibytes(self.base)})"
        )
        # From here on it is an ordinary module: no strategy, no process group, every parameter whole.
        model = load_from_checkpoint(FineTunedGPT, adapters, initial_weights=self.base).eval()
        print(f"Validation bits per byte in one process: {bits_per_byte(model, self.datamodule):.3f}")
        if sample.length:
            written = generate(model, sample.prompt.encode(), sample.length, temperature=0.5)
            text = written.split(bytes([END_OF_FILE]))[0].decode(errors="replace")
            print(f"\nA sample:\n{'-' * 80}\n{text}\n{'-' * 80}")

    def _validated(self) -> float:
        (metrics,) = self.trainer.validate(self.model, self.datamodule, verbose=False)
        return metrics["val/bits_per_byte"]


def main() -> None:
    """Run the command line."""
    # Windows are slices of a tensor in memory: there is nothing for worker processes to do (`SourceText._loader`).
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # Raised inside Lightning 2.6 with torch 2.13.
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    # Each process validates a part of the windows, and no window is validated twice unless their number is odd.
    warnings.filterwarnings("ignore", message=".*Using `DistributedSampler` with the dataloaders.*")
    # The base has no adapters. What else does not fit is still told.
    warnings.filterwarnings(
        "ignore", message=r"Initial weights .* were read\. \d+ are not there(?!.* are not in the module)"
    )
    FineTuneCLI(FineTunedGPT, PackageText, seed_everything_default=1234, auto_configure_optimizers=False)


if __name__ == "__main__":
    main()
