"""Text as ids, and batches of it."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from pathlib import Path
from queue import Queue
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from models import characters

from entry_point.command_line import Options
from entry_point.config import Config, derive_seed
from entry_point.container import Ranks, read_container
from entry_point.data import Batches
from entry_point.distributed import Group
from entry_point.errors import DataError
from entry_point.text import Corpus, Shards, load_corpus

STRANGE = "naïve\tcafé\r\n“Жук” 漢字 🙂👩‍🚀\x00\x7f\u2028 end\n" * 40


def corpus_of(training: Path, validation: Path | None = None, **hyperparameters: Any) -> Any:
    options = Options(data=str(training), validation=str(validation or ""))
    container = read_container({}, options)
    group = Group(Ranks(0, 1, 0, 1, "hand"), torch.device("cpu"), container)
    return load_corpus(container, Config(**{"block_size": 8, **hyperparameters}), group)


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def text_of(corpus: Corpus, *parts: Any) -> str:
    """The text of these parts, or the whole."""
    whole: Any = (corpus.train, corpus.val)
    ids = torch.cat(parts or whole)
    return corpus.tokenizer.decode(ids.tolist())


# -- tokenization ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [STRANGE, "plain words, all of ASCII; " * 5, "é"])
def test_ids_decode_to_the_text(tmp_path, text):
    corpus = corpus_of(write(tmp_path / "a.txt", text * 200))
    assert text_of(corpus) == text * 200
    assert characters(corpus.tokenizer) == "".join(sorted(set(text)))  # as in nanoGPT


def test_a_text_longer_than_a_piece_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("entry_point.text.PIECE", 7)
    write(tmp_path / "a.txt", "abcdefgh" * 9)
    write(tmp_path / "b.txt", STRANGE)
    assert text_of(corpus_of(tmp_path)) == "abcdefgh" * 9 + STRANGE


@pytest.mark.parametrize("n_characters, dtype", [(256, torch.uint8), (257, torch.int32)])
def test_ids_have_the_smallest_type_that_fits_the_vocabulary(tmp_path, n_characters, dtype):
    text = "".join(chr(0x4E00 + i) for i in range(n_characters - 1)) + "a" * 30
    corpus = corpus_of(write(tmp_path / "a.txt", text))
    assert len(corpus.tokenizer) == n_characters
    assert corpus.train.dtype == corpus.val.dtype == dtype
    assert text_of(corpus) == text


def test_tokenizing_does_not_change_the_number_of_threads(tmp_path):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        corpus_of(write(tmp_path / "a.txt", STRANGE))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


def test_the_last_tenth_is_for_validation_as_in_nanogpt(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(1237))
    corpus = corpus_of(write(tmp_path / "a.txt", text))
    n = int(len(text) * 0.9)
    assert text_of(corpus, corpus.train) == text[:n]
    assert text_of(corpus, corpus.val) == text[n:]


def test_a_validation_channel_keeps_the_training_text_whole(tmp_path):
    training = write(tmp_path / "a.txt", "abcdefgh" * 5)
    corpus = corpus_of(training, write(tmp_path / "v.txt", "hijklmno" * 3))
    assert text_of(corpus, corpus.train) == "abcdefgh" * 5
    assert text_of(corpus, corpus.val) == "hijklmno" * 3


def test_a_directory_is_read_as_its_text_files_in_order(tmp_path):
    write(tmp_path / "b.TXT", "bbbb" * 20)
    write(tmp_path / "a/z.txt", "zzzz" * 20)
    write(tmp_path / "notes.md", "mmmm" * 20)
    write(tmp_path / "code.py", "not this")
    assert text_of(corpus_of(tmp_path)) == "z" * 80 + "b" * 80 + "m" * 80


def test_a_byte_order_mark_is_no_character(tmp_path):
    write(tmp_path / "a.txt", "\ufeff" + "ab" * 40)
    write(tmp_path / "b.txt", "\ufeff" + "cd" * 40 + "\ufeff")
    corpus = corpus_of(tmp_path)
    assert text_of(corpus) == "ab" * 40 + "cd" * 40 + "\ufeff"


def test_the_hash_changes_with_the_text_and_its_files(tmp_path):
    text, halves = "ab" * 80, {"d/a.txt": "ab" * 40, "d/b.txt": "ab" * 40}
    other_halves = {"e/a.txt": "ab" * 30, "e/b.txt": "ab" * 50}
    texts = {"1.txt": text, "2.txt": text, "3.txt": text[:-1] + "a", **halves, **other_halves}
    for name, content in texts.items():
        write(tmp_path / name, content)
    names = ("1.txt", "2.txt", "3.txt", "d", "e")
    one, same, *others = (corpus_of(tmp_path / name).sha256 for name in names)
    assert one == same
    assert len({one, *others}) == 4


# -- text that will not do -------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [7, 1000])
@pytest.mark.parametrize(
    "content, offset",
    [
        (b"\xff" + b"a" * 50, 0),
        (b"a" * 50 + "é".encode() + b"\xe2\x28\xa1", 52),
        (b"a" * 50 + "🙂".encode()[:3], 50),
        (b"a" * 20 + b"\xed\xa0\x80" + b"a" * 20, 20),
        ("abcde漢字漢字".encode() + b"\xff", 17),
        ("abcde漢字漢字".encode() + "é".encode()[:1], 17),
    ],
)
def test_text_that_is_not_utf8_is_refused_by_place(tmp_path, monkeypatch, piece, content, offset):
    monkeypatch.setattr("entry_point.text.PIECE", piece)
    write(tmp_path / "a.txt", "good " * 20)
    path = write(tmp_path / "b.txt", content)
    with pytest.raises(DataError) as caught:
        corpus_of(tmp_path)
    assert str(caught.value) == f"{path}: not UTF-8 text (byte {offset})"


def test_a_path_without_text_is_refused(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    for path, said in (
        (write(tmp_path / "a.txt", ""), "no text"),
        (tmp_path / "empty", r"no \*\.txt or \*\.md file"),
        (tmp_path / "none.txt", "no such file"),
        (Path("/dev/zero"), "no such file"),
    ):
        with pytest.raises(DataError, match=f"^{path}: {said}"):
            corpus_of(path)
    path = write(tmp_path / "b.txt", STRANGE)
    monkeypatch.setattr(Path, "open", Mock(side_effect=OSError(errno.EIO, "no answer")))
    with pytest.raises(DataError, match=f"^{path}: no answer"):
        corpus_of(path)


def test_a_part_shorter_than_one_window_is_an_error(tmp_path):
    path = write(tmp_path / "a.txt", "a" * 85)
    with pytest.raises(
        DataError, match=r"validation text has 9 .* block_size=9 needs 10: add more"
    ):
        corpus_of(path, block_size=9)
    corpus_of(path, block_size=8)
    with pytest.raises(DataError, match=r"training text has 8 .* block_size=8 needs 9"):
        corpus_of(write(tmp_path / "b.txt", "a" * 8), path)


def test_more_characters_than_memory_holds_are_not_read(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", STRANGE)
    os.truncate(path, 2 * 10**9 + 1)
    monkeypatch.setattr(Path, "open", Mock(side_effect=AssertionError))
    with pytest.raises(DataError, match=r"a\.txt: over 2 GB .* upload-data --tokenizer"):
        corpus_of(path)


# -- batches ---------------------------------------------------------------------------------------


@pytest.fixture(params=["one pool", "many pools"])
def pools(request, monkeypatch):
    """A text of a pool of windows, and a longer one."""
    if request.param == "many pools":
        monkeypatch.setattr("entry_point.data.NEIGHBORS", 4)
        monkeypatch.setattr("entry_point.data.SHUFFLED", 16)


def batches(n: int, **hyperparameters: Any) -> Batches:
    """Over a text whose ids are their own places, so that a window shows where it is from."""
    config = Config(**{"block_size": 8, "batch_size": 4, **hyperparameters})
    return Batches(torch.arange(n, dtype=torch.int32), config, torch.device("cpu"))


def test_a_batch_is_a_function_of_seed_and_step_alone(pools):
    forward, backward = batches(10_000), batches(10_000)
    there = [forward.rows(step, 0, 1)[0] for step in range(100)]
    torch.manual_seed(2)
    back = [backward.rows(step, 0, 1)[0] for step in reversed(range(100))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(there, back, strict=True))
    others = [*there[1:], batches(10_000, seed=1).rows(0, 0, 1)[0]]
    assert not any(torch.equal(there[0], other) for other in others)


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_slices_of_the_ranks_are_the_global_batch(pools, world_size):
    b = batches(1000)
    for step in (0, 1, 50):
        whole = b.rows(step, 0, 1)
        parts = [b.rows(step, rank, world_size) for rank in range(world_size)]
        for one, cut in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(one, torch.cat(cut))


def epoch_of(b: Batches, epoch: int) -> list[int]:
    """The first places of its windows, in their order, by a batch size of 1."""
    steps = range(epoch * b.windows_per_epoch, (epoch + 1) * b.windows_per_epoch)
    return [int(b.rows(step, 0, 1)[0][0, 0]) for step in steps]


@pytest.mark.parametrize("n", [9, 10, 16, 17, 18, 24, 25, 100, 1001, 1033])
def test_an_epoch_has_each_window_once(pools, n):
    b = batches(n, batch_size=1)
    for epoch in range(5):
        seen = epoch_of(b, epoch)
        first = min(seen)
        assert sorted(seen) == [*range(first, first + 8 * len(seen), 8)]
        assert 8 * len(seen) >= n - 16


def test_a_text_of_one_pool_is_shuffled_as_a_whole():
    """By the same numbers as in earlier versions."""
    b = batches(10_001, batch_size=1, seed=7)
    for epoch in (0, 3):
        generator = torch.Generator().manual_seed(derive_seed(7, "epoch", epoch))
        offset = int(torch.randint(b.offsets, (), generator=generator))
        order = torch.randperm(b.windows_per_epoch, generator=generator)
        assert epoch_of(b, epoch) == (order * 8 + offset).tolist()


def test_a_longer_text_is_read_in_few_places_at_a_time(monkeypatch):
    monkeypatch.setattr("entry_point.data.NEIGHBORS", 10)
    monkeypatch.setattr("entry_point.data.SHUFFLED", 40)
    b = batches(8001, batch_size=1)  # 999 windows: 24 pools, and another of 3 pieces and 9 windows
    orders = [epoch_of(b, epoch) for epoch in range(2)]
    for order in orders:
        for at in range(0, 999, 40):
            pool = [place // 8 for place in order[at : at + 40]]
            breaks = sum(b - a > 1 for a, b in itertools.pairwise(sorted(pool)))
            assert breaks <= 4  # a piece may cross the end of the text
            assert sorted(pool) != pool
    assert sorted(orders[0][:40]) != sorted(orders[1][:40])


def test_epochs_cut_the_text_at_other_places(pools):
    b = batches(1000, batch_size=1)
    phases = {int(b.window_starts(e * b.windows_per_epoch)[0]) % 8 for e in range(100)}
    assert phases == set(range(8))


@pytest.mark.parametrize("n", [9, 10, 17, 30, 100])
def test_targets_are_the_inputs_shifted_by_one(pools, n):
    b = batches(n)
    seen: set[int] = set()
    for step in range(100):
        x, y = b.rows(step, 0, 1)
        assert x.shape == y.shape == (4, 8)
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert torch.equal(y, x + 1)
        assert int(y.max()) < n
        seen.update(x.flatten().tolist())
    # All but the last few characters are trained on.
    assert seen == set(range(len(seen)))
    assert n - len(seen) <= b.block_size


# -- shards ----------------------------------------------------------------------------------------


def shards_of(n: int, **hyperparameters: Any) -> Batches:
    """The same batches of mapped files, some of them shorter than a window."""
    b = batches(n, **hyperparameters)
    assert isinstance(b.tokens, torch.Tensor)
    b.tokens = Shards(b.tokens.split([300, 2, 5, n - 307]))
    return b


def test_the_next_step_is_read_while_one_computes(monkeypatch):
    in_memory, b, begun = batches(1000), shards_of(1000), Queue[int]()
    read = b.read

    def spy(step: int, *where: int) -> Any:
        begun.put(step)
        return read(step, *where)

    monkeypatch.setattr(b, "read", spy)
    # As in a warm-up, which reads steps twice and far ahead, and in a run that is resumed.
    for step, reads in ((0, [0, 1]), (0, [0, 1]), (40, [40, 41]), (7, [7, 8]), (8, [9]), (9, [10])):
        x, y = b.rows(step, 0, 1)
        assert all(map(torch.equal, (x, y), in_memory.rows(step, 0, 1)))
        # The step has its batch, and does not ask for another.
        assert [begun.get(timeout=60) for _ in reads] == reads
    assert begun.empty()


def test_an_error_of_the_disk_is_raised_in_the_step_it_hits(monkeypatch):
    b = shards_of(1000)
    read = b.read
    monkeypatch.setattr(b, "read", lambda step, *where: read(step if step < 2 else 1 // 0, *where))
    b.rows(0, 0, 1)
    b.rows(1, 0, 1)
    with pytest.raises(ZeroDivisionError):
        b.rows(2, 0, 1)


def test_only_a_step_on_shards_starts_a_thread():
    """Ranks are forked before."""
    before = set(threading.enumerate())
    batches(1000).rows(0, 0, 1)
    b = shards_of(1000)
    assert not set(threading.enumerate()) - before
    b.rows(0, 0, 1)
    assert len(set(threading.enumerate()) - before) == 1
