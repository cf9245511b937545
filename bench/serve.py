"""Tokens per second of `colrow serve` for several numbers of clients at once, in the default mode and with --fast, beside vLLM's; and what
a beginning that prompts share saves.

    python bench/serve.py demo --tp 2 --clients 1,8,32 --tokens 32 --repeat 3 [--peer vLLM=PYTHON] [--results FILE --only NAME]

Starts one server after the other on a free port; each client sends one prompt and waits for the whole answer. Printed: the median over the
repeats of all new tokens per second, and the ratio to the first server. Then the seconds to the first token of a prompt whose first 200
tokens are new to the server, and of one that begins with the same 200 (a system prompt, say) and goes on with 20 of its own; medians too.

--peer vLLM=PYTHON names the interpreter of vLLM's own environment, which needs a model's folder; without it, it is left out with a line.
With --results and --only one server runs and is added to FILE, so that a run can be cut into pieces; with --results alone FILE is printed.
Not here: llama.cpp and DeepSpeed, which have no server of many requests in their Python packages, and the memory floor (bench/decode.py).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import http.client
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
from pathlib import Path
from typing import Any

READY = 140.0  # seconds that a server may take to start
Result = dict[str, Any]


def servers(options: argparse.Namespace, port: int) -> dict[str, tuple[list[str], dict[str, str]] | str]:
    """By name the command and what it needs in its environment, or why it is left out."""
    colrow = [sys.executable, "-m", "colrow", "serve", options.model, "--tp", options.tp, "--port", str(port)]
    peers = dict(pair.split("=", 1) for pair in options.peer)
    vllm: tuple[list[str], dict[str, str]] | str = "not installed: no --peer vLLM=PYTHON"
    if "vLLM" in peers:
        asked = {"model": options.model, "tensor-parallel-size": options.tp, "port": port, "max-model-len": 1024, "host": "127.0.0.1"}
        words = [word for key, value in asked.items() for word in (f"--{key}", str(value))]
        cores = "|".join(map(str, sorted(os.sched_getaffinity(0))[: int(options.tp)]))
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_NO_USAGE_STATS": "1"}
        vllm = [peers["vLLM"], "-m", "vllm.entrypoints.openai.api_server", *words], settings
    return {"colrow": (colrow, {}), "colrow --fast": ([*colrow, "--fast"], {}), "vLLM": vllm}


def measure(options: argparse.Namespace, name: str) -> Result:
    """Tokens per second by number of clients, and the seconds to the first token."""
    port = free_port()
    server = servers(options, port)[name]
    if isinstance(server, str):
        return {"name": name, "left out": server}
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(server[0], stdout=said, stderr=said, env=os.environ | server[1]) as process:
        try:
            model = ready(process, port)
            if model is None:
                said.seek(0)
                lines = [line.strip() for line in said if line.strip()]
                return {"name": name, "left out": (lines or ["it did not start"])[-1][:120]}
            ask(port, model, 0, 4)
            times = [(first_token(port, model, at, at), first_token(port, model, at, at + 1000)) for at in range(options.repeat)]
            new, shared = (statistics.median(side) for side in zip(*times, strict=True))
            rates = {
                count: statistics.median(rate(port, model, int(count), options.tokens) for _ in range(options.repeat))
                for count in options.clients.split(",")
            }
            return {"name": name, "rates": rates, "new": new, "shared": shared}
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
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status != 200:
                raise OSError
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/v1/models")
            return str(json.loads(connection.getresponse().read())["data"][0]["id"])
        except (OSError, http.client.HTTPException, ValueError, LookupError):
            time.sleep(0.2)
    return None


def rate(port: int, model: str, count: int, tokens: int) -> float:
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        made = sum(pool.map(lambda at: ask(port, model, at, tokens), range(count)))
    return made / (time.perf_counter() - start)


def ask(port: int, model: str, number: int, tokens: int) -> int:
    return _complete(port, model, f"The story number {number} begins", tokens)


def first_token(port: int, model: str, beginning: int, end: int) -> float:
    """Seconds for one token after a prompt of 200 tokens that depend on `beginning` and 20 that depend on `end`."""
    prompt = [random.Random(seed).randrange(300, 400) for seed in range(beginning * 200, beginning * 200 + 200)]
    prompt += [random.Random(seed).randrange(300, 400) for seed in range(end * 20, end * 20 + 20)]
    start = time.perf_counter()
    assert _complete(port, model, prompt, 1) == 1
    return time.perf_counter() - start


def _complete(port: int, model: str, prompt: str | list[int], tokens: int) -> int:
    """The number of new tokens."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    if "usage" not in answer:
        raise SystemExit(f"{model}: {answer}")
    return int(answer["usage"]["completion_tokens"])


def show(results: list[Result]) -> None:
    found = {r["name"]: r for r in results if "rates" in r}
    for r in results:
        if "left out" in r:
            print(f"{r['name']} left out: {r['left out']}")
    if not found:
        return
    first = next(iter(found.values()))
    print("tokens/s of all clients together (ratio to the first)")
    print("clients " + "".join(f"{name:>20}" for name in found))
    for count in first["rates"]:
        cells = (f"{r['rates'][count]:.1f} ({r['rates'][count] / first['rates'][count]:.2f})" for r in found.values())
        print(f"{count:>7} " + "".join(f"{cell:>20}" for cell in cells))
    for name, r in found.items():
        times = f"{r['new']:.3f} where all are new, {r['shared']:.3f} where 200 came before ({r['new'] / r['shared']:.1f} times)"
        print(f"{name}: seconds to the first token of 220: {times}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tp", default="2")
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--only")
    options = parser.parse_args()
    kept = options.results is not None and options.results.exists()
    results = [json.loads(line) for line in options.results.read_text().splitlines()] if kept else []
    names = [options.only] if options.only else [] if options.results else list(servers(options, 0))
    results += [measure(options, name) for name in names]
    if options.results:
        options.results.write_text("".join(json.dumps(r) + "\n" for r in results))
    show(results)


if __name__ == "__main__":
    main()
