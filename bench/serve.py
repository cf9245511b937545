"""Tokens per second of `colrow serve` for several numbers of clients at once, in the default mode and with --fast.

    python bench/serve.py demo --tp 2 --clients 1,8,32 --tokens 32 --repeat 3

Starts one server after the other on a free port; each client sends one prompt and waits for the whole answer. Printed: the median over the
repeats of all new tokens per second, and the ratio of the two modes. Not here: peers, and the memory floor (bench/decode.py).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import http.client
import json
import re
import signal
import statistics
import subprocess
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--tp", default="2")
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    counts = [int(count) for count in options.clients.split(",")]
    rates = {mode: measure(options, mode, counts) for mode in ((), ("--fast",))}
    print("clients  default  --fast  ratio   (tokens/s of all clients together)")
    for count in counts:
        default, fast = rates[()][count], rates[("--fast",)][count]
        print(f"{count:7}  {default:7.1f}  {fast:6.1f}  {fast / default:5.2f}")


def measure(options: argparse.Namespace, mode: tuple[str, ...], counts: list[int]) -> dict[int, float]:
    command = [sys.executable, "-m", "colrow", "serve", options.model, "--tp", options.tp, "--port", "0", *mode]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        lines = []
        assert server.stderr is not None
        for line in server.stderr:
            lines.append(line)
            if found := re.search(r"http://[^/]*:(\d+)/", line):
                break
        else:
            raise SystemExit("".join(lines))
        port = int(found[1])
        try:
            ask(port, 0, 4)
            return {count: statistics.median(rate(port, count, options.tokens) for _ in range(options.repeat)) for count in counts}
        finally:
            server.send_signal(signal.SIGTERM)


def rate(port: int, count: int, tokens: int) -> float:
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        made = sum(pool.map(lambda at: ask(port, at, tokens), range(count)))
    return made / (time.perf_counter() - start)


def ask(port: int, number: int, tokens: int) -> int:
    body = {"prompt": f"The story number {number} begins", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/completions", json.dumps(body))
    return int(json.loads(connection.getresponse().read())["usage"]["completion_tokens"])


if __name__ == "__main__":
    main()
