# make demo: see it work.  make test: all tests.  make serve MODEL=...: a server.  make lint
MODEL ?= checkpoints/tiny-llada
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo serve test lint clean

demo: .venv/installed
	$(BIN)/python examples/demo.py --model $(MODEL)

serve: .venv/installed
	$(BIN)/sangam serve --model $(MODEL)

test: .venv/installed
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf .venv

# The wheel of torch for CUDA is several GB; on a machine without a GPU point pip at PyTorch's
# index of CPU builds first (PIP_EXTRA_INDEX_URL), which has the same version.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[perf,server,test]'
	touch $@
