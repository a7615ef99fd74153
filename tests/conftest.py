"""How pytest runs the tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from sm_nanogpt.entry_point.startup import limit_spinning

LONG = ("contract", "e2e", "slow")  # directories
LONGEST = ("test_wheel", "test_search_jobs", "test_day")  # one test of each takes a minute
# Tests make and delete many small files, which takes half of their time on a disk.
MEMORY = Path("/dev/shm")
MEMORY_NEEDED = 8 << 30  # bytes

# Modules hold a million objects. To look for garbage among them took a quarter of the tests' time.
gc.set_threshold(100_000, 20, 20)

# As in train.py: threads that wait for each other leave the cores to other tests. Before torch.
limit_spinning()

# A script that puts the tests in the background makes them deaf to Ctrl-C, and all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "leave out tests that start a process, a server or a container, or import what is large"
    parser.addoption("--quick", action="store_true", help=text)


def pytest_configure() -> None:
    """Has `tmp_path` in memory, where there is enough, and where programs may be started from."""
    if MEMORY.is_dir():
        room = os.statvfs(MEMORY)
        is_large = room.f_bavail * room.f_frsize >= MEMORY_NEEDED
        if is_large and not room.f_flag & os.ST_NOEXEC:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Has the fixtures where tests run: the process that gives tests to others needs no torch."""
    if not session.config.pluginmanager.has_plugin("dsession"):
        import shared_fixtures

        session.config.pluginmanager.register(shared_fixtures)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Three workers for two cores: tests wait for a third of their time, if for processes."""
    cores = os.cpu_count() or 1
    return cores if config.getoption("--quick") else min(8, (3 * cores + 1) // 2)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    slow = collection_path.name in LONG and collection_path.is_dir()
    return True if slow and config.getoption("--quick") else None


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays


def pytest_make_parametrize_id(val: object) -> str | None:
    """Short names of cases, the same in every worker: compressed bytes hold the time."""
    if isinstance(val, bytes):
        return f"{len(val)} bytes"
    return f"{val[:40]}..." if isinstance(val, str) and len(val) > 60 else None


def complete(report: Any, config: pytest.Config) -> Any:
    """Where CI is set, tests must be complete: a skip is a failure, by whatever means."""
    if report.skipped and os.environ.get("CI") and not config.getoption("--quick"):
        report.outcome = "failed"
        report.longrepr = f"skipped, and CI is set: {report.longrepr[2]}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    return complete((yield), item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    return complete((yield), collector.config)


@pytest.hookimpl(trylast=True)  # pytest itself puts tests together that share a parameter
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each worker begins with its part of the longest tests: of LONGEST, and then of LONG.

    It gets a stretch of this list, and takes from the ends of the others' when it is through.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    longest = [item for item in items if item.path.stem in LONGEST]
    others = [item for item in items if item.path.stem not in LONGEST]
    long = longest + [item for item in others if item.path.parent.name in LONG]
    short = [item for item in others if item.path.parent.name not in LONG]
    cuts = [len(short) * index // workers for index in range(workers + 1)]
    shares = [
        long[index::workers] + short[cuts[index] : cuts[index + 1]] for index in range(workers)
    ]
    items[:] = [item for share in shares for item in share]
