# Every target makes the virtual environment it needs: a fresh machine needs Python 3.10+ and make, nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test lint bench bench-quick clean
.DEFAULT_GOAL := test

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,lab,speech,vision]'
	touch $@

demo: $(READY)
	$(BIN)/python -m loosestep.demo

test: $(READY)
	$(BIN)/python -m pytest --reruns 2 # tests with real processes and deadlines may lose a race on a busy machine

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/daso_throughput.py
	$(BIN)/python benchmarks/gossip_throughput.py
	$(BIN)/python benchmarks/exchange_cost.py
	$(BIN)/python benchmarks/gossip_cpu.py
	$(BIN)/python benchmarks/attach_overhead.py
	$(BIN)/python benchmarks/accuracy.py

bench-quick: $(READY)
	$(BIN)/python benchmarks/daso_throughput.py --quick
	$(BIN)/python benchmarks/gossip_throughput.py --quick

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
