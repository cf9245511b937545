"""`colrow serve` for a measurement: started on a free port, asked over HTTP, ended with SIGTERM.

with serving("demo", "--tp", "2") as server:
    server.ask({"prompt": "Hello", "max_tokens": 4})["usage"]
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PATIENCE = 600.0  # seconds for an answer


@dataclass
class Running:
    """`lines`: what it has written on standard error so far."""

    process: subprocess.Popen[str]
    port: int
    lines: list[str]

    def begin(self, body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A request for a completion whose answer has not been read yet. `body`: an object, or bytes as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.request("POST", "/v1/completions", body if isinstance(body, bytes) else json.dumps(body))
        return connection, connection.getresponse()

    def ask(self, body: Any) -> dict[str, Any]:
        """The whole answer. ValueError where it is an error."""
        connection, response = self.begin(body)
        with contextlib.closing(connection):
            answer: dict[str, Any] = json.loads(response.read())
        if response.status != 200:
            raise ValueError(answer)
        return answer

    def get(self, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().read().decode()


@contextlib.contextmanager
def serving(model: str, *options: str) -> Iterator[Running]:
    """Until it is ready; SystemExit with what it said where that does not come. Afterwards it has ended, and `process` its exit code."""
    command = [sys.executable, "-m", "colrow", "serve", model, "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        lines = []
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"http://[^/]*:(\d+)/", line):
                break
        else:
            raise SystemExit("".join(lines))
        drain = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
        drain.start()
        try:
            yield Running(process, int(found[1]), lines)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
            drain.join(5)
