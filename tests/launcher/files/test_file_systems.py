"""File systems that lack what disks have: links, modes, times, locks, and the flushing of files.

So are sticks, shares, the drives of notebooks, and those of Windows under Linux.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
from unittest.mock import Mock, patch

import launching
import pytest

from sm_nanogpt import InputError, ServiceError, Settings
from sm_nanogpt.entry_point.files import replacing
from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.files.locks import is_locked, lock
from sm_nanogpt.launcher.text.corpus import upload_data
from sm_nanogpt.launcher.tracking import TrackedJob

# A library that is preloaded: each call that REFUSED names fails, with the error that it names.
# `symlink=1 flock=37`
REFUSING = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static int refused(const char *name) {
    const char *all = getenv("REFUSED"), *here = all ? strstr(all, name) : 0;
    if (here) errno = atoi(here + strlen(name) + 1);
    return here != 0;
}
#define CALL(function, name, parameters, arguments) \\
    int function parameters { \\
        int (*call) parameters = dlsym(RTLD_NEXT, #function); \\
        return refused(name) ? -1 : call arguments; \\
    }
CALL(symlink, "symlink", (const char *a, const char *b), (a, b))
CALL(symlinkat, "symlink", (const char *a, int d, const char *b), (a, d, b))
CALL(chmod, "chmod", (const char *a, mode_t m), (a, m))
CALL(fchmod, "chmod", (int f, mode_t m), (f, m))
CALL(fchmodat, "chmod", (int d, const char *a, mode_t m, int g), (d, a, m, g))
CALL(utimensat, "utime", (int d, const char *a, const struct timespec *t, int g), (d, a, t, g))
CALL(futimens, "utime", (int f, const struct timespec *t), (f, t))
CALL(flock, "flock", (int f, int o), (f, o))
CALL(fsync, "fsync", (int f), (f))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None and "CI" not in os.environ:
        pytest.skip("there is no C compiler")
    source = tmp_path_factory.mktemp("refusing") / "refusing.c"
    source.write_text(REFUSING)
    compiled = source.with_suffix(".so")
    command = [str(compiler), "-shared", "-fPIC", "-o", compiled, source, "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return compiled


@pytest.fixture
def on_such_a_disk(library, home):
    """Runs a command in a home whose file system refuses some calls with these errors."""

    def run(*arguments, **refused):
        calls = " ".join(f"{name}={error}" for name, error in refused.items())
        with patch.object(launching.warm, "replacing", lambda start: subprocess):
            environment = {"LD_PRELOAD": str(library), "REFUSED": calls}
            return launching.command(arguments, home=home, env=environment)

    return run


def refusing(monkeypatch, error, *functions):
    for function in functions:
        monkeypatch.setattr(function, Mock(side_effect=OSError(error, os.strerror(error))))


# -- each call by itself ---------------------------------------------------------------------------


def test_what_cannot_be_linked_is_copied(monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO")
    (tmp_path / "text.txt").write_text("a text")
    refusing(monkeypatch, errno.EPERM, "os.symlink")
    storage.fetch(str(tmp_path / "text.txt"), tmp_path / "channel")
    copy = tmp_path / "channel/text.txt"
    assert copy.read_text() == "a text"
    assert not copy.is_symlink()
    assert "a copy of" in caplog.text


def test_a_copy_that_fails_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "text.txt").write_text("a text")
    refusing(monkeypatch, errno.EPERM, "os.symlink")
    refusing(monkeypatch, errno.ENOSPC, "shutil.copyfile")
    with pytest.raises(ServiceError, match="disk is full"):
        storage.fetch(str(tmp_path / "text.txt"), tmp_path / "channel")


def test_a_file_is_stored_without_modes_and_times(monkeypatch, tmp_path):
    (tmp_path / "text.txt").write_text("a text")
    refusing(monkeypatch, errno.ENOTSUP, "os.utime", "os.chmod", "os.fchmod")
    storage.write_file(tmp_path / "text.txt", str(tmp_path / "store/text.txt"))
    assert (tmp_path / "store/text.txt").read_text() == "a text"


def test_a_file_stays_private_without_times(monkeypatch, tmp_path):
    (tmp_path / "text.txt").write_text("a text")
    (tmp_path / "text.txt").chmod(0o600)
    refusing(monkeypatch, errno.EPERM, "os.utime")
    storage.write_file(tmp_path / "text.txt", str(tmp_path / "store/text.txt"))
    assert stat.S_IMODE((tmp_path / "store/text.txt").stat().st_mode) == 0o400


def test_a_file_is_replaced_where_none_can_be_flushed(monkeypatch, tmp_path):
    refusing(monkeypatch, errno.EINVAL, "os.fsync")
    with replacing(tmp_path / "file") as file:
        file.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_disk_that_fails_keeps_the_old_file(monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    refusing(monkeypatch, errno.EIO, "os.fsync")
    with pytest.raises(OSError), replacing(tmp_path / "file") as file:
        file.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert launching.tree(tmp_path) == {"file"}


def test_a_lock_that_cannot_be_had_names_the_remedy(monkeypatch, tmp_path):
    refusing(monkeypatch, errno.ENOLCK, "fcntl.flock")
    with (
        pytest.raises(InputError, match="set SM_NANOGPT_HOME to a local disk"),
        (tmp_path / "lock").open("w") as file,
    ):
        lock(file)


def test_a_lock_shows_until_its_file_is_closed(tmp_path):
    assert not is_locked(tmp_path / "lock")
    with (tmp_path / "lock").open("w") as file:
        assert lock(file)
        assert is_locked(tmp_path / "lock")
        with (tmp_path / "lock").open("w") as other:
            assert not lock(other, wait=False)
    assert not is_locked(tmp_path / "lock")


def test_a_job_that_has_ended_needs_no_lock(job, monkeypatch):
    refusing(monkeypatch, errno.ENOLCK, "fcntl.flock")
    assert TrackedJob(job.job_id, Settings(home=job.home)).describe().status == "Completed"


# -- links inside the home -------------------------------------------------------------------------


def test_a_link_inside_the_home_holds_when_it_is_moved(home, tmp_path):
    (home / "store").mkdir(parents=True)
    (home / "store/text.txt").write_text("a text")
    settings = Settings(home=home)
    storage.fetch(str(home / "store/text.txt"), home / "jobs/a/channel", settings=settings)
    home.rename(tmp_path / "moved")
    assert (tmp_path / "moved/jobs/a/channel/text.txt").read_text() == "a text"


def test_a_link_holds_where_jobs_are_on_another_disk(home, tmp_path):
    (home / "store").mkdir(parents=True)
    (home / "store/text.txt").write_text("a text")
    (tmp_path / "disk/of/jobs").mkdir(parents=True)
    (home / "jobs").symlink_to(tmp_path / "disk/of/jobs")
    settings = Settings(home=home)
    storage.fetch(str(home / "store/text.txt"), home / "jobs/a/channel", settings=settings)
    assert (home / "jobs/a/channel/text.txt").read_text() == "a text"


# -- commands --------------------------------------------------------------------------------------


def test_a_job_runs_where_only_contents_are_kept(on_such_a_disk, home, short_text_file):
    refused = {
        "symlink": errno.EPERM,
        "chmod": errno.EPERM,
        "utime": errno.EPERM,
        "fsync": errno.EINVAL,
    }
    upload_data(short_text_file, Settings(home=home))
    job_id = on_such_a_disk(*launching.launching(), **refused).good.out.strip()
    sample = ("fetch-and-sample", job_id, "--max-new-tokens", "5")
    assert on_such_a_disk(*sample, **refused).good.out
    (log,) = home.glob("jobs/*/runner.log")
    assert "a copy of" in log.read_text()
    (channel,) = home.glob("jobs/*/hosts/algo-1/input/data/training")
    assert not any(path.is_symlink() for path in channel.iterdir())


def test_a_job_without_a_lock_is_not_started(cli, home, text_file, monkeypatch):
    refusing(monkeypatch, errno.ENOLCK, "fcntl.flock")
    ran = cli(launching.launching(data=text_file))
    assert ran.failed(2, "set SM_NANOGPT_HOME to a local disk")
    assert not any((home / "jobs").iterdir())


def test_the_preloaded_library_refuses(library):
    """Else the tests above would prove nothing."""
    probe = "import fcntl, os; fcntl.flock(os.open('.', 0), fcntl.LOCK_SH)"
    environment = {**os.environ, "LD_PRELOAD": str(library), "REFUSED": f"flock={errno.ENOLCK}"}
    command = [launching.PROGRAM[0], "-c", probe]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert f"[Errno {errno.ENOLCK}]" in ended.stderr
