"""Architectures of transformers, small and with random weights, from their own configurations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.thorough.zoo.play import listed

__all__ = ["ARCHITECTURES"]

VOCABULARY = 67
# What of these a configuration has is made small.
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, "head_dim": 8,
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48, "rotary_dim": 8,
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_layers": 2, "num_heads": 4,
    "d_kv": 8, "d_ff": 48, "ffn_dim": 48, "word_embed_proj_dim": 32, "dim": 32, "hidden_dim": 48, "n_heads": 4,
    "n_layers": 2, "embedding_size": 32, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "sliding_window": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "image_size": 32, "patch_size": 8, "depths": [1, 1], "hidden_sizes": [16, 32], "embed_dim": 16,
    "encoder_layerdrop": 0.3, "decoder_layerdrop": 0.3,
}  # fmt: skip


def small(config: str, **options: Any) -> Any:
    """The configuration of a name, with all that is large in it made small."""
    kind = getattr(transformers, config)
    default = kind()
    fixed = {key for key in _SMALL if isinstance(getattr(kind, key, None), property)}
    known = {k: v for k, v in _SMALL.items() if k not in fixed and getattr(default, k, None) is not None}
    return kind(**{**known, **options})


def text(model: nn.Module) -> Tensor:
    """The loss of next, or of masked, tokens."""
    tokens = torch.randint(3, VOCABULARY, (2, 8))
    return model(input_ids=tokens, labels=tokens).loss


def images(model: nn.Module) -> Tensor:
    """The loss of a classification."""
    return model(pixel_values=torch.randn(2, 3, 32, 32), labels=torch.randint(2, (2,))).loss


def built(model: str, config: str, options: dict[str, Any]) -> nn.Module:
    """A model with random weights."""
    module: nn.Module = getattr(transformers, model)(small(config, **options))
    return module


_CAUSAL: dict[str, dict[str, Any]] = {
    "GPT2": {}, "GPTNeo": {"attention_types": [[["global", "local"], 1]]}, "GPTNeoX": {}, "GPTJ": {}, "OPT": {},
    "Bloom": {}, "Llama": {}, "Mistral": {}, "Mixtral": {}, "Qwen2": {}, "Qwen2Moe": {}, "Qwen3": {}, "Qwen3Moe": {},
    "Gemma": {}, "Gemma2": {}, "Phi": {}, "Phi3": {}, "Falcon": {}, "StableLm": {}, "Olmo": {}, "Olmo2": {},
    "Cohere": {}, "Starcoder2": {}, "Granite": {}, "CodeGen": {}, "XGLM": {"attention_heads": 4}, "BioGpt": {},
    "Persimmon": {}, "Nemotron": {"num_key_value_heads": 2}, "Helium": {}, "Mamba": {"state_size": 4},
}  # fmt: skip
_MASKED: dict[str, dict[str, Any]] = {
    "Bert": {}, "Roberta": {}, "DistilBert": {}, "Albert": {}, "Electra": {}, "Deberta": {}, "DebertaV2": {},
    "MPNet": {}, "SqueezeBert": {"q_groups": 2, "k_groups": 2, "v_groups": 2, "output_groups": 2,
    "intermediate_groups": 2, "post_attention_groups": 2}, "FNet": {}, "RoFormer": {}, "ConvBert": {},
    "MobileBert": {}, "Nystromformer": {}, "BigBird": {"attention_type": "original_full"},
}  # fmt: skip
_SEQUENCES = ("T5", "MT5", "Bart", "MBart", "Pegasus", "BlenderbotSmall", "M2M100")
_IMAGES: dict[str, dict[str, Any]] = {
    "ViT": {}, "DeiT": {}, "Beit": {},
    "Swin": {"num_attention_heads": [2, 4], "num_heads": [2, 4], "patch_size": 4, "window_size": 4},

    "ConvNext": {"num_stages": 2, "patch_size": 4}, "Dinov2": {}, "ResNet": {"embedding_size": 16},
    "RegNet": {"embedding_size": 16, "groups_width": 8}, "ViTMSN": {},
}  # fmt: skip


def _table() -> dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]]:
    found: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {}
    kinds = [(_CAUSAL, ("ForCausalLM", "LMHeadModel"), text), (_MASKED, ("ForMaskedLM",), text)]
    sequences: dict[str, dict[str, Any]] = {name: {"decoder_start_token_id": 1} for name in _SEQUENCES}
    kinds += [(sequences, ("ForConditionalGeneration",), text)]
    kinds += [(_IMAGES, ("ForImageClassification",), images)]
    for table, ends, loss in kinds:
        for name, options in table.items():
            model = next(f"{name}{end}" for end in ends if hasattr(transformers, f"{name}{end}"))
            found[name] = partial(built, model, f"{name}Config", options), loss
    return found


ARCHITECTURES = listed("transformers", _table())
