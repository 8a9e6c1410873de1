#!/usr/bin/env bash
# A training run on Slurm: one task per process, no launcher in between, so that signals reach the training itself.
#   sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-task=1 deploy/train/slurm.sh --config configs/train/enwik8-paper.yaml --out /shared/runs/x
# What follows the script's name goes to `pmi train`. Submit from a checkout whose .venv every node sees, or set PMI=/path/to/pmi.
# Three minutes before the time limit, and when preempted, every process gets SIGTERM: it finishes its step, saves, and ends with
# 143; then the job queues itself again and goes on from there. After PMI_RESTARTS (20) restarts a failure is final. Log: pmi-JOBID.out.
#SBATCH --job-name=pmi
#SBATCH --output=pmi-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@180
#SBATCH --time=24:00:00
set -euo pipefail

pmi=${PMI:-$SLURM_SUBMIT_DIR/.venv/bin/pmi}
: "${SLURM_JOB_NODELIST:?is set by Slurm: start this with sbatch}"
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
# a port of its own for each job on a shared node, and another one for each attempt: the old one may linger
export MASTER_PORT=$((20000 + (SLURM_JOB_ID * 7 + ${SLURM_RESTART_COUNT:-0}) % 20000))
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

# RANK and the like differ from task to task: the inner shell reads them, then becomes the training.
# --wait: a minute after the first process has ended, the rest are ended too (a lost node may leave them waiting)
status=0
# shellcheck disable=SC2016
srun --wait=60 bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS; exec "$@"' \
    pmi "$pmi" train "$@" || status=$?

case $status in
0) exit 0 ;;
2) # a mistake in the flags or the configuration: trying again cannot help
    exit 2 ;;
143) # stopped by a signal, saved
    scontrol requeue "$SLURM_JOB_ID" ;;
*) # a lost node, or a crash: the newest whole checkpoint is still there
    [ "${SLURM_RESTART_COUNT:-0}" -lt "${PMI_RESTARTS:-20}" ] || exit "$status"
    echo "slurm.sh: ended with $status; queued again (restart ${SLURM_RESTART_COUNT:-0} of ${PMI_RESTARTS:-20})"
    scontrol requeue "$SLURM_JOB_ID" ;;
esac
