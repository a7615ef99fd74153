#!/usr/bin/env bash
# The tutorial on Amazon SageMaker: upload text, train with DistributedDataParallel, sample.
#
#     examples/sagemaker.sh [TEXT]
#
# TEXT is a text file or a directory of *.txt files; without one a built-in corpus is taken.
#
# It takes AWS credentials, and once, in each account: sm-nanogpt infra deploy
# (or a bucket and a role of your own, by SM_NANOGPT_STORE=s3://... and SM_NANOGPT_ROLE=arn:...).
#
# INSTANCE=ml.g5.xlarge takes a smaller machine, INSTANCE_COUNT=2 two of them;
# PRESET=cpu MAX_STEPS=200 BATCH_SIZE=16 makes a first try that is over in a minute.
set -euo pipefail

sm-nanogpt upload-data "$@"

options=(--instance "${INSTANCE:-ml.g5.12xlarge}" --instance-count "${INSTANCE_COUNT:-1}"
    --preset "${PRESET:-baby}")
[ -z "${MAX_STEPS:-}" ] || options+=(--set max_steps="$MAX_STEPS")
[ -z "${BATCH_SIZE:-}" ] || options+=(--set batch_size="$BATCH_SIZE")

# The request, as it will be sent.
sm-nanogpt launch "${options[@]}" --dry-run

# launch prints the job's id on stdout, and everything else on stderr.
job_id=$(sm-nanogpt launch "${options[@]}")

# Ctrl-C ends the showing, not the job; `sm-nanogpt stop` would end the job.
sm-nanogpt logs "$job_id" --follow
sm-nanogpt wait "$job_id" # its exit code says whether the job went well
sm-nanogpt status "$job_id"

sm-nanogpt fetch-and-sample "$job_id" --num-samples 2 --max-new-tokens 300
