"""train.py under the real SageMaker toolkit, mpirun, sshd and torchrun, on one host and on two."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
from container import Host, Job
from launching import until
from runs import SMALL, edited_folder, words

from launcher.machines import cores
from launcher.sagemaker.description import in_short
from launcher.sagemaker.logs import script_lines

VALUES: dict[str, Any] = {**SMALL, "precision": "float32"}

# The job's launcher, and what starts its ranks by the log.
LAUNCHERS = {"pytorchddp": "mpirun", "torchrun": "torchrun"}
RAISED = "OSError: NANOGPT_FAULT asked for this error"

Finished = Callable[..., list[Host]]


def log_of(hosts: list[Host]) -> str:
    return "".join(host.log for host in hosts)


def training_of(host: Host) -> dict[str, Any]:
    return json.loads((host.model / "training.json").read_text())


def assert_done(hosts: list[Host]) -> None:
    assert [host.status for host in hosts] == [0] * len(hosts), log_of(hosts)


# -- one group -------------------------------------------------------------------------------------


def test_the_ranks_of_one_host_make_one_model(finished):
    hosts = finished("one", values=VALUES, launcher="pytorchddp")
    assert_done(hosts)
    said = "running on 1 host x 2 CPU = 2 processes in one group (launched by mpirun;"
    assert hosts[0].log.count(said) == 1
    assert training_of(hosts[0])["world_size"] == 2


@pytest.fixture(scope="session", params=LAUNCHERS)
def two_hosts(request, finished):
    """The hosts of a job of two hosts with two ranks each, and what started the ranks."""
    launcher = request.param
    new = launcher == "pytorchddp"  # as the default image
    hosts = finished(f"two-{launcher}", hosts=2, values=VALUES, launcher=launcher, new_image=new)
    assert_done(hosts)
    return hosts, LAUNCHERS[launcher]


def test_two_hosts_leave_one_model_on_the_first_host(two_hosts):
    (first, second), _ = two_hosts
    assert "model.safetensors" in {path.name for path in first.model.iterdir()}
    assert list(second.model.iterdir()) == []


def test_two_hosts_are_one_group_and_say_so_once(two_hosts):
    hosts, launcher = two_hosts
    said = f"running on 2 hosts x 2 CPU = 4 processes in one group (launched by {launcher};"
    assert log_of(hosts).count("running on ") == 1
    assert said in hosts[0].log
    assert training_of(hosts[0])["world_size"] == 4


def test_four_ranks_on_two_hosts_have_the_losses_of_one(two_hosts, excerpt, tmp_path):
    hosts, _ = two_hosts
    (tmp_path / "input.txt").write_text(excerpt)
    arguments = words(**VALUES, data=tmp_path / "input.txt", out=tmp_path / "out")
    assert runs.run(arguments, cwd=tmp_path).status == 0
    for alone, together in zip(
        runs.metrics(tmp_path / "out/output"),
        runs.metrics(hosts[0].ml / "output/data"),
        strict=True,
    ):
        for name in ("step", "train_loss", "val_loss"):
            assert together[name] == pytest.approx(alone[name], rel=1e-4)


def test_hosts_started_alone_make_one_model_and_say_so(finished):
    """The typo {"pytorchddp": {"enable": True}}: nothing launches ranks or names their places."""
    hosts = finished("typo", hosts=2, launcher="typo", values={**VALUES, "processes": 2})
    assert_done(hosts)
    for host in hosts:
        assert re.search(r"^\S+/python -- train\.py ", host.log, re.MULTILINE)
    assert log_of(hosts).count("running on ") == 1
    said = "running on 2 hosts x 2 CPU = 4 processes in one group (launched by train.py;"
    assert said in hosts[0].log
    assert training_of(hosts[0])["world_size"] == 4
    assert list(hosts[1].model.iterdir()) == []


# -- what reaches a rank ---------------------------------------------------------------------------

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

ODD_VALUES: dict[str, Any] = {
    **VALUES,
    "optimizer": "adamw",
    "learning_rate": 1e-05,
    "tie_embeddings": True,
    "dropout": 0.0,
}


@pytest.fixture(scope="session")
def broken(finished, tmp_path_factory):
    """A job whose ranks declare what reached them, which on the second host is broken."""
    folder = tmp_path_factory.mktemp("declaring") / "train"
    edited_folder(folder, DECLARE)
    options = dict(second_environment_sed=LOSSES, folder=folder, threads=None)
    return finished("broken", hosts=2, values=ODD_VALUES, **options)


def declared(hosts: list[Host]) -> dict[int, tuple[dict[str, str | None], list[str]]]:
    """What each rank declared: variables and arguments."""
    found = re.findall(r"declares (\[{.+)", log_of(hosts))
    declarations = [json.loads(line) for line in found]
    return {
        int(env["OMPI_COMM_WORLD_RANK"] or env["RANK"]): (env, argv) for env, argv in declarations
    }


def test_a_host_with_broken_variables_joins_the_group(broken):
    env, _ = declared(broken)[3]
    assert env["SM_HOSTS"] == "[algo-1,algo-2]"
    assert not env["SM_CURRENT_HOST"]
    assert env["SM_RESOURCE_CONFIG"] is not None and "network" not in env["SM_RESOURCE_CONFIG"]
    assert_done(broken)
    assert log_of(broken).count("running on ") == 1
    assert "running on 2 hosts x 2 CPU = 4 processes in one group" in broken[0].log
    assert list(broken[1].model.iterdir()) == []


def test_mpirun_sets_none_of_torchruns_variables(broken):
    found = [(env["RANK"], env["OMP_NUM_THREADS"]) for env, _ in declared(broken).values()]
    assert found == [(None, None)] * 4


def test_under_mpirun_nccl_logs_only_warnings(broken):
    """The toolkit's own default is INFO, whatever the job's environment says."""
    assert {env["NCCL_DEBUG"] for env, _ in declared(broken).values()} == {"WARN"}


def test_ranks_share_the_cores_of_their_host_by_default(broken):
    threads = max(1, cores() // 2)
    assert f"(launched by mpirun; {threads} CPU thread" in broken[0].log


def test_hyperparameters_reach_every_rank_through_argv(broken):
    expected = words(**{name: ODD_VALUES[name] for name in sorted(ODD_VALUES)})
    assert "1e-05" in expected and "True" in expected
    ranks = declared(broken)
    assert sorted(ranks) == [0, 1, 2, 3]
    assert [argv for _, argv in ranks.values()] == [expected] * 4


def test_hyperparameters_keep_their_types_and_values(broken):
    config = training_of(broken[0])["config"]
    assert {name: config[name] for name in ODD_VALUES} == ODD_VALUES
    assert config["tie_embeddings"] is True


def test_the_images_since_2_11_start_one_group_by_torchrun(finished, tmp_path_factory):
    """Their toolkit passes the line through a shell, unquoted."""
    folder = tmp_path_factory.mktemp("declaring") / "train"
    edited_folder(folder, DECLARE)
    options = dict(
        launcher="torchrun", new_image=True, folder=folder, variables={"NCCL_DEBUG": "INFO"}
    )
    hosts = finished("new-torchrun", hosts=2, values=ODD_VALUES, **options)
    assert_done(hosts)
    assert "running on 2 hosts x 2 CPU = 4 processes in one group" in hosts[0].log
    expected = words(**{name: ODD_VALUES[name] for name in sorted(ODD_VALUES)})
    assert {rank: argv for rank, (_, argv) in declared(hosts).items()} == dict.fromkeys(
        range(4), expected
    )
    # The toolkit overrides the job's environment, which a launch warns of.
    assert {env["NCCL_DEBUG"] for env, _ in declared(hosts).values()} == {"WARN"}
    assert "model.safetensors" in {path.name for path in hosts[0].model.iterdir()}
    assert list(hosts[1].model.iterdir()) == []
    assert "\nERROR: ld.so: object '/libchangehostname.so'" in hosts[0].log
    lines = [(f"{host.name}-1", line) for host in hosts for line in host.log.splitlines()]
    assert not [line for line in script_lines(lines) if "ld.so" in line]


def test_metric_lines_are_read_behind_the_tag_of_mpirun(finished):
    host = finished("one", values=VALUES, launcher="pytorchddp")[0]
    rows = runs.metrics(host.ml / "output/data")
    assert len(rows) == 2
    tagged = [line for line in host.log.splitlines() if "train_loss=" in line]
    assert all(line.startswith("[1,mpirank:0,algo-1]<stdout>:step=") for line in tagged)
    for name in ("train_loss", "val_loss", "learning_rate", "tokens_per_second"):
        read = [float(value) for value in re.findall(rf"\b{name}=(\S+)", host.log)]
        assert read == [
            pytest.approx(row[name], abs=0.5 if name == "tokens_per_second" else 5e-6)
            for row in rows
        ]


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launcher", "fault", "says", "cause"),
    [
        ("pytorchddp", "kill", "signal 9", ""),  # mpirun says so; the rank leaves no words
        ("torchrun", "raise", RAISED, RAISED),
    ],
)
def test_a_rank_that_dies_fails_the_job_and_names_the_cause(
    launcher, fault, says, cause, excerpt, tmp_path
):
    variables = {"NANOGPT_FAULT": f"3:3:{fault}"}
    options: dict[str, Any] = dict(launcher=launcher, hosts=2, variables=variables, new_image=True)
    with Job(tmp_path / "job", text=excerpt, values=VALUES, **options) as job:
        until(lambda: says in job.log)
        died = time.time()
        job.wait()
    # Of several hosts, SageMaker takes the reason of the one that failed first.
    assert job.failed_first is not None, job.log
    assert cause in (in_short(f"AlgorithmError: {job.failed_first.failure}, exit code: 1") or "")
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
