"""Make the pictures of the manual again, all or some of them, from real runs on this machine.

    python examples/pictures.py --text input.txt              # tiny Shakespeare; twenty minutes
    python examples/pictures.py --text input.txt report try   # two of them

Each is a file in docs/pictures. Its jobs are kept below --work, so that a picture is made again in
seconds from the job of before; delete that directory to begin anew. The script needs
`pip install playwright pillow` and Chromium, and the recordings a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from conversations import BASE, HELD_OUT, questions, write_conversations
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from PIL import Image
from playwright.sync_api import Page, sync_playwright
from recording import Film, Recording, record

import sm_nanogpt as sm

DOCS = Path(__file__).parents[1] / "docs"
PICTURES = DOCS / "pictures"
HOME_OF_YOU = "/home/you/.sm-nanogpt"  # what the recordings show as the home
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PROGRAMS = Path(sys.executable).parent
COLORS = 128  # of a picture of the browser
SCALE = 1.5  # its pixels for one of the page
MARGIN = 16  # pixels below what it shows
SEED = 1337
PART = 100_000  # characters of the text that is forecast
SPEED = 8  # of a recording, as a multiple
RATES = (0.0125, 0.05, 0.1)
EMBEDDED = "        x = self.embed(idx).to(self.compute_dtype)\n"
SHIFTED = """\
        n = self.config.n_embd // 2
        x = torch.cat((x[..., :n], F.pad(x, (0, 0, 1, -1))[..., n:]), dim=-1)
"""
IDEAS = {  # what the picture of a search tries: in model.py, a text and what takes its place
    "GELU instead of SiLU": ("staticmethod(F.silu)", "staticmethod(F.gelu)"),
    "half of each embedding is the last token's": (EMBEDDED, EMBEDDED + SHIFTED),
    "MLPs twice as wide": ("config.hidden_dim", "2 * config.hidden_dim"),
    "a tenth of the next token": (
        EMBEDDED,
        f"{EMBEDDED}        x = x + 0.1 * x.roll(-1, dims=1)\n",
    ),
}
VERDICTS = (0, 3, 4)  # exit codes of a try that came to an end
CELLS = (
    'import sm_nanogpt as sm\n\njob = sm.job("latest")\njob',
    'print(job.sample("ROMEO:", max_new_tokens=145))',
)

NOTEBOOK_STYLE = """
body { margin: 16px 20px; font: 14px/1.45 system-ui, sans-serif; color: #1f2328 }
div { display: flex; gap: 10px; margin-bottom: 8px } div div { display: block; margin: 0 }
i { flex: none; width: 34px; padding-top: 8px; color: #307fc1; font: 13px ui-monospace, monospace }
section { flex: 1; padding: 6px 10px; border: 1px solid #d5d5d5; border-radius: 3px;
  background: #f7f7f7 }
pre { margin: 0; font: 13.5px/1.5 ui-monospace, Menlo, Consolas, monospace }
table { border-collapse: collapse; margin-bottom: 10px; font-size: 13px }
th, td { padding: 4px 10px } th { text-align: right } tr:nth-child(even) { background: #f5f5f5 }
"""


@dataclass
class Studio:
    """A directory with the jobs of the pictures, and with the text that they train on."""

    directory: Path

    @property
    def text(self) -> Path:
        return self.directory / "input.txt"

    @property
    def home(self) -> Path:
        return self.directory / "home"

    @property
    def settings(self) -> sm.Settings:
        return sm.Settings(home=self.home)

    @property
    def variables(self) -> dict[str, str]:
        """For the commands of a recording."""
        path = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
        return {"SM_NANOGPT_HOME": str(self.home), "PATH": path}

    def record(self, command: str, columns: int = 100) -> Recording:
        recording = record(command, self.directory, self.variables, columns)
        for output in recording.outputs:
            output.text = output.text.replace(str(self.home), HOME_OF_YOU)
        return recording

    def run(self, *arguments: str, codes: Sequence[int] = (0,)) -> None:
        """Run sm-nanogpt, whose messages are seen here, and which exits with one of `codes`."""
        command = [str(PROGRAMS / "sm-nanogpt"), *arguments]
        environment = os.environ | self.variables
        process = subprocess.run(command, cwd=self.directory, env=environment)
        if process.returncode not in codes:
            sys.exit(f"failed: sm-nanogpt {' '.join(arguments)}")

    def job(self, name: str, make_request: Callable[[], sm.Request]) -> sm.Job:
        """The job of a name, which is trained if there is none that has ended well."""
        for job in sm.jobs(1, "Completed", name, settings=self.settings):
            return job
        request = make_request().model_copy(update={"name": name})
        return sm.launch(request, self.settings).wait()

    def upload(self, path: Path, **options: Any) -> str:
        return sm.upload_data(path, self.settings, **options).uri


def draw_three_commands(studio: Studio) -> None:
    record_three_commands(studio, "three-commands", columns=100, rows=24)


def draw_narrow_three_commands(studio: Studio) -> None:
    record_three_commands(studio, "three-commands-narrow", columns=50, rows=28)


def record_three_commands(studio: Studio, name: str, columns: int, rows: int) -> None:
    """The three commands of README in a new home, in a terminal of a laptop or of a phone."""
    directory = studio.directory / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    shutil.copy(studio.text, directory)
    studio = Studio(directory)
    film = Film(columns, rows)
    seconds = 0.0
    for command in (
        "sm-nanogpt upload-data input.txt",
        "sm-nanogpt launch --instance local",
        'sm-nanogpt fetch-and-sample latest --prompt "ROMEO:" --max-new-tokens 220',
    ):
        recording = studio.record(command, columns)
        seconds += recording.seconds
        film.add(recording, SPEED, longest_pause=0.7)
    save_film(f"{name}.svg", film, seconds)


def shakespeare(studio: Studio) -> sm.Job:
    """A model of characters, of the default preset."""
    return studio.job(
        "Shakespeare",
        lambda: sm.Request(instance="local", data=studio.upload(studio.text), preset="cpu"),
    )


def draw_page(studio: Studio) -> None:
    """The page of a model as one file, after it has continued a prompt."""
    file = shakespeare(studio).page(DOCS / "shakespeare.html", moments=1)
    print(f"{file}: {file.stat().st_size:,} bytes")
    with browse(file.as_uri(), 1000, 900) as page:
        write(page, "ROMEO:", 400)
        page.hover(".token >> nth=30")  # to show what else was likely there
        save_page("page.png", page, until=".text")


def draw_moments(studio: Studio) -> None:
    """The same page with its slider, at an early moment of the training."""
    file = shakespeare(studio).page(studio.directory / "moments.html", moments=8)
    with browse(file.as_uri(), 900, 1300) as page:
        write(page, "ROMEO:", 250)
        page.fill("#moment", "2")
        page.wait_for_selector("#end:enabled")
        wait_for_end(page)
        save_page("moments.png", page, until=".text")


def draw_play(studio: Studio) -> None:
    """Two models side by side."""
    models = played(studio, shakespeare(studio), rates(studio)[1])
    with models as address, browse(address, 1200, 1300) as page:
        write(page, "ROMEO:", 250)
        save_page("play.png", page, until="#abouts")


def draw_report(studio: Studio) -> None:
    """The first half of a report of three runs."""
    file = studio.directory / "report.html"
    studio.run("report", *(job.id for job in rates(studio)), "-o", str(file))
    with browse(file.as_uri(), 900, 1000) as page:
        page.wait_for_selector("svg, canvas")
        save_page("report.png", page)


def rates(studio: Studio) -> list[sm.Job]:
    """Short runs that differ in their learning rate."""
    data = studio.upload(studio.text)
    return [studio.job(f"rate-{rate}", partial(request_of_rate, data, rate)) for rate in RATES]


def request_of_rate(data: str, rate: float) -> sm.Request:
    values = {"learning_rate": rate, "eval_interval": 20}
    return sm.Request(instance="local", data=data, preset="quick", hyperparameters=values)


def draw_forecast(studio: Studio) -> None:
    """A forecast of a part of the text, from its first pilot on."""
    part = studio.directory / "plays.txt"
    part.write_text(studio.text.read_text("utf-8")[:PART], "utf-8")
    studio.upload(part)
    shutil.rmtree(studio.home / "forecasts", ignore_errors=True)
    film = Film(columns=100, rows=27)
    recording = studio.record("sm-nanogpt launch --forecast")
    film.add(recording, SPEED, longest_pause=1.2)
    save_film("forecast.svg", film, recording.seconds)


def draw_try(studio: Studio) -> None:
    """The log of a search, with what it kept and refused."""
    if not (studio.home / "tries/shakespeare").exists():
        search(studio)
    recording = studio.record("sm-nanogpt try log shakespeare", columns=114)
    film = Film(columns=114)
    film.add_still(recording)
    film.rows = len(film.terminal.lines)
    save_text("try.svg", film.svg("a search of four ideas"))


def search(studio: Studio) -> None:
    """Try each of IDEAS."""
    name = "shakespeare"
    options = ("--size", "0.25", "--smallest-gain", "0.02")  # so that few short runs decide
    studio.run("try", "start", name, "--text", "input.txt", *options)
    for number, (note, (old, new)) in enumerate(IDEAS.items()):
        folder = studio.directory / f"idea-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        studio.run("copy-script", folder.name, "--from", name)
        script = folder / "model.py"
        script.write_text(script.read_text("utf-8").replace(old, new), "utf-8")
        studio.run("try", "run", folder.name, "--group", name, "--note", note, codes=VERDICTS)


def draw_chat(studio: Studio) -> None:
    """A model that has learned answers, on the page of play, and new questions."""
    base = studio.job("base-of-questions", lambda: request_of_base(studio))
    tuned = studio.job("questions", lambda: request_of_tuning(studio, base))
    prompts = []
    for pairs in questions(studio.text.read_text("utf-8"), 0).values():
        question, _ = pairs[0]
        prompts.append(question)
    with played(studio, tuned) as address, browse(address, 900, 1000) as page:
        page.wait_for_selector("#write:enabled", timeout=60_000)
        page.fill("#temperature", "0")
        for prompt in prompts:
            page.fill("#prompt", prompt)
            page.click("#write")
            wait_for_end(page)
        page.evaluate("scrollTo(0, 0)")
        save_page("chat.png", page, until="#form")


def request_of_base(studio: Studio) -> sm.Request:
    data = studio.upload(studio.text, tokenizer="bpe", vocab_size=512)
    values = {**BASE, "max_steps": 600, "seed": 0, "sample_length": 0}
    return sm.Request(instance="local", data=data, preset="cpu", hyperparameters=values)


def request_of_tuning(studio: Studio, base: sm.Job) -> sm.Request:
    """A tuning by the questions of examples/conversations.py, but for some of each kind."""
    learned = []
    for pairs in questions(studio.text.read_text("utf-8"), 0).values():
        learned += pairs[HELD_OUT:]
    file = studio.directory / "questions.jsonl"
    write_conversations(file, learned, 0)
    data = studio.upload(file, tokenizer=base.id)
    values = {"max_steps": 1500, "seed": 0, "batch_size": 12, "device": "cpu"}
    return sm.Request(instance="local", data=data, init_from=base.id, hyperparameters=values)


def draw_notebook(studio: Studio) -> None:
    """A job in a notebook."""
    shakespeare(studio)
    os.environ.update(studio.variables)
    notebook = new_notebook(cells=[new_code_cell(source) for source in CELLS])
    NotebookClient(notebook).execute()
    cells = "".join(cell_as_html(cell) for cell in notebook.cells)
    file = studio.directory / "notebook.html"
    shown = cells.replace(str(studio.home), HOME_OF_YOU)
    file.write_text(f"<!doctype html><meta charset=utf-8><style>{NOTEBOOK_STYLE}</style>{shown}")
    with browse(file.as_uri(), 860, 1000) as page:
        save_page("notebook.png", page)


def cell_as_html(cell: Any) -> str:
    """A cell of a notebook with its output, much as Jupyter shows it."""
    code = f"<pre>{escape(cell.source)}</pre>"
    shown = f"<div><i>[{cell.execution_count}]:</i><section>{code}</section></div>"
    for output in cell.outputs:
        data = output.get("data", {})
        text = output.get("text", data.get("text/plain", ""))
        html = data.get("text/html", f"<pre>{escape(text)}</pre>")
        shown += f"<div><i></i><article>{html}</article></div>"
    return shown


@contextmanager
def played(studio: Studio, *jobs: sm.Job) -> Iterator[str]:
    """Yield the address of the page of `play`."""
    command = [str(PROGRAMS / "sm-nanogpt"), "play", *(job.id for job in jobs), "--no-open"]
    environment = os.environ | studio.variables
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()


@contextmanager
def browse(address: str, width: int, height: int) -> Iterator[Page]:
    """Yield a page of a browser of a size in pixels, each of which is several of the picture."""
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        viewport: Any = {"width": width, "height": height}
        page = browser.new_page(viewport=viewport, device_scale_factor=SCALE)
        page.goto(address)
        yield page
        browser.close()


def find_browser() -> str:
    for name in BROWSERS:
        path = shutil.which(name)
        if path is not None:
            return path
    sys.exit("no Chromium is installed here")


def write(page: Page, prompt: str, n_tokens: int) -> None:
    """Have the page of a model continue a prompt, and wait for the end."""
    page.wait_for_selector("#write:enabled", timeout=60_000)
    page.fill("#prompt", prompt)
    page.fill("#length", str(n_tokens))
    page.eval_on_selector("#seed", f"(field) => {{ field.value = '{SEED}'; }}")
    page.click("#write")
    wait_for_end(page)


def wait_for_end(page: Page) -> None:
    page.wait_for_selector("#end:disabled", timeout=300_000)


def save_page(name: str, page: Page, until: str = "body") -> None:
    """Save what a page shows down to an element, in few colors, which is a third of the size."""
    element = page.locator(until).first.bounding_box()
    window = page.viewport_size
    assert element is not None and window is not None
    bottom = element["y"] + element["height"] + MARGIN
    picture: Any = {"x": 0, "y": 0, "width": window["width"]}
    picture["height"] = min(window["height"], bottom)
    screenshot = Image.open(io.BytesIO(page.screenshot(clip=picture))).convert("RGB")
    path = PICTURES / name
    screenshot.quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size:,} bytes")


def save_film(name: str, film: Film, seconds: float) -> None:
    """Save a film of what took a number of seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    took = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
    n_cores = os.cpu_count() or 1
    is_busy = os.getloadavg()[2] > 2 * n_cores  # runs of the script itself use all cores
    machine = f"{n_cores} very busy cores" if is_busy else f"{n_cores} cores"
    save_text(name, film.svg(f"{took} on {machine}, shown in {film.seconds:.0f} s"))


def save_text(name: str, text: str) -> None:
    path = PICTURES / name
    path.write_text(text, "utf-8")
    print(f"{path}: {path.stat().st_size:,} bytes")


DRAW = {
    "three-commands": draw_three_commands,
    "three-commands-narrow": draw_narrow_three_commands,
    "page": draw_page,
    "moments": draw_moments,
    "play": draw_play,
    "report": draw_report,
    "notebook": draw_notebook,
    "chat": draw_chat,
    "forecast": draw_forecast,
    "try": draw_try,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pictures", nargs="*", help=f"of {', '.join(DRAW)} (default: all)")
    parser.add_argument("--text", type=Path, required=True, help="tiny Shakespeare, as a file")
    parser.add_argument("--work", type=Path, default=Path("runs/pictures"), help="where jobs are")
    arguments = parser.parse_args()
    unknown = set(arguments.pictures) - set(DRAW)
    if unknown:
        parser.error(f"no such picture: {', '.join(unknown)}")
    studio = Studio(arguments.work.absolute())
    studio.directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(arguments.text, studio.text)
    for name in arguments.pictures or DRAW:
        DRAW[name](studio)


if __name__ == "__main__":
    main()
