# `make demo` and `make test` need Python >= 3.11 with its venv module, GNU make and a package index, and nothing else.
# The virtual environment is .venv; each of its stamps says which packages it has, as of pyproject.toml.

PYTHON ?=  # which Python makes .venv; otherwise the first of these that is new enough
PYTHONS = $(PYTHON) python3.13 python3.12 python3.11 python3
VENV ?= .venv
RUN := $(VENV)/bin/python
# What the tests run on. Said beside `dev`, which pins it, so that pip does not fetch the newest one first.
TESTED := torch==2.13.0
TORCH := $(if $(wildcard /dev/nvidiactl),torch>=2.11,$(TESTED))

# The oldest transformers that pyproject.toml allows. It wants a hub client below 2.
OLDEST := transformers==5.17.0 huggingface_hub<2
OLD_TESTS := attention check families family placing states test_families.py test_kv_shapes.py

.PHONY: help demo demo-remote test test-long test-kernels test-oldest test-foreign fuzz cubins lint types layers docs man check installed clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     install what is needed, start djinnd, talk to a small real model, stop it"
	@echo "make demo-remote  the same from another machine: two network namespaces and a cable; ARGS=--toy fetches no model"
	@echo "make test     install the test tools and run the tests; ARGS='-k name' passes arguments to pytest"
	@echo "make test-long  soaks, runs of many examples, hostile input and killed processes, which make test leaves out"
	@echo "make test-kernels  the long tests of GPU kernels, in an interpreter and by a compiler; needs no GPU"
	@echo "make test-oldest  the tests of the model, on the oldest transformers that djinnd allows"
	@echo "make test-foreign  the clients of other people's, against the HTTP gateway"
	@echo "make cubins   compile attention's kernels for all published head widths, types and GPUs; needs no GPU"
	@echo "make fuzz     fuzz whatever reads bytes of strangers; CASES=1000000 in all, SEED=1"
	@echo "make docs     build the site of the documentation into build/docs; a broken link is an error"
	@echo "make man      write the man pages of djinnctl and djinnd into build/man"
	@echo "make check    lint, types, layers and make test"
	@echo "make clean    remove .venv and caches"

demo: $(VENV)/demo.stamp
	@echo "==> djinnd's demo"
	@$(RUN) -m tools.demo

demo-remote: $(VENV)/demo.stamp
	@echo "==> djinnd's demo, from another machine"
	@$(RUN) -m tools.demo.remote $(ARGS)

# With bytecode, even where an image does without: the tests start hundreds of processes. With one thread each for
# torch, as threads that wait for each other keep other workers from the cores. Four workers for two cores: what tests
# wait for is often another process.
# The long tests of kernels, in Triton's interpreter and by its compiler, are no part of CI: `tests/gpu` runs the same
# kernels on a card.
test: which := not long
test-long: which := long and not kernels
test-kernels: which := long and kernels
test-kernels: only := tests/unit/model/kernels
test test-long test-kernels: $(VENV)/dev.stamp
	@echo "==> the tests that are $(which), on $$($(RUN) -c 'import platform, torch; print("Python", platform.python_version(), "and torch", torch.__version__)')"
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(RUN) -m pytest -m '$(which)' -n 4 --dist loadgroup --no-loadscope-reorder \
		--ignore=tests/foreign $(only) $(ARGS)

# Sockets that these clients leave open at their end are not ours to close.
test-foreign: $(VENV)/foreign.stamp
	@echo "==> other people's clients"
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(RUN) -m pytest tests/foreign \
		-W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning $(ARGS)

# The families' own code changes between the releases of transformers, and only the tests of the model run it.
test-oldest: $(VENV)/oldest.stamp
	@echo "==> the tests of the model, on $(OLDEST)"
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 PYTHONPATH=$(VENV)/oldest $(RUN) -m pytest -m 'not long' -n 3 \
		-W 'ignore:`torch.jit.script`:DeprecationWarning' $(addprefix tests/unit/model/,$(OLD_TESTS)) $(ARGS)

cubins: $(VENV)/dev.stamp
	@echo "==> attention's kernels, compiled for GPUs that this machine need not have"
	@OMP_NUM_THREADS=1 $(RUN) -m tests.cubins

CASES ?= 1000000
SEED ?= 1
fuzz: $(VENV)/fuzz.stamp
	@echo "==> $(CASES) cases of fuzzing"
	@OMP_NUM_THREADS=1 $(RUN) -m tests.fuzz --cases $(CASES) --seed $(SEED)

lint: $(VENV)/dev.stamp
	@echo "==> lint"
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m tools.prose
	@$(RUN) -m tools.results check

types: $(VENV)/dev.stamp
	@echo "==> types"
	@$(RUN) -m mypy

layers: $(VENV)/dev.stamp
	@echo "==> layers"
	@$(VENV)/bin/lint-imports

docs: $(VENV)/docs.stamp
	@echo "==> the site of the documentation, in build/docs"
	@$(VENV)/bin/mkdocs build --strict --quiet

man: $(VENV)/demo.stamp
	@$(RUN) -m tools.man_pages build/man
	@echo "==> the man pages, in build/man"

check: lint types layers docs test

# Whatever the other targets install, so that they may run at the same time: two pips in one environment may not.
installed: $(addprefix $(VENV)/,docs.stamp fuzz.stamp foreign.stamp oldest.stamp)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find djinnd djinn_client tools tests -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/demo.stamp: pyproject.toml client/pyproject.toml | $(RUN)
	@echo "==> installing djinnd with torch and transformers into $(VENV): some minutes"
	@$(RUN) -m pip install --disable-pip-version-check -e ./client -e '.[demo]' '$(TORCH)'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml client/pyproject.toml | $(RUN)
	@echo "==> installing djinnd with torch, transformers and the test tools into $(VENV): some minutes"
	@$(RUN) -m pip install --disable-pip-version-check -e ./client -e '.[dev]' '$(TESTED)'
	@touch $@

$(VENV)/oldest.stamp: pyproject.toml $(VENV)/dev.stamp | $(RUN)
	@echo "==> installing $(OLDEST) beside $(VENV)'s"
	@$(RUN) -m pip install --disable-pip-version-check --upgrade --no-deps --target $(VENV)/oldest $(foreach each,$(OLDEST),'$(each)')
	@touch $@

$(VENV)/foreign.stamp: pyproject.toml $(VENV)/dev.stamp | $(RUN)
	@echo "==> installing other people's clients into $(VENV)"
	@$(RUN) -m pip install --disable-pip-version-check -e ./client -e '.[foreign]' '$(TESTED)'
	@touch $@

$(VENV)/docs.stamp: pyproject.toml $(VENV)/dev.stamp | $(RUN)
	@echo "==> installing MkDocs into $(VENV)"
	@$(RUN) -m pip install --disable-pip-version-check -e ./client -e '.[docs]' '$(TESTED)'
	@touch $@

$(VENV)/fuzz.stamp: pyproject.toml $(VENV)/dev.stamp | $(RUN)
	@echo "==> installing the fuzzer into $(VENV)"
	@$(RUN) -m pip install --disable-pip-version-check -e ./client -e '.[fuzz]' '$(TESTED)'
	@touch $@

$(RUN):
	@for python in $(PYTHONS); do \
		"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; python=; \
	done; \
	if [ -z "$$python" ]; then \
		echo "djinnd needs Python 3.11 or newer and found none: install one, or name it with 'make PYTHON=/path/to/python3'" >&2; exit 1; \
	elif ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
		echo "$$python has no venv module: install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; \
	fi; \
	echo "==> making $(VENV) with $$($$python --version)"; \
	"$$python" -m venv $(VENV)
