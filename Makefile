# make demo: the main job, from nothing.   make test: the tests, from nothing.   make slow: the long proofs.
# make gpu: the examination on a GPU; it installs nothing from a network.
PYTHON ?= python3
BIN := .venv/bin
MODELS := models/squeezenet-digits.onnx models/gpt2-stdlib.onnx

# Images often set it. Then each process compiles torch, Prefect and MLflow anew, which doubles the time of its imports.
unexport PYTHONDONTWRITEBYTECODE

# one more than processors: tests also wait for processes and servers
WORKERS := $(shell $(PYTHON) -c "import os; print(min(os.cpu_count() + 1, 4))")

.PHONY: demo test quick slow check gpu bench compatibility sessions docs screenshots sbom licenses audit clean

demo: .venv/ready models/squeezenet-digits.onnx
	$(BIN)/onward run flows/configs/squeezenet-digits.toml

# side by side: the tests wait for processes and servers a quarter of the time, and mypy does not
test: .venv/ready
	$(MAKE) --no-print-directory -j2 check quick

quick: .venv/ready
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist worksteal

slow: .venv/ready
	$(BIN)/python -m pytest -m slow

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# With .venv, else with the Python of a machine that has its own torch. WHEELS names a folder of wheels to install first.
gpu:
	PYTHONPATH=.package:. $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m tests.gpu $(if $(WHEELS),--wheels $(WHEELS)) $(if $(LIMIT_S),--limit-s $(LIMIT_S)) $(STEPS)

bench: .venv/ready
	$(BIN)/python -m tests.bench.update_time

# docs/reference/compatibility.md: all files, or those whose names contain one of the words in ENTRIES
compatibility: .venv/ready
	$(BIN)/python -m tests.compatibility $(ENTRIES)
	$(BIN)/python docs/generate.py

# docs/reference/terminal-sessions.md: every command, typed into a real terminal
sessions: .venv/ready
	$(BIN)/python -m tests.sessions

# the generated pages, then the site in build/site
docs: .venv/ready
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict -f .mkdocs.yml

# docs/screens: Prefect's and MLflow's pages and the report after real runs, in a Chromium of the system without a window
screenshots: .venv/ready
	command -v chromium >/dev/null || { apt-get update && apt-get install -y --no-install-recommends chromium; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e ".[browser]"
	ONWARD_SCREENSHOTS=1 $(BIN)/python -m pytest tests/browser

# build/sbom.json: every installed package, as a CycloneDX document. The tool has an environment of its own: in that of
# Onward its packages would let jsonschema check IRIs, for which each import of Prefect takes a second more.
sbom: .venv/ready
	test -x build/sbom-tool/bin/cyclonedx-py || { $(PYTHON) -m venv build/sbom-tool && build/sbom-tool/bin/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt cyclonedx-bom; }
	build/sbom-tool/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON -o build/sbom.json $(BIN)/python

licenses: .venv/ready
	mkdir -p build
	$(BIN)/pip-licenses --python $(BIN)/python --format csv --with-urls --output-file build/licenses.csv

# The known vulnerabilities of the packages that are installed here, asked of a database in the network. --strict: a
# package that the database does not know is an error, and not taken for a safe one.
audit: .venv/ready
	@$(BIN)/pip-audit --progress-spinner off --strict --no-deps --disable-pip -r .ci/constraints.txt || { echo "make audit: either vulnerabilities are listed above, or the database could not be asked, and nothing is known" >&2; exit 1; }

models/squeezenet-digits.onnx: | .venv/ready
	$(BIN)/onward reference squeezenet --num-classes 10 --image-size 64 -o $@

models/gpt2-stdlib.onnx: | .venv/ready
	$(BIN)/onward reference gpt2 --vocab-size 256 --sequence-length 256 --num-layers 4 --num-heads 4 --width 128 --dropout 0 -o $@

# One call of pip, so that torch, torchvision and the rest are resolved together. --no-compile: Python compiles a module
# when it first imports it, and most of these 20,000 are never imported.
.venv/ready: pyproject.toml .ci/constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13) and "Onward needs Python 3.11, 3.12 or 3.13: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c .ci/constraints.txt -e ".[flow,mpi,metrics,sweep,remote,gcs,azure,huggingface,text,audio,wandb,dask,ray,postgres,dev]"
	touch $@

clean:
	rm -rf .venv build models *.egg-info
