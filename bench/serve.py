"""A server under several clients at once: colrow's, in the default mode and with --fast, beside vLLM's and llama.cpp's, on one model.

    python bench/serve.py FOLDER --tp 2 --clients 1,4,8,16 [--peer NAME=PYTHON ...] [--results FILE --next] [--only NAME]

Servers run one after the other, each on a free port. Each client asks for --tokens tokens after a prompt of its own (some 90 tokens, new
each time), reads them as they come, and asks again, until all of them together have asked --requests times. By number of clients:
requests/s, new tokens/s, milliseconds to the first token and from one token to the next (median, and what one in a hundred exceeds).
Then, of colrow, the seconds to the first token of a prompt whose first 200 tokens are new to the server, and of one that begins with the
same 200 and goes on with 20 of its own.

--peer vLLM=PYTHON and llama.cpp=PYTHON name the interpreters of the peers' own environments; a peer that has none, or does not start, is
left out with a line. llama.cpp's is the server of its Python package, which answers one request after the other; it gets a GGUF file of the
same weights (bench/gguf_model.py). FOLDER is best one of bench/random_model.py: each of its tokens has a text, so what is streamed can
be counted. With --results, each call with --next runs the server that FILE has least of, and a call without it prints the table of medians.
Not here: DeepSpeed, which has no server of many requests, and the memory floor (bench/decode.py).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import http.client
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType
from gguf_model import write as write_gguf

READY = 140.0  # seconds that a server may take to start
Result = dict[str, Any]
Command = tuple[list[str], dict[str, str]]
"""A command and what it needs in its environment."""


def servers(options: argparse.Namespace, port: int) -> dict[str, Command | str]:
    """By name the command, or why it is left out."""
    peers = dict(pair.split("=", 1) for pair in options.peer)
    colrow = [sys.executable, "-m", "colrow", "serve", options.model, "--tp", options.tp, "--port", str(port)]
    cores = sorted(os.sched_getaffinity(0))[: int(options.tp)]
    own: dict[str, Command | str] = {"colrow": (colrow, {}), "colrow --fast": ([*colrow, "--fast"], {})}
    makers = {"vLLM": _vllm, "llama.cpp": _llama}
    missing = "not installed: no --peer {}=PYTHON"
    return own | {name: make(peers[name], options, port, cores) if name in peers else missing.format(name) for name, make in makers.items()}


def _vllm(python: str, options: argparse.Namespace, port: int, cores: Sequence[int]) -> Command:
    asked = {"model": options.model, "tensor-parallel-size": options.tp, "port": port, "max-model-len": 1024, "host": "127.0.0.1"}
    words = [word for key, value in asked.items() for word in (f"--{key}", str(value))]
    bound = "|".join(map(str, cores))
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": bound, "VLLM_NO_USAGE_STATS": "1"}
    return [python, "-m", "vllm.entrypoints.openai.api_server", *words], settings


def _llama(python: str, options: argparse.Namespace, port: int, cores: Sequence[int]) -> Command:
    file = Path(options.model) / "model-BF16.gguf"
    if not file.exists():
        write_gguf(Path(options.model), file, GGMLQuantizationType.BF16)
    asked = {"model": file, "host": "127.0.0.1", "port": port, "n_ctx": 1024, "n_threads": len(cores), "n_threads_batch": len(cores)}
    asked |= {"logits_all": False, "interrupt_requests": False}
    return [python, "-m", "llama_cpp.server", *(word for key, value in asked.items() for word in (f"--{key}", str(value)))], {}


# ---- One server ----


def measure(options: argparse.Namespace, name: str) -> Result:
    """What is printed of it, by number of clients, or why it is left out."""
    port = free_port()
    server = servers(options, port)[name]
    if isinstance(server, str):
        return {"name": name, "left out": server}
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said, started(server, said) as process:
        model = ready(process, port)
        if model is None:
            said.seek(0)
            lines = [line.strip() for line in said if line.strip()]
            return {"name": name, "left out": (lines or ["it did not start"])[-1][:120]}
        result: Result = {"name": name, "start": time.perf_counter() - start}
        client = Client(port, model)
        client.ask(client.prompt(), 4)
        result["clients"] = {count: load(client, int(count), options.requests, options.tokens) for count in options.clients.split(",")}
        if name.startswith("colrow"):
            times = [(first_token(client, at, at), first_token(client, at, at + 1000)) for at in range(3)]
            result["new"], result["shared"] = (statistics.median(side) for side in zip(*times, strict=True))
        return result


@contextlib.contextmanager
def started(server: Command, said: Any) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(server[0], stdout=said, stderr=said, env=os.environ | server[1]) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def ready(process: subprocess.Popen[bytes], port: int) -> str | None:
    """The name under which the server has the model, once it answers; None where it ends before."""
    end = time.monotonic() + READY
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError, LookupError):
            if _get(port, "/health")[0] in (200, 404):  # llama.cpp's has no such route, and answers when the model is open
                return str(json.loads(_get(port, "/v1/models")[1])["data"][0]["id"])
        time.sleep(0.2)
    return None


def _get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection):
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()


class Client:
    """Asks a server. Prompts are made of letters, so that every server cuts them into the same tokens."""

    def __init__(self, port: int, model: str) -> None:
        self.port, self.model = port, model
        self._draw = random.Random(port)

    def prompt(self) -> str:
        return " ".join("".join(self._draw.choices("abcdefghijklmnopqrstuvwxyz", k=4)) for _ in range(30))

    def ask(self, prompt: str | list[int], tokens: int) -> list[float]:
        """When it was asked, and when each piece of text came. SystemExit where it is refused."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        with contextlib.closing(connection):
            times = [time.perf_counter()]
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise SystemExit(f"{self.model}: {response.read().decode()}")
            while line := response.readline():
                if line.startswith(b"data: {") and any(choice["text"] for choice in json.loads(line[6:])["choices"]):
                    times.append(time.perf_counter())
        return times


def load(client: Client, count: int, asked: int, tokens: int) -> dict[str, float]:
    """Of `count` clients, each of which asks again as soon as it has its answer, `asked` times together (once each at least)."""
    prompts = [client.prompt() for _ in range(max(count, asked))]
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(lambda prompt: client.ask(prompt, tokens), prompts))
    seconds = time.perf_counter() - start
    first = [answer[1] - answer[0] for answer in answers]
    between = [after - before for answer in answers for before, after in itertools.pairwise(answer[1:])]
    times = {"first": _at(first, 0.5), "first99": _at(first, 0.99), "next": _at(between, 0.5), "next99": _at(between, 0.99)}
    return {"requests": len(answers) / seconds, "tokens": sum(len(answer) - 1 for answer in answers) / seconds, **times}


def _at(values: Sequence[float], part: float) -> float:
    """Milliseconds below which that part of the values lies."""
    return 1000 * sorted(values)[min(int(part * len(values)), len(values) - 1)]


def first_token(client: Client, beginning: int, end: int) -> float:
    """Seconds for one token after a prompt of 200 tokens that depend on `beginning` and 20 that depend on `end`."""
    prompt = [random.Random(seed).randrange(300, 400) for seed in range(beginning * 200, beginning * 200 + 200)]
    prompt += [random.Random(seed).randrange(300, 400) for seed in range(end * 20, end * 20 + 20)]
    times = client.ask(prompt, 1)
    return times[-1] - times[0]


# ---- What is printed ----


def medians(results: list[Result]) -> list[Result]:
    """One result for each name, in the order of their first coming."""
    out = []
    for name in dict.fromkeys(r["name"] for r in results):
        mine = [r for r in results if r["name"] == name and "clients" in r] or [r for r in results if r["name"] == name]
        out.append({**_median(mine), "runs": len(mine)})
    return out


def _median(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: _median([value[key] for value in values if key in value]) for value in values for key in value}
    return statistics.median(values) if isinstance(first, float) else first


def lines(results: list[Result]) -> Iterator[str]:
    found = medians(results)
    yield from (f"{r['name']} left out: {r['left out']}" for r in found if "left out" in r)
    found = [r for r in found if "clients" in r]
    yield f"clients {'':16} runs requests/s tokens/s  ratio   first token ms       next token ms  (median, 99 %; ratio: to the first line)"
    for count in dict.fromkeys(count for r in found for count in r["clients"]):
        those = [(r, r["clients"][count]) for r in found if count in r["clients"]]
        for r, one in those:
            ratio = one["tokens"] / those[0][1]["tokens"]
            yield (
                f"{count:>7} {r['name']:16} {r['runs']:4} {one['requests']:10.2f} {one['tokens']:8.1f} {ratio:6.2f}"
                f" {one['first']:8.0f} {one['first99']:8.0f}  {one['next']:9.1f} {one['next99']:9.1f}"
            )
    for r in found:
        shared = f"; first token of 220: {r['new']:.3f} s, {r['shared']:.3f} s where 200 came before" if "new" in r else ""
        yield f"{r['name']}: answers {r['start']:.0f} s after its start{shared}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tp", default="2")
    parser.add_argument("--clients", default="1,4,8,16")
    parser.add_argument("--requests", type=int, default=8, help="of all clients together, by number of clients; at least one each")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--next", action="store_true")
    parser.add_argument("--only")
    options = parser.parse_args()
    kept = options.results is not None and options.results.exists()
    results = [json.loads(line) for line in options.results.read_text().splitlines()] if kept else []
    todo = list(servers(options, 0))
    least = min(todo, key=[r["name"] for r in results].count)
    for name in [options.only] if options.only else [least] if options.next else [] if options.results else todo:
        results.append(measure(options, name))
        if options.results:
            options.results.write_text("".join(json.dumps(r) + "\n" for r in results))
    print("\n".join(lines(results)))


if __name__ == "__main__":
    main()
