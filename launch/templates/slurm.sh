#!/usr/bin/env bash
# Made by launch.cluster; submit it with sbatch. One task per GPU (or per node without any) is what
# jax expects under Slurm; it finds out by itself which task is which and where they meet.
#SBATCH --job-name=@name
#SBATCH --nodes=@nodes
#SBATCH --ntasks-per-node=@tasks_per_node
@options
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@@@grace_seconds

set -uo pipefail
cd -- @directory || exit 2

# A task that fails takes the others with it, so that none waits for what it will never hear.
status=0
srun --kill-on-bad-exit=1 @command || status=$?

# 0: done. 2: bad input, which stays bad.
if ((status == 0 || status == 2)); then
  exit "$status"
fi
# 143: all have saved, since Slurm wants the nodes back. Else a host may be lost, or a fault comes
# again and again.
if ((status != 143 && ${SLURM_RESTART_COUNT:-0} >= @restarts)); then
  echo "error: status $status after ${SLURM_RESTART_COUNT:-0} restarts; no more" >&2
  exit "$status"
fi
# The same command resumes from the newest checkpoint.
scontrol requeue "$SLURM_JOB_ID"
