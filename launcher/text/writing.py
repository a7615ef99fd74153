"""Write the files of an upload into a store."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Lock

from launcher.files import storage
from launcher.files.local import LocalLocation
from launcher.files.progress import Progress
from launcher.settings import Settings
from launcher.text.copies import in_thread
from launcher.text.formats import File, opened, stored

WRITERS, SMALL_FILE = 16, 1 << 20  # files of up to SMALL_FILE bytes that are written at once
CLEANUP_SECONDS = 5.0


def write_files(files: Sequence[File], uri: str, settings: Settings, progress: Progress) -> None:
    """Write files below a URI: small ones side by side, since each waits for the disk or for S3.

    Large ones follow in turn; on S3, each goes in parallel parts. After an error or Ctrl-C no other
    file is begun.
    """
    lock, is_stopped = Lock(), Event()

    def report(n: int) -> None:
        with lock:
            progress(n)

    def write(file: File) -> None:
        target = storage.join(uri, file.name)
        path_in_store = storage.local_path(target)
        if path_in_store is not None and file.is_converted:
            with opened(file) as content, storage.reported(target):
                LocalLocation(path_in_store).write_content(content, file.path, report)
        else:  # S3 gets parallel parts, which need a file
            with stored(file) as path:
                storage.write_file(path, target, report, settings)

    def write_rest(queue: SimpleQueue[File]) -> None:
        with suppress(Empty):
            while not is_stopped.is_set():
                write(queue.get_nowait())

    small_files, large_files = SimpleQueue[File](), list[File]()
    for file in files:
        if file.path.stat().st_size <= SMALL_FILE:
            small_files.put(file)
        else:
            large_files.append(file)
    n_writers = min(WRITERS, small_files.qsize())
    writers = [in_thread(partial(write_rest, small_files)) for _ in range(n_writers)]
    try:
        for writer in wait(writers, return_when=FIRST_EXCEPTION).done:
            writer.result()
    finally:
        is_stopped.set()
        wait(writers, CLEANUP_SECONDS)  # they remove what is half written
    for file in large_files:
        write(file)
