"""README.md and pyproject.toml with the address of the repository, which a package index does not know.

python .github/addresses.py https://github.com/OWNER/NAME v0.1.0    # before a release is built; changes both files
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\((?!https?:|#)([^)\s]+)\)")
_BLOCK = re.compile(r"(```.*?```)", re.DOTALL)


def with_absolute_links(text: str, address: str, tag: str) -> str:
    """``text`` with each link to a file of the repository as one to that file on the web, pictures as raw files."""

    def absolute(link: re.Match[str]) -> str:
        mark, words, path = link.groups()
        return f"{mark}[{words}]({address}/{'raw' if mark else 'blob'}/{tag}/{path})"

    parts = _BLOCK.split(text)  # every second one is a block of code
    return "".join(part if i % 2 else _LINK.sub(absolute, part) for i, part in enumerate(parts))


def with_urls(project: str, address: str, tag: str) -> str:
    """The text of pyproject.toml with ``[project.urls]``."""
    urls = {
        "Source": address,
        "Documentation": f"{address}/blob/{tag}/docs/index.md",
        "Changelog": f"{address}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
    table = "\n".join(["[project.urls]", *(f'{name} = "{url}"' for name, url in urls.items())])
    return re.sub(r"^(?=\[project\.optional-dependencies\])", f"{table}\n\n", project, flags=re.MULTILINE)


def main(address: str, tag: str) -> None:
    """Write both files."""
    for name, change in {"README.md": with_absolute_links, "pyproject.toml": with_urls}.items():
        path = ROOT / name
        path.write_text(change(path.read_text(encoding="utf-8"), address.rstrip("/"), tag), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
