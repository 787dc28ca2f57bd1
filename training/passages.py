r"""Collects this machine's documentation prose as passages for a model that writes training text.

    python training/passages.py --output passages

Reads READMEs of installed Python packages, HTML and text in /usr/share/doc, and manual pages.
Writes LANGUAGE/SOURCE-PACKAGE.txt, with blank lines between paragraphs, and SOURCES.tsv with
licences. No paragraph is written twice. `zh` is simplified Chinese. On Debian, first install
debian-handbook, debian-reference-{en,de,fr,es,zh-cn}, debian-faq{,-de,-fr,-zh-cn}, manpages{,-de,
-fr,-es,-zh}, developers-reference{,-de,-fr} and installation-guide-amd64. If apt is set to skip
documentation, `apt-get download` them, `dpkg-deb -x` each into one folder, and give it as --root.
"""

from __future__ import annotations

import gzip
import html
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated

import typer

LANGUAGES = re.compile(
    "ar|ca|cs|da|de|el|en|es|fa|fi|fr|hr|hu|id|it|ja|ko|nl|pl|pt|ro|ru|sv|uk|vi|zh"
)
TREES = ("doc", "debian-reference", "developers-reference", "maint-guide", "aptitude")
LEFT_OUT = re.compile(r"(?i)change|news|relnotes|copyright|licen[sc]e|_sources|todo|authors|thanks")
DOCUMENT = re.compile(r"(?i)(^readme[^/]*|^faq|\.(html?|txt|md|rst))(\.gz)?$")
SECTIONS = re.compile(  # sections of manual pages without prose
    r"(?i)aut(h?or|eur)|copyright|lice|lizenz|übersetz|tradu[czç]|colo(ph|f)|kolophon|see also|voir"
    r"|siehe|v[eé]ase|veja|vedere|synops|übersicht|sinopsis|作者|[译譯跋]|版权|[參参][见見]|总览|概要"
    r"|^(name|options|optionen|opciones|opzioni|选项)$"
)
REFUSED = re.compile(  # lower case: legal text, addresses, leftover markup, translators' notes
    r"^description |hereby granted|without (any )?warrant|copyright|©|all rights reserved|//,|</"
    r"|public license|redistribut|creative commons|report bugs|this (man )?page|https?:|www\.|\\"
    r"|version of this page|@\S+\.\w|\ufffd|\[!|&[a-z]+;|traduction (française )?de|翻译人"
    r"|traducci[oó]n (al|de) |übersetzung wurde|[「『【].?译|中文版?(翻译|维护)"
    r"|(?:^| )[|=~#*_+-]{2,}(?: |$)"
)
ENGLISH = {"the", "of", "and", "is", "that", "with", "for", "this", "are", "be", "by", "it"}
LICENCES = re.compile(
    r"(?i)Apache[ -]Licen[sc]e|Artistic Licen[sc]e|GNU Free Documentation|BSD|MIT Licen[sc]e"
    r"|\bL?GPL-?\d?|GNU (Lesser )?General Public Licen[sc]e(,? version \d)?|public domain"
    r"|Mozilla Public"
)
SKIPPED = "pre|table|script|style|nav|header|footer|head|h1|h2|h3|h4|h5|h6"
INLINE = "a|abbr|acronym|b|bdi|cite|code|em|font|i|kbd|q|s|samp|small|span|strong|tt|u|var|wbr"
HAN = "[\u3000-\u30ff\u3400-\u9fff\uff00-\uffef]"
ROFF = {"em": "—", "en": "–", "aq": "'", "cq": "’", "oq": "‘", "lq": "“", "rq": "”", "Fo": "«"}
ROFF |= {"Fc": "»", "dq": '"', "ha": "^", "ti": "~", "mi": "-", "hy": "-", "->": "→"}


@dataclass(frozen=True)
class Page:
    """Documentation of one package in one language: a file, or the text of a README."""

    language: str
    source: str
    package: str
    version: str
    licence: str
    path: Path
    text: str = ""

    def blocks(self) -> Iterator[str]:
        """Yield the page's paragraphs, unfiltered."""
        if self.source == "readme":
            return text_blocks(self.text)
        raw = self.path.read_bytes()
        text = (gzip.decompress(raw) if self.path.suffix == ".gz" else raw).decode(errors="replace")
        if self.source == "man":
            return roff_blocks(text)
        return html_blocks(text) if ".htm" in self.path.name else text_blocks(text)


def html_blocks(text: str) -> Iterator[str]:
    """Yield the paragraphs and list items of HTML, without code, tables and headings."""
    text = re.sub(rf"(?is)<!--.*?-->|<({SKIPPED})\b.*?</\1>", "\0", text.replace("\0", ""))
    text = re.sub(rf"(?is)<sup\b.*?</sup>|</?({INLINE})\b[^>]*>", "", text)
    text = re.sub(r"<[^>]+>", "\0", re.sub(r"<br\b[^>]*>", " ", text))
    yield from html.unescape(text).split("\0")


def text_blocks(text: str) -> Iterator[str]:
    """Yield the paragraphs and list items of plain text, Markdown or reStructuredText."""
    text = re.sub(r"(?ms)^ *(```|~~~).*?^ *\1|<!--.*?-->|<(table|pre)\b.*?</\2>", "\n", text)
    text = re.sub(r"(?m)!\[[^\]]*\](\([^)]*\)|\[[^\]]*\])|^ *\[[^\]]+\]:.*$|<[^<>\n]+>`_", "", text)
    text = re.sub(r"\[([^\[\]]+)\](\([^)]*\)|\[[^\]]*\])", r"\1", text)
    text = re.sub(r"(?::[\w:]{2,20}:)?`+([^`<']{1,300})(?:<[^`>]{1,300}>)?`+_*", r"\1", text)
    text = re.sub(r"\*\*|\b__|__\b|(?<!\w)[*_](?=\w)|(?<=[\w.])[*_](?!\w)", "", text)
    text = re.sub(r"</?[a-zA-Z][^<>]{0,500}>", "", text)
    text = re.sub(r"(?m)^.*\n([=~^\"'#*+-])\1{2,}\s*$|^\s*#.*$|^\s*\|.*$|^.* \| .*$", "\n", text)
    text = re.sub(r"(?<=[a-z])([-/])\n *(?=[a-z])", r"\1", text)  # a line that ends in mid-word
    code = False
    for block in re.split(r"\n\s*\n", text.expandtabs(4)):
        margin = "  " if code else "    "
        indented = all(line.startswith(margin) for line in block.split("\n") if line)
        directive = block.lstrip("\n").startswith(".. ")
        code = directive or block.rstrip().endswith("::") or (code and indented)
        if not indented and not directive:
            unquoted = "\n" + re.sub(r"(?m)^> ?", "", block)
            yield from re.split(r"\n\s*(?:[-*+•o]|\d+[.)])\s+", unquoted)


def roff_blocks(text: str) -> Iterator[str]:
    """Yield the paragraphs of a page written with man macros; leaves out the tags of lists."""
    text = re.sub(r"(?ms)^\.(nf|EX|TS|Vb|de|ig|SY)\b.*?^\.(fi|EE|TE|Ve|\.|YS).*?$", ".PP", text)
    kept, tag, block = True, False, [""]
    for line in [*text.split("\n"), ".PP"]:
        macro = re.match(r"[.']\s*([A-Za-z]*)\s*(.*)", line)
        name, rest = macro.groups() if macro else ("", line)
        if name == "SH":
            kept = not SECTIONS.search(rest.strip(' "'))
        if name in {"B", "I", "BR", "IR", "RB", "RI", "BI", "IB"} or (line and not macro):
            words = [quoted or bare for quoted, bare in re.findall(r'"([^"]*)"|(\S+)', rest)]
            if kept and not tag:
                block.append(("" if len(name) == 2 else " ").join(words) if name else rest)
            tag = False
        elif name or not line:
            yield unroff(" ".join(block))
            tag, block = name in {"TP", "TQ"}, []


def unroff(text: str) -> str:
    """Remove escapes; an unknown one leaves its backslash, so that the paragraph is refused."""
    text = re.sub(r"\\(f(\w|\(..|\[\w*\])|[hvwlLs]'[^']*'|s[+-]?\d)", "", text)
    text = re.sub(r"\\([&%:/,|^c{}]|\".*|\(bu)", "", text)
    text = re.sub(r"\\([-'.])", r"\1", re.sub(r"\\[ ~0]", " ", text))
    return re.sub(r"\\(?:\((..)|\[(..)\])", lambda at: ROFF.get(at[1] or at[2], "\\"), text)


def passage(block: str, page: Page) -> str:
    """One line that ends with a sentence; empty if the block does not look like prose."""
    text = re.sub(r"\s+", " ", block.replace("\u00ad", "").replace("¶", "")).strip()
    text = re.sub(r" ?[(<\[]https?://[^\s)>\]]+[)>\]]", "", text)
    dense = page.language in {"zh", "ja"}
    text = re.sub(rf"(?<={HAN}) (?={HAN})", "", text) if dense else text
    if text.endswith((":", "：")):  # it announces what follows
        text = "".join(re.findall(r"^.*[.!?。！？][»”\"')]?(?=\s|[^\x00-\u2fff])", text))
    words, letters = text.lower().split(), [sign for sign in text if sign.isalpha()]
    if len(text) < 60 or len(words) < (1 if dense else 25):
        return ""
    english = sum(word in ENGLISH for word in words) / len(words)
    latin = sum(sign < "\u0250" for sign in letters) / max(1, len(letters))
    own = latin < 0.4 if dense else english < 0.1
    starts = not text[0].islower() or page.path.name.startswith(words[0])
    odd = sum(bool(re.search(r"[_/\\={}<>$|@]|^-", word)) for word in words)
    good = (
        ((latin > 0.99 and english > 0.05) if page.language == "en" else own)
        and (starts and text[0] not in "-.,;:)/%$>")
        and re.search(r"[.!?。！？][»”\"')]*$", text) is not None
        and len(letters) > (0.75 if dense else 0.85) * (len(text) - text.count(" "))
        and odd <= 1 + len(words) // 9
        and not REFUSED.search(text.lower())
    )
    return text if good else ""


def language(path: Path) -> str:
    """Two letters, from a folder (de-DE) or a name (a.de.html); empty for traditional Chinese."""
    parts: tuple[str, ...] = (*reversed(path.parts[4:-1]), *re.findall(r"(?<=\.)[\w-]+", path.name))
    for part in parts:
        if re.fullmatch(r"(?i)zh[-_](tw|hk).*", part):
            return ""
        if re.fullmatch("[a-z]{2}[-_][A-Z]{2}", part) or LANGUAGES.fullmatch(part.split("-")[0]):
            return part[:2]
    return "en"


def readmes() -> Iterator[Page]:
    """Yield the descriptions of the installed Python packages."""
    readme = Path("METADATA")
    for found in distributions():
        about = found.metadata.json
        kinds = [kind.split(" :: ")[-1] for kind in about.get("classifier", []) if "Licen" in kind]
        named = str(about.get("license") or "").split("\n")[0]
        licence = str(about.get("license_expression") or ", ".join(kinds) or named)
        text = str(about.get("description") or "")
        yield Page(
            "en", "readme", found.name, found.version, licence or "see METADATA", readme, text
        )


def files(root: Path, man_pages: int) -> Iterator[tuple[str, str, Path]]:
    """Yield language, source and path of each document and of a language's largest man pages."""
    for path in (path for tree in TREES for path in sorted((root / tree).rglob("*"))):
        inside = str(path.relative_to(root))
        if DOCUMENT.search(path.name) and not LEFT_OUT.search(inside) and not path.is_symlink():
            yield language(Path("/usr/share", inside)), "doc", path
    pages = [path for path in (root / "man").rglob("man[1578]/*") if not path.is_symlink()]
    taken: Counter[str] = Counter()
    for path in sorted(pages, key=lambda path: (-path.stat().st_size, path)):
        code = language(Path("/usr/share/man", path.parent.parent.name, "page"))
        family = code + re.split(r"[-_.]", path.name)[0]
        if taken[code] < man_pages and taken[family] < 20:  # gcloud has thousands of similar pages
            taken.update((code, family))
            yield code, "man", path


def system_pages(root: Path, man_pages: int) -> Iterator[Page]:
    """Yield documents and manual pages; a package unknown to dpkg is named by its folder."""

    def dpkg(*words: str) -> list[str]:
        command = ["dpkg-query", f"--admindir={root / 'var/lib/dpkg'}", *words]
        try:
            return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        except OSError:
            return []

    found = [item for item in files(root / "usr/share", man_pages) if item[0] and item[2].is_file()]
    names = [f"/{path.relative_to(root)}" for _, _, path in found]
    lines = [line for at in range(0, len(names), 999) for line in dpkg("-S", *names[at : at + 999])]
    owners = {line.rpartition(": ")[2]: re.split("[,:]", line)[0] for line in lines}
    versions = dict(line.split(" ") for line in dpkg("-W", "-f=${Package} ${Version}\n"))
    for (code, source, path), name in zip(found, names, strict=True):
        parts = name.split("/")  # "", usr, share, doc, PACKAGE
        package = owners.get(name) or parts[4 if parts[3] == "doc" else 3]
        about = root / "usr/share/doc" / package / "copyright"
        text = about.read_text(errors="replace") if about.is_file() else ""
        terms = list(dict.fromkeys(re.findall(r"(?m)^License: *(\S.*)$", text)))[:6]
        known = LICENCES.search(text)
        licence = ", ".join(terms or ([known[0]] if known else [f"see {about}"]))
        yield Page(code, source, package, versions.get(package, ""), licence, path)


def main(
    output: Annotated[Path, typer.Option(help="Folder to write; new or empty.")],
    root: Annotated[list[Path] | None, typer.Option(help="Root of system files; else /.")] = None,
    man_pages: Annotated[int, typer.Option(min=0, help="Manual pages per language at most.")] = 400,
) -> None:
    """Collect, clean and write the paragraphs; print a table of their counts."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        sys.exit(f"{output} is not an empty folder. Give another --output")
    roots = root or [Path("/")]
    pages = [*readmes(), *(page for at in roots for page in system_pages(at, man_pages))]
    judged: set[str] = set()
    kept: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for page in sorted(pages, key=lambda page: page.language != "en"):  # untranslated: English
        for block in page.blocks():
            text = "" if len(block) < 60 or block in judged else passage(block, page)
            key = re.sub(r"[\W\d_]+", "", text.lower())
            if text and key not in judged:
                name = f"{page.language}/{page.source}-{page.package}.txt"
                kept[name, page.package, page.version, page.licence].append(text)
            judged |= {block, key}
    rows = ["file\tpackage\tversion\tlicence\tparagraphs\tcharacters"]
    table: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for (name, *about), texts in sorted(kept.items()):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text("\n\n".join(texts) + "\n", encoding="utf-8")
        sizes = {"paragraphs": len(texts), "characters": sum(map(len, texts))}
        rows.append("\t".join(map(str, (name, *about, *sizes.values()))))
        table[name[:2]].update({"files": 1, **sizes})
    (output / "SOURCES.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"{'language':10}{'files':>8}{'paragraphs':>12}{'characters':>12}")
    for code, sums in sorted(table.items()):
        print(f"{code:10}{sums['files']:8}{sums['paragraphs']:12}{sums['characters']:12}")


if __name__ == "__main__":
    typer.run(main)
