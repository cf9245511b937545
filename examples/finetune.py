"""Fine-tunes a model on a small text, whole and split, and lays the two loss curves over each other.

    python examples/finetune.py --out tuned                      # the demo model, 200 steps at tp=1 and at tp=2: some minutes on 2 cores

Both runs are `colrow train` as anyone would call it. Splitting must change nothing but the order in which floats are added: the losses of
all steps are compared, and the script fails where they part by more than rounding. The model that the split run has written is then opened
with plain transformers, as a directory like any other, and continues a sentence. `curves.svg` shows both curves.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from colrow.train import curve

ROUNDING = 1e-3
"""Largest difference of the losses allowed, relative. Float32 rounding (1e-7) grows from step to step, since each step works on the weights
of the one before."""


def train(model: str, tp: int, text: Path, out: Path, steps: int, length: int) -> list[tuple[int, float]]:
    """(step, loss) of every step of `colrow train`."""
    options = {"--tp": tp, "--data": text, "--out": out, "--steps": steps, "--length": length, "--batch": 2, "--warmup": steps // 10}
    options["--save-every"] = max(1, steps // 8)  # started again, this script goes on where it was stopped
    command = [sys.executable, "-m", "colrow", "train", model, *(str(x) for pair in options.items() for x in pair)]
    subprocess.run([*command, "--dtype", "float32"], check=True)
    lines = map(json.loads, (out / "log.jsonl").read_text(encoding="utf-8").splitlines())
    return [(line["step"], line["loss"]) for line in lines if line["event"] == "step"]


def talk(path: Path, prompt: str) -> str:
    """What plain transformers makes of the trained directory: nothing of colrow takes part."""
    program = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1]); model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "ids = tokenizer(sys.argv[2], return_tensors='pt')\n"
        "print(tokenizer.decode(model.generate(**ids, max_new_tokens=40, do_sample=False)[0], skip_special_tokens=True))\n"
        "assert 'colrow' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program, path, prompt], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "docs")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--tp", type=int, default=2)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    text = options.out / "text.txt"
    pages = sorted(options.text.glob("*.md")) if options.text.is_dir() else [options.text]
    text.write_text("\n\n".join(page.read_text(encoding="utf-8") for page in pages), encoding="utf-8")
    curves = {f"tp={n}": train(options.model, n, text, options.out / f"tp{n}", options.steps, options.length) for n in (1, options.tp)}
    (options.out / "curves.svg").write_text(curve.picture(curves), encoding="utf-8")
    whole, split = curves.values()
    assert [step for step, _ in whole] == [step for step, _ in split]
    apart = [abs(a - b) / a for (_, a), (_, b) in zip(whole, split, strict=True)]
    for name, points in curves.items():
        print(f"{name}: loss {points[0][1]:.4f} in the first step, {sum(loss for _, loss in points[-20:]) / 20:.4f} over the last 20")
        print(curve.terminal(points))
    print(f"largest difference: {max(apart):.1e} of the loss (step {whole[apart.index(max(apart))][0]}), first step {apart[0]:.1e}")
    print(f"both curves: {options.out / 'curves.svg'}")
    print(f"in plain transformers: {talk(options.out / f'tp{options.tp}' / 'model', 'Tensor parallelism is')}")
    if max(apart) > ROUNDING:
        raise SystemExit(f"the curves part by more than rounding: {max(apart):.1e}, {ROUNDING:.0e} is allowed")


if __name__ == "__main__":
    main()
