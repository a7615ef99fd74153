"""Write the curves of jobs for TensorBoard: to_tensorboard.py JOB-ID... --directory runs [--follow]

It needs `pip install tensorboard`. The jobs may still run; with --follow, it adds rows until they
end. Each call writes a new event file in runs/JOB-ID, which replaces the older ones, and so does a
run that resumed from an earlier step.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

import sm_nanogpt as sm
from sm_nanogpt.launcher.curve import Curve

TAGS = {"train_loss": "loss/train", "val_loss": "loss/val", "best_loss": "loss/best"}
NOTHING = Curve("", "", [])
POLL_SECONDS = 10.0


@dataclass
class Board:
    """The event files of a job, and what the newest of them holds."""

    directory: Path
    writer: SummaryWriter | None = None
    written: Curve = NOTHING

    def update(self, job: sm.JobDescription, curve: Curve) -> None:
        columns, start, end = hparams(job.hyperparameters, {TAGS["val_loss"]: 0})
        summaries = []
        n_written = len(self.written.rows)
        if self.writer is None or curve.rows[:n_written] != self.written.rows:
            self.writer = SummaryWriter(str(self.directory), purge_step=0)  # replaces older files
            summaries += [columns, start]
            self.written = NOTHING
            n_written = 0
        if job.status == "Completed":  # torch's end always reports success
            summaries.append(end)

        for row in curve.rows[n_written:]:
            moment = row.get("time", job.ended or time.time())  # those of a log have no time
            step = int(row["step"])
            for name in row.keys() - {"step", "time"}:
                self.writer.add_scalar(TAGS.get(name, name), row[name], step, moment)
        for title, text in curve.samples.items() - self.written.samples.items():
            step = 0 if title.startswith("before") else int(curve.newest.get("step", 0))
            block = "".join(f"    {line}\n" for line in text.split("\n"))  # of Markdown
            self.writer.add_text(f"samples/{title.replace(' ', '_')}", block, step)
        for summary in summaries:
            self.writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]
        self.writer.flush()
        self.written = curve


def write(jobs: Iterable[str], directory: Path, follow: bool = False) -> None:
    """Bring the event files up to date; with follow, until the jobs end."""
    boards = {job: Board(directory / job.id) for job in map(sm.job, jobs)}
    while boards:
        for job, board in list(boards.items()):
            try:  # in this order, so that the curve of a job that has ended is complete
                description = job.describe()
                curve = job.curve(with_samples=True)
            except sm.Unreachable as error:
                if not follow:
                    raise
                print(f"{error}; it is asked again", file=sys.stderr)
                continue
            board.update(description, curve)
            if not follow or not description.is_running:
                del boards[job]
                print(board.directory)
        if boards:
            time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", metavar="JOB-ID", nargs="+")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--follow", action="store_true")
    write(**vars(parser.parse_args()))
