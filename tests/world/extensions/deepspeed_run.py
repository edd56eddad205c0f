"""One rank of a DeepSpeed run on a CPU, which saves a directory, and beside it what it has itself and how it goes on.

``python -m tests.world.extensions.deepspeed_run OUT STAGE PRECISION OPTIMIZER RANK WORLD_SIZE PORT``

What is in ``client.pt`` beside ``OUT``, if there is one, is saved too, as a Trainer has it saved.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS = 3  # before it is saved, and again afterwards


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


def tokens(step: int, rank: int, world_size: int) -> Tensor:
    """A batch."""
    return torch.randint(0, 11, (4,), generator=torch.Generator().manual_seed(step * world_size + rank))


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """With two groups, each of other options, of what is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    vectors, matrices = [p for p in trained if p.dim() == 1], [p for p in trained if p.dim() > 1]
    groups = [{"params": part, "weight_decay": 0.1 / len(part)} for part in (matrices, vectors)]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    if kind == "adagrad":
        return torch.optim.Adagrad(groups, lr=1e-2)
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.99), amsgrad=kind == "amsgrad")


def main(out: Path, stage: int, precision: str, optimizer: str, rank: int, world_size: int, port: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, DS_ACCELERATOR="cpu")
    dist.init_process_group("gloo")
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    deepspeed.ops.__compatible_ops__.clear()  # or it compiles one
    torch.manual_seed(0)
    model = Model()
    deals = world_size == 3 and precision == "fp32"
    settings = {"reduce_bucket_size": 4096, "allgather_bucket_size": 4096, "sub_group_size": 50}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "round_robin_gradients": deals, **settings},
        "bf16": {"enabled": precision == "bf16"},
    }
    made = make_optimizer(optimizer, model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=made, config=config)

    def train(steps: range) -> Tensor:
        losses = []
        for step in steps:
            losses.append(engine(tokens(step, rank, world_size)))
            engine.backward(losses[-1])
            engine.step()
        return torch.stack(losses).detach()

    train(range(STEPS))
    weights = {name: value.detach().clone() for name, value in model.named_buffers() if name != "hidden"}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            weights[name] = parameter.detach().clone()
        if parameter.requires_grad and not deals:  # it finds other elements then
            weights[name] = safe_get_full_fp32_param(parameter).detach().clone().view(weights[name].shape)
    client = {"pytorch-lightning_version": "2.6.0", "epoch": 3}
    if (out.parent / "client.pt").exists():
        client = torch.load(out.parent / "client.pt", weights_only=False)
    engine.save_checkpoint(str(out), tag="checkpoint", client_state=client)
    if rank == 0:
        torch.save(weights, out / "weights.pt")
    torch.save(train(range(STEPS, 2 * STEPS)), out / f"losses_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5], int(sys.argv[5]), int(sys.argv[6]), sys.argv[7])
