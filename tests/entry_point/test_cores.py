"""How a local job uses this machine's cores."""

import math
from typing import Any
from unittest.mock import Mock

import pytest

from sm_nanogpt.entry_point import cores
from sm_nanogpt.entry_point.config import make_config
from sm_nanogpt.entry_point.device import share_cores
from sm_nanogpt.launcher import machines

DOCKER = "12:cpu,cpuacct:/docker/4f\n11:memory:/docker/4f\n"


@pytest.mark.parametrize(
    ("files", "groups", "quota"),
    [
        ({}, "", math.inf),
        ({"cpu.max": "max 100000\n"}, "0::/\n", math.inf),
        ({"a.slice/cpu.max": "150000 100000\n"}, "0::/a.slice/b.service\n", 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "", math.inf),
        (
            {
                "cpu/docker/4f/cpu.cfs_quota_us": "400000",
                "cpu/docker/4f/cpu.cfs_period_us": "100000",
            }
            | {"cpu/docker/cpu.cfs_quota_us": "300000", "cpu/docker/cpu.cfs_period_us": "100000"},
            DOCKER,
            3.0,
        ),
    ],
    ids=["none", "no limit", "a slice", "v1, no limit", "v1, nested"],
)
def test_the_cpu_quota_is_that_of_the_container(tmp_path, monkeypatch, files, groups, quota):
    monkeypatch.setattr(cores, "CGROUPS", tmp_path)
    monkeypatch.setattr(cores, "OWN_CGROUPS", tmp_path / "groups")
    for name, content in {**files, "groups": groups}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert cores.cpu_quota() == quota


@pytest.mark.parametrize(("quota", "count"), [(math.inf, 64), (2.5, 2), (0.5, 1)])
def test_a_job_takes_no_more_cores_than_the_quota_allows(monkeypatch, quota, count):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(1000, 1064)))
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert cores.cores() == count
    threads = Mock()
    monkeypatch.setattr("torch.set_num_threads", threads)
    share_cores(2)
    threads.assert_called_once_with(max(1, count // 2))


def test_a_large_model_takes_one_process_per_core(monkeypatch):
    def processes(cores: int, **values: Any) -> int:
        monkeypatch.setattr(machines, "cores", lambda: cores)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        return machines.cpu_processes(make_config(values, "baby"))

    assert processes(1) == 1
    assert processes(2) == 2
    assert processes(4) == 4
    assert processes(6) == 4
    assert processes(64) == 8
    assert processes(6, batch_size=60) == 6
    assert processes(8, gradient_accumulation_steps=32) == 2
    assert processes(8, n_layer=1, n_embd=24, batch_size=8) == 1


@pytest.mark.parametrize(("variable", "count"), [("", 4), ("1", 4), ("2 ,1", 2)])
def test_omp_num_threads_limits_the_processes(monkeypatch, variable, count):
    monkeypatch.setattr(machines, "cores", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert machines.cpu_processes(make_config({}, "baby")) == count


@pytest.mark.parametrize(("busy_cores", "busy"), [(0.8, False), (1.5, True)])
def test_a_machine_is_busy_when_others_use_its_cores(monkeypatch, busy_cores, busy):
    seconds = iter([100.0, 100.0 + busy_cores * machines.SAMPLE_SECONDS])
    monkeypatch.setattr(machines, "busy_seconds", lambda: next(seconds))
    monkeypatch.setattr(machines, "cores", lambda: 4)
    assert machines.is_busy() is busy


def test_only_the_cpus_of_this_process_are_counted(tmp_path, monkeypatch):
    rows = ("cpu  9 9 9 9 9 9 9 9 0 0", "cpu0 300 100 200 900 50 1 2 3 7 7", "cpu1 9 9 9 9 9 9 9 9")
    (tmp_path / "stat").write_text("\n".join(rows))
    monkeypatch.setattr(machines, "CPU_TIMES", tmp_path / "stat")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    assert machines.busy_seconds() == 6.06


def test_where_no_cpu_is_counted_the_load_decides(tmp_path, monkeypatch):
    monkeypatch.setattr(machines, "CPU_TIMES", tmp_path / "none")
    monkeypatch.setattr(machines, "cores", lambda: 4)
    monkeypatch.setattr("os.getloadavg", lambda: (1.5, 0.0, 0.0))
    assert machines.is_busy()
