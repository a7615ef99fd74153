"""The script of the first day on a real account: what runs, what is spent, what it stops."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import first_day
import pytest
from first_day import STEPS, Day, Step

from sm_nanogpt import Settings
from sm_nanogpt.launcher.sagemaker.caller import Caller, LaunchedJob, remember_launch

JOB = "sm-nanogpt-20261124-120000-00000a"
PAGE = Path(__file__).parents[2] / "docs" / "first-day.md"


@pytest.fixture
def commands(monkeypatch):
    """The commands that were run; a job that one launched has cost 2 USD."""
    names: list[str] = []

    def execute(arguments: tuple[str, ...], env: Mapping[str, str]) -> tuple[int, str, str]:
        names.append(arguments[0])
        if arguments[0] == "launch":
            return 0, JOB, ""
        if arguments[0] == "status":
            status = {"billable_seconds": 60, "cost": 2.0, "instance": "ml.m5.xlarge"}
            return 0, json.dumps(status), ""
        if arguments == ("infra", "show"):  # there is no stack
            return 1, "", ""
        return 0, "", ""

    monkeypatch.setattr(first_day, "execute", execute)
    return names


@pytest.fixture
def begin(cloud, commands, tmp_path, monkeypatch):
    """Runs the script with other steps; returns its exit code and its state."""

    def call(*steps: Callable[[Day], None], ceiling: float = 3) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(first_day, "STEPS", [Step(0, ceiling, run) for run in steps])
        code = first_day.main(["--emulator", "--yes", "--directory", str(tmp_path / "day")])
        return code, json.loads((tmp_path / "day/state.json").read_text())

    return call


def deploys(day: Day) -> None:
    day.state["stack"] = {}


def launches(day: Day) -> None:
    day.sm("launch")
    day.write(f"arn:aws:iam::{day.account}:role/any")


def surprises(day: Day) -> None:
    launches(day)
    day.check("one is two", 1 == 2)


def never(day: Day) -> None:
    raise AssertionError


def test_a_surprise_ends_the_day_and_stops_its_job(begin, commands, tmp_path):
    code, state = begin(deploys, surprises, never)
    assert code == 1
    assert list(state["passed"]) == ["0"]
    assert commands == ["launch", "stop", "status"]
    assert state["jobs"][JOB]["usd"] == 2
    transcript = (tmp_path / "day/transcript.txt").read_text()
    assert "expected: one is two" in transcript
    assert "123456789012" not in transcript


def test_what_passed_is_not_repeated(begin):
    begin(deploys, surprises)
    code, state = begin(never, launches)
    assert code == 0
    assert list(state["passed"]) == ["0", "1"]


def test_no_step_starts_that_could_exceed_the_budget(begin):
    begin(deploys, launches)
    code, state = begin(never, never, never, ceiling=first_day.BUDGET - 1)
    assert code == 1
    assert list(state["passed"]) == ["0", "1"]


def test_an_interruption_stops_the_job(begin, commands):
    def interrupted(day: Day) -> None:
        launches(day)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin(deploys, interrupted)
    assert commands == ["launch", "stop", "status"]


def test_a_launch_that_is_interrupted_is_stopped(begin, commands, monkeypatch):
    """Its job's id was not read."""
    execute = first_day.execute

    def interrupted(arguments: tuple[str, ...], env: Mapping[str, str]) -> tuple[int, str, str]:
        ended = execute(arguments, env)
        if arguments[0] == "launch":
            launched = LaunchedJob(Caller("1", "me"), "us-east-1", JOB)
            remember_launch(launched, Settings(home=Path(env["SM_NANOGPT_HOME"])))
            raise KeyboardInterrupt
        return ended

    monkeypatch.setattr(first_day, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        begin(deploys, launches)
    assert commands == ["launch", "stop", "status"]


def test_a_day_goes_on_only_where_it_began(begin, monkeypatch):
    begin(deploys)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    with pytest.raises(SystemExit, match="eu-west-1"):
        begin(never)


@pytest.mark.parametrize("damage", ['{"pla', "[]", "{}"])
def test_a_day_whose_state_is_damaged_is_cleaned_up(begin, commands, tmp_path, damage):
    begin(deploys, launches)
    (tmp_path / "day/state.json").write_text(damage)
    with pytest.raises(SystemExit, match=r"state\.json is damaged"):
        begin(launches, never)
    commands.clear()
    code, state = begin(STEPS[-1].run)  # as of `first_day.py 16`
    assert code == 0
    assert list(state["jobs"]) == [JOB]
    assert commands[:2] == ["stop", "status"]


def test_an_unknown_profile_is_one_line(begin, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(SystemExit, match=r"error: .*nobody"):
        begin(never)


def test_without_a_terminal_it_asks_for_consent_by_option(cloud, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(SystemExit, match="--yes"):
        first_day.main(["--emulator", "--directory", str(tmp_path)])


def test_a_day_whose_stack_failed_is_cleaned_up(begin):
    code, state = begin(STEPS[-1].run)  # as of `first_day.py 16`
    assert code == 0
    assert list(state["passed"]) == ["0"]


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        ([], list(range(17))),
        (["3"], [3]),
        (["0-2", "16"], [0, 1, 2, 16]),
        (["2", "0-1"], [0, 1, 2]),
    ],
)
def test_steps_are_named_by_numbers_and_ranges(arguments, numbers):
    assert first_day.step_numbers(arguments) == numbers


def test_the_page_lists_each_step_with_its_costs():
    rows = re.findall(
        r"^\| +(\d+) \|.*\| *([\d.]+) \| *([\d.]+) \|$", PAGE.read_text(), re.MULTILINE
    )
    steps = first_day.STEPS
    assert len(rows) == len(steps)
    for number, (row, step) in enumerate(zip(rows, steps, strict=True)):
        assert int(row[0]) == number
        assert float(row[1]) == step.expected
        assert float(row[2]) == step.ceiling
    assert sum(step.ceiling for step in steps) < first_day.BUDGET
    assert sum(step.ceiling for step in steps[:9]) < 3
