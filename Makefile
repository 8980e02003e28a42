# make demo   trains a Mask R-CNN on photographs of coins, evaluates it, and draws what it found
# make test   runs the whole test suite
#
# Both make the environment in VENV when it is not there. VENV=path uses another one, PYTHON=path
# makes it with another Python (3.9 to 3.11). PROCESSES=1 runs one test at a time.

PYTHON ?= python3
VENV ?= .venv
OUTPUT ?= output/coins
PYTEST_ARGS ?=
PROCESSES ?= 2

export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: demo test lint types venv

demo: venv
	"$(VENV)/bin/python" projects/Coins/demo.py --output-dir "$(OUTPUT)"

test: venv
	"$(VENV)/bin/python" -m pytest -n $(PROCESSES) --dist worksteal $(PYTEST_ARGS)

lint: venv
	"$(VENV)/bin/python" -m ruff check .
	"$(VENV)/bin/python" -m ruff format --check .

types: venv
	"$(VENV)/bin/python" -m mypy

venv:
	@"$(PYTHON)" tools/make_venv.py "$(VENV)"
