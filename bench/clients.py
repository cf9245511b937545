"""A server under clients of every kind: is each answer the one that the request gets alone, and does memory stay flat?

    python bench/clients.py demo --tp 2 [--clients 32] [--minutes 10] [--seed 0]

Starts `colrow serve` (default mode), asks each of some prompts alone, then lets --clients clients ask them all at once: in every second one
the reader is slow, every eighth goes away in the middle of its answer. Then, for --minutes, each client does one random thing after the
other: ask, stream, read slowly, go away while the answer is made or before it begins, send what is no request. Every answer, and what was
read of one that was left, must be what the request got alone, to the character. Printed: what was asked, wrong answers, errors, and the
resident memory of the server's processes over time. Exit code 0 only if nothing was wrong.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import http.client
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import psutil

SYSTEM = "You are a careful assistant who answers every question of every user in short and plain words, and never guesses. " * 3
BAD: tuple[Any, ...] = (
    b"{",
    b"[]",
    b'{"prompt": 5.5}',
    b'{"prompt": []}',
    b'{"prompt": "x", "max_tokens": -1}',
    b'{"prompt": "x", "n": "y"}',
)


@dataclass
class Server:
    """`alone`: the text of each prompt when nothing else runs."""

    process: subprocess.Popen[str]
    port: int
    prompts: list[str]
    tokens: int
    alone: list[str] = field(default_factory=list)
    done: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)

    def body(self, number: int, stream: bool = False) -> dict[str, Any]:
        asked = {"prompt": self.prompts[number], "max_tokens": self.tokens, "temperature": 0, "ignore_eos": True}
        return {**asked, "stream": stream}

    def begin(self, body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", "/v1/completions", body if isinstance(body, bytes) else json.dumps(body))
        return connection, connection.getresponse()

    def whole(self, number: int) -> str:
        connection, response = self.begin(self.body(number))
        with contextlib.closing(connection):
            answer = json.loads(response.read())
            if response.status != 200:
                raise ValueError(answer)
            return str(answer["choices"][0]["text"])

    def streamed(self, number: int, pause: float = 0.0, pieces: int | None = None) -> str:
        """The text of the first `pieces` events (None: all); then the client goes away."""
        connection, response = self.begin(self.body(number, stream=True))
        text, seen, ended = "", 0, False
        with contextlib.closing(connection):
            while (line := response.readline()) and not ended and (pieces is None or seen < pieces):
                ended = line.startswith(b"data: [DONE]")
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ValueError(event)
                    text, seen = text + event["choices"][0]["text"], seen + 1
                    time.sleep(pause)
        if pieces is None and not ended:
            raise ValueError("the stream ended before its end")
        return text

    def leave_at_once(self, number: int, after: float) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(self.body(number)))
        time.sleep(after)
        connection.close()

    def check(self, kind: str, number: int, text: str, whole: bool = True) -> None:
        self.done[kind] += 1
        expected = self.alone[number]
        if text != expected if whole else not expected.startswith(text):
            self.wrong.append(f"{kind}: prompt {number}: {text!r} instead of {expected!r}")

    def metric(self, name: str) -> float:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        return float(re.findall(rf"^colrow_{name} (\S+)$", text, re.M)[0])

    def resident(self) -> list[int]:
        """Bytes of the server and its ranks."""
        parent = psutil.Process(self.process.pid)
        return [p.memory_info().rss for p in (parent, *parent.children(recursive=True))]


def one_thing(server: Server, draw: random.Random) -> None:
    """What a client does next."""
    number = draw.randrange(len(server.prompts))
    kind = draw.choice(("plain", "plain", "stream", "stream", "slow", "leaves", "leaves", "never reads", "no request"))
    try:
        if kind == "plain":
            server.check(kind, number, server.whole(number))
        elif kind in ("stream", "slow"):
            server.check(kind, number, server.streamed(number, 0.05 if kind == "slow" else 0.0))
        elif kind == "leaves":
            server.check(kind, number, server.streamed(number, 0.0, draw.randrange(1, server.tokens)), whole=False)
        elif kind == "never reads":
            server.leave_at_once(number, draw.random())
            server.done[kind] += 1
        else:
            connection, response = server.begin(draw.choice(BAD))
            with contextlib.closing(connection):
                response.read()
                server.done[kind] += 1
                if response.status != 400:
                    server.wrong.append(f"{kind}: status {response.status}")
    except Exception as error:  # whatever it is, it is counted and shown
        server.wrong.append(f"{kind}: {type(error).__name__}: {error}")


def all_at_once(server: Server, clients: int) -> None:
    def client(at: int) -> None:
        number = at % len(server.prompts)
        if at % 8 == 3:
            server.check("leaves", number, server.streamed(number, 0.0, 5), whole=False)
        else:
            server.check("slow" if at % 2 else "stream", number, server.streamed(number, 0.05 if at % 2 else 0.0))

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        for future in [pool.submit(client, at) for at in range(clients)]:
            future.result()


def soak(server: Server, clients: int, minutes: float, seed: int) -> list[list[int]]:
    """Resident memory, sampled every few seconds."""
    until, samples = time.monotonic() + 60 * minutes, list[list[int]]()

    def client(at: int) -> None:
        draw = random.Random(seed * 1000 + at)
        while time.monotonic() < until:
            one_thing(server, draw)

    threads = [threading.Thread(target=client, args=(at,)) for at in range(clients)]
    for thread in threads:
        thread.start()
    while time.monotonic() < until and server.process.poll() is None:
        samples.append(server.resident())
        time.sleep(min(3.0, 60 * minutes / 20))
    for thread in threads:
        thread.join()
    return samples


@contextlib.contextmanager
def serving(options: argparse.Namespace) -> Any:
    command = [sys.executable, "-m", "colrow", "serve", options.model, "--tp", str(options.tp), "--port", "0", "--cache", options.cache]
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
        prompts = [f"{SYSTEM if at % 2 else ''}Question {at}: what is {at} and {at * 7}?" for at in range(options.clients)]
        try:
            yield Server(process, int(found[1]), prompts, options.tokens)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
            drain.join(5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--cache", default="100MB", help="of a rank; small, so that sequences give up their places too")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with serving(options) as server:
        server.alone = [server.whole(number) for number in range(len(server.prompts))]
        start = time.perf_counter()
        all_at_once(server, options.clients)
        print(
            f"{options.clients} at once: {dict(server.done)} in {time.perf_counter() - start:.0f} s, {len(server.wrong)} wrong", flush=True
        )
        server.done.clear()
        samples = soak(server, options.clients, options.minutes, options.seed) if options.minutes else []
        if samples:
            print(f"{options.minutes:g} minutes: {dict(server.done)}, {len(server.wrong)} wrong")
            third = len(samples) // 3
            for name, at in (("HTTP", 0), *((f"rank {rank}", rank + 1) for rank in range(options.tp))):
                row = [sample[-options.tp :][at - 1] if at else sample[0] for sample in samples]
                first, last = max(row[third : 2 * third]), max(row[2 * third :])
                print(f"{name:8} resident {row[0] / 1e6:.0f} MB at first; at most {first / 1e6:.0f} midway, {last / 1e6:.0f} at the end")
        until = time.monotonic() + 30
        while (left := [server.metric("running"), server.metric("waiting")]) != [0, 0] and time.monotonic() < until:
            time.sleep(0.2)
        shared, paused = server.metric("shared_tokens_total"), server.metric("paused_total")
        print(f"left: {left[0]:g} running, {left[1]:g} waiting; {shared:g} prompt tokens shared, {paused:g} pauses")
        for line in server.wrong[:20]:
            print("WRONG", line)
    code = server.process.returncode
    print(f"exit code of the server: {code}")
    return 0 if not server.wrong and left == [0, 0] and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
