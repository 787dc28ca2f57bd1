"""No word of a request reaches the file system."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.api.test_text import byte_level_bpe
from tests.models import make_model

PROGRAM = """
import json, sys, threading
from urllib.parse import quote

import httpx
import selfspec
from tests.serve.live import running

seen, watching = [], threading.Event()


def watch(event, arguments):
    if watching.is_set():
        seen.append(f"{event} {arguments!r}")


PATHS = ("../../etc/passwd-xyzzy", "/etc/passwd-xyzzy", "xyzzy\\0")
FIELDS = ("model", "speculation.drafter", "speculation.controller", "messages", "prompt", "stop",
    "user", "response_format", "tools", "logit_bias", "metadata.xyzzy")


def bodies(path):
    for field in FIELDS:
        for shape in (path, f"ngram:path={path}", {"type": path}, [path]):
            outer, _, inner = field.partition(".")
            body = {"messages": [{"role": "user", "content": path}], "max_tokens": 2}
            yield "chat/completions", {**body, outer: {inner: shape} if inner else shape}
            yield "completions", {"prompt": path, "max_tokens": 2, outer: shape}


speculator = selfspec.load(sys.argv[1], dtype="float32")
statuses = set()
with running(speculator) as server, httpx.Client(base_url=server.address) as client:
    client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})  # imports are done
    sys.addaudithook(watch)
    watching.set()
    for path in PATHS:
        for route, body in bodies(path):
            statuses.add(client.post(f"/v1/{route}", json=body, timeout=60).status_code)
        statuses.add(client.get(f"/v1/models/{quote(path)}").status_code)
    found = [line for line in seen if "xyzzy" in line]
    try:
        open("xyzzy")  # that this is seen proves that the rest would be
    except OSError:
        pass
    control = [line for line in seen if "xyzzy" in line][len(found):]
    watching.clear()
print(json.dumps([sorted(statuses), found, control]))
"""


def test_no_word_of_a_request_reaches_the_file_system(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    tokenizer = byte_level_bpe()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    make_model("llama", vocab_size=288).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    statuses, found, control = json.loads(done.stdout.splitlines()[-1])
    assert {200, 400, 404} <= set(statuses)
    assert max(statuses) < 500
    assert found == []
    assert control
    assert control[0].startswith("open ")
