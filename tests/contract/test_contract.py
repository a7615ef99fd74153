"""train.py under the real SageMaker toolkit, mpirun, sshd and torchrun, on one host and on two."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import runs
from container import Host, Job
from launching import until
from runs import SMALL, command_line, edited_folder

from sm_nanogpt.entry_point.cores import cores
from sm_nanogpt.launcher.sagemaker.description import shorten
from sm_nanogpt.launcher.sagemaker.logs import Event, lines_of

ODD_VALUES: dict[str, Any] = {
    **SMALL,
    "optimizer": "adamw",
    "learning_rate": 1e-05,
    "tie_embeddings": True,
    "dropout": 0.0,
}
RAISED = "OSError: NANOGPT_FAULT asked for this error"

DECLARE = (
    "    config, options = parse_argv(argv)\n",
    """\
    names = ("OMPI_COMM_WORLD_RANK", "RANK", "SM_HOSTS", "SM_CURRENT_HOST", "SM_RESOURCE_CONFIG",
        "OMP_NUM_THREADS", "NCCL_DEBUG")
    import json
    log("declares " + json.dumps([{name: os.environ.get(name) for name in names}, argv]))
    config, options = parse_argv(argv)
""",
)

# /etc/environment loses quotes and what follows a `#`, and long values are cut.
LOSSES = r"""
/^SM_/s/"//g
/^SM_/s/^\(.\{60\}\).*/\1/
s/^SM_CURRENT_HOST=/&#/
"""

# Jobs of two hosts. Those of ODD_VALUES have two ranks on each, and declare what reached them.
JOBS: dict[str, dict[str, Any]] = {
    "mpirun": dict(gpus=1, new_image=True, values=SMALL),  # as the default image
    "mpirun, broken": dict(second_environment_sed=LOSSES, threads=None, values=ODD_VALUES),
    "torchrun": dict(gpus=1, launcher="torchrun", values=SMALL),
    "torchrun, new": dict(
        launcher="torchrun", new_image=True, variables={"NCCL_DEBUG": "INFO"}, values=ODD_VALUES
    ),
    # {"pytorchddp": {"enable": True}}: nothing launches ranks or names their places
    "train.py": dict(launcher="typo", values={**SMALL, "processes": 2}),
}


def log_of(hosts: list[Host]) -> str:
    return "".join(host.log for host in hosts)


@pytest.fixture(scope="session")
def job(finished, tmp_path_factory):
    """The hosts of one of JOBS, which ended well."""
    folder = tmp_path_factory.mktemp("declaring") / "train"
    edited_folder(folder, DECLARE)

    def run(name: str) -> list[Host]:
        options = JOBS[name] | ({"folder": folder} if JOBS[name]["values"] is ODD_VALUES else {})
        hosts = finished(name.replace(", ", "-"), hosts=2, **options)
        assert [host.status for host in hosts] == [0, 0], log_of(hosts)
        return hosts

    return run


# -- one group -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", JOBS)
def test_two_hosts_are_one_group_and_make_one_model(job, name):
    first, second = job(name)
    n_ranks = JOBS[name].get("gpus", 2)
    group = f"running on 2 hosts x {n_ranks} CPU = {2 * n_ranks} processes in one group"
    assert f"{group} (launched by {name.partition(',')[0]};" in first.log
    assert log_of([first, second]).count("running on ") == 1
    assert json.loads((first.model / "training.json").read_text())["world_size"] == 2 * n_ranks
    assert "model.safetensors" in {path.name for path in first.model.iterdir()}
    assert list(second.model.iterdir()) == []


def test_metrics_are_read_behind_the_tag_of_mpirun(job):
    host, _ = job("mpirun")
    rows = runs.metrics(host.ml / "output/data")
    assert len(rows) == 2
    tagged = [line for line in host.log.splitlines() if "train_loss=" in line]
    assert all(line.startswith("[1,mpirank:0,algo-1]<stdout>:step=") for line in tagged)
    for name in ("train_loss", "val_loss", "learning_rate", "tokens_per_second"):
        read = [float(value) for value in re.findall(rf"\b{name}=(\S+)", host.log)]
        tolerance = 0.5 if name == "tokens_per_second" else 5e-6
        assert read == [pytest.approx(row[name], abs=tolerance) for row in rows]


def test_two_hosts_have_the_losses_of_one_process(job, excerpt, tmp_path):
    (tmp_path / "input.txt").write_text(excerpt)
    arguments = command_line(**SMALL, data=tmp_path / "input.txt", out=tmp_path / "out")
    assert runs.run(arguments, cwd=tmp_path).status == 0
    for name in ("mpirun", "torchrun"):
        rows = runs.metrics(job(name)[0].ml / "output/data")
        for alone, together in zip(runs.metrics(tmp_path / "out/output"), rows, strict=True):
            for value in ("step", "train_loss", "val_loss"):
                assert together[value] == pytest.approx(alone[value], rel=1e-4)


def test_hosts_that_nothing_launches_run_train_py(job):
    for host in job("train.py"):
        assert re.search(r"^\S+/python -- train\.py ", host.log, re.MULTILINE)


# -- what reaches a rank ---------------------------------------------------------------------------


def declared(hosts: list[Host]) -> list[tuple[dict[str, str | None], list[str]]]:
    """What each rank declared: variables and arguments."""
    by_rank = {}
    for document in re.findall(r"declares (\[{.+)", log_of(hosts)):
        env, argv = json.loads(document)
        by_rank[int(env["OMPI_COMM_WORLD_RANK"] or env["RANK"])] = env, argv
    assert sorted(by_rank) == [0, 1, 2, 3]
    return [by_rank[rank] for rank in range(4)]


def test_the_second_host_had_broken_variables(job):
    env, _ = declared(job("mpirun, broken"))[3]
    assert env["SM_HOSTS"] == "[algo-1,algo-2]"
    assert not env["SM_CURRENT_HOST"]
    assert env["SM_RESOURCE_CONFIG"] is not None and "network" not in env["SM_RESOURCE_CONFIG"]


def test_mpirun_sets_none_of_torchruns_variables(job):
    for env, _ in declared(job("mpirun, broken")):
        assert env["RANK"] is None
        assert env["OMP_NUM_THREADS"] is None


def test_ranks_share_their_hosts_cores_by_default(job):
    threads = max(1, cores() // 2)
    assert f"(launched by mpirun; {threads} CPU thread" in job("mpirun, broken")[0].log


@pytest.mark.parametrize("name", ["mpirun, broken", "torchrun, new"])
def test_nccl_logs_only_warnings(job, name):
    """The toolkits override the job's environment, which a launch warns of."""
    assert {env["NCCL_DEBUG"] for env, _ in declared(job(name))} == {"WARN"}


@pytest.mark.parametrize("name", ["mpirun, broken", "torchrun, new"])
def test_hyperparameters_reach_every_rank_as_they_are(job, name):
    """The new toolkit passes the line through a shell, unquoted."""
    hosts = job(name)
    expected = command_line(**{name: ODD_VALUES[name] for name in sorted(ODD_VALUES)})
    assert "1e-05" in expected and "True" in expected
    assert [argv for _, argv in declared(hosts)] == [expected] * 4
    config = json.loads((hosts[0].model / "training.json").read_text())["config"]
    assert {name: config[name] for name in ODD_VALUES} == ODD_VALUES
    assert config["tie_embeddings"] is True


def test_the_new_images_complaint_is_not_shown(job):
    hosts = job("torchrun, new")
    assert "\nERROR: ld.so: object '/libchangehostname.so'" in hosts[0].log
    events = [Event(0, f"{host.name}-1", line) for host in hosts for line in host.log.splitlines()]
    assert not [line for line in lines_of(events) if "ld.so" in line]


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launcher", "fault", "says", "cause"),
    [
        ("pytorchddp", "kill", "signal 9", ""),  # mpirun says so; the rank leaves no words
        ("torchrun", "raise", RAISED, RAISED),
    ],
)
def test_a_dead_rank_fails_the_job_with_its_cause(launcher, fault, says, cause, excerpt, tmp_path):
    options: dict[str, Any] = dict(launcher=launcher, hosts=2, gpus=1, new_image=True)
    options["variables"] = {"NANOGPT_FAULT": f"1:3:{fault}"}
    with Job(tmp_path / "job", text=excerpt, values=SMALL, **options) as job:
        until(lambda: says in job.log)
        died = time.time()
        job.wait()
    # Of several hosts, SageMaker takes the reason of the one that failed first.
    assert job.failed_first is not None, job.log
    assert cause in (shorten(f"AlgorithmError: {job.failed_first.failure}, exit code: 1") or "")
    assert job.failed_at - died < 20
    assert all(list(host.model.iterdir()) == [] for host in job.hosts)


# -- the end of a job ------------------------------------------------------------------------------


def test_containers_end_even_if_the_tests_are_killed(tmp_path):
    program = f"""
import sys, time
sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
from pathlib import Path
from container import Job
with Job(Path({str(tmp_path / "job")!r}), text="", values={{}}, hosts=2) as job:
    print(job.pid1(0), job.pid1(1), flush=True)
    time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as tests:
        assert tests.stdout is not None
        processes = [Path("/proc", number) for number in tests.stdout.readline().split()]
        assert len(processes) == 2 and all(process.exists() for process in processes)
        tests.kill()
    deadline = time.monotonic() + 30
    while any(process.exists() for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)
