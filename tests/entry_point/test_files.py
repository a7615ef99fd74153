"""safetensors files: written, mapped, and damaged."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from runs import PROBE, run
from tensors import TENSORS, assert_same

from sm_nanogpt.entry_point.errors import FormatError
from sm_nanogpt.entry_point.safetensors_file import read_safetensors, write_safetensors


@pytest.fixture
def file(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", TENSORS, {"format": "pt", "a": "é🙂"})
    return tmp_path / "a.safetensors"


def test_mapped_tensors_are_in_the_memory_of_the_file(tmp_path):
    file = tmp_path / "a.safetensors"
    write_safetensors(file, {"a": torch.ones(3), "b": torch.ones(2, 5)}, {})
    tensors, _ = read_safetensors(file, mapped=True)
    one, other = (tensor.untyped_storage() for tensor in tensors.values())
    assert one.data_ptr() == other.data_ptr()
    assert one.nbytes() == file.stat().st_size


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
    ours = tmp_path / "ours"
    theirs = tmp_path / "theirs"
    metadata = {"a": "é🙂"}
    write_safetensors(ours, tensors, metadata)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(contiguous, theirs, metadata)
    for path in (ours, theirs):
        for mapped in (False, True):
            read, metadata_read = read_safetensors(path, mapped=mapped)
            assert_same(read, tensors)
            assert metadata_read == metadata
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
    "another shape": ("SHA-256", lambda b: b.replace(b"[3, 5]", b"[5, 3]")),
    "another metadatum": ("SHA-256", lambda b: b.replace(b'"pt"', b'"tf"')),
    "length of all ones": ("does not fit", lambda b: b"\xff" * 8 + b[8:]),
    "length off by 8": ("does not fit", lambda b: bytes([b[0] ^ 8]) + b[1:]),
}
HEADERS = {
    "of endless depth": with_header(b"[" * 200_000),
    "not UTF-8": with_header(b'{"\xff": 1}'),
    "a list": with_header([1, 2]),
    "entry a list": with_header({"a": []}),
    "metadata a list": with_header({"__metadata__": [1]}),
    "metadata nested": with_header({"__metadata__": {"state": {"a": 1}}}),
    "unknown type": with_header({"a": entry([1], [0, 4], "F33")}, b"1234"),
    "negative shape": with_header({"a": entry([-1, -1], [0, 4])}, b"1234"),
    "shape of flags": with_header({"a": entry([True], [0, 4])}, b"1234"),
    "shape a number": with_header({"a": entry(1, [0, 4])}, b"1234"),
    "vast empty shape": with_header({"a": entry([0, 10**30], [0, 0])}),
    "vast shape": with_header({"a": entry([2**40], [0, 2**42])}),
    "offsets of parts": with_header({"a": entry([1], [0.0, 4.0])}, b"1234"),
    "offsets with a hole": with_header({"a": entry([1], [4, 8])}, b"12345678"),
    "offsets too many": with_header({"a": entry([1], [0, 4, 8])}, b"1234"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_a_format_error(file, damage):
    reason, change = DAMAGES[damage]
    whole = file.read_bytes()
    damaged = change(whole)
    assert damaged != whole
    file.write_bytes(damaged)
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
    for _ in range(300):
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
    assert passed < 15


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
    path = tmp_path / "a.safetensors"
    syncs = []  # (is it the directory?, does the file exist?)

    def record_sync(fd: int) -> None:
        is_directory = Path(f"/dev/fd/{fd}").is_dir()
        syncs.append((is_directory, path.exists()))

    monkeypatch.setattr(os, "fsync", record_sync)
    write_safetensors(path, TENSORS, {})
    assert syncs == [(False, False), (True, True)]


def test_tensors_are_written_one_by_one(tmp_path):
    """At most two at once: the next is on its way when the last may still be in memory."""
    references: list[weakref.ref[torch.Tensor]] = []

    def contents() -> Iterator[torch.Tensor]:
        for tensor in TENSORS.values():
            content = tensor.clone()
            references.append(weakref.ref(content))
            n_living = sum(reference() is not None for reference in references)
            assert n_living <= 2
            yield content

    described = {name: tensor.to("meta") for name, tensor in TENSORS.items()}
    write_safetensors(tmp_path / "a", described, {}, contents())
    assert_same(read_safetensors(tmp_path / "a", sealed=True)[0], TENSORS)
    write_safetensors(tmp_path / "b", TENSORS, {})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
