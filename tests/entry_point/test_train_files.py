"""safetensors files, checkpoints and the artefact."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import runs
import safetensors.torch
import torch
from models import SMALL, characters, lively, tokenizer_of
from runs import PROBE, run, words

from entry_point import train
from entry_point.checkpoint import Checkpoints, read_safetensors, write_safetensors
from entry_point.config import Config, check_resumable
from entry_point.errors import ConfigError, FormatError, TrainingError
from entry_point.huggingface import SCRIPT_SHA256, to_hugging_face, write_artefact, write_sums
from launcher.errors import InputError
from launcher.models import engine
from launcher.models.load import export_checkpoint, own_model, read_checkpoint

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


def test_mapped_tensors_are_in_the_memory_of_the_file(tmp_path):
    file = tmp_path / "a.safetensors"
    write_safetensors(file, {"a": torch.ones(3), "b": torch.ones(2, 5)}, {})
    tensors, _ = read_safetensors(file, mapped=True)
    places = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    assert len(places) == 1
    sizes = {tensor.untyped_storage().nbytes() for tensor in tensors.values()}
    assert sizes == {file.stat().st_size}


def test_tensors_at_odd_bytes_are_mapped_too(tmp_path):
    header = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'  # of 61 bytes
    content = torch.tensor([1.5, 2.5])
    (tmp_path / "a").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(content.numpy())
    )
    tensors, _ = read_safetensors(tmp_path / "a", mapped=True)
    assert_same(tensors, {"a": content})


@pytest.mark.parametrize("tensors", [TENSORS, {}], ids=["of all types", "none"])
def test_both_libraries_read_what_either_wrote(tmp_path, tensors):
    ours, theirs, metadata = tmp_path / "ours", tmp_path / "theirs", {"a": "é🙂"}
    write_safetensors(ours, tensors, metadata)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(contiguous, theirs, metadata)
    for path in (ours, theirs):
        for mapped in (False, True):
            read, found = read_safetensors(path, mapped=mapped)
            assert_same(read, tensors)
            assert found == metadata
    assert_same(safetensors.torch.load_file(ours), tensors)
    with safetensors.safe_open(ours, "pt") as opened:
        assert opened.metadata().items() >= metadata.items()


def header_length(content: bytes) -> int:
    return int.from_bytes(content[:8], "little")


def with_header(header: object, data: bytes = b"") -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def entry(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


# Each with the reason that is given.
DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "trailing bytes": ("does not fit", lambda b: b + b"\0"),
    "bit of the data": ("SHA-256", lambda b: b[:-1] + bytes([b[-1] ^ 1])),
    "another name": ("SHA-256", lambda b: b.replace(b'"f32"', b'"g32"')),
    "another shape": ("SHA-256", lambda b: b.replace(b"[3, 5]", b"[5, 3]")),
    "another type": ("SHA-256", lambda b: b.replace(b'"F32", "shape": [3', b'"I32", "shape": [3')),
    "another metadatum": ("SHA-256", lambda b: b.replace(b'"pt"', b'"tf"')),
    "length of all ones": ("does not fit", lambda b: b"\xff" * 8 + b[8:]),
    "length off by 8": ("does not fit", lambda b: bytes([b[0] ^ 8]) + b[1:]),
    "not a safetensors file": ("does not fit", lambda b: b"PK\3\4" + bytes(range(256)) * 4),
    "text": ("does not fit", lambda b: b"Once upon a time there was a file. " * 9),
}
HEADERS = {
    "not JSON": with_header(b"{" * 16),
    "of endless depth": with_header(b"[" * 200_000),
    "not UTF-8": with_header(b'{"\xff": 1}'),
    "a list": with_header([1, 2]),
    "a word": with_header("word"),
    "null": with_header(None),
    "entry a list": with_header({"a": []}),
    "metadata a list": with_header({"__metadata__": [1]}),
    "metadata null": with_header({"__metadata__": None}),
    "metadata nested": with_header({"__metadata__": {"state": {"a": 1}}}),
    "unknown type": with_header({"a": entry([1], [0, 4], "F33")}, b"1234"),
    "type a list": with_header({"a": entry([1], [0, 4], ["F32"])}, b"1234"),
    "negative shape": with_header({"a": entry([-1, -1], [0, 4])}, b"1234"),
    "shape of flags": with_header({"a": entry([True], [0, 4])}, b"1234"),
    "shape of parts": with_header({"a": entry([0.5, 2], [0, 4])}, b"1234"),
    "shape a number": with_header({"a": entry(1, [0, 4])}, b"1234"),
    "vast empty shape": with_header({"a": entry([0, 10**30], [0, 0])}),
    "vast shape": with_header({"a": entry([2**40], [0, 2**42])}),
    "offsets of parts": with_header({"a": entry([1], [0.0, 4.0])}, b"1234"),
    "offsets backwards": with_header({"a": entry([1], [4, 0])}, b"1234"),
    "offsets with a hole": with_header({"a": entry([1], [4, 8])}, b"12345678"),
    "offsets too many": with_header({"a": entry([1], [0, 4, 8])}, b"1234"),
    "offsets of words": with_header({"a": entry([1], ["0", "4"])}, b"1234"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_a_format_error(file, damage):
    whole, (reason, change) = file.read_bytes(), DAMAGES[damage]
    file.write_bytes(change(whole))
    assert file.read_bytes() != whole
    with pytest.raises(FormatError, match=f"damaged: .*{reason}"):
        read_safetensors(file)


@pytest.mark.parametrize("header", HEADERS)
def test_an_invalid_header_is_a_format_error(file, header):
    file.write_bytes(HEADERS[header])
    with pytest.raises(FormatError, match="damaged: its header does not fit"):
        read_safetensors(file)


def test_a_truncated_file_is_a_format_error(file):
    whole = file.read_bytes()
    for size in (*range(0, len(whole), 11), len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(FormatError, match="damaged: its header"):
            read_safetensors(file)


def test_random_damage_is_refused_or_harmless(file):
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
        file.write_bytes(content)
        try:
            tensors, _ = read_safetensors(file)
        except FormatError:
            continue
        passed += 1
        assert_same(tensors, TENSORS)
    assert passed < 30


@pytest.mark.parametrize("moment", ["os.fsync", "Path.replace"])
def test_a_kill_during_a_write_keeps_the_old_file(file, tmp_path, moment):
    old = file.read_bytes()
    code = (
        "import os, signal, sys, torch\n"
        "from pathlib import Path\n"
        f"{PROBE}"
        f"train.{moment} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "train.write_safetensors(Path(sys.argv[1]), {'b': torch.ones(9)}, {})\n"
    )
    killed = run([str(file)], cwd=tmp_path, command=(sys.executable, "-c", code))
    assert killed.status == -signal.SIGKILL
    assert file.with_name("unfinished.sagemaker-ignore").exists()
    assert file.read_bytes() == old
    write_safetensors(file, {}, {})
    assert list(tmp_path.iterdir()) == [file]


def test_a_curve_may_exceed_the_official_limit(tmp_path):
    metadata = {"state": "x" * 100_000_000}
    write_safetensors(tmp_path / "a", {}, metadata)
    assert read_safetensors(tmp_path / "a") == ({}, metadata)


def test_a_write_syncs_file_before_directory(tmp_path, monkeypatch):
    place, synced = tmp_path / "a.safetensors", []

    def note(fd: int) -> None:
        synced.append(("directory" if Path(f"/dev/fd/{fd}").is_dir() else "file", place.exists()))

    monkeypatch.setattr(os, "fsync", note)
    write_safetensors(place, TENSORS, {})
    assert synced == [("file", False), ("directory", True)]


def test_tensors_are_written_one_by_one(tmp_path):
    """At most two at once: the next is on its way when the last may still be in memory."""
    given: list[weakref.ref[torch.Tensor]] = []

    def contents() -> Iterator[torch.Tensor]:
        for tensor in TENSORS.values():
            given.append(weakref.ref(content := tensor.clone()))
            assert sum(reference() is not None for reference in given) <= 2
            yield content

    described = {name: tensor.to("meta") for name, tensor in TENSORS.items()}
    write_safetensors(tmp_path / "a", described, {}, contents())
    assert_same(read_safetensors(tmp_path / "a", sealed=True)[0], TENSORS)
    write_safetensors(tmp_path / "b", TENSORS, {})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# -- checkpoints -----------------------------------------------------------------------------------


def state_of(step: int, **config: Any) -> dict[str, Any]:
    config = dataclasses.asdict(Config(**config))
    return {"step": step, "config": config, "corpus_sha256": "abc"}


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
    assert checkpoints.load_latest() is None
    checkpoints.save(TENSORS, state_of(7))
    loaded = checkpoints.load_latest()
    assert loaded is not None
    assert_same(loaded[0], TENSORS)
    assert loaded[1] == checkpoints.latest_state() == state_of(7)


def test_pruning_keeps_the_last_two_checkpoints(checkpoints):
    save(checkpoints, 10)
    others = {"checkpoint-best", "checkpoint-1.txt", "notes"}
    for name in others:
        (checkpoints.directory / name).write_text("mine")
    save(checkpoints, 20)
    save(checkpoints, 30)
    assert names(checkpoints) == sorted({"checkpoint-00000020", "checkpoint-00000030", *others})
    assert checkpoints.steps() == [30, 20]


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


def test_a_broken_checkpoint_is_passed_over(checkpoints, capsys):
    save(checkpoints, 10)
    save(checkpoints, 20)
    spoil(checkpoints.path(20))
    loaded = checkpoints.load_latest()
    assert loaded is not None and loaded[1]["step"] == 10
    assert "checkpoint of step 20 is skipped" in capsys.readouterr().out
    save(checkpoints, 25)
    assert checkpoints.steps() == [25, 10]


def test_the_options_of_a_resumed_run_need_no_tensors(checkpoints, monkeypatch):
    """Every rank asks for them, and rank 0 alone reads the tensors."""
    save(checkpoints, 10)
    save(checkpoints, 20)
    content = checkpoints.path(20).read_bytes()
    checkpoints.path(20).write_bytes(content[:-1])
    monkeypatch.setattr("entry_point.checkpoint.read_safetensors", Mock(side_effect=AssertionError))
    assert checkpoints.latest_state()["step"] == 10
    checkpoints.path(20).write_bytes(content)
    assert checkpoints.latest_state()["step"] == 20


def test_checkpoints_that_are_all_broken_are_an_error(checkpoints):
    save(checkpoints, 10)
    save(checkpoints, 20)
    spoil(checkpoints.path(10))
    path = checkpoints.path(20)
    path.write_bytes(path.read_bytes().replace(b'"sha256"', b'"sha257"'))
    with pytest.raises(TrainingError, match=r"every checkpoint in .* SHA-256 is missing"):
        checkpoints.load_latest()


def test_a_checkpoint_of_an_older_version_is_called_that(checkpoints):
    save(checkpoints, 10)
    path = checkpoints.path(10)
    path.write_bytes(path.read_bytes().replace(b'"state_sha256"', b'"state_sha257"'))
    with pytest.raises(TrainingError, match="older version"):
        checkpoints.latest_state()


def test_an_unreadable_checkpoint_is_skipped(checkpoints):
    save(checkpoints, 10)
    checkpoints.path(15).symlink_to("nowhere")
    checkpoints.path(20).mkdir()
    assert checkpoints.latest_state()["step"] == 10
    loaded = checkpoints.load_latest()
    assert loaded is not None and loaded[1]["step"] == 10


def test_resume_may_change_length_and_schedule():
    now = state_of(0, max_steps=9999, learning_rate=0.5, dropout=0.3, log_interval=1)
    check_resumable(state_of(7), now)


@pytest.mark.parametrize(
    "config, said",
    [
        ({"n_layer": 5}, "n_layer (from 4 to 5)"),
        ({"n_embd": 64}, "n_embd (from 128 to 64)"),
        ({"block_size": 32}, "block_size (from 64 to 32)"),
        ({"tie_embeddings": True}, "tie_embeddings (from False to True)"),
        ({"batch_size": 24}, "batch_size (from 12 to 24)"),
        ({"seed": 1, "n_layer": 5}, "n_layer (from 4 to 5), seed (from 1337 to 1)"),
        ({"optimizer": "adamw"}, "optimizer (from 'muon' to 'adamw')"),
        ({"validation_fraction": 0.2}, "validation_fraction (from 0.1 to 0.2)"),
    ],
)
def test_the_values_that_define_a_run_may_not_change(config, said):
    with pytest.raises(ConfigError, match=f" {re.escape(said)};"):
        check_resumable(state_of(7), state_of(0, **config))


def test_of_model_and_data_only_two_values_may_change():
    group, free = "", list[str]()
    for field in dataclasses.fields(Config):
        group = field.metadata["group"] or group
        if group in ("model", "data") and not field.metadata["kept_on_resume"]:
            free.append(field.name)
    assert free == ["dropout", "gradient_accumulation_steps"]


def test_the_text_of_a_run_may_not_change():
    with pytest.raises(ConfigError, match="text"):
        check_resumable(state_of(7), {**state_of(0), "corpus_sha256": "def"})


def test_new_hyperparameters_resume_as_defaults():
    before = state_of(7)
    del before["config"]["mask_documents"]
    check_resumable(before, state_of(0))
    with pytest.raises(ConfigError, match="mask_documents"):
        check_resumable(before, state_of(0, mask_documents=True))


def test_a_full_disk_keeps_the_earlier_checkpoints(checkpoints, monkeypatch):
    """The limit on the size of a file stands for the end of the disk."""
    save(checkpoints, 10)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(TrainingError, match=r"checkpoint-00000020\.\w+: File too large"):
            save(checkpoints, 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(TrainingError, match=r"checkpoint-00000020\.\w+: Input/output error"):
        save(checkpoints, 20)
    assert names(checkpoints) == ["checkpoint-00000010"]
    assert checkpoints.latest_state()["step"] == 10


# -- the artefact ----------------------------------------------------------------------------------


STEPS = 60


@pytest.fixture(scope="module")
def trained(text_file, tmp_path_factory):
    """The model directory of a short training on a text with tabs, emoji and other scripts."""
    out = tmp_path_factory.mktemp("trained")
    steps = {"max_steps": STEPS, "eval_interval": STEPS, "log_interval": STEPS}
    how = {**runs.SMALL, **steps, "n_embd": 64}
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


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", "meta.json"]
)
def test_a_run_opens_only_regular_files(copied, text_file, tmp_path, put, name):
    """This holds for its initial model and for its data: a pipe or a device would never end."""
    data = tmp_path / "data"
    data.mkdir()
    file = (data if name == "meta.json" else copied) / name
    file.unlink(missing_ok=True)
    put(file)
    data = data if name == "meta.json" else text_file
    how = words(device="cpu", data=data, init_from=copied, out=tmp_path / "out")
    with pytest.raises(TrainingError, match="not a regular file") as caught:
        train.main(how)
    assert name in str(caught.value)


def ids_of(vocabulary: str, text: str) -> list[int]:
    return [vocabulary.index(character) for character in text]


def test_transformers_computes_the_same_logits(artefact, text):
    """Also beyond the context, where a cache slides."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(artefact)
    model, tokenizer = own_model(artefact)
    sample = "".join(text[i : i + 32] for i in range(0, 400_000, 25_000))
    x = torch.tensor(ids_of(characters(tokenizer), sample)).view(-1, 32)
    long = torch.tensor([ids_of(characters(tokenizer), text[1000:1100])])
    cache = engine.KeyValueCache(model, 1, 100)
    with torch.inference_mode():
        expected = theirs(x).logits
        assert float(expected.std()) > 1
        torch.testing.assert_close(model(x), expected, atol=1e-4, rtol=0)
        steps = [engine.forward(model, long[:, i : i + 1], cache) for i in range(100)]
        expected = theirs(long).logits
        torch.testing.assert_close(torch.stack(steps, dim=1), expected, atol=1e-4, rtol=0)


def test_transformers_encodes_text_as_ours_does(artefact, text):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(artefact)
    vocabulary = characters(own_model(artefact)[1])
    assert {"\n", "\t", "🙂", "é", "漢", "\u200d"} < set(vocabulary)
    marks = ("\n\n\t \t\n", "🙂🚀👩‍🚀", "  a  ", " .  , ' n't \n\t ")
    for sample in (vocabulary, *vocabulary, *marks, text[-300:], text[:3000]):
        ids = theirs(sample)["input_ids"]
        assert ids == ids_of(vocabulary, sample)
        assert theirs.decode(ids) == sample
    assert theirs.decode(theirs("aЪb")["input_ids"]) == "a b"  # an unknown character


def test_the_artefact_holds_no_pickle(artefact):
    assert {path.suffix for path in artefact.iterdir()} == {".json", ".safetensors", ""}
    assert (artefact / "SHA256SUMS").exists()


def test_the_artefact_says_what_it_was_trained_with(artefact, trained):
    training = json.loads((artefact / "training.json").read_text())
    rows = (trained / "output/metrics.jsonl").read_text().splitlines()
    assert training["metrics"] == json.loads(rows[-1])
    assert training["val_loss"] == training["metrics"]["val_loss"]
    assert training["config"]["n_embd"] == 64
    assert training["causal"] is True
    assert len(training["corpus_sha256"]) == 64


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_read_back_as_it_was_written(tied, tmp_path):
    model = lively(dataclasses.replace(SMALL, tie_embeddings=tied))
    write_artefact(tmp_path, model, tokenizer_of("abcdefghijk"), {"script_sha256": SCRIPT_SHA256})
    found, tokenizer = own_model(tmp_path)
    assert characters(tokenizer) == "abcdefghijk"
    assert_same(dict(found.named_parameters()), dict(model.named_parameters()))


def test_an_unknown_or_missing_weight_is_not_exported():
    weights = dict(lively().named_parameters())
    with pytest.raises(TrainingError, match=r"Qwen3 has no weight 'blocks\.0\.mlp\.bias'"):
        to_hugging_face({**weights, "blocks.0.mlp.bias": torch.zeros(3)}, SMALL)
    del weights["blocks.1.mlp.down.weight"]
    with pytest.raises(KeyError, match=r"blocks\.1\.mlp\.down\.w"):
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
EMBEDDING, MORE = "model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "name, change, found",
    [
        (V, lambda t: t.pop(V), "nothing"),
        (EMBEDDING, lambda t: t.update({EMBEDDING: t[EMBEDDING][:-1].clone()}), ", 64]"),
        (Q, lambda t: t.update({Q: t[Q][:, :-2].clone()}), "[64, 62]"),
        (K, lambda t: t.update({Q: torch.zeros(128, 64), K: torch.zeros(0, 64)}), "[0, 64]"),
        (Q, lambda t: t.update({Q: torch.tensor(1.0)}), "[] in the model"),
        (MORE, lambda t: t.update({MORE: torch.zeros(2)}), "[2]"),
    ],
)
def test_tensors_that_do_not_fit_are_a_format_error(copied, name, change, found):
    change_tensors(copied, change)
    with pytest.raises(FormatError, match=rf"^{name} is .*{re.escape(found)}"):
        own_model(copied)


@pytest.mark.parametrize(
    "name, change, said",
    [
        ("training.json", lambda d: d["config"].update(n_embd=128), r", 64\] in the model and"),
        ("training.json", lambda d: d["config"].update(n_embd="many"), "n_embd='many'"),
        ("training.json", lambda d: d.update(config=[]), "training.json .*config: "),
        ("training.json", lambda d: d.pop("config"), "training.json .*config: "),
        ("tokenizer.json", lambda d: d["model"]["vocab"].update(a=10_000), r"10001, 64\]"),
        ("tokenizer.json", lambda d: d["model"]["vocab"].update(a="b"), "is no tokenizer"),
        ("tokenizer.json", lambda d: d.update(model={"vocab": {"ab": 0}}), "is no tokenizer"),
        ("tokenizer.json", lambda d: d.update(model=[]), "tokenizer.json is no tokenizer"),
    ],
)
def test_documents_that_do_not_fit_are_a_format_error(copied, name, change, said):
    change_json(copied, name, change)
    with pytest.raises(FormatError, match=said):
        own_model(copied)


def test_an_added_recipe_hyperparameter_is_accepted(copied):
    change_json(copied, "training.json", lambda d: d["config"].update(mine=1))
    change_json(copied, "training.json", lambda d: d.update(script_sha256="f" * 64))
    model, _ = own_model(copied)
    assert model.config.n_embd == 64


@pytest.mark.parametrize(
    "change, error, said",
    [
        (lambda t, state: state.update(script_sha256="f" * 64), InputError, r"SHA-256 f{12}\."),
        (lambda t, state: t.pop("model.embed.weight"), FormatError, r"embed\.weight is nothing"),
    ],
)
def test_a_checkpoint_of_another_script_is_refused(trained, tmp_path, change, error, said):
    loaded = Checkpoints(trained / "checkpoints").load_latest()
    assert loaded is not None
    change(*loaded)
    Checkpoints(tmp_path / "checkpoints").save(*loaded)
    with pytest.raises(error, match=said):
        export_checkpoint(read_checkpoint(tmp_path / "checkpoints"), tmp_path / "model")


def test_a_checkpoint_can_be_made_a_model(trained, artefact, tmp_path):
    assert export_checkpoint(read_checkpoint(trained / "checkpoints"), tmp_path / "model") == STEPS
    assert_same(
        read_safetensors(tmp_path / "model/model.safetensors")[0],
        read_safetensors(artefact / "model.safetensors")[0],
    )
    model, tokenizer = own_model(tmp_path / "model")
    assert len(tokenizer) == model.embed.num_embeddings


def test_export_without_a_checkpoint_makes_no_model(tmp_path):
    with pytest.raises(TrainingError, match="no checkpoint in"):
        export_checkpoint(read_checkpoint(tmp_path), tmp_path / "model")
    assert not (tmp_path / "model").exists()
