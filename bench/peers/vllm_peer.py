"""vLLM's CPU build: `python vllm_peer.py MODEL TOKENS DTYPE RANKS`. For bench/decode.py, in vLLM's environment.

The engine runs in this process and is stepped by hand, so that each step can be timed. One core for each rank.
"""

from __future__ import annotations

import os
import sys
import time
from importlib.metadata import distributions

from timing import LONG, PROMPT, answer, prompt, seconds

CORES = sorted(os.sched_getaffinity(0))


def main(model: str, tokens: int, dtype: str, ranks: int) -> None:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, CORES[:ranks])),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, tensor_parallel_size=ranks, max_model_len=1024, enable_prefix_caching=False, disable_log_stats=True)
    engine = llm.llm_engine

    def ask(ids: list[int], new: int) -> list[float]:
        """When each of `new` tokens came."""
        asked = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        engine.add_request(str(time.perf_counter()), {"prompt_token_ids": ids}, asked)
        times, seen = [], 0
        while engine.has_unfinished_requests():
            for out in engine.step():
                if len(out.outputs[0].token_ids) > seen:
                    seen = len(out.outputs[0].token_ids)
                    times.append(time.perf_counter())
        return times

    long = seconds(lambda: ask(prompt(LONG), 1))
    times = ask(prompt(PROMPT), tokens + 2)[1:]
    answer(times, long, " ".join(f"{d.name} {d.version}" for d in distributions() if d.name in ("vllm", "vllm-cpu")))


if __name__ == "__main__":  # workers are spawned
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
