"""lm-eval on a served model and on transformers itself: the same scores?

    python bench/evaluate.py demo --tp 2 [--lm-eval PROGRAM]

Writes three small tasks on local data (multiple choice, generation, perplexity of a text) and the model as a float32 directory of
transformers, then lets lm-eval measure that directory with its own transformers backend, and `colrow serve` as `local-completions`, and as
`local-chat-completions` where it generates. PROGRAM is lm-eval's command, which may live in an environment of its own. Printed: every score
of both sides, the largest difference of a log-likelihood, and how many answers are the same. Exit code 0 only if all scores are equal, to
1e-4 where they are no counts. Needs no network.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from server import Running, serving

QUESTIONS = [
    ("What is the capital of France?", ["Paris", "Rome", "Cairo", "Oslo"]),
    ("What do bees make?", ["honey", "iron", "paper", "glass"]),
    ("How many legs has a spider?", ["eight", "two", "three", "one"]),
    ("What is frozen water called?", ["ice", "smoke", "sand", "wood"]),
    ("Which planet do we live on?", ["Earth", "Mars", "Venus", "Saturn"]),
    ("What colour is a ripe banana?", ["yellow", "black", "purple", "blue"]),
    ("What do fish breathe with?", ["gills", "lungs", "leaves", "wheels"]),
    ("Which animal barks?", ["a dog", "a fish", "a snake", "an ant"]),
    ("What is two plus two?", ["four", "seven", "ten", "zero"]),
    ("What falls from clouds?", ["rain", "stones", "books", "bread"]),
    ("Which season comes after winter?", ["spring", "autumn", "night", "noon"]),
    ("What is the largest ocean?", ["the Pacific", "the Baltic", "the Thames", "the Sahara"]),
]
ASKED = ["Name a fruit.", "Count from one to five.", "What is the capital of Italy?", "Say hello.", "What is 3 + 4?", "Name a colour."]
TEXTS = [
    "The river rose in the night, and by morning the lower fields were under water. Nobody had heard it come.",
    "A matrix that is cut by its columns gives slices of the result; one that is cut by its rows gives sums that are still to be added.",
    "Größe, façade, naïve, 東京 and 👍 are words that a tokenizer takes apart into pieces smaller than a character.",
]
TASKS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "choice": (
        [{"q": q, "choices": choices, "answer": 0} for q, choices in QUESTIONS],
        "output_type: multiple_choice\ndoc_to_text: 'Question: {{q}} Answer:'\ndoc_to_choice: choices\ndoc_to_target: answer\n"
        "metric_list:\n  - metric: acc\n  - metric: acc_norm\n",
    ),
    "answer": (
        [{"q": q, "a": "x"} for q in ASKED],
        "output_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: a\ngeneration_kwargs:\n  until: ['\\n']\n  do_sample: false\n"
        "  max_gen_toks: 16\nmetric_list:\n  - metric: exact_match\n",
    ),
    "text": (
        [{"t": t} for t in TEXTS],
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{t}}'\nmetric_list:\n  - metric: word_perplexity\n"
        "  - metric: bits_per_byte\n",
    ),
}


def write_tasks(folder: Path) -> None:
    for name, (rows, text) in TASKS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder / name}.jsonl\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(f"task: colrow_{name}\n{data}{text}")


def write_model(model: str, folder: Path) -> None:
    """The model by transformers' own reader, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    from colrow.checkpoint.model_dir import find

    files = find(model)
    where = {"gguf_file": files.path.name} if files.kind == "gguf" else {}
    read = AutoModelForCausalLM.from_pretrained(files.path.parent if where else files.path, dtype=torch.float32, **where)
    read.config.__dict__.pop("quantization_config", None)  # a model read from a GGUF file cannot be saved as it is
    whole = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    whole.load_state_dict(read.state_dict())
    whole.save_pretrained(folder)
    files.tokenizer().save_pretrained(folder)


def measure(program: str, folder: Path, tasks: tuple[str, ...], kind: str, arguments: str, *more: str) -> dict[str, Any]:
    """{task: (scores, samples)} of one run of lm-eval."""
    out = folder / f"out-{kind}-{'-'.join(more).strip('-')}"
    names = ",".join(f"colrow_{task}" for task in tasks)
    command = [program, "--model", kind, "--model_args", arguments, "--tasks", names, "--include_path", str(folder), *more]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"), "OPENAI_API_KEY": "none"}
    command += ["--output_path", str(out), "--log_samples", "--batch_size", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    (results,) = out.rglob("results_*.json")
    scores = json.loads(results.read_text())["results"]
    found = {}
    for task in tasks:
        (samples,) = out.rglob(f"samples_colrow_{task}_*.jsonl")
        rows = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda row: row["doc_id"])
        numbers = {k.split(",")[0]: v for k, v in scores[f"colrow_{task}"].items() if isinstance(v, float) and "stderr" not in k}
        found[task] = (numbers, [row["resps"] for row in rows])
    return found


def compare(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    equal = True
    for task, (scores, answers) in ours.items():
        reference, expected = theirs[task]
        for metric, value in scores.items():
            same = abs(value - reference[metric]) <= (1e-4 * abs(reference[metric]))
            equal &= same
            verdict = "equal" if same else "DIFFERENT"
            print(f"{name:24} {task:8} {metric:18} {value:12.6f}  transformers {reference[metric]:12.6f}  {verdict}")
        if task == "answer":
            same_texts = sum(a == b for a, b in zip(answers, expected, strict=True))
            equal &= same_texts == len(answers)
            print(f"{name:24} {task:8} {same_texts} of {len(answers)} answers the same")
        else:
            flat = [list(_floats(side)) for side in (answers, expected)]
            worst = max(abs(a - b) for a, b in zip(*flat, strict=True))
            print(f"{name:24} {task:8} largest difference of {len(flat[0])} log-likelihoods {worst:.1e}")
    return equal


def _floats(value: Any) -> Any:
    if isinstance(value, list):
        for part in value:
            yield from _floats(part)
    elif not isinstance(value, bool):
        try:
            yield float(value)
        except ValueError:
            yield float(value == "True")


def served(server: Running, program: str, folder: Path, model: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    common = f"model={json.loads(server.get('/v1/models'))['data'][0]['id']},num_concurrent=4,max_retries=1"
    url = f"http://127.0.0.1:{server.port}/v1"
    plain = measure(
        program,
        folder,
        tuple(TASKS),
        "local-completions",
        f"{common},base_url={url}/completions,tokenizer={model},tokenized_requests=True",
    )
    chat = measure(
        program, folder, ("answer",), "local-chat-completions", f"{common},base_url={url}/chat/completions", "--apply_chat_template"
    )
    return plain, chat


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tp", default="2")
    parser.add_argument("--lm-eval", default="lm_eval", help="lm-eval's command")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="colrow-evaluate-") as name:
        folder, model = Path(name), Path(name) / "model"
        write_tasks(folder)
        write_model(options.model, model)
        alone = f"pretrained={model},dtype=float32"
        theirs = measure(options.lm_eval, folder, tuple(TASKS), "hf", alone, "--device", "cpu")
        theirs_chat = measure(options.lm_eval, folder, ("answer",), "hf", alone, "--device", "cpu", "--apply_chat_template")
        with serving(options.model, "--tp", options.tp) as server:
            plain, chat = served(server, options.lm_eval, folder, model)
    same = [compare("completions", plain, theirs), compare("chat completions", chat, theirs_chat)]
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
