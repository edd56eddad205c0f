"""One rank of a DeepSpeed run on a CPU, which saves a directory and beside it the weights that it has itself.

``python -m tests.checkpoint.deepspeed_run OUT STAGE PRECISION RANK WORLD_SIZE PORT``
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Model(nn.Module):
    """Frozen and tied weights, buffers of two kinds, and sizes that no world divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.norm = nn.LayerNorm(7)
        self.scale = nn.Parameter(torch.ones(1))
        self.body = nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 7))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("table", torch.arange(5))
        self.register_buffer("hidden", torch.arange(5.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.frozen(self.embed(tokens))) * self.scale
        self.mean += hidden.detach().mean(0)
        return self.head(self.body(hidden)).float().logsumexp(-1).mean()


def main(out: Path, stage: int, precision: str, rank: int, world_size: int, port: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, DS_ACCELERATOR="cpu")
    dist.init_process_group("gloo")
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    deepspeed.ops.__compatible_ops__.clear()  # or it compiles one
    torch.manual_seed(0)
    model = Model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [[p for p in trained if p.dim() > 1], [p for p in trained if p.dim() == 1]]
    optimizer = torch.optim.AdamW([{"params": group, "weight_decay": 0.1 / len(group)} for group in groups], lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 4096, "allgather_bucket_size": 4096},
        "bf16": {"enabled": precision == "bf16"},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(3):
        torch.manual_seed(step * world_size + rank)
        loss = engine(torch.randint(0, 11, (4,)))
        engine.backward(loss)
        engine.step()
    weights = {name: value.detach().clone() for name, value in model.named_buffers() if name != "hidden"}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            weights[name] = parameter.detach().clone()
        if parameter.requires_grad:
            weights[name] = safe_get_full_fp32_param(parameter).detach().clone().view(weights[name].shape)
    engine.save_checkpoint(str(out), tag="checkpoint", client_state={"pytorch-lightning_version": "2.6.0", "epoch": 3})
    if rank == 0:
        torch.save(weights, out / "weights.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
