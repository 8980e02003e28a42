# make demo   trains a Mask R-CNN on photographs of coins, evaluates it, and draws what it found
# make test   runs the test suite, in about 8 minutes on two cores
# make quick  runs the part of it that needs half a minute
# make guard  runs those real runs of many seconds that CI needs: endings, kills, resumes, recovery,
#             dry runs and a user's first hour
# make long   runs all real runs of many seconds, which are tried each night
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

.PHONY: demo test quick guard long exhaustive docs lint types venv

PYTEST = "$(VENV)/bin/python" -m pytest -n $(PROCESSES) --dist worksteal

demo: venv
	"$(VENV)/bin/python" projects/Coins/demo.py --output-dir "$(OUTPUT)"

test: venv
	$(PYTEST) $(PYTEST_ARGS)

quick: venv
	$(PYTEST) -m "not slow and not long and not exhaustive" $(PYTEST_ARGS)

GUARD = $(wildcard tests/engine/test_*.py) tests/planner/test_dry_run.py tests/test_first_hour.py tests/tools/test_train_net.py

guard: venv
	$(PYTEST) -m "long and not exhaustive" $(GUARD) $(PYTEST_ARGS)

long: venv
	$(PYTEST) -m "long and not exhaustive" $(PYTEST_ARGS)
	$(PYTEST) -m exhaustive tests/gpu $(PYTEST_ARGS)

exhaustive: venv
	$(PYTEST) -m exhaustive $(PYTEST_ARGS)

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
