"""What a resumed job takes over from the earlier one."""

from __future__ import annotations

from typing import Any

import pytest

from sm_nanogpt import Request
from sm_nanogpt.launcher.job import TrainingJob
from sm_nanogpt.launcher.launching.resume import with_earlier_fields


def resumed(earlier: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request with these changes, for a job that had such fields."""
    job = TrainingJob(**{"instance": "ml.g5.12xlarge", "data": "s3://bucket/text", **earlier})
    request = Request(resume="a-job", **changes)
    return with_earlier_fields(request, job).explicit_fields()


@pytest.mark.parametrize(
    ("earlier", "changes", "kept", "dropped"),
    [
        ({"keep_alive": 600}, {"max_run": 60}, {"keep_alive": 600, "max_run": 60}, ""),
        ({"keep_alive": 600}, {"spot": True}, {"spot": True}, "keep_alive"),
        ({"spot": True, "max_wait": 90000}, {"spot": False}, {"spot": False}, "max_wait"),
        (
            {"image_uri": "mine:1"},
            {"pytorch_version": "2.8.0"},
            {"pytorch_version": "2.8.0"},
            "image_uri",
        ),
        (
            {"pytorch_version": "2.8.0"},
            {"image_uri": "mine:1"},
            {"image_uri": "mine:1"},
            "pytorch_version",
        ),
        (
            {"instance": "ml.m5.xlarge", "volume_size": 500},
            {"instance": "ml.c5.xlarge"},
            {"volume_size": 500},
            "",
        ),
        (
            {"instance": "ml.m5.xlarge", "volume_size": 500},
            {"instance": "ml.g5.xlarge"},  # it has disks of its own
            {"instance": "ml.g5.xlarge"},
            "volume_size",
        ),
        (
            {"instance": "ml.g5.12xlarge,ml.g6.12xlarge"},
            {"instance": "ml.g6.xlarge", "spot": True},
            {"instance": "ml.g6.xlarge"},
            "",
        ),
        (
            {"environment": {"A": "1", "B": "1"}, "tags": {"A": "1", "B": "1"}},
            {"environment": {"B": "2"}, "tags": {"B": "2"}},
            {"environment": {"A": "1", "B": "2"}, "tags": {"A": "1", "B": "2"}},
            "",
        ),
        ({"name": "first", "size": 2}, {}, {"name": "first"}, "size"),
        ({"name": "first"}, {"name": "second"}, {"name": "second"}, ""),
    ],
)
def test_a_resumed_job_keeps_what_fits_its_changes(earlier, changes, kept, dropped):
    fields = resumed(earlier, changes)
    assert fields["resume"] == "a-job"
    assert {name: fields.get(name) for name in kept} == kept
    assert dropped not in fields
