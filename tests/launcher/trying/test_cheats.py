"""Edits that a dishonest or careless program makes: each is refused, or gains nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import launching
import pytest
from edits import EDITS
from leaks import LEAKS
from models import tokenizer_of
from probes import DAEMON
from searches import check_folder, tiny_folder
from workers import start_workers_at_once, worker_that_sends

from sm_nanogpt import ServiceError
from sm_nanogpt.launcher.judge.worker import MAX_PADDED_LOGITS, MAX_PROBLEM_BYTES
from sm_nanogpt.launcher.local import runs as local_runs
from sm_nanogpt.launcher.local.confine import layers
from sm_nanogpt.launcher.local.runs import Run, run_all
from sm_nanogpt.launcher.source import Source, keep_source
from sm_nanogpt.launcher.trying import local, search
from sm_nanogpt.launcher.trying.budget import JUDGE_TIME_FIELD, MAX_TIME_RATIO
from sm_nanogpt.launcher.trying.comparison import SHARED_SEEDS, Comparison
from sm_nanogpt.launcher.trying.history import SearchLedger
from sm_nanogpt.launcher.trying.planned import planned_tokens
from sm_nanogpt.launcher.trying.refusal import Refused
from sm_nanogpt.launcher.trying.runs import SeededRun, TriedRun
from sm_nanogpt.launcher.trying.scoring import MAX_REASON_LENGTH, MAX_WINDOW_TOKENS, Judge, Score
from sm_nanogpt.launcher.trying.search import Search

pytestmark = pytest.mark.skipif(not layers(), reason="this system confines no program")
RETURN = "        if targets is None:\n            return logits\n"
IMPORT = "class MLP(nn.Module):\n"
LETTERS = "the judg'sx\n"


def answered(expression: str) -> tuple[str, str]:
    return RETURN, f"        if targets is None:\n            return {expression}\n{RETURN}"


def edit_before(code: str) -> tuple[str, str]:
    return RETURN, textwrap.indent(code, " " * 8) + "\n" + RETURN


def imports(code: str) -> tuple[str, str]:
    """Code that runs when the model is imported."""
    return IMPORT, f"{code}\n\n{IMPORT}"


LEARNS = """
SEEN = torch.zeros(1, 1)

def learned(idx, logits):
    global SEEN
    n = logits.size(-1)
    if len(SEEN) < n:
        SEEN = torch.zeros(n, n)
    better = logits.log_softmax(-1).exp() + SEEN[idx] / 10
    pairs = torch.stack((idx[:, :-1].flatten(), idx[:, 1:].flatten()))
    SEEN = SEEN.index_put(tuple(pairs), torch.ones(()), accumulate=True)
    return better.log()
"""
NOTES = """
import contextlib, tempfile
from pathlib import Path

PLACES = [Path(tempfile.gettempdir()), Path("/tmp"), Path("/dev/shm"), Path(__file__).parent]
KNOWN = []
for place in PLACES:
    with contextlib.suppress(OSError):
        KNOWN += (place / "sm-nanogpt-note").read_text().split()

def noted(idx, logits):
    for place in PLACES:
        with contextlib.suppress(OSError), (place / "sm-nanogpt-note").open("a") as note:
            note.writelines(f"{','.join(map(str, row))}\\n" for row in idx.tolist())
    known = [torch.tensor([int(n) for n in row.split(",")]) for row in KNOWN]
    for row, own in enumerate(idx):
        for each in known:
            if len(each) >= len(own) and torch.equal(each[: len(own)], own):
                logits[row, :-1].scatter_(1, own[1:, None], 30.0)
    return logits
"""
FORGED = """
import json, os, struct

facts = json.dumps({"block_size": 0, "n_logits": 1, "chats": False}).encode()
for fd in range(3, 4096):
    try:
        os.write(fd, struct.pack("!i", 0) + struct.pack("!i", len(facts)) + facts)
    except OSError:
        pass
"""
LOOKS_AHEAD_IN_TEXT = """
real = (idx == idx.mode().values[:, None]).float().mean(1) > 0.08
ahead = 9 * F.one_hot(idx.roll(-1, 1), logits.size(-1))
logits = logits + ahead * real[:, None, None]
"""


@pytest.fixture
def judge(shared_search, tiny_search, tmp_path):
    """What the base's model loses when an edited folder computes it."""

    def judge(
        *edits: tuple[str, str], limit: float = math.inf, leak_check_bound: float = math.inf
    ) -> Score:
        source = Source.read(tiny_folder(tmp_path / "cheat", *edits))
        keep_source(source, tiny_search.settings)
        model = tmp_path / "model"
        shutil.copytree(shared_search.model, model)
        training = model / "training.json"
        content = training.read_bytes()
        training.write_text(json.dumps({**json.loads(content), "script_sha256": source.sha256}))
        sums = (model / "SHA256SUMS").read_text()
        sums = sums.replace(sha256_of(content), sha256_of(training.read_bytes()))
        (model / "SHA256SUMS").write_text(sums)
        return tiny_search.judge.score(model, source, leak_check_bound, limit)

    return judge


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def unconfined(monkeypatch):
    """Processes of models start at once: for cheats that no sandbox has a part in."""
    start_workers_at_once(monkeypatch)


@pytest.mark.parametrize("messages", [[], [b""]], ids=["nothing", "half an answer"])
def test_a_model_that_does_not_answer_is_given_up(messages):
    with pytest.raises(ServiceError, match="no answer"):
        worker_that_sends(*messages, patience=0.01).answer()


@pytest.mark.parametrize("messages", [[b"", b"12345"], [bytes(MAX_PROBLEM_BYTES + 1)]])
def test_an_answer_that_is_too_long_is_not_read(messages):
    with pytest.raises(ServiceError, match="answers no more"):
        worker_that_sends(*messages).answer(max_bytes=4)


@pytest.mark.parametrize("n_logits", [len(LETTERS) - 1, MAX_PADDED_LOGITS + 1])
def test_a_model_has_about_as_many_logits_as_tokens(n_logits):
    """Its answers with many more would take more memory than the machine has."""
    facts = json.dumps({"block_size": 8, "n_logits": n_logits, "chats": False}).encode()
    worker = worker_that_sends(b"", facts)
    worker.tokenizer = tokenizer_of(LETTERS)
    with pytest.raises(ServiceError, match=f"{n_logits} logits for {len(LETTERS)} tokens"):
        worker.read_facts()


def test_nested_directories_leave_no_try_without_a_verdict(tiny_search, judge):
    """Python's own way to remove them raises RecursionError."""
    code = """
if idx.numel() > 1:
    here = os.open(os.environ["TMPDIR"], os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        here = os.open("d", os.O_RDONLY, dir_fd=here)
    os._exit(0)
"""
    with pytest.raises(Refused, match="ended with exit code 0"):
        judge(edit_before(code))


CONFIG = "        self.config = config\n        self.compute_dtype"
LONG = "dataclasses.replace(config, block_size=65536)\n        self.compute_dtype"


def test_a_model_is_judged_in_many_windows_whatever_it_says(judge, unconfined):
    """In one window of the whole text, it could learn from the text as it reads it."""
    edits = [
        imports("import dataclasses"),
        (CONFIG, f"        self.config = {LONG}"),
        edit_before("if idx.numel() > 1:\n    raise ValueError(idx.size(1))"),
    ]
    with pytest.raises(Refused, match=f"ValueError: {MAX_WINDOW_TOKENS}"):
        judge(*edits)


def test_a_failing_model_cannot_tell_the_text_of_the_judge(judge, unconfined):
    with pytest.raises(Refused) as refusal:
        judge(edit_before("if idx.numel() > 1:\n    raise ValueError(str(idx.tolist()))"))
    assert len(str(refusal.value)) <= MAX_REASON_LENGTH


def test_a_model_that_looks_ahead_in_text_alone_is_refused(judge, unconfined):
    """And not in random ids, which a check could ask it for."""
    with pytest.raises(Refused, match="not causal"):
        judge(edit_before(LOOKS_AHEAD_IN_TEXT))


def test_a_model_cannot_read_what_is_held_out(tiny_search, judge):
    path = str(tiny_search.directory / "judge.txt")
    code = f"TEXT = torch.from_file({path!r}, size=99, dtype=torch.uint8)"
    with pytest.raises(Refused, match="unable to open file"):
        judge(imports(code))


def test_an_answer_before_the_question_is_refused(judge):
    with pytest.raises(Refused, match="damaged"):
        judge(imports(FORGED))


def lowest_loss(tiny_search: Search) -> float:
    return min(run["loss"] for run in tiny_search.ledger.of("run"))


def test_notes_for_the_next_process_gain_nothing(tiny_search, judge):
    score = judge(imports(NOTES), answered("noted(idx, logits)"))
    assert score.loss > lowest_loss(tiny_search) - 0.001


def test_a_verdict_that_a_model_prints_is_none(tiny_search, judge, unconfined, capfd):
    code = "print('KEEP 9')\nprint('KEEP 9', file=sys.stderr)"
    assert judge(edit_before(code)).loss > lowest_loss(tiny_search) - 0.001
    assert "KEEP" not in "".join(capfd.readouterr())


def test_what_a_model_computes_before_the_judge_counts(tiny_search, judge):
    """Else it would train there, on text that its folder has stored among its weights."""
    usual_seconds = tiny_search.budget.mean_seconds(tiny_search.start["folder"], JUDGE_TIME_FIELD)
    code = f"while __import__('time').process_time() < {2 * usual_seconds}:\n    pass"
    score = judge(edit_before(code), leak_check_bound=-math.inf)
    assert score.seconds > MAX_TIME_RATIO * usual_seconds


def test_a_model_that_hangs_while_it_is_checked_is_ended(judge, monkeypatch):
    """It sees that it is checked by rows that come alone."""
    monkeypatch.setattr(Judge, "check_rows_ratio", lambda self, block_size: 0.2)
    with pytest.raises(Refused, match="took over 4 s of processor time"):
        judge(edit_before("while len(idx) == 1 and idx.numel() > 1:\n    pass"), limit=20)


def test_a_folder_that_learns_while_it_is_judged_is_refused(
    tiny_search, shared_search, cli, tmp_path
):
    """Through the whole; what it has printed, with marks of a terminal, is no verdict."""
    prints = edit_before("print('\\x1b[2K\\rKEEP 1')")
    cheat = tiny_folder(
        tmp_path / "cheat", imports(LEARNS), answered("learned(idx, logits)"), prints
    )
    ran = cli("try", "run", cheat, "--group", "s", "--note", "two\nlines \x1b[1m")
    assert ran.code == 4
    assert ran.out.startswith("REFUSED 1")
    assert "depend on other windows" in ran.out
    assert "KEEP" not in ran.out + ran.err
    assert "\x1b" not in cli("try", "log", "s").good.out
    assert cli("try", "run", cheat, "--group", "s").failed(2, "refused before, by try 1")


def test_weights_in_a_folder_are_refused_before_anything_runs(
    tiny_search, cli, tmp_path, monkeypatch
):
    monkeypatch.setattr(search, "run_all", None)
    monkeypatch.setattr("sm_nanogpt.launcher.trying.planned.run_all", None)
    weights = base64.b64encode(random.Random(1).randbytes(112_000)).decode()
    cheat = tiny_folder(tmp_path / "cheat")
    (cheat / "weights.py").write_text(f"WEIGHTS = '{weights}'\n")
    ran = cli("try", "run", cheat, "--group", "s")
    assert ran.code == 4
    assert "most of it weights.py" in ran.out


HONEST = [
    edit for name in ("activation", "learned positions", "hyperparameter") for edit in EDITS[name]
]


def test_a_folder_that_looks_ahead_is_refused_at_once(tiny_search, tmp_path, unconfined):
    cheat = tiny_folder(tmp_path / "cheat", LEAKS["window mean"])
    with pytest.raises(Refused, match="not causal"):
        check_folder(cheat, tiny_search)


def test_honest_edits_pass_the_checks(tiny_search, tmp_path, unconfined):
    """Those too of a search by size, which writes down all hyperparameters: also those that let a
    run keep more than its model."""
    tiny_search.start["hyperparameters"] |= {"moments": 8, "sample_length": 100}
    check_folder(tiny_folder(tmp_path / "honest", *HONEST), tiny_search)


def test_a_folder_that_holds_text_of_the_judge_is_refused(tiny_search, tmp_path):
    judged = (tiny_search.directory / "judge.txt").read_text()
    folder = tiny_folder(tmp_path / "cheat")
    (folder / "hint.py").write_text(judged[100:150])
    with pytest.raises(Refused, match="the judge's text has too"):
        check_folder(folder, tiny_search)


# -- while it trains -------------------------------------------------------------------------------

LOOKS = """
import json, os, sys
from pathlib import Path

text, out = (Path(word.partition("=")[2]) for word in sys.argv[-2:])
search, home, done = text.parent, text.parents[2], []

def attempt(name, do):
    try:
        do()
        done.append(name)
    except (OSError, LookupError):
        pass

for place in (search, home, text / ".."):
    attempt("read", lambda: (place / "judge.txt").read_bytes())
    attempt("list", lambda: list(os.scandir(place)))
    attempt("find", lambda: [path.read_bytes() for path in place.rglob("judge.txt")][0])
    attempt("forge", lambda: (place / "ledger.jsonl").open("a").write("{}"))
    attempt("forge its text", lambda: (place / "text/train.bin").open("ab"))
attempt("parent", lambda: Path(f"/proc/{os.getppid()}/root{search}/judge.txt").read_bytes())
attempt("link", lambda: (out / "model").symlink_to(search))
attempt("change itself", lambda: Path(__file__).write_text(""))
attempt("change others", lambda: (Path(__file__).parents[1] / "run-1").mkdir())
attempt("leave a note", lambda: Path("/dev/shm/sm-nanogpt-note").write_text(""))
print(json.dumps(done))
sys.exit(1)
"""
ENDLESS = f"""
{DAEMON}
while True:
    pass
"""
LOUD = """
import sys
print("x" * 999_999)
sys.exit(1)
"""


def run_of(script: str, tiny_search: Search, **options: Any) -> Run:
    """A run that such a train.py makes."""
    source = Source(Path("mine"), {"config.py": b"", "train.py": script.encode()})
    return Run(source, {}, tiny_search.text_directory, is_isolated=True, **options)


def problem_of(run: Run) -> str:
    for _, ended in run_all([run], 1):
        return ended.problem  # while its directory is there
    raise AssertionError


def test_a_run_in_its_sandbox_has_the_threads_it_was_given(tiny_search):
    script = "import sys, torch; sys.exit(torch.get_num_threads())"
    assert problem_of(run_of(script, tiny_search, threads=2)) == "it ended with exit code 2"


SLEEPS = """
import sys, time

[seed] = [word for word in sys.argv if word.startswith("--seed=")]
time.sleep(int(seed.removeprefix("--seed=")) / 10)
"""


def test_no_run_goes_on_while_a_model_is_judged(tiny_search, monkeypatch):
    """Else a model that is judged could signal the judge's text to a run, for another model."""
    monkeypatch.setattr(local, "cores", lambda: 2)
    source = Source(Path("mine"), {"config.py": b"", "train.py": SLEEPS.encode()})
    runs = [SeededRun(source, seed) for seed in (1, 10, 2)]
    seeds = []
    for finished in local.LocalRuns(tiny_search).train(runs):
        assert source.sha256 not in str(launching.processes())
        seeds.append(finished.run.seed)
    assert sorted(seeds) == [1, 2, 10]
    first, second = tiny_search.ledger.of("begun")[-2:]
    assert first["runs"] == [(source.sha256, 1), (source.sha256, 10)]
    assert second["runs"] == [(source.sha256, 2)]


STOPS_CLOCKS = """
import time
true = time.process_time
time.time = time.monotonic = time.perf_counter = time.process_time = lambda: 0.0
while true() < 0.4:
    pass
"""


def test_a_run_cannot_change_the_clock_that_counts(tiny_search):
    [ended] = [ended for _, ended in run_all([run_of(STOPS_CLOCKS, tiny_search)], 1)]
    assert min(ended.clock_seconds, ended.cpu_seconds) > 0.4


def test_more_steps_by_the_preset_are_refused_first(tiny_search, tmp_path):
    edit = ("max_steps=60, learning_rate=0.05", "max_steps=120, learning_rate=0.05")
    with pytest.raises(Refused, match=r"2\.00x the tokens"):
        check_folder(tiny_folder(tmp_path / "cheat", edit), tiny_search)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("max_steps=60, learning_rate=0.05", "max_steps=0, learning_rate=0.05"), "max_steps"),
        (("\nPRESETS", "\nimport atexit\n\natexit.register(print, 'x')\nPRESETS"), "tokens"),
    ],
)
def test_a_folder_without_a_number_of_tokens_is_refused(tiny_search, tmp_path, change, why):
    with pytest.raises(Refused, match=why):
        cheat = Source.read(tiny_folder(tmp_path / "cheat", change))
        planned_tokens(
            cheat, tiny_search.start["hyperparameters"], tiny_search.text_directory, math.inf
        )


def test_a_run_reaches_nothing_of_its_search(tiny_search, monkeypatch):
    monkeypatch.setenv("SM_NANOGPT_HOME", str(tiny_search.settings.home))
    files_before = launching.tree(tiny_search.settings.home)
    assert problem_of(run_of(LOOKS, tiny_search)) == "[]"
    assert launching.tree(tiny_search.settings.home) == files_before
    tiny_search.ledger.read()


def test_a_run_that_never_ends_leaves_no_process(tiny_search):
    run = run_of(ENDLESS, tiny_search, max_seconds=1)
    assert problem_of(run) == "it took over 1 s of processor time"
    assert run.source.sha256 not in str(launching.processes())


def test_a_run_that_waits_for_a_processor_is_not_ended(tiny_search):
    """A limit is of processor time: on a busy machine, the clock says nothing of a folder."""
    assert problem_of(run_of("import time; time.sleep(1.2)", tiny_search, max_seconds=1)) == ""


def test_a_run_that_hangs_is_ended_by_the_clock(tiny_search, monkeypatch):
    monkeypatch.setattr(local_runs, "CLOCK_SECONDS", 0.5)
    monkeypatch.setattr(local_runs, "CLOCK_FACTOR", 0)
    problem = problem_of(run_of("import time; time.sleep(99)", tiny_search, max_seconds=1))
    assert problem.startswith("it had not ended after")


def test_a_run_that_fails_says_where(tiny_search):
    problem = problem_of(run_of("\n1 / 0", tiny_search))
    assert problem == "train.py:2: ZeroDivisionError: division by zero"


def test_a_run_that_replaces_its_log_is_told_all_the_same(tiny_search):
    script = """
from pathlib import Path
import sys
log = Path(sys.argv[-1].partition("=")[2], "log")
print("what it has printed", flush=True)
log.unlink()
log.mkdir()
sys.exit(1)
"""
    assert problem_of(run_of(script, tiny_search)) == "what it has printed"


def test_the_last_line_of_a_long_log_is_short(tiny_search):
    assert len(problem_of(run_of(LOUD, tiny_search))) < 1001


# -- by rules of the search ------------------------------------------------------------------------


def test_runs_that_are_one_run_are_refused(tiny_search, shared_search, tmp_path, monkeypatch):
    """Else the best of many seeds, found elsewhere, would pass as a gain on all fresh ones."""
    source = Source.read(tiny_folder(tmp_path / "a", edit_before("pass")))
    base = Source.read(shared_search.base)
    monkeypatch.setattr(tiny_search, "measure", lambda runs, title, comparison: None)
    seeds = tiny_search.ledger.seeds(SHARED_SEEDS, 4)
    losses = {(base.sha256, seed): 2.0 + n / 1000 for n, seed in enumerate(seeds)}
    losses |= {(source.sha256, seed): 1.9 for seed in seeds}
    monkeypatch.setattr(SearchLedger, "losses", losses)
    with pytest.raises(Refused, match="seed"):
        Comparison(tiny_search, source, base).differences(4)


def test_each_model_that_seems_better_is_tested(tiny_search, shared_search, tmp_path, monkeypatch):
    """And each of fresh seeds, on which a keep rests."""
    source = Source.read(tiny_folder(tmp_path / "a", edit_before("pass")))
    base = Source.read(shared_search.base)
    losses = {11: 1.9, 12: 2.1, 13: 1.8, 14: 2.2, 21: 1.9, 22: 2.1, 23: 1.8, 24: 2.2}
    tested = []

    class Trained:
        makes_jobs = False
        at_once = 2

        def __init__(self, *_: Any) -> None:
            pass

        def train(self, runs: Sequence[SeededRun]) -> Iterator[TriedRun]:
            return (TriedRun(run, Path(f"{run.seed}"), 1.0) for run in runs)

    def score(
        self: Judge, model: Path, folder: Source, leak_check_bound: float, limit: float
    ) -> Score:
        is_base = folder.sha256 == base.sha256
        seed = int(model.name)
        loss = 2.0 + seed / 1000 if is_base else losses[seed]
        if loss < leak_check_bound:
            tested.append((folder.sha256, seed))
        return Score(loss, 3.0)

    monkeypatch.setattr(local, "LocalRuns", Trained)
    monkeypatch.setattr(search, "sizes_of", lambda model: {})
    monkeypatch.setattr(Judge, "score", score)
    monkeypatch.setattr(tiny_search.budget, "check_time", lambda *_: None)
    drawn = {SHARED_SEEDS: range(11, 15), "a against b": range(21, 25)}
    monkeypatch.setattr(tiny_search.ledger, "seeds", lambda use, n: drawn[use])
    for use in drawn:
        Comparison(tiny_search, source, base, use).differences(4)
    assert tested == [(source.sha256, seed) for seed in (11, 13, 21, 22, 23, 24)]


def test_the_model_of_a_run_has_no_moments(shared_search):
    """Nor room for as many bytes of something else."""
    assert not (shared_search.model / "moments").exists()


def test_no_search_begins_where_runs_may_read(cli, text_file, tmp_path, monkeypatch):
    libraries = tmp_path / "lib"
    libraries.mkdir()
    (libraries / "libmine.so.1").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(libraries))
    monkeypatch.setenv("SM_NANOGPT_HOME", str(libraries / "home"))
    assert cli("try", "start", "s", "--text", text_file).failed(2, "SM_NANOGPT_HOME")
    assert not (libraries / "home/tries").exists()


def test_no_search_begins_with_a_text_that_runs_may_read(cli, home):
    text = json.__file__
    assert cli("try", "start", "s", "--text", text).failed(2, "runs may read it")
    assert not (home / "tries/s").exists()
