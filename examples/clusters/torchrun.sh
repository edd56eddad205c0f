#!/usr/bin/env bash
# torchrun. On each machine, in a folder that all of them share:
#
#   JOB=night1 NODES=2 DEVICES=8 HEAD=machine0 bash examples/clusters/torchrun.sh
#
# JOB is any name, HEAD one of the machines, DEVICES the number of processes on each; all are the same everywhere. Options
# of the program may follow. If a process dies, torchrun starts all of them again, on all machines and up to three times,
# and the run goes on from its last checkpoint. So it does if you start it again, also with other NODES and DEVICES.
set -euo pipefail

# Without this, processes that are started again find the addresses of those before them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun \
    --rdzv-backend=c10d --rdzv-id="$JOB" --rdzv-endpoint="$HEAD:${PORT:-29500}" \
    --nnodes="$NODES" --nproc-per-node="$DEVICES" --max-restarts=3 \
    examples/language_model.py fit --config configs/zero3.yaml --config examples/clusters/run.yaml \
    --trainer.accelerator=auto \
    --trainer.num_nodes="$NODES" \
    --trainer.devices="$DEVICES" \
    --ckpt_path=last \
    "$@"
