"""One vocabulary: docs/glossary.md has the words, and the ones that they replaced do not come back."""

from __future__ import annotations

import re
from pathlib import Path

import functorch_shard as fs
from tests.support.pages import PAGES, ROOT

PACKAGE = Path(fs.__file__).parent
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()

# A pattern, and what to write instead.
WORDS = {
    r"\b[Pp]art(y|ies)\b": "participants",
    r"\b[Ss]tand-ins?\b": "placeholder",
    r"\bBox(es)?\b": "Region",
    r"\b[Hh]omes?\b": "memory kind",
    r"\b(is|are|was) told\b|\btells? (every|all|each) ranks?\b": "reported",
    r"(?<!here )\b(is|are|was|were) no (?!longer\b|more\b|less\b|larger\b|smaller\b|need\b)": "is not a",
    r"\b(has|have) not (?!been\b|yet\b|run\b|made\b|done\b)": "does not have",
    r", say\b(?!s)": "for example",
    r"\b(lie|lies) (in|at|on|as|there|where|directly|inside)\b": "is in",
    r", as (``|`)[^`\n]+`+[.,;:)]": "for example",
    r"\bon (its|their) way\b": "started",
}


def sources() -> list[Path]:
    return [*sorted(PACKAGE.rglob("*.py")), *(ROOT / page for page in PAGES)]


def test_words_that_were_replaced_do_not_come_back() -> None:
    found = [
        f"{path}:{text[: match.start()].count(chr(10)) + 1}: {match.group()!r}, write: {instead}"
        for path in sources()
        for text in [path.read_text()]
        for pattern, instead in WORDS.items()
        for match in re.finditer(pattern, text)
    ]
    assert found == []


def test_every_word_of_the_glossary_has_one_meaning() -> None:
    words = [
        word.strip(" `")
        for row in re.findall(r"^\| (.+?) \|", GLOSSARY, re.MULTILINE)
        for word in row.split(",")
        if row != "word" and not row.startswith("---")
    ]
    assert len(words) > 40
    assert sorted({word for word in words if words.count(word) > 1}) == []
