"""A search from start to keep: what the judge keeps, the verdicts, and what the commands say."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import launching
import pytest
from searches import draw_same_seeds, edits_of, folder, gain_of

from sm_nanogpt import InputError, Request, ServiceError, entry_point
from sm_nanogpt.entry_point.config import Config
from sm_nanogpt.entry_point.text import read_tokens, unsigned
from sm_nanogpt.launcher.cli.search import escape_invisible
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.source import Source, keep_source
from sm_nanogpt.launcher.trying import comparison, local, search
from sm_nanogpt.launcher.trying.comparison import Comparison
from sm_nanogpt.launcher.trying.history import SearchLedger
from sm_nanogpt.launcher.trying.refusal import Refused
from sm_nanogpt.launcher.trying.runs import SeededRun, TriedRun
from sm_nanogpt.launcher.trying.scoring import Judge, Score
from sm_nanogpt.launcher.trying.search import Search
from sm_nanogpt.launcher.trying.start import begin_search

LOCAL_RUNS = local.LocalRuns  # which makes real runs


class Trained:
    """Runs whose loss is that of their folder, as its file gain.py says, with noise by seed."""

    makes_jobs = False
    at_once = 2

    def __init__(self, *_: Any) -> None:
        pass

    def train(self, runs: Sequence[SeededRun]) -> Iterator[TriedRun]:
        for run in runs:
            yield TriedRun(run, Path(f"{gain_of(run.source)}/{run.seed}"), 10.0)


def score(self: Judge, model: Path, source: Source, leak_check_bound: float, limit: float) -> Score:
    draw = random.Random(f"{edits_of(source)} {model.name}")
    return Score(2.0 - gain_of(source) + draw.gauss(0, 0.004), 3.0)


def replace_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No real runs: what a folder loses stands in it."""
    monkeypatch.setattr(local, "LocalRuns", Trained)
    monkeypatch.setattr(Judge, "score", score)
    monkeypatch.setattr(Search, "check", lambda self, source: None)
    monkeypatch.setattr(search, "sizes_of", lambda model: {"parameters": 100, "tokens": 1000})


@pytest.fixture
def trained(monkeypatch, same_seeds):
    replace_runs(monkeypatch)


@pytest.fixture(scope="module")
def begun_home(tmp_path_factory, short_text_file):
    """The home of a search that has measured its base."""
    home = tmp_path_factory.mktemp("begun") / "home"
    with pytest.MonkeyPatch.context() as patch:
        replace_runs(patch)
        draw_same_seeds(patch)
        request = Request(instance="local", preset="quick", data=str(short_text_file))
        begin_search("plays", request, Settings(home=home), 0.01, None).measure_base()
    return home


@pytest.fixture
def started(begun_home, home, cli, trained):
    """The commands, in a copy of that home."""
    shutil.copytree(begun_home, home)
    return cli


def opened(home: Path) -> Search:
    return Search("plays", Settings(home=home))


def seeds_of(home: Path, use: str) -> list[int]:
    """The seeds that were drawn for a use."""
    entries = [entry for entry in opened(home).ledger.of("seeds") if entry["use"] == use]
    return [seed for entry in entries for seed in entry["seeds"]]


def test_the_judges_text_is_in_nothing_that_runs_read(started, home, short_text_file):
    text = short_text_file.read_text("utf-8")
    directory = home / "tries" / "plays"
    judged = (directory / "judge.txt").read_text()
    assert text.endswith(judged)
    read = read_tokens(directory / "text", Config())
    for part in (read.train, read.val):
        assert read.tokenizer.decode(unsigned(part[0 : len(part)]).tolist()) in text[: -len(judged)]
    assert len(read.train) + len(read.val) + len(judged) == len(text)
    assert len(judged) == pytest.approx(0.05 * len(text), rel=0.01)


def test_a_better_folder_is_the_base_of_the_next_try(started, home, tmp_path):
    ran = started("try", "run", folder(tmp_path / "a", 0.05), "--group", "plays")
    assert ran.code == 0
    assert ran.out.startswith("KEEP 1 ")
    assert opened(home).ledger.base == Source.read(tmp_path / "a").sha256
    assert started("copy-script", "mine", "--from", "plays").good
    assert Source.read(Path("mine")).sha256 == Source.read(tmp_path / "a").sha256
    assert "gain.py" in started("try", "show", "1", "--group", "plays").good.out


HIDING = {
    "what was before on its line": "\x1b[2K\r",
    "the end of the line": "\x9b8m",
    "the order of characters": "\u202e",
    "that there is a character": "\u200b\U000e0041",
    "that a line goes on": "\x0c\x85\u2028",
    "a byte that is no character": os.fsdecode(b"\xff"),
}


@pytest.mark.parametrize("hidden", HIDING)
def test_a_hidden_character_is_shown(hidden):
    characters = HIDING[hidden]
    assert escape_invisible(f"a{characters}b\tc") == f"a{ascii(characters)[1:-1]}b\tc"


def test_what_a_try_changed_is_shown_whatever_hides_it(started, tmp_path):
    """Also in a pipe, as a pager or a program reads it."""
    lines = [f"a = 1  # {characters} ok" for characters in HIDING.values()]
    tried = folder(tmp_path / "a", 0.0)
    (tried / "extra.py").write_bytes(os.fsencode("\n".join(lines)))
    started("try", "run", tried, "--group", "plays")
    output = started("try", "show", "1", "--group", "plays").good.out
    for characters in HIDING.values():
        assert f"+a = 1  # {ascii(characters)[1:-1]} ok\n" in output
    assert all(map(str.isprintable, output.splitlines()))


def test_a_folder_that_gains_nothing_is_not_kept(started, home, tmp_path):
    base_before = opened(home).ledger.base
    ran = started("try", "run", folder(tmp_path / "a", 0.0), "--group", "plays")
    assert ran.code == 3
    assert opened(home).ledger.base == base_before


def test_a_kept_gain_is_told_by_fresh_seeds_alone(started, home, tmp_path):
    started("try", "run", folder(tmp_path / "a", 0.05), "--group", "plays")
    [entry] = opened(home).ledger.of("try")
    assert entry["fresh"] is True
    assert entry["low"] < -0.05 < entry["high"]
    fresh = seeds_of(home, f"{entry['folder']} against {entry['base']}")
    assert len(fresh) == entry["pairs"]
    losses = opened(home).ledger.losses
    differences = [losses[entry["folder"], seed] - losses[entry["base"], seed] for seed in fresh]
    assert fmean(differences) == pytest.approx(entry["mean"], abs=1e-5)


def test_a_killed_try_goes_on_with_its_runs_and_seeds(started, home, tmp_path, monkeypatch):
    source, train = Source.read(folder(tmp_path / "a", 0.05)), Trained.train
    fresh = f"{source.sha256} against {opened(home).ledger.base}"

    def killed(self: Trained, runs: Sequence[SeededRun]) -> Iterator[TriedRun]:
        for finished in train(self, runs):
            if finished.run.seed in seeds_of(home, fresh)[3:]:  # it dislikes what these show
                raise KeyboardInterrupt
            yield finished

    monkeypatch.setattr(Trained, "train", killed)
    with pytest.raises(KeyboardInterrupt):
        opened(home).attempt(source, "")
    drawn = seeds_of(home, fresh)
    monkeypatch.setattr(Trained, "train", train)
    assert opened(home).attempt(source, "")["verdict"] == "kept"
    runs = [(run["folder"], run["seed"]) for run in opened(home).ledger.of("run")]
    assert len({*runs}) == len(runs)
    assert seeds_of(home, fresh) == drawn


def test_a_try_that_is_killed_again_and_again_begins_anew(started, home, tmp_path):
    """A run that depends on more than its seed could wait for a kill until it was lucky."""
    path = folder(tmp_path / "a", 0.05)
    ledger, folder_hash = opened(home).ledger, Source.read(path).sha256
    [seed, *_] = ledger.seeds(search.SHARED_SEEDS, 1)
    ledger.add("run", folder=folder_hash, seed=seed, seconds=10.0, judge_seconds=3.0, loss=1.0)
    for _ in range(4):
        ledger.add("begun", runs=[(folder_hash, seed)])
    ran = started("try", "run", str(path), "--group", "plays")
    assert "its runs were killed again and again, so they begin anew" in ran.err
    assert opened(home).ledger.losses[folder_hash, seed] > 1.5


def test_a_model_that_is_too_large_is_refused(started, home, tmp_path, monkeypatch):
    sizes = {"parameters": 111, "tokens": 1000}  # those of the first folder are 100
    monkeypatch.setattr(search, "sizes_of", lambda model: sizes)
    entry = opened(home).attempt(Source.read(folder(tmp_path / "a", 0.05)), "")
    assert entry["verdict"] == "refused"
    assert "1.11x the parameters" in entry["why"]


def test_a_slow_folder_is_refused(started, home, tmp_path, monkeypatch):
    def slowly(self: Trained, runs: Sequence[SeededRun]) -> Iterator[TriedRun]:
        for run in runs:
            seconds = 16.0 if "gain.py" in run.source.files else 10.0
            yield TriedRun(run, Path(f"x/{run.seed}"), seconds)

    monkeypatch.setattr(Trained, "train", slowly)
    ran = started("try", "run", folder(tmp_path / "a", 0.05), "--group", "plays")
    assert ran.code == 4
    assert "1.60x the time" in ran.out


def test_a_machine_that_is_busy_by_now_refuses_nobody(started, home, tmp_path, monkeypatch):
    """All runs take 1.6 times as long as those of the base did; its fresh ones too."""

    def slowly(self: Trained, runs: Sequence[SeededRun]) -> Iterator[TriedRun]:
        for run in runs:
            yield TriedRun(run, Path(f"x/{run.seed}"), 16.0)

    monkeypatch.setattr(Trained, "train", slowly)
    ran = started("try", "run", folder(tmp_path / "a", 0.05), "--group", "plays")
    assert ran.code == 0, ran.out


def test_a_folder_that_computes_before_the_judge_is_refused(started, home, tmp_path, monkeypatch):
    def slow_score(self: Judge, model: Path, source: Source, *args: Any) -> Score:
        scored = score(self, model, source, *args)
        factor = 1.4 if "gain.py" in source.files else 1.0
        return Score(scored.loss, factor * scored.seconds)

    monkeypatch.setattr(Judge, "score", slow_score)
    ran = started("try", "run", folder(tmp_path / "a", 0.05), "--group", "plays")
    assert ran.code == 4
    assert "takes 1.40x the time before the judge" in ran.out


def test_a_folder_with_chosen_batches_is_no_better(
    cli, short_text_file, trained, tmp_path, monkeypatch
):
    """The base's losses follow the seed, as the order of its batches does."""

    def with_chosen_batches(self: Judge, model: Path, source: Source, *_: Any) -> Score:
        is_chosen = "gain.py" in source.files
        weights = random.Random(f"{edits_of(source)} {model.name}").gauss(0, 0.003)
        order = -0.018 if is_chosen else random.Random(model.name).gauss(0, 0.014)
        return Score(2.0 + order + weights, 3.0)

    monkeypatch.setattr(Judge, "score", with_chosen_batches)
    assert cli("try", "start", "plays", "--text", short_text_file).good
    ran = cli("try", "run", folder(tmp_path / "a", 0.05), "--group", "plays", "--json")
    assert ran.code == 3
    entry = json.loads(ran.out)
    assert entry["high"] < 0 and entry["fresh"]
    assert "a lucky order of its batches" in entry["why"]


def test_a_base_that_fails_is_no_fault_of_the_try(started, home, tmp_path, monkeypatch):
    def failing(self: Trained, runs: Sequence[SeededRun]) -> Iterator[TriedRun]:
        for run in runs:
            problem = "" if "gain.py" in run.source.files else "no memory"
            yield TriedRun(run, Path(f"x/{run.seed}"), 10.0, problem)

    monkeypatch.setattr(Trained, "train", failing)
    with pytest.raises(ServiceError, match="no memory"):
        opened(home).attempt(Source.read(folder(tmp_path / "a", 0.05)), "")
    assert not opened(home).ledger.of("try")


def test_a_keep_against_another_base_is_none(started, home, tmp_path, monkeypatch):
    mine, theirs = opened(home), Source.read(folder(tmp_path / "b", 0.06))
    compare = mine.compare

    def meanwhile(*args: Any) -> Any:
        numbers = compare(*args)
        opened(home).decide(theirs, "another")
        return numbers

    monkeypatch.setattr(mine, "compare", meanwhile)
    entry = mine.decide(Source.read(folder(tmp_path / "a", 0.05)), "")
    assert entry["verdict"] == "no better"
    assert "why" in entry
    assert opened(home).ledger.base == theirs.sha256


def test_the_gain_of_all_kept_tries_is_measured_anew(started, home, tmp_path):
    assert started("try", "log", "plays", "--gain", "8").failed(2, "nothing was kept")
    for name, gain in (("a", 0.03), ("b", 0.06)):
        started("try", "run", folder(tmp_path / name, gain), "--group", "plays")
    ran = started("try", "log", "plays", "--gain", "8").good
    [entry] = opened(home).ledger.of("gain")
    assert entry["low"] < -0.06 < entry["high"]
    assert f"{entry['mean']:+.4f}" in ran.out


class Waiting(Exception):
    """A command waits for another one."""


def test_a_gain_waits_for_another_command(started, home, tmp_path, monkeypatch):
    """No run trains while a model is judged: the model could signal to it what the text is."""
    started("try", "run", folder(tmp_path / "a", 0.05), "--group", "plays")

    def log(line: str) -> None:
        if "another command uses this search" in line:
            raise Waiting

    monkeypatch.setattr(search.logger, "info", log)
    with opened(home).locked(shared=False), pytest.raises(Waiting):
        opened(home).gain(4)


def test_an_error_within_a_held_search_is_not_of_its_lock(tiny_search):
    with pytest.raises(FileNotFoundError, match="other"), tiny_search.locked(shared=True):
        (tiny_search.directory / "other").read_bytes()


def test_a_search_whose_lock_cannot_be_opened_is_an_error(tiny_search):
    (tiny_search.directory / search.LOCK_FILE).mkdir()
    with pytest.raises(ServiceError, match=search.LOCK_FILE), tiny_search.locked(shared=True):
        pass


def test_the_log_lists_each_try(started, tmp_path):
    notes = ["idea a", os.fsdecode(b"caf\xe9")]  # as a command gets an argument of any bytes
    for note, gain in zip(notes, (0.05, 0.0), strict=True):
        tried = folder(tmp_path / f"{gain}", gain)
        started("try", "run", tried, "--group", "plays", "--note", note)
    ran = started("try", "log", "plays", "--verify").good
    first, second = ran.table
    assert (first["TRY"], first["VERDICT"]) == ("1", "kept")
    assert (second["TRY"], second["VERDICT"]) == ("2", "no better")
    assert "caf" in second["NOTE"]
    entries = json.loads(started("try", "log", "plays", "--json").good.out)
    assert [entry["note"] for entry in entries] == notes


@pytest.mark.parametrize("command", ["delete", "stop", "jobs", "report"])
def test_a_search_without_jobs_is_named_as_one(command, started, home):
    directory = home / "tries" / "plays"
    ran = started(command, "--group", "plays")
    assert ran.failed(2, "plays is a search without jobs", f"`rm -r {directory}`")
    assert opened(home).ledger.of("base")


@pytest.mark.parametrize("command", ["delete", "stop", "jobs", "report"])
def test_a_search_whose_jobs_are_not_listed_may_have_some(command, started, monkeypatch):
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_PROFILE", "nosuch")
    ran = started(command, "--group", "plays")
    assert ran.failed(2, "jobs on SageMaker are not listed", "nosuch")
    assert "without jobs" not in ran.err


def test_a_try_says_how_many_runs_it_takes_and_how_long(started, tmp_path):
    """Of 10 seconds each, two at a time, and 3 before the judge."""
    ran = started("try", "run", folder(tmp_path / "a", 0.05), "--group", "plays")
    lines = ran.good.err.splitlines()
    assert lines[0] == (
        "4 to 8 pairs of shared seeds, and if it looks better up to 8 of fresh ones:"
        " about 0:00:32 to 0:03:12 if nothing else uses the cores"
    )
    assert lines[1] == "4 pairs of shared seeds: 4 runs, 2 at a time"
    assert lines[2].startswith("4 pairs of shared seeds: -0.0")


def test_a_long_check_of_a_folder_says_how_long(started, tmp_path, monkeypatch):
    monkeypatch.setattr("sm_nanogpt.launcher.files.progress.LINE_SECONDS", 0.01)
    monkeypatch.setattr(Search, "check", lambda self, source: time.sleep(0.3))
    ran = started("try", "run", folder(tmp_path / "a", 0.05), "--group", "plays").good
    assert "checking the folder: 0:00:00 so far\n" in ran.err


def test_a_try_that_runs_is_in_the_log_and_can_be_shown(started, home, tmp_path):
    source = Source.read(folder(tmp_path / "a", 0.05))
    keep_source(source, Settings(home=home))
    running = opened(home)
    with running.locked(shared=False):
        checked = "running: try 1, whose folder is being checked\n"
        assert checked in started("try", "log", "plays").good.err
        running.ledger.add("begun", runs=[[running.ledger.base, 1], [source.sha256, 1]])
        line = f"running: try 1, folder {source.sha256[:8]}, 0 runs made so far\n"
        assert line in started("try", "log", "plays").good.err
        shown = started("try", "show", "1", "--group", "plays").good
        assert "try 1 is still running\n" in shown.err
        assert "+0.05\n" in shown.out
    assert "running" not in started("try", "log", "plays").good.err
    assert started("try", "show", "1", "--group", "plays").failed(2, "no try 1")


def test_a_gain_that_is_measured_is_no_try(started, home, tmp_path):
    started("try", "run", folder(tmp_path / "a", 0.05), "--group", "plays")
    running = opened(home)
    ledger = running.ledger
    assert ledger.base != ledger.start["folder"]
    with running.locked(shared=False):
        ledger.add("begun", runs=[[ledger.start["folder"], 1], [ledger.base, 1]])
        ran = started("try", "log", "plays").good
        assert "running: the gain of all kept tries is being measured\n" in ran.err
        assert started("try", "show", "2", "--group", "plays").failed(2, "no try 2")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("start", "plays"), "there is a search plays"),
        (("start", "a/b"), "letters"),
        (("start", "new", "--ceiling", "5"), "for SageMaker"),
        (("start", "new", "--instance", "ml.g5.xlarge"), "must be given"),
        (("start", "new", "--smallest-gain", "0.001"), "must be at least 0.002 nats"),
        (("start", "new", "--ceiling", "0", "--instance", "ml.g5.xlarge"), "more than 0"),
        (("log", "other"), "plays"),
        (("run", "nowhere", "--group", "plays"), "nowhere"),
    ],
)
def test_wrong_words_are_told_in_one_line(started, arguments, problem):
    assert started("try", *arguments).failed(2, problem)


def test_a_kill_at_any_moment_is_as_none(home, short_text_file, trained, tmp_path, monkeypatch):
    """The verdict comes after some kills; each leaves an intact ledger, and no process of a run."""
    monkeypatch.setattr(local, "LocalRuns", LOCAL_RUNS)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where a killed command leaves its own
    noise = random.SystemRandom()  # not that of the process that is forked
    monkeypatch.setattr(
        Judge, "score", lambda *args: Score(2.0 - gain_of(args[2]) + noise.gauss(0, 0.004), 3.0)
    )
    monkeypatch.setattr(comparison, "MAX_TIME_RATIO", 100.0)  # of a tenth of a second
    monkeypatch.setattr(comparison, "MAX_TIME_RATIO_SHARED", 100.0)
    mine = folder(tmp_path / "mine", 0.05)
    base = folder(tmp_path / "base", 0.0)
    for path in (mine, base):  # real runs that learn nothing
        (path / "train.py").write_text("import time\ntime.sleep(0.1)\n")
    request = Request(instance="local", preset="quick", data=str(short_text_file), entry_point=base)
    begin_search("plays", request, Settings(home=home), 0.01, None).measure_base()
    source = Source.read(mine)
    draw = random.Random(1)
    states = [opened(home).ledger.base, source.sha256]
    for _ in range(8):
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                opened(home).attempt(source, "")
            os._exit(0)
        time.sleep(draw.uniform(0.05, 1.0))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        search_now = opened(home)
        search_now.verify()
        assert search_now.ledger.base in states
        launching.until(lambda: not any(sha256 in str(launching.processes()) for sha256 in states))
    if not opened(home).ledger.of("try"):
        opened(home).attempt(source, "")
    ledger = opened(home).ledger
    entry = ledger.of("try")[0]  # later ones try the base against itself
    assert entry["verdict"] == "kept", entry
    assert ledger.base == source.sha256
    runs = [(run["folder"], run["seed"]) for run in ledger.runs]
    assert len({*runs}) == len(runs)


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def edit_ledger(directory: Path) -> None:
    edit(directory / "ledger.jsonl", lambda lines: lines.replace(b": 10.0", b": 11.0", 1))


@pytest.mark.parametrize(
    ("damage", "fact"),
    [
        (edit_ledger, "ledger.jsonl"),
        (lambda directory: edit(directory / "judge.txt", lambda text: text[1:]), "judge.txt"),
        (lambda directory: edit(directory / "text" / "train.bin", lambda ids: ids[::-1]), "text"),
        (
            lambda directory: edit(
                next((directory.parents[1] / "sources").glob("*/gain.py")), lambda code: code + b"#"
            ),
            "sources",
        ),
    ],
)
def test_what_was_changed_afterwards_is_found(damage, fact, started, home, tmp_path):
    started("try", "run", folder(tmp_path / "a", 0.0), "--group", "plays")
    assert started("try", "log", "plays", "--verify").good
    damage(home / "tries" / "plays")
    assert started("try", "log", "plays", "--verify").failed(1, fact, "was changed")


@pytest.fixture
def interrupted(cli, short_text_file, trained, monkeypatch):
    """A search whose base was interrupted after a run: the message, and the command."""
    command = ("try", "start", "plays", "--text", str(short_text_file))

    def killed(self: Trained, runs: Sequence[SeededRun]) -> Iterator[TriedRun]:
        yield TriedRun(runs[0], Path("0/1"), 10.0)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trained, "train", killed)
        message = cli(command).err
    return message, command


def test_a_base_that_was_interrupted_goes_on(interrupted, cli, home, short_text_file, tmp_path):
    message, command = interrupted
    advice = "`sm-nanogpt try start plays` goes on"
    assert advice in message and "keeps the runs" in message
    log = cli("try", "log", "plays").good.err
    assert "the base is not measured yet, 1 run made so far" in log and advice in log
    first_run = opened(home).ledger.of("run")
    (tmp_path / "other.txt").write_text("Another last upload.\n" * 999)
    assert cli("upload-data", tmp_path / "other.txt").good
    ran = cli("try", "start", "plays").good
    assert f"{short_text_file}" in ran.err and "goes on with 1 run of its base" in ran.err
    runs = opened(home).ledger.of("run")
    assert len(runs) == search.BASE_SEEDS and runs[:1] == first_run
    assert [path.name for path in (home / "tries").iterdir()] == ["plays"]
    for again in (command, command[:3]):
        assert cli(again).failed(2, "there is a search plays")


def test_another_start_says_what_it_removes(interrupted, cli, home):
    _, command = interrupted
    first_run = opened(home).ledger.of("run")
    ran = cli(command, "--smallest-gain", "0.01", "--preset", "cpu").good
    assert "began with another preset or size and smallest gain: 1 run of its base" in ran.err
    assert first_run[0] not in opened(home).ledger.of("run")


def test_the_same_start_goes_on(interrupted, cli, home):
    _, command = interrupted
    first_run = opened(home).ledger.of("run")
    assert "goes on with 1 run of its base" in cli(command).good.err
    assert opened(home).ledger.of("run")[:1] == first_run


@pytest.mark.parametrize(
    "shared, problem",
    [(False, "another command uses search plays"), (True, "search plays, which began otherwise")],
)
def test_a_search_that_a_command_uses_is_not_begun_anew(
    shared, problem, cli, home, short_text_file, trained
):
    request = Request(instance="local", preset="quick", data=str(short_text_file))
    with begin_search("plays", request, Settings(home=home), 0.01, None).locked(shared):
        again = cli("try", "start", "plays", "--text", short_text_file)
        assert again.failed(2, problem)
        assert "delete" not in again.error
    assert len(opened(home).ledger.entries) == 1


def test_another_start_removes_no_search_that_has_sent_a_job(interrupted, cli, home):
    _, command = interrupted
    opened(home).ledger.add("sent", job_id="a-job")
    entries = opened(home).ledger.entries
    ran = cli(command, "--smallest-gain", "0.01")
    assert ran.failed(2, "`sm-nanogpt try start plays` goes on")
    assert "delete" not in ran.error
    assert opened(home).ledger.entries == entries


def test_a_base_that_does_not_train_leaves_no_name_taken(
    cli, home, short_text_file, trained, monkeypatch
):
    command = ("try", "start", "plays", "--text", short_text_file)

    def failing(self: Trained, runs: Sequence[SeededRun]) -> Iterator[TriedRun]:
        yield TriedRun(runs[0], Path("0/1"), 10.0, "no memory")

    def failing_later(self: Trained, runs: Sequence[SeededRun]) -> Iterator[TriedRun]:
        yield TriedRun(runs[0], Path("0/1"), 10.0)
        yield TriedRun(runs[1], Path("0/2"), 10.0, "no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Trained, "train", failing)
        assert cli(command).failed(1, "no memory")
        assert [*(home / "tries").iterdir()] == []
        patch.setattr(Trained, "train", failing_later)
        assert cli(command).failed(1, "no memory")
    assert "goes on with 1 run" in cli(command).good.err


def test_a_search_of_the_last_upload_says_so_first(cli, short_text_file, trained):
    name = cli("upload-data", short_text_file).good.out.strip().rpartition("/")[2]
    ran = cli("try", "start", "plays").good
    assert ran.err.splitlines()[0] == f"text: {name} (the last upload)"
    ran = cli("try", "start", "others", "--text", short_text_file).good
    assert "the last upload" not in ran.err


def test_a_search_takes_text_whose_length_is_known(cli, home, tmp_path, trained):
    chats = [
        {"messages": [{"role": role, "content": f"{n}"} for role in ("user", "assistant")]}
        for n in range(100)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, chats)))
    assert cli("upload-data", "a.jsonl", "--tokenizer", "bpe").good
    assert cli("try", "start", "chats").failed(2, "conversations")
    assert not (home / "tries" / "chats").exists()


@pytest.mark.parametrize("length", [5_000, 19_000])
def test_a_short_text_is_refused_with_the_length_that_suffices(
    cli, home, tmp_path, text, trained, length
):
    short = tmp_path / "short.txt"
    short.write_text(text[:length])
    for size in ((), ("--preset", "auto"), ("--size", "1")):
        refused = cli("try", "start", "short", "--text", short, size)
        assert refused.failed(2, "too short for a search", "20,000")
        assert "warning" not in refused.err  # what it advises would be refused too
    short.write_text(text[:20_001])
    assert cli("try", "start", "short", "--text", short).good


def test_begin_is_whole_or_nothing(home, short_text_file, trained, monkeypatch):
    def full(self: SearchLedger, *args: Any, **facts: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SearchLedger, "add", full)
    request = Request(instance="local", preset="quick", data=str(short_text_file))
    with pytest.raises((InputError, ServiceError), match="space"):
        begin_search("plays", request, Settings(home=home), 0.01, None)
    assert not list((home / "tries").iterdir())


def test_a_folder_that_is_known_is_no_try(started, home, tmp_path):
    first = Path(entry_point.__file__).parent
    assert started("try", "run", first, "--group", "plays").failed(2, "began with")
    for number, gain in ((1, 0.0), (2, 0.05)):
        path = folder(tmp_path / f"{gain}", gain)
        started("try", "run", path, "--group", "plays")
        again = started("try", "run", path, "--group", "plays")
        assert again.failed(2, f"tried before: try {number}")
    assert len(opened(home).ledger.of("try")) == 2


def test_a_folder_that_looked_ahead_is_no_try_again(started, home, tmp_path, monkeypatch):
    """Else it could leave a note in its first try, and pass in its second."""

    def looks_ahead(*_: Any) -> None:
        raise Refused("not causal", is_final=True)

    command = ("try", "run", folder(tmp_path / "a", 0.05), "--group", "plays")
    with monkeypatch.context() as patch:
        patch.setattr(Search, "check", looks_ahead)
        ran = started(command, "--json")
    assert ran.code == 4
    assert json.loads(ran.out)["why"] == "not causal"
    assert started(command).failed(2, "refused before, by try 1: not causal")
    [entry] = opened(home).ledger.of("try")
    assert entry["verdict"] == "refused"


LOSSES = {"first": 2.0, "base": 1.9, "tried": 1.95}


@pytest.mark.parametrize(
    ("same", "name"),
    [
        ("first", "the search's first folder"),
        ("base", "the base"),
        ("tried", "folder tried, tried before"),
    ],
)
def test_a_folder_that_changes_no_loss_is_refused(tmp_path, same, name):
    """The refusal says whose losses it has."""
    ledger = SearchLedger(tmp_path)
    ledger.add("start", folder="first", ceiling=None)
    for seed in (1, 2):
        for tried, loss in LOSSES.items():
            ledger.add("run", folder=tried, seed=seed, loss=loss + 0.1 * seed)
        ledger.add("run", folder="mine", seed=seed, loss=LOSSES[same] + 0.1 * seed)
    search: Any = SimpleNamespace(ledger=ledger)
    mine: Any = SimpleNamespace(sha256="mine")
    base: Any = SimpleNamespace(sha256="base")
    comparison = Comparison(search, mine, base)
    with pytest.raises(Refused, match=f"its runs are those of {name}: the change changes nothing"):
        comparison.check_losses([1, 2])
    ledger.add("run", folder="mine", seed=2, loss=1.5)
    comparison.check_losses([1, 2])


def test_a_folder_that_was_refused_begins_anew(started, home, tmp_path, monkeypatch):
    """Else it could be tried until each of its runs was lucky once."""
    scores = Judge.score
    judged = list[int]()

    def unlucky(self: Judge, *args: Any) -> Score:
        judged.append(len(judged))
        if len(judged) == 3:
            raise Refused("ended with exit code 1")
        return scores(self, *args)

    command = ("try", "run", folder(tmp_path / "a", 0.05), "--group", "plays")
    with monkeypatch.context() as patch:
        patch.setattr(Judge, "score", unlucky)
        assert started(*command).code == 4
    sha256 = Source.read(tmp_path / "a").sha256
    assert opened(home).ledger.runs_of(sha256) == []
    assert started(*command).code == 0
    entries = [run for run in opened(home).ledger.of("run") if run["folder"] == sha256]
    n_again = len(opened(home).ledger.runs_of(sha256))
    assert len(entries) == len(judged) - 1 + n_again


def test_a_search_by_auto_trains_one_generation(home, text_file):
    """Two would make each of its runs take more than twice as long."""
    request = Request(instance="local", preset="auto", data=str(text_file))
    search_of_plays = begin_search("plays", request, Settings(home=home), 0.01, None)
    assert search_of_plays.hyperparameters["generations"] == 1
