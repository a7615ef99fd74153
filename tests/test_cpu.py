"""How a local job uses this machine's cores."""

import math
from typing import Any

import pytest

from entry_point.config import make_config
from launcher import machines


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2.5),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2),
        (None, {}, math.inf),
    ],
)
def test_the_cpu_quota_is_that_of_the_control_groups(tmp_path, groups, files, quota):
    if groups is not None:
        files = {"../../../proc/self/cgroup": groups, **files}
    for name, content in files.items():
        path = (tmp_path / "sys/fs/cgroup" / name).resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert machines.cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(("quota", "cores"), [(math.inf, 64), (2.5, 2), (0.5, 1), (100.0, 64)])
def test_a_job_takes_no_more_cores_than_the_quota_allows(monkeypatch, quota, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(1000, 1064)))
    monkeypatch.setattr(machines, "cpu_quota", lambda root: quota)
    assert machines.cores() == cores


def test_a_large_model_takes_one_process_per_core(monkeypatch):
    def processes(cores: int, **values: Any) -> int:
        monkeypatch.setattr(machines, "cores", lambda: cores)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        return machines.cpu_processes(make_config(values, "baby"))

    assert [processes(cores) for cores in (1, 2, 4, 6, 64)] == [1, 2, 4, 4, 8]
    assert processes(6, batch_size=60) == 6
    assert processes(8, gradient_accumulation_steps=32) == 2
    assert processes(8, n_layer=1, n_embd=24, batch_size=8) == 1


@pytest.mark.parametrize(("said", "count"), [("", 4), ("0", 4), ("1", 4), ("2 ,1", 2), ("x", 4)])
def test_omp_num_threads_limits_the_processes(monkeypatch, said, count):
    monkeypatch.setattr(machines, "cores", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert machines.cpu_processes(make_config({}, "baby")) == count
