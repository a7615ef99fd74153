"""safetensors files, checkpoints and the artefact."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from models import SMALL, characters, lively, tokenizer_of
from runs import PROBE, environment, run, words

from entry_point.checkpoint import Checkpoints, read_safetensors, write_safetensors
from entry_point.config import Config, check_resumable
from entry_point.errors import ConfigError, FormatError, TrainingError
from entry_point.huggingface import SCRIPT_SHA256, to_hugging_face, write_artefact, write_sums
from launcher.errors import InputError
from launcher.models import engine
from launcher.models.load import export_checkpoint, load_artefact

TENSORS = {
    "f32": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)),
    "bf16": torch.randn(7, generator=torch.Generator().manual_seed(2)).bfloat16(),
    "f16": torch.randn(2, 2, 2, generator=torch.Generator().manual_seed(3)).half(),
    "i64": torch.tensor([-(2**62), 0, 2**62]),
    "i32": torch.tensor([[1], [-1]], dtype=torch.int32),
    "i16": torch.tensor([-1], dtype=torch.int16),
    "i8": torch.tensor([-1], dtype=torch.int8),
    "c64": torch.tensor([1 - 2j]),
    "u8": torch.arange(255, dtype=torch.uint8),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(6.0).view(2, 3).T,
}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert tensor.shape == other[name].shape, name
        assert torch.equal(tensor, other[name]), name


# -- safetensors -----------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", TENSORS, {"format": "pt", "a": "é🙂"})
    return tmp_path / "a.safetensors"


def test_written_tensors_are_read_back(file):
    tensors, metadata = read_safetensors(file)
    assert_same(tensors, TENSORS)
    assert metadata == {"format": "pt", "a": "é🙂"}


def test_the_official_library_reads_our_files(file):
    assert_same(safetensors.torch.load_file(file), TENSORS)
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata()["a"] == "é🙂"


def test_files_of_the_official_library_are_read(tmp_path):
    theirs = {name: t.contiguous() for name, t in TENSORS.items()}
    safetensors.torch.save_file(theirs, tmp_path / "b.safetensors", {"a": "b"})
    tensors, metadata = read_safetensors(tmp_path / "b.safetensors")
    assert_same(tensors, TENSORS)
    assert metadata == {"a": "b"}


def test_a_file_may_hold_no_tensors(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", {}, {})
    assert read_safetensors(tmp_path / "a.safetensors") == ({}, {})


def test_a_type_that_the_format_lacks_is_refused(tmp_path):
    with pytest.raises(TrainingError, match=r"^a is of torch\.complex128, which cannot be saved$"):
        write_safetensors(tmp_path / "a", {"a": torch.ones(2, dtype=torch.complex128)}, {})
    assert not list(tmp_path.iterdir())


def header_length(content: bytes) -> int:
    return int.from_bytes(content[:8], "little")


def with_header(header: object, data: bytes = b"") -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def entry(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda b: b"",
    "within the length": lambda b: b[:5],
    "after the length": lambda b: b[:8],
    "within the header": lambda b: b[: 8 + header_length(b) // 2],
    "after the header": lambda b: b[: 8 + header_length(b)],
    "within the data": lambda b: b[:-100],
    "one byte short": lambda b: b[:-1],
    "trailing bytes": lambda b: b + b"\0",
    "bit of the data": lambda b: b[:-50] + bytes([b[-50] ^ 4]) + b[-49:],
    "bit of the first tensor": lambda b: (
        b[: 8 + header_length(b)] + bytes([b[8 + header_length(b)] ^ 1]) + b[9 + header_length(b) :]
    ),
    "another name": lambda b: b.replace(b'"f32"', b'"g32"'),
    "another shape": lambda b: b.replace(b"[3, 5]", b"[5, 3]"),
    "another type": lambda b: b.replace(b'"F32", "shape": [3', b'"I32", "shape": [3'),
    "another metadatum": lambda b: b.replace(b'"pt"', b'"tf"'),
    "length of all ones": lambda b: b"\xff" * 8 + b[8:],
    "length too small": lambda b: (header_length(b) - 8).to_bytes(8, "little") + b[8:],
    "not a safetensors file": lambda b: b"PK\3\4" + bytes(range(256)) * 4,
    "text": lambda b: b"Once upon a time there was a file. " * 9,
    "header not JSON": lambda b: with_header(b"{" * 16),
    "header of endless depth": lambda b: with_header(b"[" * 200_000),
    "header not UTF-8": lambda b: with_header(b'{"\xff": 1}'),
    "header a list": lambda b: with_header([1, 2]),
    "header a word": lambda b: with_header("word"),
    "header null": lambda b: with_header(None),
    "entry a list": lambda b: with_header({"a": []}),
    "metadata a list": lambda b: with_header({"__metadata__": [1]}),
    "metadata null": lambda b: with_header({"__metadata__": None}),
    "metadata nested": lambda b: with_header({"__metadata__": {"state": {"a": 1}}}),
    "unknown type": lambda b: with_header({"a": entry([1], [0, 4], "F33")}, b"1234"),
    "type a list": lambda b: with_header({"a": entry([1], [0, 4], ["F32"])}, b"1234"),
    "negative shape": lambda b: with_header({"a": entry([-1, -1], [0, 4])}, b"1234"),
    "shape of flags": lambda b: with_header({"a": entry([True], [0, 4])}, b"1234"),
    "shape of parts": lambda b: with_header({"a": entry([0.5, 2], [0, 4])}, b"1234"),
    "shape a number": lambda b: with_header({"a": entry(1, [0, 4])}, b"1234"),
    "vast empty shape": lambda b: with_header({"a": entry([0, 10**30], [0, 0])}),
    "vast shape": lambda b: with_header({"a": entry([2**40], [0, 2**42])}),
    "offsets of parts": lambda b: with_header({"a": entry([1], [0.0, 4.0])}, b"1234"),
    "offsets backwards": lambda b: with_header({"a": entry([1], [4, 0])}, b"1234"),
    "offsets with a hole": lambda b: with_header({"a": entry([1], [4, 8])}, b"12345678"),
    "offsets too many": lambda b: with_header({"a": entry([1], [0, 4, 8])}, b"1234"),
    "offsets of words": lambda b: with_header({"a": entry([1], ["0", "4"])}, b"1234"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_every_damage_is_a_format_error(file, damage):
    whole = file.read_bytes()
    damaged = damage(whole)
    assert damaged != whole
    file.write_bytes(damaged)
    with pytest.raises(FormatError, match="damaged"):
        read_safetensors(file)


def test_random_damage_is_a_format_error_or_harms_nothing(file):
    """Only a change in the name of the checksum itself can pass, and then all else is whole."""
    whole = file.read_bytes()
    rng = random.Random(1)
    passed = 0
    for _ in range(600):
        content = bytearray(whole)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            # Half of the changes fall into the header, where there is more to go wrong.
            end = rng.choice((8 + header_length(whole), len(whole)))
            content[rng.randrange(end)] ^= 1 << rng.randrange(8)
        if rng.random() < 0.2:
            del content[rng.randrange(len(content)) :]
        file.write_bytes(content)
        try:
            tensors, _ = read_safetensors(file)
        except FormatError:
            continue
        passed += 1
        assert_same(tensors, TENSORS)
    assert passed < 30


def stalled(directory: Path, body: str) -> subprocess.Popen[str]:
    """A process that runs the body, in which STALL() says so and waits to be killed."""
    prelude = (
        "import sys, time, torch\n"
        "from pathlib import Path\n"
        f"{PROBE}"
        f"directory = Path({str(directory)!r})\n"
        "def STALL(*_, **__):\n"
        "    print('stalled', flush=True)\n"
        "    time.sleep(60)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", prelude + body],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("moment", ["os.fsync", "Path.replace"])
def test_a_kill_during_a_write_keeps_the_old_file(file, tmp_path, moment):
    old = file.read_bytes()
    process = stalled(
        tmp_path,
        f"train.{moment} = STALL\n"
        "train.write_safetensors(directory / 'a.safetensors', {'b': torch.ones(9)}, {})\n",
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "stalled\n"
        assert (tmp_path / "a.safetensors.sagemaker-ignore").exists()
    finally:
        process.kill()
        process.communicate()
    assert file.read_bytes() == old


def test_a_write_syncs_the_file_first_and_the_directory_last(tmp_path, monkeypatch):
    place, synced = tmp_path / "a.safetensors", []

    def note(fd: int) -> None:
        synced.append(("directory" if Path(f"/dev/fd/{fd}").is_dir() else "file", place.exists()))

    monkeypatch.setattr(os, "fsync", note)
    write_safetensors(place, TENSORS, {})
    assert synced == [("file", False), ("directory", True)]


def test_a_failed_write_leaves_only_the_old_file(file, monkeypatch):
    old = file.read_bytes()

    def no_fsync(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", no_fsync)
    with pytest.raises(OSError):
        write_safetensors(file, {"b": torch.ones(9)}, {})
    assert file.read_bytes() == old
    assert [p.name for p in file.parent.iterdir()] == [file.name]


# -- checkpoints -----------------------------------------------------------------------------------


def state_of(step: int, **config: Any) -> dict[str, Any]:
    return {
        "step": step,
        "config": dataclasses.asdict(Config(**config)),
        "corpus_sha256": "abc",
    }


def save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save({"model.w": torch.full((1000,), float(step))}, state_of(step))


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints")


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(p.name.removesuffix(".safetensors") for p in checkpoints.directory.iterdir())


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_checkpoint_gives_back_what_was_saved(checkpoints):
    checkpoints.save(TENSORS, state_of(7))
    loaded = checkpoints.load_latest()
    assert loaded is not None
    assert_same(loaded[0], TENSORS)
    assert loaded[1] == checkpoints.latest_state() == state_of(7)


def test_a_checkpoint_holds_a_curve_of_any_length(checkpoints):
    state = {"step": 1, "metrics": "x" * 100_000_000}  # the official limit
    checkpoints.save({}, state)
    assert checkpoints.load_latest() == ({}, state)


def test_a_fresh_directory_has_no_checkpoint(checkpoints):
    assert checkpoints.load_latest() is None


def test_the_last_two_checkpoints_are_kept(checkpoints):
    for step in (10, 20, 30):
        save(checkpoints, step)
    assert names(checkpoints) == ["checkpoint-00000020", "checkpoint-00000030"]


def test_the_leftovers_of_a_killed_write_are_removed(checkpoints):
    save(checkpoints, 10)
    half = checkpoints.path(15)
    half.with_name(f"{half.name}.sagemaker-ignore").write_bytes(b"half")
    save(checkpoints, 20)
    assert names(checkpoints) == ["checkpoint-00000010", "checkpoint-00000020"]


def test_a_file_is_deleted_only_after_its_upload(checkpoints):
    """SageMaker's checkpoint agent makes such markers beside a file that it uploads."""
    save(checkpoints, 10)
    first = checkpoints.path(10)
    first.with_name(f"{first.name}.sagemaker-uploading").touch()
    save(checkpoints, 20)
    save(checkpoints, 30)
    assert first.exists()
    first.with_name(f"{first.name}.sagemaker-uploaded").touch()
    save(checkpoints, 40)
    assert not first.exists()


def test_a_broken_newest_checkpoint_is_skipped_with_a_note(checkpoints, capsys):
    save(checkpoints, 10)
    save(checkpoints, 20)
    spoil(checkpoints.path(20))
    loaded = checkpoints.load_latest()
    assert loaded is not None and loaded[1]["step"] == 10
    assert "checkpoint of step 20 is skipped" in capsys.readouterr().out


def test_a_broken_checkpoint_replaces_no_valid_one(checkpoints):
    save(checkpoints, 10)
    save(checkpoints, 20)
    spoil(checkpoints.path(20))
    assert checkpoints.load_latest() is not None
    save(checkpoints, 25)
    assert checkpoints.steps() == [25, 10]


def test_a_checkpoint_without_its_sha256_is_broken(checkpoints):
    save(checkpoints, 10)
    path = checkpoints.path(10)
    path.write_bytes(path.read_bytes().replace(b'"sha256"', b'"sha257"'))
    with pytest.raises(TrainingError, match="it has no SHA-256"):
        checkpoints.load_latest()


def test_checkpoints_that_are_all_broken_are_an_error(checkpoints):
    save(checkpoints, 10)
    save(checkpoints, 20)
    for step in (10, 20):
        spoil(checkpoints.path(step))
    with pytest.raises(TrainingError, match=r"every checkpoint in .* is damaged"):
        checkpoints.load_latest()


def test_a_checkpoint_that_cannot_be_opened_is_skipped(checkpoints):
    save(checkpoints, 10)
    checkpoints.path(15).symlink_to("nowhere")
    checkpoints.path(20).mkdir()
    assert checkpoints.latest_state()["step"] == 10
    loaded = checkpoints.load_latest()
    assert loaded is not None and loaded[1]["step"] == 10


def test_other_files_in_the_directory_are_left_alone(checkpoints):
    save(checkpoints, 10)
    for name in ("checkpoint-best.safetensors", "checkpoint-1.txt", "notes"):
        (checkpoints.directory / name).write_text("mine")
    save(checkpoints, 20)
    save(checkpoints, 30)
    assert {"checkpoint-best", "checkpoint-1.txt", "notes"} < set(names(checkpoints))
    assert checkpoints.steps() == [30, 20]


def test_a_run_may_resume_with_another_length_and_schedule():
    now = state_of(0, max_steps=9999, learning_rate=0.5, dropout=0.3, log_interval=1)
    check_resumable(state_of(7), now)


@pytest.mark.parametrize(
    "name, was, now",
    [
        ("n_layer", 4, 5),
        ("n_embd", 128, 64),
        ("block_size", 64, 32),
        ("tie_embeddings", False, True),
        ("batch_size", 12, 24),
        ("seed", 1337, 1),
        ("optimizer", "muon", "adamw"),
        ("validation_fraction", 0.1, 0.2),
    ],
)
def test_the_values_that_define_a_run_may_not_change(name, was, now):
    with pytest.raises(ConfigError, match=f"{name} was {was!r} and is {now!r}"):
        check_resumable(state_of(7), state_of(0, **{name: now}))


def test_a_newer_hyperparameter_takes_its_default_at_a_resume():
    before = state_of(7)
    del before["config"]["mask_documents"]
    check_resumable(before, state_of(0))
    with pytest.raises(ConfigError, match="mask_documents was False and is True"):
        check_resumable(before, state_of(0, mask_documents=True))


def test_the_text_may_not_change():
    with pytest.raises(ConfigError, match="the text is not the same"):
        check_resumable(state_of(7), {**state_of(0), "corpus_sha256": "def"})


def test_every_difference_is_named():
    with pytest.raises(ConfigError, match=r"n_layer was 4 and is 5; seed was 1337 and is 1\."):
        check_resumable(state_of(7), state_of(0, n_layer=5, seed=1))


def test_a_full_disk_keeps_the_earlier_checkpoints(tmp_path):
    """The limit on the size of a file stands for the end of the disk."""
    probe = (
        "import resource, signal, sys, torch\n"
        "from pathlib import Path\n"
        f"{PROBE}"
        "checkpoints = train.Checkpoints(Path(sys.argv[1]))\n"
        "state = {'step': 1}\n"
        "checkpoints.save({'w': torch.ones(100)}, state)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n"
        "    checkpoints.save({'w': torch.ones(100_000)}, {**state, 'step': 2})\n"
        "except train.TrainingError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "checkpoint-00000002.safetensors: File too large" in done.stdout, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-00000001.safetensors"]
    assert Checkpoints(tmp_path).load_latest() is not None


# -- the artefact ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(text_file, tmp_path_factory):
    """The model directory of a short training on a text with tabs, emoji and other scripts."""
    out = tmp_path_factory.mktemp("trained")
    how = {
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 64,
        "block_size": 32,
        "batch_size": 32,
        "max_steps": 120,
        "eval_windows": 64,
        "eval_interval": 120,
        "log_interval": 120,
        "sample_length": 0,
        "device": "cpu",
        "precision": "float32",
    }
    end = run(words(**how, data=text_file, out=out), cwd=out)
    assert end.status == 0, end.output
    return out


@pytest.fixture(scope="module")
def artefact(trained):
    return trained / "model"


@pytest.fixture
def copied(artefact, tmp_path):
    shutil.copytree(artefact, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="module")
def theirs(artefact):
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        artefact, trust_remote_code=False
    )
    return model, transformers.AutoTokenizer.from_pretrained(artefact, trust_remote_code=False)


def ids_of(vocabulary: str, text: str) -> list[int]:
    return [vocabulary.index(character) for character in text]


def test_transformers_computes_the_same_logits(artefact, theirs, text):
    model, tokenizer = load_artefact(artefact)
    sample = "".join(text[i : i + 32] for i in range(0, 400_000, 25_000))
    x = torch.tensor(ids_of(characters(tokenizer), sample)).view(-1, 32)
    with torch.inference_mode():
        ours, other = model(x), theirs[0](x).logits
    assert float(other.std()) > 1
    assert float((ours - other).abs().max()) < 1e-4


def test_transformers_computes_the_same_logits_beyond_context(artefact, theirs, text):
    model, tokenizer = load_artefact(artefact)
    x = torch.tensor([ids_of(characters(tokenizer), text[1000:1100])])
    cache = engine.KeyValueCache(model, 1, 100)
    with torch.inference_mode():
        steps = [engine.forward(model, x[:, i : i + 1], cache) for i in range(100)]
        ours = torch.stack(steps, dim=1)
        other = theirs[0](x).logits
    assert float((ours - other).abs().max()) < 1e-4


def test_transformers_generates_the_same_text(artefact, theirs, text):
    model, tokenizer = load_artefact(artefact)
    prompt = torch.tensor([ids_of(characters(tokenizer), text[500:520])])
    with torch.inference_mode():
        expected = theirs[0].generate(prompt, max_new_tokens=80, do_sample=False)[0, 20:].tolist()
    assert [int(i) for i in engine.generate(model, prompt, 80, temperature=0)] == expected


def test_transformers_makes_the_same_ids_of_all_characters(artefact, theirs, text):
    _, tokenizer = load_artefact(artefact)
    vocabulary = characters(tokenizer)
    assert {"\n", "\t", "🙂", "é", "漢", "\u200d"} < set(vocabulary)
    for sample in (vocabulary, "\n\n\t \t\n", "🙂🚀👩‍🚀", text[-300:], text[:3000], "  a  ", "\n"):
        assert theirs[1](sample)["input_ids"] == ids_of(vocabulary, sample)


def test_transformers_gives_the_text_back_exactly(artefact, theirs, text):
    for sample in (text[-300:], text[:3000], " .  , ' n't \n\t ", *sorted(set(text))):
        assert theirs[1].decode(theirs[1](sample)["input_ids"]) == sample


def test_transformers_reads_an_unknown_character_as_a_space(theirs):
    assert theirs[1].decode(theirs[1]("aЪb")["input_ids"]) == "a b"


def test_the_artefact_holds_no_pickle(artefact):
    assert sorted(p.name for p in artefact.iterdir()) == [
        "SHA256SUMS",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    ]


def test_the_artefact_says_what_it_was_trained_with(artefact, trained):
    training = json.loads((artefact / "training.json").read_text())
    rows = (trained / "output/metrics.jsonl").read_text().splitlines()
    assert training["metrics"] == json.loads(rows[-1])
    assert training["val_loss"] == training["metrics"]["val_loss"]
    assert training["config"]["n_embd"] == 64
    assert len(training["corpus_sha256"]) == 64


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_read_back_as_it_was_written(tied, tmp_path):
    model = lively(dataclasses.replace(SMALL, tie_embeddings=tied))
    write_artefact(tmp_path, model, tokenizer_of("abcdefghijk"), {"script_sha256": SCRIPT_SHA256})
    found, tokenizer = load_artefact(tmp_path)
    assert characters(tokenizer) == "abcdefghijk"
    assert_same(dict(found.named_parameters()), dict(model.named_parameters()))


def test_an_unknown_weight_is_not_exported():
    weights = {**dict(lively().named_parameters()), "blocks.0.mlp.bias": torch.zeros(3)}
    with pytest.raises(TrainingError, match=r"Qwen3 has no weight 'blocks\.0\.mlp\.bias'"):
        to_hugging_face(weights, SMALL)


def test_a_missing_weight_is_not_exported():
    weights = dict(lively().named_parameters())
    del weights["blocks.1.mlp.down.weight"]
    with pytest.raises(TrainingError, match=r"it has no weight 'blocks\.1\.mlp\.down\.w"):
        to_hugging_face(weights, SMALL)


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors, _ = read_safetensors(directory / "model.safetensors")
    change(tensors)
    write_safetensors(directory / "model.safetensors", tensors, {"format": "pt"})
    write_sums(directory)


def change_json(directory: Path, name: str, change: Callable[[Any], object]) -> None:
    document = json.loads((directory / name).read_text())
    change(document)
    (directory / name).write_text(json.dumps(document))
    write_sums(directory)


Q, K, V = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")
EMBEDDING = "model.embed_tokens.weight"


HEAD, MORE = "lm_head.weight", "model.layers.2.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "name, change, found",
    [
        (V, lambda t: t.pop(V), "nothing"),
        (HEAD, lambda t: t.pop(HEAD), "nothing"),
        (EMBEDDING, lambda t: t.update({EMBEDDING: t[EMBEDDING][:-1].clone()}), "[114, 64]"),
        (EMBEDDING, lambda t: t.update({EMBEDDING: t[EMBEDDING].flatten()}), "[7360]"),
        (Q, lambda t: t.update({Q: t[Q][:, :-2].clone()}), "[64, 62]"),
        (K, lambda t: t.update({Q: torch.zeros(128, 64), K: torch.zeros(0, 64)}), "[0, 64]"),
        (Q, lambda t: t.update({Q: torch.tensor(1.0)}), "float32 []"),
        (EMBEDDING, lambda t: t.update({EMBEDDING: t[EMBEDDING].long()}), "int64 [115, 64]"),
        (HEAD, lambda t: t.update({HEAD: t[HEAD].long()}), "int64 [115, 64]"),
        (MORE, lambda t: t.update({MORE: torch.zeros(2)}), "float32 [2]"),
    ],
)
def test_tensors_that_do_not_fit_are_a_format_error(copied, name, change, found):
    change_tensors(copied, change)
    with pytest.raises(FormatError) as caught:
        load_artefact(copied)
    assert re.search(rf": {name} should be .* and is .*{re.escape(found)}$", str(caught.value))


def test_weights_of_a_norm_that_has_none_are_refused(copied):
    change_tensors(copied, lambda t: t.update({"model.norm.weight": torch.full((64,), 2.0)}))
    with pytest.raises(FormatError, match=r"model\.norm\.weight is not all ones"):
        load_artefact(copied)


@pytest.mark.parametrize(
    "name, change, said",
    [
        ("config.json", lambda d: d.update(hidden_size=128), "hidden_size is 128, not 64"),
        ("config.json", lambda d: d.update(num_hidden_layers=3), "num_hidden_layers is 3, not 2"),
        ("config.json", lambda d: d.update(num_attention_heads=4), "num_attention_heads is 4, not"),
        ("config.json", lambda d: d.update(rope_theta=1e6), "rope_theta is 1000000.0, not 10000.0"),
        ("config.json", lambda d: d.update(rms_norm_eps=1e-5), "rms_norm_eps is 1e-05, not 1e-06"),
        (
            "config.json",
            lambda d: d.update(tie_word_embeddings=True),
            "embeddings is True",
        ),
        ("config.json", lambda d: d.update(model_type="llama"), "model_type is 'llama'"),
        ("config.json", lambda d: d.pop("vocab_size"), "vocab_size is None, not 115"),
        ("training.json", lambda d: d["config"].update(n_embd=128), "hidden_size is 64, not 128"),
        ("training.json", lambda d: d["config"].update(n_embd="many"), "n_embd='many'"),
        ("training.json", lambda d: d["config"].update(block_size=64), "embeddings is 32, not 64"),
        ("training.json", lambda d: d.update(config=[]), "training.json .*config: must be an obj"),
        ("training.json", lambda d: d.pop("config"), "training.json .*config: Field required"),
        ("tokenizer.json", lambda d: d["model"]["vocab"].pop("a"), "tokenizer.json lacks an id"),
        ("tokenizer.json", lambda d: d["model"]["vocab"].update(a=10_000), "lacks an id, or has"),
        (
            "tokenizer.json",
            lambda d: d["model"]["vocab"].update(a=d["model"]["vocab"]["b"]),
            "tokenizer.json lacks an id, or has one twice",
        ),
        ("tokenizer.json", lambda d: d["model"]["vocab"].update(a="b"), "tokenizer.json cannot be"),
        ("tokenizer.json", lambda d: d.update(model={"vocab": {"ab": 0}}), "tokenizer.json cannot"),
        (
            "tokenizer.json",
            lambda d: d.update(model={"vocab": {}}),
            "tokenizer.json cannot be read",
        ),
        ("tokenizer.json", lambda d: d.update(model=[]), "tokenizer.json cannot be read"),
    ],
)
def test_documents_that_disagree_are_a_format_error(copied, name, change, said):
    change_json(copied, name, change)
    with pytest.raises(FormatError, match=said):
        load_artefact(copied)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "training.json", "model.safetensors"]
)
@pytest.mark.parametrize(
    "content",
    [None, b"", b"\xff\xfe", b"[]", b"null", b"[" * 200_000],
    ids=["missing", "empty", "binary", "list", "null", "deep"],
)
def test_an_invalid_file_of_a_model_is_a_format_error(copied, name, content):
    (copied / name).unlink()
    if content is not None:
        (copied / name).write_bytes(content)
        write_sums(copied)
    with pytest.raises(FormatError) as caught:
        load_artefact(copied)
    assert name in str(caught.value)
    assert "SHA" not in str(caught.value)


def test_an_added_recipe_hyperparameter_is_accepted(copied):
    change_json(copied, "training.json", lambda d: d["config"].update(mine=1))
    change_json(copied, "training.json", lambda d: d.update(script_sha256="f" * 64))
    model, _ = load_artefact(copied)
    assert model.config.n_embd == 64


def test_a_checkpoint_of_another_script_is_refused(trained, tmp_path):
    loaded = Checkpoints(trained / "checkpoints").load_latest()
    assert loaded is not None
    tensors, state = loaded
    state["script_sha256"] = "f" * 64
    Checkpoints(tmp_path / "checkpoints").save(tensors, state)
    with pytest.raises(InputError, match=r"SHA-256 ffffffffffff\.\.\., which is not on this"):
        export_checkpoint(tmp_path / "checkpoints", tmp_path / "model")


def test_a_checkpoint_with_other_weights_is_refused(trained, tmp_path):
    loaded = Checkpoints(trained / "checkpoints").load_latest()
    assert loaded is not None
    tensors, state = loaded
    tensors["model.wte.weight"] = tensors.pop("model.embed.weight")
    Checkpoints(tmp_path / "checkpoints").save(tensors, state)
    with pytest.raises(FormatError, match=r"embed\.weight is nothing in the checkpoint and"):
        export_checkpoint(tmp_path / "checkpoints", tmp_path / "model")


def test_a_missing_directory_is_a_format_error(tmp_path):
    with pytest.raises(FormatError):
        load_artefact(tmp_path / "none")


def test_a_checkpoint_can_be_made_a_model(trained, artefact, tmp_path):
    assert export_checkpoint(trained / "checkpoints", tmp_path / "model") == 120
    assert_same(
        read_safetensors(tmp_path / "model/model.safetensors")[0],
        read_safetensors(artefact / "model.safetensors")[0],
    )
    model, tokenizer = load_artefact(tmp_path / "model")
    assert len(tokenizer) == model.embed.num_embeddings


def test_export_without_a_checkpoint_makes_no_model(tmp_path):
    with pytest.raises(TrainingError, match="no checkpoint in"):
        export_checkpoint(tmp_path, tmp_path / "model")
    assert not (tmp_path / "model").exists()
