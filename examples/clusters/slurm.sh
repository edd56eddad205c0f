#!/usr/bin/env bash
# Slurm. In the folder of the repository, which all nodes share:
#
#   sbatch examples/clusters/slurm.sh
#
# Options of the program may follow. Options of sbatch in front replace those below, for example --nodes=4: a run goes on
# with other numbers of nodes and tasks, too. Submitted again, it goes on by itself.
#
#SBATCH --job-name=zero3
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
# Tasks are numbered node by node, on which `shard_within="node"` relies.
#SBATCH --distribution=block
# So many seconds before the time is over tasks get the signal. Lightning then saves a checkpoint between two steps and has
# the job queued again: give it what a step and a save take.
#SBATCH --signal=SIGUSR1@90
# Slurm queues the job again itself where a node has failed.
#SBATCH --requeue
#
# A task sees all devices of its node and takes the one of its number: --gpus-per-task would hide the others. A job with the
# name "bash" or "interactive" would not be seen as one of Slurm's.
set -euo pipefail

# The newer one of what Lightning has saved at the signal and of what ModelCheckpoint has saved on the way.
newest=$(ls -td runs/cluster/hpc_ckpt_*.ckpt runs/cluster/last.ckpt 2> /dev/null | head -n 1 || true)

export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # which srun does not take over from sbatch

srun --kill-on-bad-exit=1 \
    python examples/language_model.py fit --config configs/zero3.yaml --config examples/clusters/run.yaml \
    --trainer.accelerator=auto \
    --trainer.num_nodes="$SLURM_NNODES" \
    --trainer.devices="$SLURM_NTASKS_PER_NODE" \
    --ckpt_path="${newest:-last}" \
    "$@"
