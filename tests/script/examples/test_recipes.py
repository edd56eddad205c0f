"""The recipes: their configurations, and runs on something small, as a user starts them."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from examples.language_model import ByteGPT
from examples.recipes import CausalLM, ImageClassifier, StepSampler, TextFolder
from lightning_zero import load_from_checkpoint
from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.cli import main
from lightning_zero.comm import ControlGroup
from tests.helpers.script import ROOT, Finished, run_forked

RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
SCRIPT = str(ROOT / "examples" / "recipes.py")


class StopAt(Callback):
    """Stops a run after so many steps, wherever it was to end."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == self.step


class MeanGPT(ByteGPT):
    """Logs the loss of all ranks: comparable with that of another number of them."""

    def training_step(self, windows: Tensor, batch_idx: int) -> Tensor:
        loss = self._nats(windows).mean()
        self.log("train/loss", loss, sync_dist=True)
        return loss


def run(recipe: str, ranks: int, folder: Path, *options: str, code: int = 0) -> Finished:
    """A run of some steps in ``float32`` on CPU ranks."""
    cpu = ["--trainer.accelerator=cpu", f"--trainer.devices={ranks}", "--trainer.precision=32-true"]
    arguments = [SCRIPT, "fit", f"--config={ROOT / 'configs' / 'recipes' / recipe}.yaml", *cpu]
    arguments += ["--trainer.log_every_n_steps=1", *options]
    return run_forked(arguments, cwd=folder, timeout=200, ranks=ranks, code=code)


def logged(folder: Path, key: str, version: int = 0) -> list[float]:
    """What the last run in ``folder`` has logged under a name."""
    (file,) = folder.glob(f"runs/*/version_{version}/metrics.csv")
    with file.open() as lines:
        return [float(row[key]) for row in csv.DictReader(lines) if row[key]]


def write_text(folder: Path) -> Path:
    """Some text, of which a model can learn something."""
    for index in range(3):
        text = "".join(f"The square of {i} is {i * i}.\n" for i in range(index, 200, 3))
        (folder / "text" / f"part{index}").mkdir(parents=True)
        (folder / "text" / f"part{index}" / "squares.txt").write_text(text)
    return folder / "text"


# --------------------------------------------------------------------------------------------- without other packages


@pytest.mark.parametrize("config", RECIPES, ids=lambda path: path.stem)
def test_every_key_is_one_of_the_classes(config: Path, tmp_path: Path) -> None:
    stdout, _ = run_forked([SCRIPT, "fit", f"--config={config}", "--print_config"], cwd=tmp_path)

    given, parsed = yaml.safe_load(config.read_text()), yaml.safe_load(stdout)
    assert given["model"]["class_path"] == parsed["model"]["class_path"]
    assert given["model"]["init_args"].items() <= parsed["model"]["init_args"].items()
    assert given["data"]["init_args"].items() <= parsed["data"]["init_args"].items()
    (keeper,) = (one["init_args"] for one in given["trainer"]["callbacks"] if "ModelCheckpoint" in one["class_path"])
    header = config.read_text().split("seed_everything")[0]
    last = f"{keeper['dirpath']}/last.ckpt"
    assert last in header
    assert f'load_from_checkpoint(CausalLM, "{last}"' in header or f"consolidate {last}" in header
    assert f"--config configs/recipes/{config.name}" in header
    assert given["trainer"]["logger"]["init_args"]["name"] == config.stem


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("lora", ["--model.model_name_or_path=."], "give --data.path FOLDER"),
        ("lora", ["--data.path=."], "give --model.model_name_or_path FOLDER, or a name"),
        ("lora", ["--data.path=nowhere", "--model.model_name_or_path=."], "data.path='nowhere' is not a folder"),
        ("lora", ["--data.path=.", "--model.model_name_or_path=."], "no file in '.' ends in .txt, .md"),
        ("lora", ["--data.path=.", "--model.rank=4", "--model.model_name_or_path=."], "rank"),
        ("vision_transformer", [], "give --data.path FOLDER"),
        (
            "vision_transformer",
            ["--data.path=.", "--trainer.strategy=ddp"],
            "trainer.strategy: give one of lightning_zero, such as zero3",
        ),
    ],
)
def test_what_is_missing_is_named(recipe: str, options: list[str], message: str, tmp_path: Path) -> None:
    code = 2 if "rank" in message else 1
    assert message in run(recipe, 1, tmp_path, *options, code=code).stderr


def rows_of(trainer: Any, ranks: int) -> list[list[int]]:
    """The rows of each step, of ranks that have ``12 / ranks`` of them each."""
    samplers = []
    for rank in range(ranks):
        trainer.distributed_sampler_kwargs = {"num_replicas": ranks, "rank": rank}
        samplers.append(StepSampler(range(100), 12, trainer))
        assert len(samplers[-1]) == 96 // ranks
    each = [list(sampler) for sampler in samplers]
    size = 12 // ranks
    return [sorted(row for one in each for row in one[i : i + size]) for i in range(0, len(each[0]), size)]


def test_steps_have_the_same_rows_on_any_number_of_ranks_and_go_on() -> None:
    trainer = SimpleNamespace(global_step=0)
    first = rows_of(trainer, 1)
    assert len({row for rows in first for row in rows}) == 96

    for step, ranks in ((0, 2), (0, 3), (3, 1), (3, 4)):
        trainer.global_step = step
        assert rows_of(trainer, ranks) == first[step:]
    trainer.global_step = 8  # the next epoch
    assert len(rows_of(trainer, 2)) == 8
    assert rows_of(trainer, 2) != first


def test_tokens_are_those_of_the_files_and_made_again_for_others(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name)
    data = TextFolder(str(tmp_path), "bytes", window=4, validation_share=0.3, cache=str(tmp_path / "tokens"))
    data.prepare_data()
    data.setup("fit")

    assert data.training.flatten().tolist() == [*b"a.txt\0b."]
    assert data.validation.flatten().tolist() == [*b"txt\0"]
    first = data.tokens()
    (tmp_path / "a.txt").write_text("another")
    assert data.tokens() != first


BYTES = ["--model=tests.script.examples.test_recipes.MeanGPT", "--data.tokenizer=bytes", "--data.validation_share=0.2"]
TINY = ["--model.dim=16", "--model.layers=2", "--model.heads=2", "--model.context=32"]


def check_resumed(tmp_path: Path, others: list[tuple[int, int]], *options: str) -> None:
    """A run of two ranks that is stopped goes on with other numbers of ranks, and of batches that each accumulates.

    It is compared with one that is not stopped.
    """
    given = [f"--data.path={write_text(tmp_path)}", "--data.window=32", "--data.batch_size=6", "--trainer.max_steps=6"]
    given += ["--trainer.val_check_interval=6", "--model.learning_rate=1e-2", "--model.warmup_steps=2", *options]
    given += ["--trainer.callbacks.every_n_train_steps=2"]
    stop = ["--trainer.callbacks+=tests.script.examples.test_recipes.StopAt", "--trainer.callbacks.step=2"]

    def weights(folder: Path) -> dict[str, Tensor]:
        last = folder / "runs/continued_pretraining/checkpoints/last.ckpt"
        return {name: value + 0 for name, value in open_checkpoint(last, ControlGroup(None))["state_dict"].items()}

    whole = tmp_path / "whole"
    whole.mkdir()
    run("continued_pretraining", 2, whole, *given)
    losses, expected = logged(whole, "train/loss"), weights(whole)
    assert len(losses) == 6
    assert losses[-1] < losses[0]

    for ranks, accumulated in others:
        stopped = tmp_path / f"stopped {ranks} {accumulated}"
        stopped.mkdir()
        run("continued_pretraining", 2, stopped, *given, *stop)
        assert logged(stopped, "train/loss") == losses[:2]
        run("continued_pretraining", ranks, stopped, *given, f"--trainer.accumulate_grad_batches={accumulated}")
        after, found = logged(stopped, "train/loss", version=1), weights(stopped)
        exact = (ranks, accumulated) == (2, 1)  # otherwise sums have other orders
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0 if exact else 1e-4)
        if accumulated == 1:  # else that of a part of a step is logged
            assert after == (losses[2:] if exact else pytest.approx(losses[2:], rel=1e-5))


def test_a_run_that_was_stopped_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    check_resumed(tmp_path, [(1, 1)], *BYTES, *TINY)


@pytest.mark.thorough
def test_a_run_that_was_stopped_goes_on_with_as_many_ranks_and_with_more(tmp_path: Path) -> None:
    check_resumed(tmp_path, [(2, 1), (3, 1), (1, 2)], *BYTES, *TINY)


# ------------------------------------------------------------------------------------------------ with other packages


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with a small model and its tokenizer."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path / "llama"
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokens = {token: index for index, token in enumerate(["<s>", "</s>", *sorted(letters)])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(tokens, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=len(tokens), bos_token_id=0, eos_token_id=1, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def small(tmp_path: Path, llama: Path) -> list[str]:
    return [
        *(f"--model.model_name_or_path={llama}", f"--data.path={write_text(tmp_path)}", "--data.validation_share=0.2"),
        *("--data.window=32", "--data.batch_size=6", "--model.learning_rate=1e-2", "--model.warmup_steps=2"),
    ]


@torch.no_grad()
def logits(model: Any) -> Tensor:
    value: Tensor = model.eval()(input_ids=torch.arange(24).reshape(2, 12)).logits
    return value


@pytest.mark.zoo
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_full_fine_tuning(tmp_path: Path, llama: Path) -> None:
    import transformers

    losses = []
    for stage in (1, 2, 3):
        folder = tmp_path / str(stage)
        folder.mkdir()
        options = small(folder, llama)
        run("full_fine_tuning", 2, folder, *options, f"--trainer.strategy.stage={stage}", "--trainer.max_epochs=1")
        losses.append(logged(folder, "train/loss"))
    assert losses[0] == losses[1] == losses[2]
    assert losses[0][-1] < losses[0][0] - 0.5

    last, out = folder / "runs/full_fine_tuning/checkpoints/last.ckpt", tmp_path / "tuned"
    load_from_checkpoint(CausalLM, last).net.save_pretrained(out)
    tuned = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(tuned), logits(load_from_checkpoint(CausalLM, last).net))
    data = TextFolder(str(folder / "text"), str(llama), (".txt", ".md"), 32, 6, 0.2, str(folder / "runs/tokens"))
    data.setup("fit")
    with torch.no_grad():
        rows = data.validation.long()
        loss = sum(tuned(input_ids=row[None], labels=row[None]).loss.item() for row in rows) / len(rows)
    assert loss == pytest.approx(logged(folder, "val/loss")[-1], rel=2e-2)  # ranks may validate a row twice


@pytest.mark.zoo
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:::peft", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_lora(tmp_path: Path, llama: Path) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    options = [*small(tmp_path, llama), "--model.dtype=float32", "--model.lora.lora_dropout=0.0"]
    run("lora", 2, tmp_path, *options, "--trainer.max_epochs=1")

    losses, last = logged(tmp_path, "train/loss"), tmp_path / "runs/lora/checkpoints/last.ckpt"
    assert losses[-1] < losses[0]
    assert all("lora_" in name for name in open_checkpoint(last, ControlGroup(None))["state_dict"])
    trained = load_from_checkpoint(CausalLM, last, initial_weights=llama).net
    expected = logits(trained)
    trained.save_pretrained(tmp_path / "adapter")
    trained.merge_and_unload().save_pretrained(tmp_path / "merged")
    base = transformers.AutoModelForCausalLM.from_pretrained(llama)
    before = logits(base)
    found = logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    assert torch.equal(found, expected)
    assert not torch.allclose(found, before, atol=1e-2)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), found, rtol=1e-4, atol=1e-5)


@pytest.mark.zoo
@pytest.mark.thorough
def test_lora_begins_as_the_model_it_adapts(tmp_path: Path, llama: Path) -> None:
    pytest.importorskip("peft")
    for name, recipe in (("base", "full_fine_tuning"), ("adapted", "lora")):
        (tmp_path / name).mkdir()
        options = [*small(tmp_path / name, llama), "--model.dtype=float32", "--trainer.max_steps=1"]
        run(recipe, 1, tmp_path / name, *options, *(["--model.lora.lora_dropout=0.0"] if recipe == "lora" else []))
    assert logged(tmp_path / "base", "train/loss") == logged(tmp_path / "adapted", "train/loss")


@pytest.mark.zoo
@pytest.mark.thorough
def test_continued_pretraining(tmp_path: Path, llama: Path) -> None:
    check_resumed(tmp_path, [(1, 1), (3, 1)], f"--model.model_name_or_path={llama}")


@pytest.mark.zoo
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_vision_transformer(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    images = pytest.importorskip("PIL.Image")
    torch.manual_seed(0)
    for part, count in (("train", 12), ("val", 4)):
        for color in range(3):
            (tmp_path / "images" / part / f"class{color}").mkdir(parents=True)
            for index in range(count):
                pixels = torch.randint(0, 80, (40, 40, 3), dtype=torch.uint8)
                pixels[..., color] += 150
                file = tmp_path / "images" / part / f"class{color}" / f"{index}.png"
                images.fromarray(pixels.numpy()).save(file)
    options = [f"--data.path={tmp_path / 'images'}", "--data.batch_size=6", "--data.workers=1"]
    options += ["--model.model_name=test_vit", "--model.model_args.pretrained=false", "--model.model_args.img_size=32"]
    options += ["--model.warmup_steps=2", "--model.learning_rate=3e-3", "--trainer.max_epochs=4"]
    wrong = run("vision_transformer", 1, tmp_path, *options, "--model.num_classes=4", code=1)
    assert re.search(r"has 3 folders, of a class each; model.num_classes is 4", wrong.stderr)

    (tmp_path / "run").mkdir()
    run("vision_transformer", 2, tmp_path / "run", *options, "--model.num_classes=3")
    assert logged(tmp_path / "run", "val/accuracy")[-1] > 0.6
    last, out = tmp_path / "run/runs/vision_transformer/checkpoints/last.ckpt", tmp_path / "vit.safetensors"
    main(["consolidate", str(last), str(out), "--prefix", "net."])
    found = timm.create_model("test_vit", num_classes=3, img_size=32, checkpoint_path=out).eval()
    trained = load_from_checkpoint(ImageClassifier, last).net.eval()
    with torch.no_grad():
        assert torch.equal(found(torch.ones(2, 3, 32, 32)), trained(torch.ones(2, 3, 32, 32)))
