"""Tokens per second of `colrow serve` for several numbers of clients at once, in the default mode and with --fast; and what a beginning
that prompts share saves.

    python bench/serve.py demo --tp 2 --clients 1,8,32 --tokens 32 --repeat 3

Starts one server after the other on a free port; each client sends one prompt and waits for the whole answer. Printed: the median over the
repeats of all new tokens per second, and the ratio of the two modes. Then the seconds to the first token of a prompt whose first 200 tokens
are new to the server, and of one that begins with the same 200 (a system prompt, say) and goes on with 20 of its own; medians too. Not
here: peers, and the memory floor (bench/decode.py).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import random
import statistics
import time

from server import Running, serving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--tp", default="2")
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    counts = [int(count) for count in options.clients.split(",")]
    found = {mode: measure(options, mode, counts) for mode in ((), ("--fast",))}
    rates = {mode: of_mode[0] for mode, of_mode in found.items()}
    print("clients  default  --fast  ratio   (tokens/s of all clients together)")
    for count in counts:
        default, fast = rates[()][count], rates[("--fast",)][count]
        print(f"{count:7}  {default:7.1f}  {fast:6.1f}  {fast / default:5.2f}")
    first, second = found[()][1]
    print(
        f"seconds to the first token of 220: {first:.3f} where all are new, {second:.3f} where 200 came before ({first / second:.1f} times)"
    )


def measure(options: argparse.Namespace, mode: tuple[str, ...], counts: list[int]) -> tuple[dict[int, float], tuple[float, float]]:
    """Tokens per second by number of clients, and the seconds to the first token."""
    with serving(options.model, "--tp", options.tp, *mode) as server:
        ask(server, 0, 4)
        times = [(first_token(server, at, at), first_token(server, at, at + 1000)) for at in range(options.repeat)]
        new, shared = (statistics.median(side) for side in zip(*times, strict=True))
        rates = {count: statistics.median(rate(server, count, options.tokens) for _ in range(options.repeat)) for count in counts}
        return rates, (new, shared)


def rate(server: Running, count: int, tokens: int) -> float:
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        made = sum(pool.map(lambda at: ask(server, at, tokens), range(count)))
    return made / (time.perf_counter() - start)


def ask(server: Running, number: int, tokens: int) -> int:
    body = {"prompt": f"The story number {number} begins", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return int(server.ask(body)["usage"]["completion_tokens"])


def first_token(server: Running, beginning: int, end: int) -> float:
    """Seconds for one token after a prompt of 200 tokens that depend on `beginning` and 20 that depend on `end`."""
    prompt = [random.Random(seed).randrange(300, 400) for seed in range(beginning * 200, beginning * 200 + 200)]
    prompt += [random.Random(seed).randrange(300, 400) for seed in range(end * 20, end * 20 + 20)]
    start = time.perf_counter()
    answer = server.ask({"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True})
    assert answer["usage"]["completion_tokens"] == 1
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
