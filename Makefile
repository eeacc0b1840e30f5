# `make demo` and `make test` do all the set-up; both cost seconds when nothing changed.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Test processes side by side, of one thread each; more than two cores, since some wait for processes that they have started.
TESTERS ?= 3
READY := $(VENV)/.ready

# What is compiled once need not be compiled in each process that a test starts.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-long test-gpu lint clean

demo: $(READY)
	$(RUN) -m train demo

test: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(TESTERS) --dist loadfile --no-loadscope-reorder

test-long: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(TESTERS) --dist loadfile --no-loadscope-reorder -m long

test-gpu: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m cuda -rs

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

$(READY): pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
