"""Data sets of the Hugging Face Hub, served on loopback as its API answers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_the_test"
PAGE = 2  # entries of a page of a listing; the Hub has 1000


@dataclass
class Hub:
    """What it serves: files by the id of their data set. The client is a member of `granted`."""

    url: str = ""
    datasets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    granted: set[str] = field(default_factory=set)  # gated ones that the owner of TOKEN may read
    claimed: dict[str, int] = field(default_factory=dict)  # sizes that it lists, of some paths
    sent: list[str] = field(default_factory=list)  # paths of the files that were downloaded
    broken: bool = False  # each body ends early


class Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            try:
                status, headers, body = answer(hub, self.path, self.headers)
            except Refused as refused:
                status, body = refused.status, json.dumps({"error": str(refused)}).encode()
                headers = {"X-Error-Code": refused.code, "X-Error-Message": str(refused)}
            self.send_response(status)
            length = len(body) + (1000 if hub.broken and "/resolve/" in self.path else 0)
            self.send_header("Content-Length", str(length))
            self.send_header("X-Request-Id", "Root=1-0")
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = length != len(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield hub
    server.shutdown()
    server.server_close()


def answer(hub: Hub, target: str, sent: Any) -> tuple[int, dict[str, str], bytes]:
    url = urlsplit(target)
    match = re.fullmatch(
        r"(?:/api)?/datasets/([^/]+/[^/]+)(?:/(revision|tree|resolve)/([^/]+)(?:/(.*))?)?", url.path
    )
    if not match:
        raise Refused(404, "", "Sorry, we can't find the page you are looking for.")
    name = match[1]
    part = match[2]
    revision = unquote(match[3] or "main")
    path = unquote(match[4] or "")
    token = sent.get("Authorization", "").removeprefix("Bearer ")
    if token not in ("", TOKEN):
        raise Refused(401, "", "Invalid credentials in Authorization header")
    if name not in hub.datasets or (name in hub.private and not token):
        if not token:  # so that nobody learns which private ones there are
            raise Refused(401, "RepoNotFound", "Invalid username or password.")
        raise Refused(404, "RepoNotFound", "Repository not found")
    if revision not in ("main", COMMIT, "refs/convert/parquet"):
        raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
    files = hub.datasets[name]
    if part == "resolve":
        if name in hub.gated and (not token or name not in hub.granted):
            raise Refused(*restricted(name, bool(token)))
        if path not in files:
            raise Refused(404, "EntryNotFound", "Entry not found")
        hub.sent.append(path)
        etag = f'"{hashlib.sha1(files[path]).hexdigest()}"'
        return 200, {"ETag": etag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}, files[path]
    if part == "tree":
        return listing(hub, name, path, url)
    gated = "manual" if name in hub.gated else False  # anybody may read this
    facts = {"_id": "6", "id": name, "sha": COMMIT, "private": name in hub.private, "gated": gated}
    facts |= {"tags": [], "downloads": 0, "siblings": [{"rfilename": file} for file in files]}
    return 200, {"Content-Type": "application/json"}, json.dumps(facts).encode()


def restricted(name: str, is_authenticated: bool) -> tuple[int, str, str]:
    message = f"Access to dataset {name} is restricted"
    if not is_authenticated:
        message += ". You must have access to it and be authenticated to access it. Please log in."
        return 401, "GatedRepo", message
    page = f"https://huggingface.co/datasets/{name}"
    message += f" and you are not in the authorized list. Visit {page} to ask for access."
    return 403, "GatedRepo", message


def listing(hub: Hub, name: str, path: str, url: Any) -> tuple[int, dict[str, str], bytes]:
    """A page of the entries below a folder, and a link to the next one."""
    query = parse_qs(url.query)
    prefix = f"{path}/" if path else ""
    entries: dict[str, dict[str, Any]] = {}
    for file, content in sorted(hub.datasets[name].items()):
        if not file.startswith(prefix):
            continue
        oid = hashlib.sha1(content).hexdigest()
        parts = file.removeprefix(prefix).split("/")
        for depth in range(1, len(parts)):
            folder = prefix + "/".join(parts[:depth])
            entries[folder] = {"type": "directory", "oid": oid, "size": 0, "path": folder}
        entries[file] = {"type": "file", "oid": oid, "path": file}
        entries[file]["size"] = hub.claimed.get(file, len(content))
    if not entries:
        raise Refused(404, "EntryNotFound", f'{path} does not exist on "main"')
    if query.get("recursive", ["false"])[0].lower() != "true":
        entries = {e: v for e, v in entries.items() if "/" not in e.removeprefix(prefix)}
    begin = int(query.get("cursor", ["0"])[0])
    page = list(entries.values())[begin : begin + PAGE]
    headers = {"Content-Type": "application/json"}
    if begin + PAGE < len(entries):
        options = f"recursive={query['recursive'][0]}&cursor={begin + PAGE}"
        headers["Link"] = f'<{hub.url}{url.path}?{options}>; rel="next"'
    return 200, headers, json.dumps(page).encode()
