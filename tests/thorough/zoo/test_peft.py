"""Runs with adapters of peft: they begin on the files of a base, and end in folders that peft and transformers load."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import CheckpointPolicy, ZeroStrategy, full_parameters, load_from_checkpoint
from tests.helpers.runs import quiet, values_of
from tests.helpers.training import make_trainer
from tests.helpers.world import run_world

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore:::peft"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from tests.thorough.zoo.transformers_models import built, text  # noqa: E402

_LLAMA, _GPT2 = ("LlamaForCausalLM", "LlamaConfig"), ("GPT2LMHeadModel", "GPT2Config")
_MIXTRAL = ("MixtralForCausalLM", "MixtralConfig")
_ATTENTION = {"target_modules": ["q_proj", "v_proj"], "r": 4}
CASES: dict[str, tuple[tuple[str, str], str, dict[str, Any]]] = {
    "LoRA": (_LLAMA, "LoraConfig", _ATTENTION),
    "all linear layers": (_GPT2, "LoraConfig", {"r": 4, "target_modules": "all-linear"}),
    "a tied head that trains": (_GPT2, "LoraConfig", {"r": 4, "modules_to_save": ["lm_head"]}),
    "DoRA": (_GPT2, "LoraConfig", {"r": 4, "use_dora": True, "target_modules": ["c_attn", "wte"]}),
    "fused experts": (_MIXTRAL, "LoraConfig", {**_ATTENTION, "target_parameters": ["mlp.experts.gate_up_proj"]}),
    "AdaLoRA": (_LLAMA, "AdaLoraConfig", {**_ATTENTION, "init_r": 4, "target_r": 2, "total_step": 10}),
    "layer norms": (_LLAMA, "LNTuningConfig", {}),
    "VeRA": (_LLAMA, "VeraConfig", {"target_modules": ["q_proj", "o_proj"], "r": 4}),
    "prompts": (_LLAMA, "PromptTuningConfig", {"num_virtual_tokens": 4}),
}


class Tuned(pl.LightningModule):
    """A model with adapters, of which peft's own way would load the base first."""

    def __init__(self, case: str, seed: int, path: str | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        base, config, options = CASES[case]
        torch.manual_seed(seed)
        model = built(*base, {})
        if path is not None:
            model = type(model).from_pretrained(path)
        torch.manual_seed(5)
        self.net = peft.get_peft_model(model, getattr(peft, config)(task_type="CAUSAL_LM", **options))
        self.first: dict[str, Tensor] = {}

    def on_train_start(self) -> None:
        self.first = values_of(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return text(self.net)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=5.0)


def hub(case: str, folder: Path) -> str:
    """The files of a base, none of whose values is that of a new model."""
    torch.manual_seed(1)
    model = built(*CASES[case][0], {})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
    return str(folder)


def trained(module: Tuned, base: str, path: Path, stage: int = 3, **policy: Any) -> None:
    """Fit a module on the files of a base, and save a checkpoint. Collective."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = CheckpointPolicy(initial_weights=base, **policy)
        trainer = make_trainer(ZeroStrategy(stage, checkpoint=settings), max_steps=2)
        trainer.fit(module, DataLoader(range(4)))  # type: ignore[arg-type]
        trainer.save_checkpoint(path)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        value: Tensor = model.eval()(input_ids=torch.arange(12).reshape(2, 6)).logits
    return value


@pytest.mark.parametrize("case", CASES)
def test_a_run_begins_as_after_from_pretrained_and_ends_in_folders(case: str, tmp_path: Path) -> None:
    base, path = hub(case, tmp_path / "hub"), tmp_path / "last.ckpt"
    expected = {name: value.detach().clone() for name, value in Tuned(case, 3, base).named_parameters()}

    def world(rank: int) -> dict[str, Tensor]:
        for stage in (1, 2, 3):
            module = Tuned(case, seed=2)
            trained(module, base, path, stage)
            for name, value in expected.items():
                assert torch.equal(module.first[name], value), (stage, name)
        return values_of(module)

    after = run_world(2, world, timeout=200)[0]
    module = Tuned(case, 4, base)
    module.load_state_dict(after, strict=False)
    right = logits(module.net)
    assert not torch.equal(right, logits(Tuned(case, 4, base).net))

    load_from_checkpoint(Tuned, path, seed=9).net.save_pretrained(tmp_path / "adapter")
    model = type(built(*CASES[case][0], {})).from_pretrained(base)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(model, tmp_path / "adapter")), right)


def test_a_checkpoint_of_adapters_alone(tmp_path: Path) -> None:
    base, path = hub("LoRA", tmp_path / "hub"), tmp_path / "last.ckpt"

    def world(rank: int) -> dict[str, Tensor]:
        module, values = Tuned("LoRA", seed=2), {}
        trained(module, base, path, exclude_frozen=True)
        with full_parameters(module):
            if rank == 0:
                module.net.save_pretrained(tmp_path / "live")
                values = {name: value.detach().clone() for name, value in module.named_parameters()}
        return values

    values = run_world(2, world, timeout=200)[0]
    module = load_from_checkpoint(Tuned, path, initial_weights=base, seed=9)
    for name, value in module.named_parameters():
        assert torch.equal(value, values[name]), name
    right = logits(module.net)

    module.net.save_pretrained(tmp_path / "by hand")  # what a program does
    for folder in ("live", "by hand"):
        model = transformers.LlamaForCausalLM.from_pretrained(base)
        assert torch.equal(logits(peft.PeftModel.from_pretrained(model, tmp_path / folder)), right)
    module.net.merge_and_unload().save_pretrained(tmp_path / "merged")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(whole), right, rtol=1e-4, atol=1e-5)


def test_a_model_without_adapters(tmp_path: Path) -> None:
    class Plain(Tuned):
        def __init__(self) -> None:
            super().__init__("LoRA", 2)
            self.net = built(*_MIXTRAL, {})

    def world(rank: int) -> dict[str, Tensor]:
        module = Plain()
        with quiet():
            trainer = make_trainer(ZeroStrategy(3), max_steps=1)
            trainer.fit(module, DataLoader(range(4)))  # type: ignore[arg-type]
            trainer.save_checkpoint(tmp_path / "plain.ckpt")
        return values_of(module)

    plain = run_world(2, world, timeout=200)[0]
    load_from_checkpoint(Plain, tmp_path / "plain.ckpt").net.save_pretrained(tmp_path / "plain")
    model, info = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not any(info.values()), info
    for name, value in model.named_parameters():
        assert torch.equal(value, plain[f"net.{name}"]), name
