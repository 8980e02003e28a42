# make demo   trains a Mask R-CNN on photographs of coins, evaluates it, and draws what it found
# make test   runs the test suite, in about 4 minutes on two cores
# make test-slow  runs the tests of more than 5 seconds each: real runs, endings, kills, dry runs
# make prose  writes the sentences that have changed to tests/prose.txt (git diff shows them)
# make docs   makes a site of the documentation, with Python 3.11 or later: open
#             build/site/index.html, or, so that its search works too, the address that
#             `python3 -m http.server --directory build/site` says
#
# They make the environment in VENV when it is not there. VENV=path uses another one, PYTHON=path
# makes it with another Python (3.9 to 3.13). PROCESSES=1 runs one test at a time.

PYTHON ?= python3
VENV ?= .venv
OUTPUT ?= output/coins
PYTEST_ARGS ?=
PROCESSES ?= 2

export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: venv demo test test-slow prose lint types docs

PYTEST = "$(VENV)/bin/python" -m pytest -n $(PROCESSES) --dist worksteal

demo: venv
	"$(VENV)/bin/python" projects/Coins/demo.py --output-dir "$(OUTPUT)"

test: venv
	$(PYTEST) $(PYTEST_ARGS)

test-slow: venv
	$(PYTEST) -m "slow and not sweep" $(PYTEST_ARGS)

prose: venv
	"$(VENV)/bin/python" -m pytest tests --prose -q $(PYTEST_ARGS)

docs: venv
	NO_MKDOCS_2_WARNING=1 "$(VENV)/bin/python" -m mkdocs build --strict

lint: venv
	"$(VENV)/bin/python" -m ruff check .
	"$(VENV)/bin/python" -m ruff format --check .

types: venv
	"$(VENV)/bin/python" -m mypy

venv:
	@command -v "$(PYTHON)" >/dev/null || { echo "error: there is no $(PYTHON): see docs/INSTALL.md"; exit 1; }
	@"$(PYTHON)" tools/make_venv.py "$(VENV)"
