# The front door: `make demo` and `make test` work on a fresh machine; the rest is for every day.
SHELL := /bin/bash
python := .venv/bin/python
benchmarks := demo etl loader train gpu accuracy augmentation ladder calibration quality groups unknown verdict predict stream serve distributed submission scaling ranks_to_best
# Where set-up puts uv on a machine that has none.
export PATH := $(or $(LAKEVISION_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/lakevision)/uv/bin:$(PATH)

.PHONY: help setup packages archive demo up test test-all checks lint types audit test-unit test-integration test-e2e test-faults test-python bench readme image clean

help:  ## say what there is
	@grep -hE '^[a-z0-9% -]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 50

setup: packages  ## everything a fresh machine needs, each step once
	@$(MAKE) --no-print-directory archive

packages:
	@deployments/setup/setup.sh

archive:
	@$(python) -m deployments.setup.class_archive --check || \
	    { . deployments/setup/step.sh; optional_step "Spark's classes archived (once for this .venv)" \
	        "local Spark sessions start slower" $(python) -m deployments.setup.class_archive; }

jars-%: setup  ## what Spark needs for a store, into the user's cache once: jars-s3a, jars-abfss
	@$(python) -m deployments.setup.fetch_jars $* --check || \
	    { . deployments/setup/step.sh; step "jars for $* (checked by hash)" $(python) -m deployments.setup.fetch_jars $*; }

demo: setup  ## the whole DAG on the built-in images, or on SOURCE=/folder (WEIGHTS=, MODEL=, IMAGE_SIZE=)
	@$(python) -m deployments.demo $(if $(SOURCE),--source "$(SOURCE)") $(if $(MODEL),--model "$(MODEL)") \
	    $(if $(WEIGHTS),--weights "$(WEIGHTS)") $(if $(IMAGE_SIZE),--image-size "$(IMAGE_SIZE)")

up: setup  ## server, workers and MLflow UI until Ctrl-C
	@$(python) -m deployments.up

# One file of each kind that matters, without the tests marked `long`; `make test-all` has the others, too.
core := $(patsubst %,tests/integration/test_%.py,etl delta cache training backends promotion predict stream same_answers) \
    tests/e2e/test_digits.py
$(foreach file,$(core),$(if $(wildcard $(file)),,$(error $(file), a file of `make test`, does not exist)))
beyond_core := $(filter-out $(core),$(wildcard tests/integration/test_*.py tests/e2e/test_*.py))
# Three files at a time, also on two cores: a third of the time a test waits for a process. The long ones first: the
# folders' names are in that order. If they were named here, pytest's main process would import their conftest.py, too.
# Bytecode is written even where the environment says no: else each of the tests' processes compiles this project again.
pytest := PYTHONDONTWRITEBYTECODE= $(python) -m pytest --durations=10 -n 3 --dist loadfile --no-loadscope-reorder --ignore=tests/faults

test: checks  ## lint, types, unit tests, and one file of tests for each kind: ETL, cache, training, promotion, inference
	@$(pytest) -m "not long and not fault" $(beyond_core:%=--ignore=%) tests

test-all: checks  ## lint, types, and all tests but those of `make test-faults`
	@$(pytest) -m "not fault" --junitxml=$(or $(LAKEVISION_HOME),.lakevision)/test-all.xml tests

# The archive of classes and mypy take one core and a minute each, so they run side by side.
checks: packages
	@$(MAKE) --no-print-directory --jobs=2 --output-sync archive lint types

lint:  ## ruff, import rules, the prose check, hadolint, the schema of compose.yaml, zizmor on the workflow
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/lint-imports --no-cache --no-logo
	@$(python) -m deployments.checks.prose
	@.venv/bin/hadolint docker/Dockerfile.*
	@.venv/bin/check-jsonschema --builtin-schema vendor.compose-spec docker/compose*.yaml
	@.venv/bin/zizmor --offline --quiet --persona=pedantic .github/workflows

types:  ## mypy, strict
	@.venv/bin/mypy

test-unit test-integration test-e2e: setup  ## one folder of tests
	@$(python) -m pytest tests/$(@:test-%=%)

test-faults: setup  ## tests/faults, and the tests of other folders that are marked `fault`: hours
	@$(python) -m pytest tests/faults
	@$(python) -m pytest -m fault tests/integration

# `make test` with the DAG on the digits as its only test that is not a unit test.
test-python:  ## set-up, lint, types, unit tests and the DAG on the digits with PYTHON=3.11 or 3.13, in a root of that Debian
	@deployments/setup/test_python.sh "$(PYTHON)"

audit: setup  ## the lock against a source of security advisories
	@$(python) -m deployments.checks.audit $(if $(SOURCE),--source "$(SOURCE)")

bench: setup  ## all benchmarks
	@for name in $(benchmarks); do $(python) tests/benchmarks/$$name.py $(BENCH_ARGS) || exit 1; done

bench-train: setup  ## training's speed, and its time to the best accuracy
	@for name in train accuracy; do $(python) tests/benchmarks/$$name.py $(BENCH_ARGS) || exit 1; done

bench-%: setup  ## one benchmark, e.g. bench-demo; BENCH_ARGS=--quick
	@$(python) tests/benchmarks/$*.py $(BENCH_ARGS)

readme: setup  ## write the READMEs' trees from the docstrings, and their tables from what the benchmarks measured
	@$(python) -m deployments.checks.readme

image:  ## build the CPU image, or with VARIANT=gpu the GPU image, and run the DAG's smallest case in it
	@deployments/setup/build_image.sh

clean:  ## remove what runs wrote (not .venv)
	rm -rf .lakevision
