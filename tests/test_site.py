"""The site builds in strict mode, has its generated parts, and loads nothing from other hosts."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from html import unescape
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from eval import pictures
from selfspec.cli.main import app
from selfspec.config import OPTION_NAMES
from selfspec.serve.options import ServeOptions

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
        assert config.strict
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
    return folder


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r'<(?!a )\w+[^>]*(?:src|href)="(?:https?:)?//', text), page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//", style.read_text(encoding="utf-8")), style


def test_reference_pages_cover_the_code(site: Path) -> None:
    def text(page: str) -> str:
        return unescape(re.sub(r"<[^>]*>", "", (site / page).read_text(encoding="utf-8")))

    options, commands = text("reference/options.html"), text("reference/commands.html")
    for name in (*OPTION_NAMES, *(entry.name for entry in fields(ServeOptions))):
        assert f"--{name.replace('_', '-')}" in options
    assert "Answers generated at once, in one batch." in text("serving.html")
    for name in app().commands:
        assert f"Usage: selfspec {name} " in commands
    assert "generate_batch(" in text("reference/python.html")


def test_the_gallery_has_the_pages_and_pictures_of_its_commands(site: Path) -> None:
    """`python -m eval.pictures gallery NAME` makes them in advance: a build needs no model."""
    commands = {Path(words[2]).stem: words for words in pictures.commands()}
    pages = {name for name, words in commands.items() if words[1] == "--html"}
    assert {path.stem for path in (site / "gallery").glob("*.html")} == pages
    assert len(pages) >= 5
    for name in pages:
        text = (site / "gallery" / f"{name}.html").read_text(encoding="utf-8")
        assert "<script" in text
        assert json.dumps(commands[name][-1])[1:-1] in text  # its trace is of this prompt
    assert {path.stem for path in pictures.PICTURES.glob("*.png")} == commands.keys()


def test_the_light_and_the_dark_picture_have_equal_words() -> None:
    light, dark = (
        re.findall(r">([^<>]+)<", (IMAGES / f"how-{name}.svg").read_text(encoding="utf-8"))
        for name in ("light", "dark")
    )
    assert light == dark
