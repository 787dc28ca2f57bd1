"""The heat map shows the record's numbers whatever the texts hold, on as many pages as needed."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from xml.etree import ElementTree

from selfspec.visualise.fonts import fitting
from selfspec.visualise.heat_map import cells, pages, save
from selfspec.visualise.layers import LayerTrace
from tests.hand_traces import INFO, RIGHT, long_trace, small_trace

CELL = re.compile(r"p(?P<place>\d+)-l(?P<layer>\d+)-c(?P<sure>[\d.]+)(?P<marks>[a-z-]*)")
SVG = "{http://www.w3.org/2000/svg}"


def drawn(trace: LayerTrace, tmp_path: Path, tokens_a_page: int = 20) -> list[ElementTree.Element]:
    files = save(trace, tmp_path / "map.svg", tokens_a_page)
    return [ElementTree.parse(file).getroot() for file in files]


def ids(root: ElementTree.Element) -> list[str]:
    return [element.get("id", "") for element in root.iter()]


def texts(root: ElementTree.Element) -> dict[str, str]:
    """What is written, by the id of its group."""
    return {
        group.get("id", ""): "".join(group.itertext()).strip()
        for group in root.iter(f"{SVG}g")
        if group.get("id", "").startswith(("text-", "token-"))
    }


def test_numbers_in_the_picture_are_those_of_the_record(tmp_path: Path) -> None:
    trace = small_trace()
    (root,) = drawn(trace, tmp_path)
    found = [match for name in ids(root) if (match := CELL.fullmatch(name))]
    shown = {(int(m["place"]), int(m["layer"])): (float(m["sure"]), m["marks"]) for m in found}
    assert len(shown) == len(found) == 6 * 4
    for place in trace.places:
        for said, threshold in zip(place.layers, INFO.thresholds, strict=True):
            sure, marks = shown[place.index, said.layer]
            right = said.top_tokens[0] == RIGHT
            assert sure == said.confidence
            assert ("right" in marks) == right
            assert ("wrong" in marks) == (not right and said.confidence >= threshold)
            assert ("exit" in marks) == (place.exit_layer == said.layer)
        assert shown[place.index, 6] == (place.final_top_probs[0], "-right")


def test_only_confident_wrong_guesses_and_exits_are_framed(tmp_path: Path) -> None:
    trace = small_trace()
    (root,) = drawn(trace, tmp_path)
    frames = {name for name in ids(root) if name.startswith("frame-")}
    every = [cell for place in trace.places for cell in cells(trace, place)]
    assert frames == {f"frame-{cell.id}" for cell in every if cell.wrong or cell.exited}
    assert {(c.index, c.layer) for c in every if c.exited} == {(2, 2), (4, 4)}
    assert {c.index for c in every if c.wrong} == {0, 1, 3, 4, 5}
    assert {c.layer for c in every if c.wrong} == {2}


def test_cells_read_the_guess_and_columns_the_token(tmp_path: Path) -> None:
    (root,) = drawn(small_trace(), tmp_path)
    written = texts(root)
    assert [written[f"token-{n}"] for n in range(6)] == [
        *("A", "␣line⏎", "␣kept", "␣checked", "␣deep", "<end>")
    ]
    assert {name: text for name, text in written.items() if name.startswith("text-p2-l2")} == {
        "text-p2-l2-c0.625000-right-exit": "yes"
    }


def test_rounds_are_told_apart(tmp_path: Path) -> None:
    (root,) = drawn(small_trace(), tmp_path)
    assert [name for name in ids(root) if name.startswith("round-")] == [
        f"round-{number}" for number in range(4)
    ]


def test_markup_and_formulas_are_written_as_they_are(tmp_path: Path) -> None:
    (root,) = drawn(long_trace(["<script>", "$x^2$", "&amp;", "a]]>"], guess="$<b>"), tmp_path)
    assert not list(root.iter(f"{SVG}script"))
    written = texts(root)
    assert [written[f"token-{n}"] for n in range(4)] == ["<script>", "$x^2$", "&amp;", "a]]>"]
    assert "$<b>" in written.values()


def test_a_long_answer_takes_several_pages(tmp_path: Path) -> None:
    trace = long_trace([f"t{number}" for number in range(7)])
    roots = drawn(trace, tmp_path, tokens_a_page=3)
    names = ["map-1.svg", "map-2.svg", "map-3.svg"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert [path.name for path in pages(len(trace.places), Path("map.svg"), 3)] == names
    shown = [[text for name, text in texts(r).items() if name[:5] == "token"] for r in roots]
    assert shown == [["t0", "t1", "t2"], ["t3", "t4", "t5"], ["t6"]]


def test_one_page_has_the_name_that_was_asked_for(tmp_path: Path) -> None:
    assert save(small_trace(), tmp_path / "map.png") == [tmp_path / "map.png"]
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["map.png"]


def test_the_same_trace_gives_the_same_file(tmp_path: Path) -> None:
    first, second = (save(small_trace(), tmp_path / name)[0] for name in ("a.svg", "b.svg"))
    assert first.read_bytes() == second.read_bytes()


def test_no_script_breaks_the_layout_or_warns(tmp_path: Path) -> None:
    odd = ["你好世界你好世界", "🎉", "", "\ufffd", "שלום", "\u0301", "\x00", "x" * 80, " ", "\n"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (root,) = drawn(long_trace(odd, guess="🎉🎉🎉"), tmp_path)
        save(long_trace(odd), tmp_path / "map.png")
    written = texts(root)
    columns = [fitting(text, 9) for text in written.values()]
    assert columns == list(written.values())
    assert written["token-8"] == "␣"
    assert written["token-9"] == "⏎"
