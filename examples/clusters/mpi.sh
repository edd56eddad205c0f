#!/usr/bin/env bash
# MPI, with the package mpi4py, through which Lightning finds the processes. In a folder that all machines share:
#
#   NODES=2 DEVICES=8 MPIEXEC="mpiexec -f hosts" bash examples/clusters/mpi.sh
#
# NODES is the number of machines, DEVICES that of processes on each. MPIEXEC says which machines these are in the words of
# your MPI: -f FILE in MPICH, --hostfile FILE in Open MPI. Options of the program may follow. Started again, the run goes on
# from its last checkpoint, also with other NODES and DEVICES.
set -euo pipefail

# More than one word.
# shellcheck disable=SC2086
exec ${MPIEXEC:-mpiexec} -n "$((NODES * DEVICES))" \
    python examples/language_model.py fit --config configs/zero3.yaml --config examples/clusters/run.yaml \
    --trainer.accelerator=auto \
    --trainer.num_nodes="$NODES" \
    --trainer.devices="$DEVICES" \
    --ckpt_path=last \
    "$@"
