# `make demo` and `make test` do all the set-up; both cost seconds when nothing changed.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Test processes side by side, of one thread each; more than two cores, since some wait for processes that they have started.
TESTERS ?= 3
READY := $(VENV)/.ready

# What is compiled once need not be compiled in each process that a test starts.
unexport PYTHONDONTWRITEBYTECODE

# Where stock clients of the Realtime API have environments of their own.
JUDGES ?= $(CURDIR)/.judges

# A trained model, and the adapters that ship with it, as NAME=FOLDER.
MODEL ?= runs/nano-live/model
ADAPTERS ?=
NANO := omni/pretrained/nano

.PHONY: demo test test-long test-gpu test-real judges lint pretrained clean

demo: $(READY)
	$(RUN) -m train demo

test: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(TESTERS) --dist loadfile --no-loadscope-reorder

# Those against the clock run alone.
CLOCKED := tests/infer/serve/test_crowds.py tests/infer/serve/test_soak.py
test-long: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(TESTERS) --dist loadfile --no-loadscope-reorder -m long $(CLOCKED:%=--ignore=%)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 0 -m long $(CLOCKED)

test-gpu: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m cuda -rs

# On pretrained parts in the folder REAL.
test-real: $(READY)
	OMP_NUM_THREADS=1 REAL=$(REAL) $(RUN) -m pytest -n 0 -m long -rs tests/real

judges: demo
	-bash tests/judges/setup.sh $(JUDGES)
	OMP_NUM_THREADS=1 JUDGES=$(JUDGES) $(RUN) -m pytest -n 0 -m long -rs tests/judges

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# Puts a trained model into the package; its card and its question stay.
pretrained: $(READY)
	$(RUN) -m train convert $(MODEL) build/nano --dtype bfloat16 --drop_ctc --overwrite
	cp build/nano/* $(NANO)
	rm -rf $(NANO)/adapters
	for one in $(ADAPTERS); do \
		$(RUN) -m train convert $${one#*=} $(NANO)/adapters/$${one%%=*} --kind omni --dtype bfloat16 || exit 1; \
	done

$(READY): pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .judges build *.egg-info
