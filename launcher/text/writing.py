"""Write the files of an upload into a store."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Lock

from sm_nanogpt.launcher.files import storage
from sm_nanogpt.launcher.files.local import LocalLocation
from sm_nanogpt.launcher.files.progress import Progress
from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.text.reading import File, file_to_upload, open_text
from sm_nanogpt.launcher.text.threads import in_thread

SMALL_FILE_BYTES = 1 << 20  # the most of a small file
MAX_WRITERS = 16  # small files that are written at once
CLEANUP_SECONDS = 5.0  # in which writers may remove half-written files after an error


class FileWriter:
    """Writes files below a URI."""

    def __init__(self, uri: str, settings: Settings, progress: Progress) -> None:
        self.uri = uri
        self.settings = settings
        self.progress = progress
        self.lock = Lock()  # of progress
        self.is_stopped = Event()
        self.small_files = SimpleQueue[File]()

    def write_all(self, files: Sequence[File]) -> None:
        """Write small files in parallel, since each waits for the disk or for S3.

        Large files follow one by one; S3 gets each in parallel parts. After an error or Ctrl-C, no
        other file is begun.
        """
        large_files: list[File] = []
        for file in files:
            if file.path.stat().st_size <= SMALL_FILE_BYTES:
                self.small_files.put(file)
            else:
                large_files.append(file)
        n_writers = min(MAX_WRITERS, self.small_files.qsize())
        writers = [in_thread(self.write_small_files) for _ in range(n_writers)]
        try:
            for writer in wait(writers, return_when=FIRST_EXCEPTION).done:
                writer.result()
        finally:
            self.is_stopped.set()
            wait(writers, CLEANUP_SECONDS)  # they remove half-written files
        for file in large_files:
            self.write(file)

    def write_small_files(self) -> None:
        with suppress(Empty):
            while not self.is_stopped.is_set():
                self.write(self.small_files.get_nowait())

    def write(self, file: File) -> None:
        target = storage.join(self.uri, file.name)
        path_in_store = storage.local_path(target)
        if path_in_store is not None and file.is_converted:
            with open_text(file) as content, storage.errors_about(target):
                LocalLocation(path_in_store).write_content(content, file.path, self.report)
        else:  # S3 gets a file in parallel parts, which are read from a file
            with file_to_upload(file) as path:
                storage.write_file(path, target, self.report, self.settings)

    def report(self, n_bytes: int) -> None:
        with self.lock:
            self.progress(n_bytes)
