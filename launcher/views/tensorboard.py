"""The curves of jobs in TensorBoard.

Everything comes from a job's curve and description, so it works while the job runs and afterwards,
wherever the job runs. A row that was read from a log has no time: it gets the time at which it was
first seen, or the end of its job.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.curve import Curve
from launcher.errors import not_installed
from launcher.files import storage
from launcher.job import JobDescription

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

TAGS = {"train_loss": "loss/train", "val_loss": "loss/val", "best_loss": "loss/best"}


class Board:
    """The event files of a job in DIRECTORY/JOB-ID; none of them is read.

    The first file of each call of `track`, and another one after rows have changed, begins with an
    event that tells readers to drop what older files hold.
    """

    def __init__(self, directory: Path, job_id: str) -> None:
        self.place = directory.expanduser() / job_id
        self.writer: SummaryWriter | None = None
        self.curve = Curve(job_id, "", [])  # what the newest file holds

    def update(self, curve: Curve, description: JobDescription) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
            from torch.utils.tensorboard.summary import hparams
        except ImportError as error:
            raise not_installed(error.name or "tensorboard", "tensorboard") from None
        with storage.reported(str(self.place)):
            known = len(self.curve.rows)
            fresh = self.writer is None or list(curve.rows[:known]) != list(self.curve.rows)
            if fresh:
                self.writer = SummaryWriter(str(self.place), purge_step=0)
                self.curve, known = Curve(curve.job_id, "", []), 0
            assert self.writer is not None
            now = description.ended or time.time()
            for row in curve.rows[known:]:
                for name in row.keys() - {"step", "time"}:
                    tag, step = TAGS.get(name, name), int(row["step"])
                    self.writer.add_scalar(tag, row[name], step, walltime=row.get("time", now))
            for when, text in curve.samples.items() - self.curve.samples.items():
                step = 0 if when.startswith("before") else int(curve.newest.get("step", 0))
                block = "".join(f"    {line}\n" for line in text.split("\n"))  # of Markdown
                self.writer.add_text(f"samples/{when.replace(' ', '_')}", block, step)
            self.curve = curve
            if fresh or not description.is_running:  # TensorBoard's table of hyperparameters
                columns, start, end = hparams(description.hyperparameters, {TAGS["val_loss"]: 0})
                # torch's end of a run always reports success.
                for summary in (columns, start, *[end] * (description.status == "Completed")):
                    self.writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]
            self.writer.flush()
