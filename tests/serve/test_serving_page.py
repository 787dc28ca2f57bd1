"""docs/serving.md says what is true: flags, the systemd unit, the Dockerfile."""

from __future__ import annotations

import ast
import configparser
import json
import re
import shlex
from pathlib import Path

import pytest

from selfspec.cli.serve import FLAGS
from selfspec.serve.gate import OPEN
from selfspec.serve.options import VARIABLE, ServeOptions
from selfspec.serve.replica import NAME
from tests.test_readme import fenced

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
TEXT = PAGE.read_text(encoding="utf-8")
(UNIT,) = fenced("ini", TEXT)
(DOCKERFILE,) = fenced("Dockerfile", TEXT)
STEPS = [line.split(maxsplit=1) for line in DOCKERFILE.replace("\\\n", " ").splitlines()]


def step(name: str) -> str:
    """What stands behind an instruction."""
    (found,) = [rest for word, rest in STEPS if word == name]
    return found


def test_each_flag_that_is_named_exists() -> None:
    known = {flag.long_name for flag in FLAGS} | {"--config", "--help-all"}
    ours = TEXT.replace(DOCKERFILE, "")
    ours = re.sub(r"^docker (build|run).*?^```", "", ours, flags=re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"<!--.*?-->", "", ours)))
    assert named <= known
    assert len(named) > 10


def test_names_that_clients_and_people_need_are_there() -> None:
    for name in (VARIABLE, NAME, *OPEN):
        assert name in TEXT


def test_the_unit_stops_longer_than_answers_take_and_has_few_rights() -> None:
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # as the manual of the module does
    unit.read_string(UNIT)
    service = unit["Service"]
    command = shlex.split(service["ExecStart"])
    assert command[:2] == ["/opt/selfspec/bin/selfspec", "serve"]
    assert {word for word in command if word.startswith("--")} <= {one.long_name for one in FLAGS}
    assert float(service["TimeoutStopSec"]) > ServeOptions().graceful_seconds
    assert service["KillMode"] == "mixed"
    assert service["DynamicUser"] == "yes"
    assert service["CapabilityBoundingSet"] == ""


def test_the_image_has_extras_that_exist_a_user_and_a_health_check() -> None:
    project = Path(PAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.findall(r"/source\[([a-z,]+)\]", DOCKERFILE)
    assert extras
    for extra in extras[0].split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE)
    assert step("USER") != "root"
    words = [word for word, _ in STEPS]
    assert "RUN" not in words[words.index("USER") :]
    python, flag, program = json.loads(step("HEALTHCHECK").split("CMD", 1)[1])
    assert (python, flag) == ("python", "-c")
    assert any(f":{ServeOptions().port}{path}'" in program for path in OPEN)
    ast.parse(program)
    assert json.loads(step("ENTRYPOINT")) == ["selfspec", "serve", "--host", "0.0.0.0"]
    assert step("EXPOSE") == str(ServeOptions().port)


@pytest.mark.parametrize("status", [400, 401, 404, 405, 413, 429, 500, 503])
def test_each_status_is_explained(status: int) -> None:
    assert f"\n| {status} | " in TEXT
