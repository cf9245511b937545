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
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import psutil
from server import Running, serving

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
class Asked:
    """What clients ask the server and what came back. `alone`: the text of each prompt when nothing else runs."""

    server: Running
    prompts: list[str]
    tokens: int
    alone: list[str] = field(default_factory=list)
    done: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)

    def body(self, number: int, stream: bool = False) -> dict[str, Any]:
        asked = {"prompt": self.prompts[number], "max_tokens": self.tokens, "temperature": 0, "ignore_eos": True}
        return {**asked, "stream": stream}

    def whole(self, number: int) -> str:
        return str(self.server.ask(self.body(number))["choices"][0]["text"])

    def streamed(self, number: int, pause: float = 0.0, pieces: int | None = None) -> str:
        """The text of the first `pieces` events (None: all); then the client goes away."""
        connection, response = self.server.begin(self.body(number, stream=True))
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
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(self.body(number)))
        time.sleep(after)
        connection.close()

    def check(self, kind: str, number: int, text: str, whole: bool = True) -> None:
        self.done[kind] += 1
        expected = self.alone[number]
        if text != expected if whole else not expected.startswith(text):
            self.wrong.append(f"{kind}: prompt {number}: {text!r} instead of {expected!r}")

    def metric(self, name: str) -> float:
        return float(re.findall(rf"^colrow_{name} (\S+)$", self.server.get("/metrics"), re.M)[0])

    def resident(self) -> list[int]:
        """Bytes of the server and of each rank."""
        ranks = [float(size) for size in re.findall(r"^colrow_resident_bytes\{rank=\"\d+\"\} (\S+)$", self.server.get("/metrics"), re.M)]
        return [psutil.Process(self.server.process.pid).memory_info().rss, *map(int, ranks)]


def one_thing(asked: Asked, draw: random.Random) -> None:
    """What a client does next."""
    number = draw.randrange(len(asked.prompts))
    kind = draw.choice(("plain", "plain", "stream", "stream", "slow", "leaves", "leaves", "never reads", "no request"))
    try:
        if kind == "plain":
            asked.check(kind, number, asked.whole(number))
        elif kind in ("stream", "slow"):
            asked.check(kind, number, asked.streamed(number, 0.05 if kind == "slow" else 0.0))
        elif kind == "leaves":
            asked.check(kind, number, asked.streamed(number, 0.0, draw.randrange(1, asked.tokens)), whole=False)
        elif kind == "never reads":
            asked.leave_at_once(number, draw.random())
            asked.done[kind] += 1
        else:
            connection, response = asked.server.begin(draw.choice(BAD))
            with contextlib.closing(connection):
                response.read()
                asked.done[kind] += 1
                if response.status != 400:
                    asked.wrong.append(f"{kind}: status {response.status}")
    except Exception as error:  # whatever it is, it is counted and shown
        asked.wrong.append(f"{kind}: {type(error).__name__}: {error}")


def all_at_once(asked: Asked, clients: int) -> None:
    def client(at: int) -> None:
        number = at % len(asked.prompts)
        if at % 8 == 3:
            asked.check("leaves", number, asked.streamed(number, 0.0, 5), whole=False)
        else:
            asked.check("slow" if at % 2 else "stream", number, asked.streamed(number, 0.05 if at % 2 else 0.0))

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        for future in [pool.submit(client, at) for at in range(clients)]:
            future.result()


def soak(asked: Asked, clients: int, minutes: float, seed: int) -> list[list[int]]:
    """Resident memory, sampled every few seconds."""
    until, samples = time.monotonic() + 60 * minutes, list[list[int]]()

    def client(at: int) -> None:
        draw = random.Random(seed * 1000 + at)
        while time.monotonic() < until:
            one_thing(asked, draw)

    threads = [threading.Thread(target=client, args=(at,)) for at in range(clients)]
    for thread in threads:
        thread.start()
    while time.monotonic() < until and asked.server.process.poll() is None:
        samples.append(asked.resident())
        time.sleep(min(3.0, 60 * minutes / 20))
    for thread in threads:
        thread.join()
    return samples


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
    prompts = [f"{SYSTEM if at % 2 else ''}Question {at}: what is {at} and {at * 7}?" for at in range(options.clients)]
    with serving(options.model, "--tp", str(options.tp), "--cache", options.cache) as server:
        asked = Asked(server, prompts, options.tokens)
        asked.alone = [asked.whole(number) for number in range(len(prompts))]
        start = time.perf_counter()
        all_at_once(asked, options.clients)
        print(f"{options.clients} at once: {dict(asked.done)} in {time.perf_counter() - start:.0f} s, {len(asked.wrong)} wrong", flush=True)
        asked.done.clear()
        if samples := soak(asked, options.clients, options.minutes, options.seed) if options.minutes else []:
            print(f"{options.minutes:g} minutes: {dict(asked.done)}, {len(asked.wrong)} wrong")
            third = len(samples) // 3
            for name, row in zip(("HTTP", *(f"rank {rank}" for rank in range(options.tp))), zip(*samples, strict=True), strict=True):
                first, last = max(row[third : 2 * third]), max(row[2 * third :])
                print(f"{name:8} resident {row[0] / 1e6:.0f} MB at first; at most {first / 1e6:.0f} midway, {last / 1e6:.0f} at the end")
        until = time.monotonic() + 30
        while (left := [asked.metric("running"), asked.metric("waiting")]) != [0, 0] and time.monotonic() < until:
            time.sleep(0.2)
        shared, paused = asked.metric("shared_tokens_total"), asked.metric("paused_total")
        print(f"left: {left[0]:g} running, {left[1]:g} waiting; {shared:g} prompt tokens shared, {paused:g} pauses")
        for line in asked.wrong[:20]:
            print("WRONG", line)
    code = server.process.returncode
    print(f"exit code of the server: {code}")
    return 0 if not asked.wrong and left == [0, 0] and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
