"""Record commands in a terminal, and draw the recording as one SVG, which an <img> plays.

The SVG has the text as text, and is animated by CSS alone: no script, and no font from elsewhere.
Where a reader asked for less motion, it is the last screen.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

COLUMNS, ROWS = 100, 24
PROMPT = "$ "
SECONDS_PER_KEY = 0.035
PAUSE = 0.7  # seconds before and after a command is typed
HOLD = 12.0  # seconds for which the last screen stays
FRAMES_PER_SECOND = 12
CHARACTER_WIDTH, LINE_HEIGHT, PADDING, TITLE_HEIGHT = 8.4, 19, 14, 30  # pixels; the font has 14
RUN = re.compile(r"[!-~]+( [!-~]+)*|[^ -~]+")  # of letters with single spaces, or of other signs
ESCAPE_SEQUENCE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\-_])")
STYLE = """\
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  fill: #1f2328 }
.window { fill: #f6f8fa; stroke: #d1d9e0 }
.title { fill: #59636e; font: 12px system-ui, sans-serif }
.command { font-weight: 700 }
.prompt { fill: #0969da }
.dot { fill: #d1d9e0 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .window { fill: #161b22; stroke: #3d444d } .title { fill: #9198a1 }
  .prompt { fill: #4493f8 } .dot { fill: #3d444d } }
@media (prefers-reduced-motion: reduce) { * { animation: none !important } }
"""


@dataclass
class Output:
    """What a command wrote, at a number of seconds after its start."""

    seconds: float
    text: str


@dataclass
class Recording:
    """A command, as it is shown, and what it wrote to a terminal."""

    command: str
    outputs: list[Output] = field(default_factory=list)
    seconds: float = 0.0  # until the command ended

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)


def record(
    command: str,
    directory: Path,
    variables: Mapping[str, str],
    columns: int = COLUMNS,
    rows: int = ROWS,
) -> Recording:
    """Run a shell command in a pseudo-terminal. Ends this program if the command fails."""
    recording = Recording(command)
    began = time.monotonic()
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(directory)
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.execvpe("sh", ["sh", "-c", f"exec {command}"], {**os.environ, **variables})
    pending = b""  # the beginning of a character that is not complete
    while True:
        try:
            data = os.read(terminal, 65_536)
        except OSError:  # the command has closed its terminal
            break
        if not data:
            break
        text, pending = decode(pending + data)
        recording.outputs.append(Output(time.monotonic() - began, text))
        sys.stderr.write(text)
    os.close(terminal)
    recording.seconds = time.monotonic() - began
    _, status = os.waitpid(child, 0)
    if status != 0:
        sys.exit(f"failed: {command}")
    return recording


def decode(data: bytes) -> tuple[str, bytes]:
    """The text of bytes in UTF-8, and what is left of a character that is not complete."""
    for length in range(4):
        try:
            end = len(data) - length
            return data[:end].decode("utf-8"), data[end:]
        except UnicodeDecodeError:
            continue
    return data.decode("utf-8", "replace"), b""


@dataclass
class Version:
    """What a line of the terminal says from one time to another."""

    text: str
    start: float
    end: float | None = None  # None: to the end of the recording
    is_command: bool = False


class Terminal:
    """All lines that were written so far, and how they came about.

    It knows line breaks, carriage returns, and the width of a line, as progress bars need.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.lines: list[list[str]] = [[]]
        self.column = 0
        self.versions: list[list[Version]] = []

    def write(self, text: str) -> None:
        for character in ESCAPE_SEQUENCE.sub("", text):
            if character == "\n":
                self.new_line()
            elif character == "\r":
                self.column = 0
            else:
                self.put(character)

    def new_line(self) -> None:
        self.lines.append([])
        self.column = 0

    def put(self, character: str) -> None:
        if self.column == self.columns:
            self.new_line()
        line = self.lines[-1]
        line[self.column : self.column + 1] = [character]
        self.column += 1

    def show(self, seconds: float, is_command: bool = False) -> None:
        """Note which lines have changed until a time, which is that of a frame of the SVG."""
        while len(self.versions) < len(self.lines):
            self.versions.append([])
        for line, versions in zip(self.lines, self.versions, strict=True):
            text = "".join(line).rstrip()
            shown = versions[-1] if versions and versions[-1].end is None else None
            if shown is None and text:
                versions.append(Version(text, seconds, is_command=is_command))
            elif shown is not None and text != shown.text:
                shown.end = seconds
                if text:
                    versions.append(Version(text, seconds, is_command=is_command))


@dataclass
class Film:
    """What some recordings show, one below the other, and when."""

    columns: int = COLUMNS
    rows: int = ROWS
    seconds: float = 0.0
    terminal: Terminal = field(init=False)
    n_lines: dict[float, int] = field(default_factory=dict)  # by the time from which it holds

    def __post_init__(self) -> None:
        self.terminal = Terminal(self.columns)

    def frame(self, is_command: bool = False) -> None:
        """Show the terminal as it is now."""
        self.terminal.show(self.seconds, is_command)
        self.n_lines[self.seconds] = len(self.terminal.lines)

    def add_still(self, recording: Recording) -> None:
        """Add a command and all that it wrote at once."""
        self.terminal.write(f"{PROMPT}{recording.command}")
        self.frame(is_command=True)
        self.terminal.write(f"\n{recording.text.rstrip()}")
        self.frame()

    def add(self, recording: Recording, speed: float, longest_pause: float) -> None:
        """Add a command that is typed, and what it wrote, `speed` times as fast as it was."""
        if self.seconds:
            self.terminal.write("\n")
        self.type(recording.command)
        self.play(recording.outputs, speed, longest_pause)

    def type(self, command: str) -> None:
        self.terminal.write(PROMPT)
        self.frame(is_command=True)
        self.seconds += PAUSE
        for start in range(0, len(command), 2):
            keys = command[start : start + 2]
            self.terminal.write(keys)
            self.frame(is_command=True)
            self.seconds += SECONDS_PER_KEY * len(keys)
        self.seconds += PAUSE
        self.terminal.write("\n")

    def play(self, outputs: Sequence[Output], speed: float, longest_pause: float) -> None:
        earlier = 0.0
        for output in outputs:
            later = self.seconds + min(longest_pause, (output.seconds - earlier) / speed)
            if frame_number(later) != frame_number(self.seconds):
                self.frame()
            self.seconds = later
            earlier = output.seconds
            self.terminal.write(output.text)
        self.frame()
        self.seconds += PAUSE

    def svg(self, title: str) -> str:
        """All of it as an SVG, which plays again and again."""
        total = self.seconds + HOLD
        width = self.columns * CHARACTER_WIDTH + 2 * PADDING
        height = self.rows * LINE_HEIGHT + 2 * PADDING + TITLE_HEIGHT
        keyframes = Keyframes(total)
        texts = "\n".join(self.draw_lines(keyframes))
        scroll = self.draw_scroll(keyframes)
        style = STYLE + keyframes.css()
        size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
        dots = "".join(f'<circle class="dot" cx="{20 + 18 * n}" cy="19" r="5"/>' for n in range(3))
        return f"""\
<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">
<title>{escape(title)}</title>
<style>
{style}</style>
<rect class="window" x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="8"/>
{dots}<text class="title" x="{width / 2:g}" y="23" text-anchor="middle">{escape(title)}</text>
<svg x="0" y="{TITLE_HEIGHT + PADDING}" width="{width:g}" height="{self.rows * LINE_HEIGHT}">
<g{scroll}>
{texts}
</g>
</svg>
</svg>
"""

    def draw_scroll(self, keyframes: Keyframes) -> str:
        """The attributes of the group of all lines, which moves up as lines are added."""
        values: dict[float, str] = {}
        top = 0
        for seconds, n_lines in self.n_lines.items():
            if n_lines - self.rows > top or not values:
                top = max(0, n_lines - self.rows)
                values[seconds] = f"transform:translateY({-top * LINE_HEIGHT}px)"
        if top == 0:
            return ""
        name = keyframes.add(values)
        return f' class="{name}" style="{list(values.values())[-1]}"'

    def draw_lines(self, keyframes: Keyframes) -> Iterator[str]:
        for row, versions in enumerate(self.terminal.versions):
            begins = self.time_of_line(row)
            for version in versions:
                name = ""
                style = ""
                if version.end is not None:
                    values = {version.start: "opacity:1", version.end: "opacity:0"}
                    name = keyframes.add({0.0: "opacity:0"} | values)
                    style = ' style="opacity:0"'
                elif version.start > begins or (row < self.rows and version.start > 0):
                    name = keyframes.add({0.0: "opacity:0", version.start: "opacity:1"})
                y = (row + 1) * LINE_HEIGHT - 5
                yield draw_line(version, y, name, style)

    def time_of_line(self, row: int) -> float:
        """When a line came into being."""
        return next(seconds for seconds, n_lines in self.n_lines.items() if n_lines > row)


class Keyframes:
    """The animations of CSS of an SVG, each of which jumps from value to value."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.names: dict[str, str] = {}

    def add(self, values: Mapping[float, str]) -> str:
        """The class of elements that take some values, by the second from which each holds."""
        steps = ""
        for seconds, value in values.items():
            steps += f"{100 * seconds / self.seconds:.2f}%{{{value}}}"
        return self.names.setdefault(steps, f"a{len(self.names)}")

    def css(self) -> str:
        if not self.names:
            return ""
        rules = f'[class^="a"] {{ animation: {self.seconds:.2f}s step-end infinite }}\n'
        for steps, name in self.names.items():
            rules += f"@keyframes {name}{{{steps}}}.{name}{{animation-name:{name}}}\n"
        return rules


def draw_line(version: Version, y: int, name: str, style: str) -> str:
    """A line as <text>, of which each run of letters is as wide as in the terminal."""
    classes = " ".join(filter(None, (name, "command" if version.is_command else "")))
    attribute = f' class="{classes}"' if classes else ""
    runs = ""
    for run in RUN.finditer(version.text):
        x = PADDING + run.start() * CHARACTER_WIDTH
        width = len(run[0]) * CHARACTER_WIDTH
        runs += f'<tspan x="{x:g}" textLength="{width:g}">{escape(run[0])}</tspan>'
    return f'<text y="{y}"{attribute}{style}>{runs}</text>'


def frame_number(seconds: float) -> int:
    return int(seconds * FRAMES_PER_SECOND)
