"""A text for those who have none."""

from __future__ import annotations

import hashlib
import http.client
import http.server
import socket
import sys
import threading
from typing import Any
from unittest.mock import Mock

import pytest
from texts import LONG, stored

from sm_nanogpt.launcher.settings import Settings
from sm_nanogpt.launcher.text import first_text


@pytest.fixture
def shakespeare(monkeypatch):
    """A public home of Shakespeare on loopback; yields what was asked of it."""
    addresses: list[str] = []

    class Home(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            addresses.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(LONG)))
            self.end_headers()
            self.wfile.write(LONG.encode())

        def log_message(self, *_: Any) -> None:
            pass

    sha256 = hashlib.sha256(LONG.encode()).hexdigest()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Home) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        url = f"http://127.0.0.1:{server.server_port}/input.txt"
        monkeypatch.setattr(first_text, "SHAKESPEARE_URL", url)
        monkeypatch.setattr(first_text, "SHAKESPEARE_SHA256", sha256)
        yield addresses
        server.shutdown()


@pytest.mark.usefixtures("home", "shakespeare")
def test_notebooks_get_shakespeare_without_settings():
    assert first_text.first_text().read_text() == LONG


def test_shakespeare_is_downloaded_only_once(home, cli, shakespeare):
    ran = cli("upload-data").good
    assert (stored(ran.out.strip()) / "shakespeare.txt").read_text() == LONG
    assert cli("upload-data").code == 0
    assert shakespeare == ["/input.txt"]
    (home / "cache/shakespeare.txt").write_text("damaged")
    assert cli("upload-data").code == 0
    assert shakespeare == ["/input.txt"] * 2
    assert (home / "cache/shakespeare.txt").read_text() == LONG


@pytest.mark.parametrize("trouble", ["silent name server", "cut", "another file"])
def test_without_shakespeare_pythons_own_reference_is_taken(
    trouble, home, shakespeare, monkeypatch, caplog
):
    has_ended = threading.Event()

    def name_server_that_is_silent(*_: Any, **__: Any) -> None:
        has_ended.wait(60)
        raise socket.gaierror("no answer")

    if trouble == "silent name server":
        monkeypatch.setattr(first_text, "PATIENCE_SECONDS", 0.1)
        monkeypatch.setattr("socket.getaddrinfo", name_server_that_is_silent)
    elif trouble == "cut":
        cut = Mock(side_effect=http.client.IncompleteRead(b"some"))
        monkeypatch.setattr("urllib.request.urlopen", cut)
    else:
        monkeypatch.setattr(first_text, "SHAKESPEARE_SHA256", "0" * 64)
    path = first_text.first_text(Settings(home=home))
    assert not has_ended.is_set()
    has_ended.set()
    assert path.name == "python-reference.txt"
    (message,) = caplog.messages
    assert "/input.txt: " in message
    assert "comes with Python" in message
    assert not (home / "cache/shakespeare.txt").exists()


def test_pythons_own_reference_is_uploaded(cli, monkeypatch):
    url = "http://127.0.0.1:9/input.txt"
    monkeypatch.setattr(first_text, "SHAKESPEARE_URL", url)
    ran = cli("upload-data").good
    (line,) = [line for line in ran.err.splitlines() if "comes with Python" in line]
    assert "`sm-nanogpt upload-data FILE`" in line
    text = (stored(ran.out.strip()) / "python-reference.txt").read_text()
    assert len(text) > 300_000
    assert 'The "while" statement' in text


def test_without_either_text_an_own_one_is_asked_for(cli, monkeypatch):
    url = "http://127.0.0.1:9/input.txt"
    monkeypatch.setattr(first_text, "SHAKESPEARE_URL", url)
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    ran = cli("upload-data")
    assert ran.failed(1, url, "`sm-nanogpt upload-data FILE`") and not ran.out
