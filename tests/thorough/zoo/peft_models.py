"""Adapters of peft around small models of transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

import peft
from torch import nn

from tests.thorough.zoo.play import listed
from tests.thorough.zoo.transformers_models import built, text

__all__ = ["ARCHITECTURES"]

_LLAMA = ("LlamaForCausalLM", "LlamaConfig")
_T5 = ("T5ForConditionalGeneration", "T5Config")
_ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
_MODELS: dict[str, tuple[tuple[str, str], str, dict[str, Any]]] = {
    "LoRA": (_LLAMA, "LoraConfig", {**_ATTENTION, "r": 4, "lora_dropout": 0.1}),
    "LoRA of all linear layers": (_LLAMA, "LoraConfig", {"target_modules": "all-linear", "r": 4}),
    "LoRA with saved modules": (_LLAMA, "LoraConfig", {**_ATTENTION, "r": 4, "modules_to_save": ["lm_head"]}),
    "LoRA with biases": (("GPT2LMHeadModel", "GPT2Config"), "LoraConfig", {"r": 4, "bias": "all"}),
    "rank-stabilised LoRA": (_LLAMA, "LoraConfig", {**_ATTENTION, "r": 4, "use_rslora": True}),
    "DoRA": (_LLAMA, "LoraConfig", {**_ATTENTION, "r": 4, "use_dora": True}),
    "LoRA of an encoder and decoder": (_T5, "LoraConfig", {"r": 4, "lora_dropout": 0.1}),
    "AdaLoRA": (_LLAMA, "AdaLoraConfig", {**_ATTENTION, "init_r": 4, "target_r": 2, "total_step": 10}),
    "IA3": (_LLAMA, "IA3Config", {}),
    "LoHa": (_LLAMA, "LoHaConfig", {**_ATTENTION, "r": 4}),
    "LoKr": (_LLAMA, "LoKrConfig", {**_ATTENTION, "r": 4}),
    "VeRA": (_LLAMA, "VeraConfig", {"target_modules": ["q_proj", "o_proj"], "r": 4}),
    "OFT": (_LLAMA, "OFTConfig", {**_ATTENTION, "r": 4, "oft_block_size": 0}),
    "BOFT": (_LLAMA, "BOFTConfig", {**_ATTENTION, "boft_block_size": 4}),
    "layer norms": (_LLAMA, "LNTuningConfig", {}),
    "prefix tuning": (_LLAMA, "PrefixTuningConfig", {"num_virtual_tokens": 4}),
    "prompt tuning": (_LLAMA, "PromptTuningConfig", {"num_virtual_tokens": 4}),
    "P-tuning": (_LLAMA, "PromptEncoderConfig", {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
}


def _build(base: tuple[str, str], config: str, options: dict[str, Any]) -> nn.Module:
    task = "SEQ_2_SEQ_LM" if base is _T5 else "CAUSAL_LM"
    model: nn.Module = peft.get_peft_model(
        built(*base, {"decoder_start_token_id": 1} if base is _T5 else {}),
        getattr(peft, config)(task_type=task, **options),
    )
    return model


ARCHITECTURES = listed("peft", {name: (partial(_build, *parts), text) for name, parts in _MODELS.items()})
