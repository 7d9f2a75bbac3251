# Every target makes the virtual environment it needs: a fresh machine needs Python 3.10+ and make, nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PEERS  := .venv-peers
PIP    := -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-quick test-long lint peers bench bench-quick clean
.DEFAULT_GOAL := test

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,lab,speech,vision,lightning,accelerate,transformers]'
	touch $@

demo: $(READY)
	$(BIN)/loosestep demo

test: $(READY)
	$(BIN)/python -m pytest -rR

# Under a minute, without processes.
test-quick: $(READY)
	$(BIN)/python -m pytest -rR -m "not processes and not slow"

# Hours of faults, many ranks, long conservation: what the rest is too short for.
test-long: $(READY)
	$(BIN)/python -m pytest -rR --timeout 1800 tests/long

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The libraries we are measured against, in an environment of their own that borrows torch and our dependencies from the first.
peers: $(PEERS)/.ready

$(PEERS)/.ready: $(READY) benchmarks/peers/requirements.txt
	test -x $(PEERS)/bin/python || $(BIN)/python -m venv $(PEERS)
	printf '%s\n' $(CURDIR)/$(VENV)/lib/python*/site-packages $(CURDIR)/src > $$(echo $(PEERS)/lib/python*/site-packages)/borrowed.pth
	grep -v '^#' benchmarks/peers/requirements.txt | while read -r line; do \
	  $(PEERS)/bin/python $(PIP) $$line || echo "cannot install $$line: the tables will say so"; done
	touch $@

BESIDE = throughput time_to_accuracy stragglers kill footprint scaling
ALONE = daso_throughput gossip_throughput exchange_cost gossip_cpu attach_overhead accuracy gossip_accuracy compiled \
        prediction published_shapes simulated_learners simulated_accuracy replay \
        papers_rate papers_schedule papers_published

bench: $(PEERS)/.ready
	set -e; for name in $(BESIDE) claims; do $(PEERS)/bin/python benchmarks/$$name.py; done
	set -e; for name in $(ALONE); do $(BIN)/python benchmarks/$$name.py; done

bench-quick: $(PEERS)/.ready
	set -e; for name in $(BESIDE); do $(PEERS)/bin/python benchmarks/$$name.py --quick; done

clean:
	rm -rf $(VENV) $(PEERS) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
