"""examples/recording.py: what a terminal showed, as an SVG that needs nothing else."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import recording
from recording import Film, Output, Recording, Terminal

SVG = "{http://www.w3.org/2000/svg}"
OUTPUTS = [Output(0.5 * n, f"line {n} <é>\r\n") for n in range(9)]


def texts_of(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def film() -> Film:
    film = Film(columns=40, rows=4)
    film.add(Recording("count", OUTPUTS, 4.5), speed=1, longest_pause=1)
    return film


def test_a_command_is_recorded_as_a_terminal_shows_it(tmp_path, capsys):
    shown = recording.record("sh -c '[ -t 1 ] && stty size && echo é'", tmp_path, {}, 50, 20)
    assert shown.text == "20 50\r\né\r\n"


def test_a_command_that_fails_ends_the_script(tmp_path):
    with pytest.raises(SystemExit, match="failed: false"):
        recording.record("false", tmp_path, {})


def test_a_progress_bar_is_written_over():
    terminal = Terminal(columns=6)
    for seconds, text in enumerate(["10 %", "\r100 %", "\r     \rdone\n"]):
        terminal.write(text)
        terminal.show(float(seconds))
    first_line = [(version.text, version.end) for version in terminal.versions[0]]
    assert first_line == [("10 %", 1.0), ("100 %", 2.0), ("done", None)]


def test_a_line_is_cut_at_the_width_of_the_terminal():
    terminal = Terminal(columns=4)
    terminal.write("\x1b[1mabcdef\x1b[0m")
    assert ["".join(line) for line in terminal.lines] == ["abcd", "ef"]


def test_an_svg_has_all_lines_and_needs_nothing_else():
    svg = film().svg("counting")
    texts = texts_of(svg)
    assert texts[0] == "counting"
    assert texts[-1] == "line 8 <é>"[: len(texts[-1])]
    assert "$ count" in texts
    assert "prefers-reduced-motion" in svg
    assert not any(sign in svg for sign in ("<script", "href", "url(", "@import"))


def test_the_last_screen_needs_no_animation():
    """What was moved or replaced stands where it ends, for those who asked for no motion."""
    svg = film().svg("counting")
    root = ElementTree.fromstring(svg)
    [group] = root.iter(f"{SVG}g")
    lines_above = 1 + len(OUTPUTS) + 1 - 4  # the command, what it wrote, an empty line
    assert group.get("style") == f"transform:translateY({-recording.LINE_HEIGHT * lines_above}px)"
    typed = [text for text in group if "".join(text.itertext()) == "$ co"]
    assert [text.get("style") for text in typed] == ["opacity:0"]
