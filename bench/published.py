"""Published single-request decoding times beside the planner's: predictions first, the comparison in PUBLISHED.

    python bench/published.py

The predictions of CASES are printed from the presets as they are; nothing is fitted to the published numbers. They were committed before
the published ones were looked up, but where the source says otherwise (of gpt-fast's the author had seen some before, and changed no preset
for them); cases without a published number found none of a single request.
"""

from __future__ import annotations

from dataclasses import dataclass

from colrow.planning import degrees, links
from colrow.planning.derive import derive
from colrow.planning.shapes import config
from colrow.planning.study import Question, Study


@dataclass(frozen=True)
class Case:
    model: str
    device: str
    ranks: int
    context: int = 1024


CASES = [
    *(Case("llama-3-8b", device, ranks) for device in ("a100", "h100") for ranks in (1, 2, 4, 8)),
    *(Case("llama-3-70b", device, ranks) for device in ("a100", "h100") for ranks in (2, 4, 8)),
    Case("llama-2-7b", "a100", 1, 64),
    Case("llama-2-13b", "a100", 1, 64),
    Case("llama-2-70b", "a100", 4, 64),
    *(Case("llama-2-7b", "a100", ranks, 128) for ranks in (1, 2, 4, 8)),
    *(Case("llama-2-70b", "a100", ranks, 128) for ranks in (2, 4, 8)),
]

LMDEPLOY = "lmdeploy 0.1.0a1, docs/en/benchmark/a100_fp16.md, A100-80G, batch 1, prompt 1, output 128"
GPT_FAST = "gpt-fast, README, 8 A100-80G limited to 330 W, batch 1, prompt 5, at commit 0f925b5"
PUBLISHED: dict[Case, tuple[float, str]] = {  # milliseconds a token, source
    Case("llama-2-7b", "a100", 1, 64): (1e3 / 100.02, f"{LMDEPLOY}; seen before it was predicted"),
    Case("llama-2-13b", "a100", 1, 64): (1e3 / 57.49, LMDEPLOY),
    Case("llama-2-70b", "a100", 4, 64): (1e3 / 33.94, LMDEPLOY),
    **{Case("llama-2-7b", "a100", n, 128): (1e3 / rate, GPT_FAST) for n, rate in ((1, 104.9), (2, 168.84), (4, 254.02), (8, 328.43))},
    **{Case("llama-2-70b", "a100", n, 128): (1e3 / rate, GPT_FAST) for n, rate in ((2, 21.32), (4, 38.01), (8, 62.50))},
}


def predicted(case: Case) -> float:
    """Milliseconds a token, batch 1, 2 bytes an element."""
    cfg = config(case.model)
    small = degrees.shortened(cfg)
    assert small is not None
    plan = degrees.stretch(derive(small, case.ranks), cfg.num_hidden_layers)
    study = Study.of(cfg, plan, links.machine(case.device), Question(context=case.context), others=())
    return 1e3 * study.row.decode.total


def main() -> None:
    print(f"{'model':<14}{'device':<8}{'tp':>3}{'predicted':>12}{'published':>12}{'error':>8}  source")
    for case in CASES:
        ours = predicted(case)
        theirs, source = PUBLISHED.get(case, (0.0, ""))
        beside = f"{theirs:>9.2f} ms{100 * (ours / theirs - 1):>+6.0f} %" if theirs else f"{'-':>12}{'':>8}"
        print(f"{case.model:<14}{case.device:<8}{case.ranks:>3}{ours:>9.2f} ms{beside}  {source}")


if __name__ == "__main__":
    main()
