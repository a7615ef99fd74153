"""Text from a fetched model: the same for the same words, as it is made, and never a surprise."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import launching
import pytest
from launching import Ran
from test_edited import EDITS

from launcher import InputError, fetch_model, load_model, sample, stream_samples


@pytest.fixture
def say(job, cli):
    """fetch-and-sample of a job, 60 characters unless told otherwise."""

    def call(*words: str) -> Ran:
        return cli("fetch-and-sample", job.job_id, "--max-new-tokens", "60", *words)

    return call


def test_stdout_holds_only_the_text(say):
    ran = say()
    assert ran.code == 0
    assert len(ran.out) == 61
    assert ran.out.endswith("\n")


def test_the_same_seed_gives_the_same_text(say):
    assert say("--seed", "7").out == say("--seed", "7").out


def test_another_seed_gives_another_text(say):
    assert say("--seed", "7").out != say("--seed", "8").out


def test_temperature_0_top_k_1_and_tiny_top_p_are_greedy(say):
    greedy = say("--temperature", "0", "--seed", "1").out
    assert say("--temperature", "0", "--seed", "2").out == greedy
    assert say("--top-k", "1", "--seed", "3").out == greedy
    assert say("--top-p", "1e-9", "--seed", "4").out == greedy


def test_temperature_zero_without_a_prompt_warns(say):
    advice = "at temperature 0 without --prompt, the text often repeats one character"
    assert advice in say("--temperature", "0").err
    assert advice not in say("--temperature", "0", "--prompt", "The").err


def test_the_text_begins_with_the_prompt(say):
    ran = say("--prompt", "The class")
    assert ran.out.startswith("The class")
    assert len(ran.out) == len("The class") + 61


def test_several_samples_differ_and_are_separated(say):
    texts = say("--num-samples", "3", "--prompt", "The ").out.split("\n---\n")
    assert len(set(texts)) == 3
    assert all(text.startswith("The ") for text in texts)


def test_samples_as_json_are_a_list_of_texts(say):
    texts = json.loads(say("--num-samples", "2", "--prompt", "The ", "--json").out)
    assert [len(text) for text in texts] == [64, 64]


def test_the_library_gives_the_same_text_as_the_command(job, say):
    assert sample(job.job_id, "The ", 60, seed=5)[0] + "\n" == (
        say("--prompt", "The ", "--seed", "5").out
    )


def test_a_prompt_and_a_text_may_be_longer_than_the_context(say):
    prompt = "the quick brown fox " * 5
    ran = say("--prompt", prompt, "--max-new-tokens", "100")
    assert ran.code == 0
    assert len(ran.out) == len(prompt) + 101


def test_only_the_end_of_a_long_prompt_counts(job):
    model, vocabulary = load_model(fetch_model(job.job_id))
    end = "the end of it, which is in sight"
    assert len(end) == model.config.block_size
    long, short = (
        list(stream_samples(model, vocabulary, prompt, 40)) for prompt in ("x y z " * 20 + end, end)
    )
    assert long == short


def test_unknown_characters_of_a_prompt_are_named(say):
    ran = say("--prompt", "The ☃ and the \x07")
    assert ran.code == 2
    assert "'\\x07', '☃'" in ran.error
    assert ran.out == ""


def test_an_empty_prompt_is_refused(job, say):
    ran = say("--prompt", "")
    assert ran.code == 2
    assert ran.error.startswith("--prompt is empty")
    with pytest.raises(InputError, match="prompt is empty"):
        sample(job.job_id, "")


@pytest.mark.parametrize(
    "words",
    [
        ("--max-new-tokens", "0"),
        ("--num-samples", "0"),
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--temperature", "hot"),
        ("--top-k", "-1"),
        ("--top-p", "0"),
        ("--top-p", "1.1"),
        ("--seed", "-1"),
        ("--seed", str(2**63)),
    ],
)
def test_a_number_out_of_its_range_is_named_with_its_value(say, words):
    ran = say(*words)
    assert ran.code == 2
    name, value = words
    assert ran.error.startswith(f"Invalid value for '{name}': ")
    assert value in ran.error


def test_the_library_refuses_a_number_out_of_its_range(job):
    model, vocabulary = load_model(fetch_model(job.job_id))
    with pytest.raises(InputError, match=r"top_p=2\.0: must be over 0 and at most 1"):
        stream_samples(model, vocabulary, top_p=2.0)
    with pytest.raises(InputError, match="num_samples=1000000000: must be from 1 to 10,000"):
        stream_samples(model, vocabulary, num_samples=10**9)


def test_text_streams_as_it_is_made(job):
    # So long that it would take minutes to make.
    words = ("fetch-and-sample", job.job_id, "--max-new-tokens", "1000000")
    with launching.started(*words, home=job.home) as process:
        assert process.stdout is not None
        assert len(os.read(process.stdout.fileno(), 10)) > 0
        assert process.poll() is None


def test_a_reader_that_leaves_causes_no_failure(job):
    words = ("fetch-and-sample", job.job_id, "--max-new-tokens", "1000000")
    with launching.started(*words, home=job.home) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert len(process.stdout.read(10)) == 10  # and then leaves, as `head -c 10` does
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        (line,) = process.stderr.read().splitlines()
    assert line.startswith("model: ")


def test_a_directory_that_is_not_a_model_is_refused(tmp_path):
    from launcher import ServiceError

    with pytest.raises(ServiceError, match=f"{tmp_path} does not load: "):
        load_model(tmp_path)


def test_sampling_a_running_job_says_how_to_follow_it(home, text_file, cli):
    words = launching.launching("--detach", data=text_file, max_steps=10_000_000)
    job_id = cli(*words).out.strip()
    ran = cli("fetch-and-sample", job_id)
    assert ran.code == 1
    assert "is still InProgress" in ran.error
    assert f"`sm-nanogpt logs {job_id} --follow`" in ran.error
    assert f"`sm-nanogpt stop {job_id}`" in ran.error
    assert not (home / "models").exists()


def test_a_stopped_job_is_sampled_from_its_last_checkpoint(home, text_file, cli):
    words = launching.launching("--detach", data=text_file, **launching.ENDLESS)
    job_id = cli(*words).out.strip()
    launching.wait_for_step(home / "jobs" / job_id)
    assert cli("stop", job_id).code == 0
    ran = cli("fetch-and-sample", job_id, "--max-new-tokens", "20")
    assert ran.code == 0, ran.err
    checkpoints = (home / "jobs" / job_id).glob("hosts/algo-1/checkpoints/checkpoint-*")
    step = max(path.stem.removeprefix("checkpoint-") for path in checkpoints)
    assert f"job {job_id} is Stopped; this is its last checkpoint, step-{step}" in ran.err
    assert len(ran.out) == 21


def test_sampling_does_not_depend_on_the_working_directory(job):
    shadows = job.home.parent / "shadows"
    (shadows / "launcher").mkdir(parents=True)
    (shadows / "entry_point").mkdir()
    for name in ("torch.py", "train.py", "launcher/__init__.py", "entry_point/__init__.py"):
        (shadows / name).write_text("raise SystemExit('shadowed')\n")
    program = Path(sys.executable).parent / "sm-nanogpt"
    done = subprocess.run(
        [program, "fetch-and-sample", job.job_id, "--max-new-tokens", "5"],
        cwd=shadows,
        env=launching.environment(job.home),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_sample_takes_a_directory_of_an_edited_model(home, text_file, cli):
    script = launching.edited(home.parent / "my", *EDITS["activation"])
    words = launching.launching("--entry-point", str(script), data=text_file, sample_length=0)
    job_id = cli(*words).out.strip()
    of_job = cli("fetch-and-sample", job_id, "--max-new-tokens", "20")
    (directory,) = re.findall(r"^model: (.+)$", of_job.err, re.MULTILINE)
    of_directory = cli("sample", directory, "--max-new-tokens", "20")
    assert (of_directory.code, of_directory.out) == (0, of_job.out)


def test_a_missing_directory_is_one_line(cli):
    ran = cli("sample", "./nowhere")
    assert (ran.code, ran.error) == (2, "./nowhere: no such directory")
