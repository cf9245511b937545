"""llama.cpp by its Python binding: `python llama_cpp_peer.py FILE.gguf TOKENS THREADS`. For bench/decode.py, in llama.cpp's environment."""

from __future__ import annotations

import sys
import time
from importlib.metadata import version

import llama_cpp as c
import numpy as np
from timing import LONG, PROMPT, answer, prompt, seconds


def main(file: str, tokens: int, threads: int) -> None:
    c.llama_backend_init()
    model = c.llama_model_load_from_file(file.encode(), c.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp does not load {file}")
    asked = c.llama_context_default_params()
    asked.n_ctx, asked.n_batch, asked.n_ubatch = 1024, LONG, LONG
    asked.n_threads = asked.n_threads_batch = threads
    context = c.llama_init_from_model(model, asked)
    columns = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))

    def run(ids: list[int]) -> int:
        """The likeliest token after these."""
        array = (c.llama_token * len(ids))(*ids)
        if c.llama_decode(context, c.llama_batch_get_one(array, len(ids))):
            raise SystemExit("llama_decode failed")
        return int(np.ctypeslib.as_array(c.llama_get_logits_ith(context, -1), (columns,)).argmax())

    def begin(ids: list[int]) -> int:
        c.llama_memory_clear(c.llama_get_memory(context), False)
        return run(ids)

    long = seconds(lambda: begin(prompt(LONG)))
    token, times = begin(prompt(PROMPT)), []
    for _ in range(tokens + 1):
        token = run([token])
        times.append(time.perf_counter())
    answer(times, long, f"llama-cpp-python {version('llama-cpp-python')}")


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
