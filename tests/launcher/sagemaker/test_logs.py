"""Logs of jobs on SageMaker: merged, cut, and read from their end."""

from __future__ import annotations

import pytest
from sagemaker_jobs import TAGGED

from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.sagemaker.backend import SageMakerBackend
from sm_nanogpt.launcher.sagemaker.logs import Event, lines_of
from sm_nanogpt.launcher.settings import load_settings


def test_logs_of_all_hosts_are_merged_by_time_until_the_end(cli, launch):
    # The first ten are there when one begins to look; the others come meanwhile, so that hosts may
    # be asked before and after a line.
    lines = []
    for i in range(20):
        seconds = 0.01 * i - 2 if i < 10 else 0.1 * (i - 10)
        lines.append((seconds, f"algo-{1 + i % 2}", f"line {i}"))
    expected = [f"{host}: {line}" for _, host, line in lines]

    job_id = launch("--instance-count", "2", log=lines)
    printed = cli("logs", job_id, "--follow", "--raw").good.out.splitlines()
    assert printed[:10] == expected[:10]
    assert sorted(printed) == sorted(expected)
    for host in ("algo-1", "algo-2"):  # each in its order
        of_host = [line for line in expected if line.startswith(host)]
        assert [line for line in printed if line.startswith(host)] == of_host
    assert cli("logs", job_id, "--raw").out.splitlines() == expected


CHATTER = "2026-11-23 05:54:51,090 sagemaker-training-toolkit "
ENVIRONMENT = ["SM_HOSTS=[...]", "Invoking script with the following command:", "", "mpirun"]
PRELOAD = "ERROR: ld.so: object '/libchangehostname.so' from LD_PRELOAD cannot be preloaded (no)"


def test_logs_show_only_the_lines_of_the_script():
    events = [
        Event(0, "algo-1-1", f"{CHATTER}INFO     Imported framework"),
        Event(0, "algo-2-1", "bash: no job control in this shell"),
    ]
    events += [Event(0, "algo-1-1", line) for line in ENVIRONMENT]
    events += [
        Event(0, "algo-1-1", f"{TAGGED}step=1/2 train_loss=1.0"),
        Event(0, "algo-1-1", "[1,mpirank:3,algo-2]<stderr>:OutOfMemory: too much"),
        Event(0, "algo-1-1", f"{TAGGED}{PRELOAD}"),
        Event(0, "algo-1-1", "mpirun noticed that process rank 3 exited"),
        Event(0, "algo-2-1", f"{CHATTER}INFO     Orted process exited"),
        Event(0, "algo-1-1", f"{CHATTER}ERROR    Reporting training FAILURE"),
    ]
    assert list(lines_of(events)) == [
        "step=1/2 train_loss=1.0",
        "algo-2: OutOfMemory: too much",
        "mpirun noticed that process rank 3 exited",
        f"{CHATTER}ERROR    Reporting training FAILURE",
    ]


def test_logs_find_the_lines_of_each_start_under_torchrun():
    """A spot job that starts again has new streams, which the toolkit begins anew."""
    events = []
    for start in ("17", "18"):
        one = f"algo-1-{start}"
        two = f"algo-2-{start}"
        events += [Event(0, one, line) for line in ENVIRONMENT]
        events += [Event(0, two, line) for line in ENVIRONMENT]
        events += [
            Event(0, one, f"step={start}/20"),
            Event(0, two, "a warning"),
            Event(0, two, PRELOAD),
            Event(0, one, f"{CHATTER}INFO     Done"),
        ]
    warned = "algo-2: a warning"
    assert list(lines_of(events)) == ["step=17/20", warned, "step=18/20", warned]


def log_of(tags: list[str], steps: int) -> list[tuple[float, str, str]]:
    """The log of two hosts: time, host, line. There is a tag for each host that runs the script."""
    hosts = ["algo-1", "algo-2"][: len(tags)]
    lines = []
    for line in (f"{CHATTER}INFO     Imported framework", *ENVIRONMENT, ""):
        lines += [(host, line) for host in hosts]
    for step in range(steps):
        n = step % len(hosts)
        lines.append((hosts[n], f"{tags[n]}step={step}"))
    lines.append(("algo-1", f"{CHATTER}ERROR    Reporting training FAILURE"))
    lines.append(("algo-2", "ended"))
    return [(i / 100 - 10, host, line) for i, (host, line) in enumerate(lines)]


@pytest.mark.parametrize("tags", [["", ""], [TAGGED]], ids=["torchrun", "mpirun"])
def test_the_tail_of_a_log_is_the_end_of_all_its_lines(cloud, cli, launch, tags):
    job_id = launch("--instance-count", "2", log=log_of(tags, 10))
    backend = SageMakerBackend(load_settings())
    for raw in (False, True):
        lines = list(backend.logs(job_id, follow=False, raw=raw))
        assert len(lines) > 10
        for n in (1, 4, 9, 11):
            assert list(backend.logs(job_id, follow=False, raw=raw, tail=n)) == lines[-n:]
        assert list(backend.logs(job_id, follow=False, raw=raw, tail=99)) == lines
    assert cli("logs", job_id, "--raw", "--tail", "1").good.out == f"{lines[-1]}\n"
    assert cli("logs", job_id, "--tail", "0").good.out == ""


@pytest.mark.parametrize("tags", [["", ""], [TAGGED]], ids=["torchrun", "mpirun"])
def test_the_end_of_a_long_log_is_not_read_from_its_head(cloud, cli, launch, tags):
    job_id = launch("--instance-count", "2", log=log_of(tags, 300), reason="it broke")
    cli("wait", job_id)
    checkpoints = cloud.sagemaker.jobs[job_id].request["CheckpointConfig"]["S3Uri"]
    storage.write_bytes(f"{checkpoints}metrics-00000001.jsonl", b'{"step": 1}\n')
    for arguments in (("logs", job_id, "--tail", "3"), ("status", job_id)):
        cloud.calls.clear()
        assert "step=299" in cli(arguments).good.out
        requests = [operation for operation, _ in cloud.calls if operation == "GetLogEvents"]
        assert len(requests) < 40  # of a hundred pages
