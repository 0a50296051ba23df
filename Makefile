# `make` shows what there is. Everything runs in .venv, which `make setup` makes.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# By its full path: Ansible ignores an ansible.cfg that it finds by itself in a world-writable folder.
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg

# HEAVY=1 adds the tests that download gigabytes (torch in a pod).
ifeq ($(HEAVY),1)
MARKS :=
else
MARKS := -m "not heavy"
endif
# Two cores: one worker each. Tests that must not run side by side share an xdist_group.
WORKERS ?= 2
PYTEST := python -m pytest $(MARKS) -n $(WORKERS) --dist loadgroup

.PHONY: help
help: ## show this list
	@echo "usage: make TARGET [ARGS='...']"
	@sed -nE 's/^([a-z][a-z-]*):.*## (.*)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | while IFS=$$'\t' read -r target text; do \
	    printf '  %-12s %s\n' "$$target" "$$text"; done

.PHONY: setup
setup: ## install what is missing: system packages, .venv, the locked Python packages
	@scripts/setup.sh

.PHONY: test-tools
test-tools: ## make setup, and what the tests start themselves: an OpenSSH server, PostgreSQL, a registry, tmux, Chromium
	@scripts/setup.sh --tests

.PHONY: demo
demo: setup ## rent a local pod, train the demo job on it, bring the weights home, destroy it; ARGS='-e smoke=true' is passed on
	ansible-playbook train.yml -e job=demo -e provider=local $(ARGS)

.PHONY: live
live: setup ## one small paid run: PROVIDER=vast|runpod MAX_USD=0.25; says where the service differs from the simulator
	@pennypod live --provider "$(PROVIDER)" --max-usd "$(MAX_USD)" $(ARGS)

# --- tests ------------------------------------------------------------------------------------------------------------

# One after the other, cheapest first; the slowest group is pytest, so its closing line is the last thing printed.
.PHONY: test
test: test-tools ## every check: lint, unit, molecule, integration, contract and chaos tests; HEAVY=1 adds the heavy ones
	@$(MAKE) lint
	@$(MAKE) unit
	@$(MAKE) molecule
	@$(MAKE) pods

.PHONY: lint
lint: setup ## ruff, mypy, import floors, shellcheck, yamllint, ansible-lint, generated READMEs
	ruff check
	ruff format --check
	mypy
	vermin --quiet --target=3.8- --violations --no-tips --no-parse-comments \
	    --backport argparse --backport importlib --backport typing python/pennypod/onpod
	lint-imports --no-cache
	shellcheck $$(git ls-files '*.sh' .ci/run)
	yamllint --strict .
	scripts/role_readmes.py --check
	scripts/guarantees.py --check
	ansible-lint --offline --strict

.PHONY: format
format: setup ## let ruff put the Python code in shape
	ruff check --fix-only --quiet
	ruff format

.PHONY: unit
unit: test-tools ## pytest without a container: seconds
	$(PYTEST) tests/unit $(ARGS)

.PHONY: pods
pods: test-tools ## pytest against real local pods: integration, contract and chaos tests
	$(PYTEST) $(POD_TESTS) $(ARGS)
POD_TESTS := $(foreach group,contract integration chaos,$(if $(wildcard tests/$(group)/test_*.py),tests/$(group)))

.PHONY: integration
integration: test-tools ## whole playbooks and single modules against real local pods
	$(PYTEST) tests/integration $(ARGS)

.PHONY: chaos
chaos: test-tools ## the crash matrix and KILLS=200 random kills, JOBS=3 at a time; SEED=, MINUTES=, CELL='...' (docs/guarantees.md)
	@python tests/chaos/matrix.py $(if $(KILLS),--kills $(KILLS)) $(if $(JOBS),--jobs $(JOBS)) $(if $(SEED),--seed $(SEED)) \
	    $(if $(MINUTES),--minutes $(MINUTES)) $(if $(CELL),--cell '$(CELL)') $(ARGS)

.PHONY: molecule
molecule: setup ## roles against local containers, most of them with systemd: converge, idempotence, testinfra
	molecule test --all $(ARGS)

.PHONY: bench
bench: setup ## bench-golden, bench-commands and bench-serve in one JSON; ARGS='--publish' writes docs/bench as well
	@python tests/bench/bench.py $(ARGS)

.PHONY: bench-golden
bench-golden: setup ## the demo from a golden and a stock image beside a plain ssh/scp/tar script on the same images (ten minutes)
	@python tests/bench/loop_bench.py $(ARGS)

.PHONY: bench-commands
bench-commands: setup ## the start of each command, and a thousand pods in the inventory beside the vendor's own client
	@python tests/bench/commands_bench.py $(ARGS)

.PHONY: bench-data
bench-data: setup ## the data path on emulated links beside scp, rsync, tar and rclone (about ten minutes)
	@python tests/bench/data_bench.py $(ARGS)

.PHONY: bench-serve
bench-serve: setup ## what pennypod serve costs, also in bench: accepted webhooks per second beside Debian's `webhook`, 200 runs that wait
	@python tests/bench/orchestrator_bench.py $(ARGS)

# --- the rest ------------------------------------------------------------------------------------------------------------

.PHONY: sample-data
sample-data: setup ## write a small generated YOLO data set to data/sample
	python python/trainers/make_sample_data.py yolo data/sample $(ARGS)

.PHONY: docs
docs: setup ## write the variable tables of roles/*/README.md and the measured tables of docs/guarantees.md anew
	scripts/role_readmes.py
	scripts/guarantees.py

.PHONY: lock
lock: setup ## resolve requirements.lock anew from pyproject.toml
	scripts/lock.sh

.PHONY: clean
clean: ## remove .venv and every cache; artifacts/, data/ and the state folder stay
	rm -rf .venv .cache .ansible .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
