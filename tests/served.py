"""The page of `play`, served to a client of the test."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from sm_nanogpt.launcher.views import api
from sm_nanogpt.launcher.views.play import ServedModel, listen, make_app, make_server

ORIGIN = "http://localhost:3000"
LETTERS = "\nabcdefghi "  # as many as the small models have
WISH: dict[str, Any] = dict(prompt="abc", max_tokens=40, temperature=0.8, seed=7)


@dataclass(frozen=True)
class Site:
    """A served page."""

    port: int
    models: list[ServedModel]

    def connect(self, path: str, body: dict[str, Any] | None = None, **changes: Any) -> Any:
        """The answer to a request, which is a POST if it has a body; the connection if it waits."""
        path = f"{path}?token={changes.get('token', 'secret')}"
        headers = {"Host": changes["host"]} if "host" in changes else {}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET" if body is None else "POST", path, json.dumps(body), headers)
        return closing(connection) if changes.get("waits") else connection.getresponse()

    def text(self, number: int = 0, **wish: Any) -> str:
        """What the server generates for WISH, with these changes."""
        name = self.models[number].name
        answer = self.connect("/v1/completions", {"model": name, **WISH, **wish})
        content = answer.read().decode()
        assert answer.status == 200, content
        return str(json.loads(content)["choices"][0]["text"])


@contextmanager
def served(models: list[ServedModel]) -> Iterator[Site]:
    listener = listen(0)
    port = listener.getsockname()[1]
    server = make_server(make_app(models, "secret", api.routes(models), [ORIGIN]))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield Site(port, models)
    server.should_exit = True
    thread.join()
