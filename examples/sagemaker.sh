#!/usr/bin/env bash
# The tutorial on Amazon SageMaker: upload text, train with DistributedDataParallel, sample.
#
#     examples/sagemaker.sh [TEXT]
#
# TEXT is a text file or a folder (default: tiny Shakespeare).
#
# You need AWS credentials. Once in each account, run: sm-nanogpt infra deploy
# (or set a bucket and a role of your own: SM_NANOGPT_STORE=s3://... SM_NANOGPT_ROLE=arn:...).
#
# Set INSTANCE=ml.g5.xlarge for a smaller machine, and INSTANCE_COUNT=2 for two of them.
# For a first try of less than a minute on a CPU: INSTANCE=ml.m5.xlarge PRESET=cpu MAX_STEPS=200.
set -euo pipefail

sm-nanogpt upload-data "$@"

options=(--instance "${INSTANCE:-ml.g5.12xlarge}" --instance-count "${INSTANCE_COUNT:-1}"
    --preset "${PRESET:-baby}")
[ -z "${MAX_STEPS:-}" ] || options+=(--set max_steps="$MAX_STEPS")
[ -z "${BATCH_SIZE:-}" ] || options+=(--set batch_size="$BATCH_SIZE")

# Show the request without sending it.
sm-nanogpt launch "${options[@]}" --dry-run

# launch prints the job's id on stdout, and everything else on stderr.
job_id=$(sm-nanogpt launch "${options[@]}")

# Ctrl-C stops this output, not the job; `sm-nanogpt stop` stops the job.
sm-nanogpt logs "$job_id" --follow
sm-nanogpt wait "$job_id" # exit code 0 means that the job completed
sm-nanogpt status "$job_id"

sm-nanogpt fetch-and-sample "$job_id" --num-samples 2 --max-new-tokens 300
