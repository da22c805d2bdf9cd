"""What the package says of itself is the same everywhere."""

from __future__ import annotations

import re
from importlib.metadata import entry_points

import functorch_shard as fs
from functorch_shard.cli import main
from tests.support.pages import ROOT, program

PYPROJECT = (ROOT / "pyproject.toml").read_text()
TESTS, RELEASE = ((ROOT / f".github/workflows/{name}.yml").read_text() for name in ("tests", "release"))


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    assert match, pattern
    return match.group(1)


def test_the_version_is_the_same_everywhere() -> None:
    assert 'dynamic.version.attr = "functorch_shard.__version__"' in PYPROJECT
    assert found(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text()) == fs.__version__
    assert found(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text()) == fs.__version__


def test_links_of_a_release_are_addresses_of_files_that_are_there() -> None:
    addresses, home = program("addresses", ROOT / ".github"), "https://example.org/owner/name"
    readme = addresses.with_absolute_links((ROOT / "README.md").read_text(), home, "v1")
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", readme, flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    paths = [path for target in targets for path in re.findall(rf"^{home}/(?:raw|blob)/v1/([^#]+)", target)]
    assert len(paths) >= 40
    assert [path for path in paths if not (ROOT / path).exists()] == []
    urls = re.findall(r'^\w+ = "(https://.*)"$', addresses.with_urls(PYPROJECT, home, "v1"), re.MULTILINE)
    assert len(urls) == 4
    assert all((ROOT / path).exists() for url in urls for path in re.findall(rf"^{home}/blob/v1/(.*)", url))
    assert "addresses.py" in (ROOT / ".ci/release").read_text()
    assert ".ci/release" in RELEASE


def test_tests_run_on_every_python_that_the_package_names() -> None:
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)
    assert re.findall(r"3\.\d+", found(r"^ +python: (\[.*\])$", TESTS)) == named
    assert found(r'^requires-python = ">=(.*)"$', PYPROJECT) == named[0]
    readme = (ROOT / "README.md").read_text()
    assert f"Python {named[0]} to {named[-1]}" in readme


def test_tests_run_with_the_oldest_torch_the_pinned_one_and_the_current_one() -> None:
    oldest = found(r'^    "torch>=(.*)",$', PYPROJECT)
    pinned = found(r"^torch==(\d+\.\d+)\.", (ROOT / ".ci/constraints.txt").read_text())
    assert found(r"^ +torch: (\[.*?\])", TESTS) == f'["torch=={oldest}.*", "torch=={pinned}.*", "torch"]'


def test_the_program_is_the_command_line() -> None:
    assert found(r'^functorch-shard = "(.*)"$', PYPROJECT) == f"{main.__name__}:{main.run.__name__}"
    installed = [x.value for x in entry_points(group="console_scripts") if x.name == "functorch-shard"]
    assert set(installed) <= {f"{main.__name__}:{main.run.__name__}"}
