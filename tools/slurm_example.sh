#!/usr/bin/env bash
# A job of 2 machines with 4 GPUs each under Slurm: one torchrun on each machine starts its 4 ranks.
#
#   sbatch tools/slurm_example.sh
#
#SBATCH --job-name=d2_memfit
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
set -euo pipefail

# The first machine of the job is where all ranks meet.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 40000))

# 16 images an iteration: 1 on each of 8 GPUs, twice. When Slurm takes the machines, or two minutes before
# the time is over, all ranks save after the iteration and end; --resume goes on there when the job is requeued.
# Nothing is lost but the iteration, if it does not end within torchrun's 30 seconds: then all since the last
# SOLVER.CHECKPOINT_PERIOD.
srun --cpus-per-task "$SLURM_CPUS_PER_TASK" torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node 4 \
    --rdzv-backend c10d \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" \
    -m d2_memfit train \
    --config-file configs/COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml \
    --resume \
    SOLVER.IMS_PER_BATCH 8 \
    SOLVER.ACCUMULATION_STEPS 2 \
    SOLVER.CHECKPOINT_PERIOD 1000 \
    MEMFIT.OOM.POLICY split \
    MEMFIT.HOST.BUDGET_GB 60 \
    OUTPUT_DIR output/mask_rcnn
