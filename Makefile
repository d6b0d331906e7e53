# Needs Python 3.11 or newer with pip, and make; everything else goes into .venv.

PYTHON ?= $(shell command -v python3.11 || command -v python3 || command -v python)
BIN := .venv/bin
INSTALLED := .venv/installed
WHEEL_BIN := .venv-wheel/bin
PIP_INSTALL := pip install --quiet --disable-pip-version-check
DEMO := textbook_backward_prefetch

# Not as options of pip: what builds the package, setuptools, heeds only these (from pip 25.3 on the
# second, before that the first).
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt

.PHONY: help demo test test-all bench lint wheel wheel-test clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1:  /p' Makefile

# An environment of other requirements is thrown away, so that a dropped one cannot linger.
$(INSTALLED): pyproject.toml constraints.txt
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(BIN)/$(PIP_INSTALL) --editable '.[test,lint]'
	touch $@

demo: $(INSTALLED)  ## simulate a scenario and draw its chart
	$(BIN)/fsdpsim run scenarios/$(DEMO).toml
	mkdir -p demo
	$(BIN)/fsdpsim plot scenarios/$(DEMO).toml -o demo/$(DEMO).png

test: $(INSTALLED)  ## the test suite
	$(BIN)/pytest -n 2 --dist worksteal

test-all: $(INSTALLED)  ## the test suite with slow tests and benchmarks
	$(BIN)/pytest -m ''

bench: $(INSTALLED)  ## speeds
	$(BIN)/pytest -m benchmark -s

lint: $(INSTALLED)  ## style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

wheel: $(INSTALLED)  ## build the wheel into dist/
	rm -rf build dist
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

# Run from another directory: the source tree must not be what is imported.
wheel-test: wheel  ## install the wheel in a fresh environment and use it
	rm -rf .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	$(WHEEL_BIN)/$(PIP_INSTALL) dist/*.whl
	cd .venv-wheel && bin/python -P -c 'import fsdpsim; print(fsdpsim.__file__)'
	cd .venv-wheel && bin/fsdpsim run ../scenarios/$(DEMO).toml -o out
	cd .venv-wheel && bin/fsdpsim report ../scenarios/$(DEMO).toml -o out/report.html
	cd .venv-wheel && bin/fsdpsim validate >out/validate.txt

clean:  ## remove all that these targets make
	rm -rf .venv .venv-wheel build dist demo *.egg-info .pytest_cache .mypy_cache .ruff_cache \
		.hypothesis .benchmarks
