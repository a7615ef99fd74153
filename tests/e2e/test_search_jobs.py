"""A search whose runs are jobs on SageMaker: the real toolkit starts the driver in containers."""

from __future__ import annotations

import json
import re

import launching
import pytest

from sm_nanogpt.launcher.trying import comparison, search
from sm_nanogpt.launcher.trying.history import SearchLedger
from sm_nanogpt.launcher.trying.search import SHARED_SEEDS

QUICK = (
    """\
    "quick": dict(n_layer=2, n_head=2, n_embd=176, n_hidden=480, block_size=64, batch_size=12,
                  max_steps=180, learning_rate=0.05, momentum=0.85, short_windows=0.3,
""",
    """\
    "quick": dict(n_layer=1, n_head=2, n_embd=32, block_size=32, batch_size=4, max_steps=10,
                  eval_tokens=1024, learning_rate=0.05,
""",
)
SLOWER = ("eval_tokens=1024, learning_rate=0.05", "eval_tokens=1024, learning_rate=0.01")


PARSED = "    config, options = parse_argv(argv)\n"
# It looks for what is not its own, and says so if it finds anything: but not in the check here.
CURIOUS = (
    PARSED,
    f"""\
{PARSED}\
    out, places = Path(options.out), ["/opt/ml", "/opt/ml/model", "/tmp", "/dev/shm"]
    for place in [*places, out.parent] if config.max_steps > 2 else []:
        for act in (os.listdir, lambda place: open(f"{{place}}/mine", "w")):
            try:
                raise ConfigError(f"{{place}}: {{act(place)}}")
            except PermissionError:
                pass
    if config.max_steps > 2:
        try:
            raise ConfigError(f"it has a socket: {{__import__('socket').socket()}}")
        except PermissionError:
            pass
        if "MY_TOKEN" in os.environ:
            raise ConfigError("it has a token")
        for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
            if "train.py" in open(f"/proc/{{pid}}/cmdline").read() and pid != os.getpid():
                try:
                    os.kill(pid, signal.SIGKILL)
                    raise ConfigError(f"it could kill {{pid}}")
                except PermissionError:
                    pass
""",
)


def failing(seed: int) -> tuple[str, str]:
    """An edit by which the run of one seed fails."""
    lines = f"""\
    if config.seed == {seed} and config.max_steps > 2:
        raise ConfigError("no luck with {seed}")
"""
    return PARSED, f"{PARSED}{lines}"


@pytest.fixture
def group(aws, cli, short_text_file, tmp_path, home, monkeypatch):
    """The name of a search whose base was trained."""
    # Ten steps are less than the imports' noise.
    monkeypatch.setattr(comparison, "MAX_TIME_RATIO_SHARED", 100.0)
    monkeypatch.setattr(search, "BASE_SEEDS", 4)  # as many as the pairs of a try
    aws.sagemaker.rate = 1.0
    aws.sagemaker.run.rate = 1.0
    aws.sagemaker.run.gpus = 2
    launching.edited(tmp_path / "base", QUICK)
    options = ("--instance", "ml.m5.xlarge", "--ceiling", "1", "--smallest-gain", "0.5")
    text_options = ("--text", str(short_text_file), "--entry-point", str(tmp_path / "base"))
    assert cli("try", "start", "group", text_options, options).good
    return "group"


@pytest.mark.usefixtures("containers")
def test_a_try_is_one_job_of_runs_on_each_gpu(group, aws, cli, tmp_path, home):
    first, second, third, fourth = SearchLedger(home / "tries" / group).seeds(SHARED_SEEDS, 4)
    folder = launching.edited(tmp_path / "slower", QUICK, SLOWER, CURIOUS, failing(third))
    ran = cli("try", "run", folder, "--group", group, "--note", "a lower rate", "--json")
    assert ran.code == 4, (ran.err, ran.out)
    assert json.loads(ran.out)["why"] == f"ConfigError: no luck with {third}"

    ledger = SearchLedger(home / "tries" / group)
    assert len(aws.sagemaker.jobs) == 2
    assert len(ledger.of("settled")) == 2
    of_base, of_try = ledger.of("reserved")
    assert len(of_base["runs"]) == 4
    assert len(of_try["runs"]) == 4
    assert 0 < ledger.spent < 1
    assert not ledger.open_reservations
    log = cli("logs", ledger.of("sent")[1]["job"]).out
    runs = re.findall(r"^run (\d) of 4: ", log, re.MULTILINE)
    assert sorted(runs) == ["1", "2", "3", "4"]

    [failed] = ledger.of("failed")
    assert failed["seed"] == third
    runs = [run for run in ledger.of("run") if run["folder"] == failed["folder"]]
    seeds = [run["seed"] for run in runs]
    assert seeds == [first, second, fourth]  # which found nothing that is not their own
    assert ledger.runs_of(failed["folder"]) == []  # after a refusal, none counts
