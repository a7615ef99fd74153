#!/usr/bin/env bash
# The whole loop on this machine: upload text, train a GPT, sample from it, train further.
#
#     examples/local_loop.sh [TEXT]
#
# TEXT is a text file or a folder (default: tiny Shakespeare).
# MAX_STEPS=200 makes it shorter.
set -euo pipefail

sm-nanogpt upload-data "$@"

# launch prints the job's id on stdout, and everything else on stderr.
job_id=$(sm-nanogpt launch --instance local --preset cpu --processes-per-instance 2 \
    --set max_steps="${MAX_STEPS:-2000}")

sm-nanogpt fetch-and-sample "$job_id" --num-samples 2 --max-new-tokens 300

# Continue the run for half as many steps again.
longer=$(sm-nanogpt launch --instance local --resume "$job_id" \
    --set max_steps="$((${MAX_STEPS:-2000} * 3 / 2))")

sm-nanogpt status "$longer"
