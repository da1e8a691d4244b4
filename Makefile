# SPDX-License-Identifier: Apache-2.0
PYTHON ?= python

.PHONY: install style quality test test-slow docs demo bench

install:  ## The package with all extras, in the versions it is tested with
	$(PYTHON) -m pip install -c constraints.txt -e ".[train,demo,eval,quantization,dev]"

style:  ## Repair what ruff can repair
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

quality:  ## What must be clean before a change is merged
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

test:  ## The default suite, on the CPU
	$(PYTHON) -m pytest

test-slow:  ## The tests that take minutes
	$(PYTHON) -m pytest -m slow

docs:  ## Build the site; a broken link is an error
	$(PYTHON) -m mkdocs build --strict

demo:  ## Serve the Gradio app on this machine
	$(PYTHON) demo/app.py

bench:  ## Speed of the default pair with and without the draft
	$(PYTHON) benchmarks/latency.py
