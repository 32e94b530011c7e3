"""The documents as a site: built strictly and without network, every page reachable; and the page of the Python interface."""

from __future__ import annotations

import importlib.util
import re
import socket
import sys
from pathlib import Path
from types import ModuleType

import pytest

import grpo_rl

ROOT = Path(grpo_rl.__file__).parents[1]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_of_the_python_interface_is_what_the_docstrings_say() -> None:
    api = script("write_api_page")
    assert (ROOT / "docs/api.md").read_text() == api.page(), "python scripts/write_api_page.py"
    assert set(grpo_rl.__all__) - {"__version__"} <= set(re.findall(r"### `grpo_rl\.(\w+)", api.page()))


def test_every_link_of_every_page_leads_somewhere_and_every_document_is_in_the_navigation(tmp_path: Path) -> None:
    docs = script("build_docs")
    docs.stage(tmp_path)
    shown = {str(entry) for group in docs.navigation() for entry in flat(group)}
    assert shown >= {str(page) for page in docs.pages()}


def flat(entry: object) -> list[object]:
    if isinstance(entry, dict):
        return [inner for value in entry.values() for inner in flat(value)]
    return [inner for value in entry for inner in flat(value)] if isinstance(entry, list) else [entry]


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = script("build_docs")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "SINGLE", ("README.md",))
    (tmp_path / "docs").mkdir()
    (tmp_path / "code.py").write_text("")
    (tmp_path / "README.md").write_text("[gone](docs/gone.md) [code](code.py)\n```python\nx[0](gone)\n```\n")
    with pytest.raises(ValueError, match=r"README.md: docs/gone.md is not there"):
        docs.stage(tmp_path / "out")
    assert (tmp_path / "out/README.md").read_text() == "gone code\n```python\nx[0](gone)\n```\n"
    (tmp_path / "docs/README.md").write_text("**To use it**\n\n| | |\n|---|---|\n| [r](../README.md) | |\n")
    (tmp_path / "docs/forgotten.md").write_text("")
    with pytest.raises(ValueError, match=r"docs/README.md does not name docs/forgotten.md"):
        docs.navigation()


@pytest.mark.campaign
def test_the_site_is_built_strictly_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: bash scripts/setup.sh docs")
    pytest.importorskip("material", reason="mkdocs-material is not installed: bash scripts/setup.sh docs")
    monkeypatch.setattr(socket.socket, "connect", lambda *a: pytest.fail("the network was used"))
    assert script("build_docs").build(tmp_path / "site", tmp_path / "staged") == []
    home = (tmp_path / "site/index.html").read_text()
    assert "Tutorial" in home and (tmp_path / "site/docs/api/index.html").exists()
    # Nothing that a browser would load comes from another server.
    loaded = re.findall(r"<(?:link|script|img)[^>]+(?:href|src)=\"?(https?://[^\s\">]+)", home)
    assert [address for address in loaded if "canonical" not in address] == []
