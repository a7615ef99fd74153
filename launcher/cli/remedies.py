"""Say what to do about an error, by commands to type and options of the command line."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sm_nanogpt.launcher.errors import MAX_VALUE, LauncherError, joined, shortened, text_of

if TYPE_CHECKING:
    from sm_nanogpt.launcher.description import JobDescription

LOGIN = "`aws login`, `aws sso login` or `aws configure`"
CAPACITY = "AWS has no capacity now; try later, or name several types with --instance TYPE,TYPE,..."

# What to do, by the code of an error or of a log record. `{sm}` is `sm-nanogpt` with the options
# that the user gave before the command, and `{option}` that of the error's field; the other fields
# are the facts of the error.
#
# To add one, raise an error with a new code, and its facts as keywords:
#     raise InputError("there is no job a1b2", "no-such-job")
#     raise ServiceError(f"job {job_id} runs", "job-is-running", job_id=job_id)
# and write its row here. A log record has them too: logger.warning(text, extra={"code": ...}).
REMEDIES: dict[str, str] = {
    # launching, jobs
    "allow-vpc": "allow it with `{sm} infra deploy --vpc`, or set another --role",
    "copy-folder": "start from the folder that `{sm} copy-script` writes",
    "list-hyperparameters": "`{sm} hyperparameters` lists them",
    "list-edited-hyperparameters": "`{sm} hyperparameters --entry-point {folder}` lists them",
    "list-of-values": "`--sweep {sweep}` launches a job for each of these values",
    "decimal-comma": "write `{decimal}`, with a decimal point",
    "needs-ends": "leave it out, or encode the text with `{sm} upload-data PATH --tokenizer bpe`",
    "name-of-a-job": "choose another name, or delete the job: `{sm} delete {job_id}`",
    "name-of-a-sweep": "choose another name, or delete the sweep: `{sm} delete --group {group}`; if"
    " not all of its jobs completed, `{sm} launch --resume {group}` continues it",
    "train-further": "to train further, add `--set max_steps=N` with N above {step}",
    "start-from-model": "`{sm} launch --init-from {job_id}` starts a new run from its model",
    "encode-for-model": "encode the text with `{sm} upload-data PATH --tokenizer {model}`",
    "idle-gpus": "add `--set device=auto`, or `--set device=cpu` if you mean it",
    "gpu-too-small": "take a smaller model, or an --instance whose GPUs have more memory",
    "job-may-exist": "`{sm} status {job_id}` shows whether the job exists",
    "no-role": "`{sm} infra deploy` creates one, or set --role or SM_NANOGPT_ROLE to its ARN",
    "no-stack-seen": "set --store or SM_NANOGPT_STORE to s3://bucket/prefix; or, if you have a"
    " stack, run `{sm} infra show` once",
    "no-store": "create one with `{sm} infra deploy`, or set --store or SM_NANOGPT_STORE to"
    " s3://bucket/prefix",
    "fewer-steps": "use more text, or --set max_steps={steps} to read it {n} times",
    "one-generation": "`--set generations=1` trains one",
    "one-size": "--size N in place of --preset auto or --fit gives all jobs one size",
    "measure-sizes": "`--sweep size=1,1.25,1.5,1.75 --set generations=2` in place of `--preset"
    " auto` measures four",
    "bits-over-limit": "--bits 4 writes it all the same",
    "forecast-first": "`{sm} launch --forecast --data {data}` makes a forecast, in about two"
    " minutes if nothing else runs here",
    "fitting-size": "use more text, or --preset auto, which fits the model to the text",
    "more-text": "use more text",
    "sdk-differs": "install the version in constraints.txt, or uninstall the package `sagemaker`",
    "store-on-s3": "set --store or SM_NANOGPT_STORE to s3://bucket/prefix",
    "train-on-cpu": "--set device=cpu trains without them",
    "cost-unconfirmed": "set a ceiling with --max-cost, where the price is known, or pass --yes",
    # finding, tracking, sweeps
    "no-such-job": "`{sm} jobs` lists the jobs, and `{sm} data` the uploads",
    "no-job-of-yours": "`{sm} jobs` lists your jobs, `{sm} jobs --everyone` also those of others,"
    " which go by their whole ids, and `{sm} data` the uploads",
    "in-another-region": "--region {region}, before the command, finds it",
    "not-yours": "pass --yes if you mean it",
    "job-is-running": "stop it first: `{sm} stop {job_id}`",
    "job-goes-on": "`{sm} logs {job_id} --follow` follows it",
    "sweep-is-running": "let it end, or stop it with `{sm} stop --group {group}`",
    "no-such-sweep": "the id of a sweep is that of its jobs without the number at the end, and"
    " `{sm} jobs` lists these",
    "no-sweeps-yet": "`{sm} launch --instance local --sweep KEY=V1,V2` starts one",
    "sweep-of-one": "to start the jobs of a sweep from its weights, use --init-from {job_id}",
    "go-on-with-search": "`{sm} try start {search}` goes on with it",
    "no-search": "`{sm} try start NAME` begins one",
    "swept-and-set": "leave it out of --sweep, or of --set, --config, --seeds, --size and --preset",
    # models, views
    "not-a-model": "`{sm} fetch-and-sample JOB-ID` prints the directory of a model after `model:`,"
    " and `save_pretrained` of transformers writes one",
    "model-not-yet": "`{sm} logs {job_id} --follow` shows its progress,"
    " `{sm} stop {job_id}` stops it",
    "models-of-a-search": "`{sm} copy-script my_gpt --from {search}` writes the folder that the"
    " search has kept",
    "no-model-left": "`{sm} logs {job_id}` shows what happened",
    "leave-out-returns": r"`tr -d '\r' < FILE > NEW-FILE` leaves the carriage returns out",
    "use-tokens": "`{sm} upload-data PATH --tokenizer bpe` makes tokens to train one",
    "text-changes": "use another tokenizer, or --tokenizer bpe",
    "no-turns": "use --tokenizer bpe, a model that was trained on such tokens, or one of Qwen's",
    "teach-to-chat": "`{sm} upload-data CHATS.jsonl --tokenizer JOB-ID` and"
    " `{sm} launch --init-from JOB-ID` teach it",
    "port-taken": "leave it out to take a free one",
    "name-folder": "--entry-point DIR names that folder",
    # texts, files
    "other-column": "`--column` takes another field",
    "needs-tokens": "`{sm} upload-data {path} --tokenizer bpe` learns tokens from them, and"
    " `--tokenizer JOB-ID` takes those of a job's model",
    "chats-need-tokens": "`{sm} upload-data {path} --tokenizer JOB-ID` encodes these conversations"
    " for the model of that job, and `--tokenizer bpe` for a new one",
    "talks-need-tokens": "`{sm} upload-data {path} --tokenizer JOB-ID --me NAME` encodes it for the"
    " model of that job, and `--tokenizer bpe` for a new one; NAME, whose messages are the answers,"
    " is one of these",
    "chats-as-tokens": "add --tokenizer bpe, or --tokenizer JOB-ID for the model of a job",
    "give-me": "--me NAME says whose messages are the answers",
    "read-as-chat": "--me NAME, whose messages are the answers, reads it as a chat",
    "base-first": "first train a base model on `{sm} upload-data TEXT --tokenizer bpe`; then upload"
    " these with --tokenizer JOB-ID, and launch with --init-from JOB-ID",
    "needs-bpe": "train a base on `{sm} upload-data TEXT --tokenizer bpe`",
    "take-plain": "`--include {glob}` takes such files as plain text",
    "name-column": "`--tokenizer bpe --column NAME` reads a column of it",
    "leave-out": "`--exclude {glob}` leaves it out",
    "hold-out": "`{excludes}` leaves them out, to measure a model on them",
    "another-kind": "without `--validation FILE`, the last tenth of a text validates: give another"
    " one, or mix the text",
    "text-repeats": "leave out what stands there twice",
    "give-encoding": "`upload-data` and `eval` read it with `--encoding {encoding}`",
    "mend-utf8": "no other encoding fits the rest: repair it, or `iconv -c -f utf-8 -t utf-8 FILE"
    " > NEW-FILE` leaves it out",
    "leave-out-zeros": r"`tr -d '\000' < FILE > NEW-FILE` leaves zeros out",
    "mend-surrogates": '`python3 -c "import sys; b = sys.stdin.buffer.read(); sys.stdout.buffer'
    ".write(b.decode('utf-8', 'surrogatepass').encode('utf-16', 'surrogatepass').decode('utf-16')"
    '.encode())" < FILE > NEW-FILE` makes UTF-8 of it',
    "download": "`curl -L {url} | {sm} upload-data -` takes what is there",
    "first-text": "without a PATH, `{sm} upload-data` takes tiny Shakespeare",
    "own-text": "to train on a text of your own: `{sm} upload-data FILE`",
    "no-upload": "`{sm} upload-data FILE` makes one, and `{sm} data` lists them",
    "no-last-upload": "`{sm} upload-data FILE` uploads a text, and --data takes a file or one of"
    " `{sm} data`",
    # settings, AWS
    "other-image": "--image-uri takes any other image",
    "sandbox": "install bubblewrap and libseccomp; docs/try.md says where that works",
    "try-locally": "`{sm} launch --instance local` shows the full log",
    "deploy-stack": "`{sm} infra deploy` creates a bucket and a role",
    "show-stack": "`{sm} infra show` shows its state, and why",
    "no-gpus-yet": "request an increase in the Service Quotas console; meanwhile,"
    " `{sm} launch --instance ml.m5.xlarge --preset quick --max-cost 0.20` needs no GPU",
    "aws-expired": f"the AWS credentials have expired: renew them with {LOGIN}",
    "aws-no-credentials": f"no AWS credentials: run {LOGIN}",
    "aws-crt": "the package awscrt is missing: install sm-nanogpt again",
    "aws-clock": "the clock of this machine is wrong, so AWS rejects its signatures; correct it",
    "aws-rejected": "AWS rejects the credentials: check AWS_PROFILE or the keys",
    "aws-denied": "not allowed: ask for the permission, or use another AWS_PROFILE",
    "aws-400": f"if the credentials have expired, renew them with {LOGIN}",
    "aws-403": "not allowed, or the credentials are wrong: check AWS_PROFILE and the keys, ask for"
    " the permission, or use another store",
    "aws-elsewhere": "it is in another region: set --region",
    "aws-throttled": "AWS is throttling: wait a minute and try again",
    "aws-capacity": CAPACITY,
    "aws-quota": "request an increase in the Service Quotas console, or use another --instance",
    "aws-no-bucket": "there is no such bucket: check the name of the store",
    "aws-network": "check the region's name and the network",
    "no-region-and-store": "set --region to that of the job, and --store to s3://bucket/prefix",
    "no-region": "set --region, SM_NANOGPT_REGION or AWS_REGION",
    "other-profile": "`aws configure list-profiles` shows the profiles",
    "other-region": "set --region {bucket_region}, or {option} to a bucket in {job_region}",
    "deploy-stack-again": "`{sm} infra deploy` deletes it and creates it again",
    "name-other-stack": "choose another name with --stack",
}

# What to do, by a part of the reason why a job failed or stopped.
REASONS = {
    "CapacityError": CAPACITY,
    "Data download failed": "allow the execution role to read the store",
    "MaxRuntimeExceeded": "raise --max-run, or --max-cost if that set the limit",
    "MaxWaitTimeExceeded": "raise --max-wait, or use --on-demand",
}

# Options that are not named like their fields.
OPTIONS = {
    "subnets": "--subnet",
    "security_group_ids": "--security-group",
    "tags": "--tag",
    "hyperparameters": "--set",
}


def option(field: str) -> str:
    return OPTIONS.get(field, f"--{field.replace('_', '-')}")


def launch_options(fields: Mapping[str, Any]) -> list[str]:
    """The options of `launch` for fields of a request, each with its value, quoted for a shell."""
    arguments: list[str] = []
    for field, value in fields.items():
        if isinstance(value, dict):
            value = [f"{key}={text}" for key, text in value.items()]
        values = value if isinstance(value, list | tuple) else [value]
        arguments += [option_with_value(field, value) for value in values]
    return arguments


def option_with_value(field: str, value: object) -> str:
    """The option of a field with one value, quoted for a shell. A flag has the value True."""
    if value is True:
        return option(field)
    return shlex.join([option(field), str(value)])


def command(*arguments: str) -> str:
    """A command for the user to type, with the options that the user gave before the command.

    Without --region, for example, the command would search for a job in another region. The caller
    has quoted arguments that need it.
    """
    root_options: dict[str, str | None] = {}
    context = click.get_current_context(silent=True)
    if context is not None:
        root_options.update(context.find_root().obj or {})
    store = root_options.get("store")
    if store and "://" not in store:
        from sm_nanogpt.launcher.locations import expand_user

        root_options["store"] = str(expand_user(store).absolute())
    parts = [program()]
    for name, value in root_options.items():
        if value:
            parts.append(shlex.join([f"--{name}", value]))
    parts += filter(None, arguments)
    return " ".join(parts)


def program() -> str:
    """How to call this program: by its path, if the shell does not find it, as in a .venv."""
    path = sys.argv[0]
    if Path(path).name != "sm-nanogpt" or shutil.which("sm-nanogpt"):
        return "sm-nanogpt"
    return shlex.quote(path)


def remedy(code: str, facts: Mapping[str, Any]) -> str:
    """What to do about an error or a log record, by its code; '' if it has no code."""
    if not code:
        return ""
    excludes = " ".join(f"--exclude {glob}" for glob in facts.get("globs", ()))
    return REMEDIES[code].format_map({**facts, "sm": command(), "excludes": excludes})


def reason_of(description: JobDescription) -> str | None:
    """Why a job failed or stopped, with a remedy if one is known."""
    reason = description.failure_reason
    if not reason:
        return reason
    for part, advice in REASONS.items():
        if part in reason:
            reason = f"{reason} ({advice})"
    if "no space left on device" in reason.lower():
        reason = f"{reason} ({disk_advice(description)})"
    return reason


def disk_advice(description: JobDescription) -> str:
    """What to do about a full disk of a job."""
    from sm_nanogpt.launcher.backends import backend_class

    advice = {
        "home": f"`{command('delete')}` old jobs, or set SM_NANOGPT_HOME to a larger disk",
        "instance": "use a larger --instance",
        "volume": "raise --volume-size",
    }
    disk = backend_class(description.instance).disk_of(description.instance)
    return advice[disk]


def remedies(error: object) -> list[str]:
    """The different remedies for an error and for the errors that caused it."""
    advice: dict[str, None] = {}  # in order
    while isinstance(error, LauncherError):
        text = remedy(error.code, {**error.facts, "option": option(error.field)})
        if text:
            advice[text] = None
        error = error.__cause__
    return list(advice)


def with_options(problem: str) -> str:
    """A problem with options in place of the arguments that it names, such as `resume=`."""
    if "=`" not in problem:
        return problem
    from sm_nanogpt.launcher.job import Request

    def option_of(match: re.Match[str]) -> str:
        return option(match[1]) if match[1] in Request.model_fields else match[0]

    return re.sub(r"`(\w+)=`", option_of, problem)


def sentence(error: LauncherError) -> str:
    """An error as a sentence for people: the option, the problem, and the remedy."""
    message = with_options(error.problem)
    if error.names_field:
        subject = option(error.field)
        if error.value is not None:
            subject = shortened(f"{subject} {text_of(error.value)}", MAX_VALUE)
        message = f"{subject}: {message}"
    return joined(message, *remedies(error))
