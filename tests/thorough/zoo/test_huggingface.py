"""Weights of transformers in both directions: files into sharded models, and out again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import CheckpointPolicy, ZeroStrategy, full_parameters
from lightning_zero.checkpoint import open_checkpoint
from lightning_zero.checkpoint.consolidated import consolidate_checkpoint
from lightning_zero.checkpoint.format.stored import whole as whole_of
from lightning_zero.comm import ControlGroup
from lightning_zero.errors import CheckpointError
from lightning_zero.extensions.formats import names
from lightning_zero.extensions.formats.names import in_layout_of
from tests.helpers.runs import quiet, values_of
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world

pytestmark = pytest.mark.zoo
transformers = pytest.importorskip("transformers")

from tests.thorough.zoo import transformers_models as small  # noqa: E402

# Fused experts (Mixtral, Qwen's), tied embeddings (GPT2, T5, Bart), other names in files (Bert), and as they are.
FAMILIES = {
    architecture.name: architecture
    for architecture in small.ARCHITECTURES
    if architecture.name
    in ("Llama", "Mistral", "Mixtral", "Qwen2Moe", "Qwen3Moe", "GPT2", "Bert", "T5", "Bart", "ViT", "Gemma2", "Falcon")
}


class Tuned(pl.LightningModule):
    """One of the zoo's, as a user holds it."""

    def __init__(self, family: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.architecture = FAMILIES[family]
        self.net = self.architecture.build().train()
        self.first: dict[str, Tensor] = {}

    def on_train_start(self) -> None:
        self.first = values_of(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.architecture.loss(self.net)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _pretrained(family: str, folder: Path) -> dict[str, Tensor]:
    """What the library makes of a folder."""
    model = type(FAMILIES[family].build()).from_pretrained(folder)
    return {f"net.{name}": parameter.detach() for name, parameter in model.named_parameters()}


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert expected
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("family", FAMILIES)
def test_files_of_the_library_go_in_and_come_out(family: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    hub, saved, trained = tmp_path / "hub", tmp_path / "saved", tmp_path / "trained.ckpt"
    FAMILIES[family].build().save_pretrained(hub, max_shard_size="20KB")
    assert len(list(hub.glob("*.safetensors"))) > 1
    values = _pretrained(family, hub)

    def world(rank: int) -> dict[str, Tensor]:
        module = Tuned(family, seed=2)
        policy = CheckpointPolicy(initial_weights=str(hub))
        with quiet():
            trainer = make_trainer(ZeroStrategy(3, checkpoint=policy), max_steps=1)
            trainer.fit(module, DataLoader(range(1)))  # type: ignore[arg-type]
        _assert_equal(module.first, values)
        trainer.save_checkpoint(trained)
        with full_parameters(module):
            if rank == 0:
                module.net.save_pretrained(saved)
        return {name: value for name, value in values_of(module).items() if name in values}

    after = run_world(2, world, timeout=200)[0]
    assert any(not torch.equal(after[name], values[name]) for name in values)
    _assert_equal(_pretrained(family, saved), after)
    assert load_file(saved / "model.safetensors").keys() == {
        name for file in hub.glob("*.safetensors") for name in load_file(file)
    }
    out = tmp_path / "out"
    consolidate_checkpoint(trained, out, format="safetensors", prefix="net.", progress=False)
    FAMILIES[family].build().config.save_pretrained(out)
    _assert_equal(_pretrained(family, out), after)


def test_a_slice_reads_its_own_experts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FAMILIES["Mixtral"].build().save_pretrained(tmp_path)
    model = nn.ModuleDict({"net": FAMILIES["Mixtral"].build()})
    expected = _pretrained("Mixtral", tmp_path)
    stored = open_checkpoint(tmp_path, ControlGroup(None))["state_dict"]
    read: list[str] = []
    monkeypatch.setattr(names, "whole", lambda tensor: read.append(tensor.key) or whole_of(tensor))
    name = "net.model.layers.1.mlp.experts.gate_up_proj"
    found = in_layout_of(model, model.state_dict(), stored)[name]
    assert not read
    whole = expected[name].reshape(-1)
    per_expert = whole.numel() // 4

    slice_ = torch.empty(per_expert + 20)  # the end of the second, the third, the beginning of the fourth
    found.read_into(slice_, 2 * per_expert - 10)

    assert torch.equal(slice_, whole[2 * per_expert - 10 : 3 * per_expert + 10])
    assert read == [
        f"model.layers.1.block_sparse_moe.experts.{expert}.{part}.weight"
        for expert in (1, 2, 3)
        for part in ("w1", "w3")
    ]


def test_what_is_missing_is_named_and_nothing_else(tmp_path: Path) -> None:
    FAMILIES["Mixtral"].build().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})

    def world(rank: int) -> str:
        module = Tuned("Mixtral", seed=2)
        policy = CheckpointPolicy(initial_weights=str(tmp_path))
        with quiet(), pytest.raises(RuntimeError) as error:
            make_trainer(ZeroStrategy(3, checkpoint=policy), max_steps=1).fit(
                module,
                DataLoader(range(1)),  # type: ignore[arg-type]
            )
        return str(error.value)

    for message in run_world(2, world, timeout=200):
        assert "q_proj.weight" in message
        assert "layers.1" not in message
        assert "Unexpected" not in message


def test_an_expert_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    FAMILIES["Mixtral"].build().save_pretrained(tmp_path)
    stored = dict(open_checkpoint(tmp_path, ControlGroup(None))["state_dict"])
    del stored["model.layers.0.block_sparse_moe.experts.1.w3.weight"]
    model = nn.ModuleDict({"net": FAMILIES["Mixtral"].build()})
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.gate_up_proj.*MixtralForCausalLM"):
        in_layout_of(model, model.state_dict(), stored)


def test_an_older_checkpoint_of_the_module_is_converted(tmp_path: Path) -> None:
    source = FAMILIES["Mixtral"].build()
    source.save_pretrained(tmp_path)
    stored = {f"net.{k}": v for k, v in load_file(tmp_path / "model.safetensors").items()} | {"extra": torch.ones(1)}
    model = nn.ModuleDict({"net": FAMILIES["Mixtral"].build()})
    found = in_layout_of(model, model.state_dict(), stored)
    assert found.keys() == {f"net.{name}" for name in source.state_dict()} | {"extra"}
    for name, value in source.state_dict().items():
        assert torch.equal(found[f"net.{name}"] + 0, value)
