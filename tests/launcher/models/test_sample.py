"""Text from a fetched model: the same for the same words, as it is made, and never a surprise."""

from __future__ import annotations

import json

import launching
import pytest
import torch
from jobs import running
from launching import Ran
from models import lively

from sm_nanogpt import InputError, Job, load_model, stream_samples
from sm_nanogpt.launcher.models.sample import decode_steps, encode_prompt


@pytest.fixture
def say(job, cli):
    """fetch-and-sample of a job, 60 characters unless told otherwise."""

    def call(*arguments: str) -> Ran:
        return cli("fetch-and-sample", job.job_id, "--max-new-tokens", "60", arguments)

    return call


def test_a_sample_begins_with_a_word(job, say, monkeypatch):
    pieces = [["\n", "\r\n"], ["\n\n", "b"], ["a", "\n"], ["\n", "c"]]
    monkeypatch.setattr(
        "sm_nanogpt.launcher.models.sample.stream_samples", lambda *_, **__: iter(pieces)
    )
    assert say("--num-samples", "2").good.out == "a\n\n---\nb\nc\n"
    assert json.loads(say("--num-samples", "2", "--json").good.out) == ["a\n", "b\nc"]
    assert say("--num-samples", "2", "--prompt", "T").good.out.startswith("T\n\n\na")


def test_several_samples_differ_and_are_separated(say):
    texts = say("--num-samples", "3", "--prompt", "The ").out.split("\n---\n")
    assert len(set(texts)) == 3
    assert all(text.startswith("The ") for text in texts)


def test_samples_as_json_are_a_list_of_texts(say):
    texts = json.loads(say("--num-samples", "2", "--prompt", "The ", "--json").out)
    assert [len(text) for text in texts] == [64, 64]


def test_the_library_gives_the_same_text_as_the_command(job, say):
    text = Job(job.job_id).sample("The ", 60, seed=5)
    assert say("--prompt", "The ", "--seed", "5").out == f"{text}\n"


def test_only_the_end_of_a_long_prompt_counts(job):
    model, tokenizer = load_model(Job(job.job_id).model())
    end = "the end of it, which is in sight"
    assert len(end) == model.config.block_size
    after_long = list(stream_samples(model, tokenizer, f"{'x y z ' * 20}{end}", 40))
    assert after_long == list(stream_samples(model, tokenizer, end, 40))


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("--prompt=The ☃ and the \x07", "'\\x07', '☃'"),
        ("--prompt=", "--prompt= is empty"),
        ("--num-samples=0", "--num-samples 0: must be"),
        ("--temperature=nan", "--temperature nan: must be"),
    ],
)
def test_an_impossible_wish_is_refused_by_name(say, option, name):
    ran = say(option)
    assert ran.code == 2
    assert ran.out == ""
    assert name in ran.error


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("num_samples", 10_001),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("seed", 2**63),
    ],
)
def test_a_number_out_of_range_is_refused(tokenizer, name, value):
    with pytest.raises(InputError, match=f"{name}={value}: must be "):
        stream_samples(lively(), tokenizer, **{name: value})


def test_an_empty_prompt_is_refused(tokenizer):
    with pytest.raises(InputError, match="prompt is empty"):
        stream_samples(lively(), tokenizer, "")


def test_text_streams_until_its_reader_leaves(job):
    # So long that it would take minutes to make.
    command = ("fetch-and-sample", job.job_id, "--max-new-tokens", "1000000")
    with launching.started(command, home=job.home) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert len(process.stdout.read(10)) == 10
        assert process.poll() is None
        process.stdout.close()  # as `head -c 10` does
        assert process.wait(timeout=60) == 0
        (line,) = process.stderr.read().splitlines()
    assert line.startswith("model: ")


def test_a_directory_without_a_model_is_refused(cli, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").touch()
    for directory in ("empty", "./nowhere", "a.txt"):
        ran = cli("sample", directory)
        assert ran.failed(2, directory)
        assert "directory" in ran.error


def test_a_running_job_has_no_model_yet(home, cli):
    with running(home / "jobs/a"):
        ran = cli("fetch-and-sample", "a")
    assert ran.failed(
        1, "is still InProgress", "`sm-nanogpt logs a --follow`", "`sm-nanogpt stop a`"
    )
    assert not (home / "models").exists()


def test_a_character_of_several_tokens_is_shown_whole(tokenizer):
    ids = [tokenizer.words.index(bytes([byte])) for byte in "漢🙂".encode()]
    steps = (torch.tensor([id]) for id in ids)
    shown = [piece for (piece,) in decode_steps(steps, tokenizer, 1)]
    assert shown == ["", "", "漢", "", "", "", "🙂", ""]


def test_a_prompt_that_is_not_utf8_is_refused(tokenizer):
    with pytest.raises(InputError, match="the prompt is not UTF-8 text"):
        encode_prompt(tokenizer, "caf\udce9", 8)


def test_a_sample_ends_with_its_document(tokenizer):
    assert tokenizer.end is not None
    (a,) = encode_prompt(tokenizer, "a", 8)
    (b,) = encode_prompt(tokenizer, "b", 8)
    end = tokenizer.end
    steps = [
        [a, b],
        [b, end],
        [end, a],
        [a, a],
    ]
    shown = list(decode_steps(map(torch.tensor, steps), tokenizer, 2))
    assert shown == [["a", "b"], ["b", ""], ["", ""]]
