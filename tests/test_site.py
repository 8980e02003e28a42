# Copyright (c) the d2_memfit developers.
"""The documentation as a site, opened in a browser."""

import importlib.util
import json
import os
import sys
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from browser import CHROMIUM, browser
from tiny import ROOT, run_process

pytestmark = pytest.mark.slow

CONFIG = ROOT / "mkdocs.yml"
_SEARCHED_S = 120

if not all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings"))):
    pytest.skip("mkdocs is not there: requirements/docs.txt", allow_module_level=True)


class Tolerant(yaml.SafeLoader):
    """Reads mkdocs.yml, which names a Python function."""


Tolerant.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def pages():
    """Of the navigation, as the addresses of the site."""

    def leaves(node):
        for entry in node:
            target = next(iter(entry.values())) if isinstance(entry, dict) else entry
            yield from leaves(target) if isinstance(target, list) else [target]

    nav = yaml.load(CONFIG.read_text(), Tolerant)["nav"]
    return [
        "index.html" if page == "README.md" else page.removesuffix(".md") + ".html"
        for page in leaves(nav)
    ]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    result = run_process(
        [*command, "--config-file", CONFIG, "--site-dir", folder],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.returncode == 0, result.stderr
    return folder


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def address(site):
    """Of the site on this machine: its search needs a server, which a file has not."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_every_page_is_there_with_a_heading(site):
    assert len(pages()) > 30
    for page in pages():
        text = (site / page).read_text()
        assert text.count("<h1") == 1, page


def test_links_to_files_of_the_repository_are_paths(site):
    text = (site / "HOW_IT_WORKS.html").read_text()
    assert "<code>d2_memfit/job/job.py</code>" in text
    assert 'href="../' not in text


def test_the_public_names_are_in_the_reference(site):
    import d2_memfit

    text = (site / "api" / "d2_memfit.html").read_text()
    missing = [name for name in d2_memfit.__all__ if f'id="d2_memfit.{name}"' not in text]
    assert not missing
    assert ":class:" not in text


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to open pages with")
@pytest.mark.long
def test_pages_open_without_an_error_and_without_the_network(address, tmp_path):
    with browser(tmp_path) as opened:
        for page in pages():
            opened.open(address + page)
            assert opened.evaluate("document.querySelectorAll('article h1').length") == 1, page
            broken = "[...document.images].filter(i => i.complete && !i.naturalWidth).length"
            assert opened.evaluate(broken) == 0, page
        assert opened.errors == []
        elsewhere = [u for u in opened.asked_for if not u.startswith((address, "data:", "blob:"))]
        assert elsewhere == []


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to open pages with")
@pytest.mark.long
def test_no_page_is_wider_than_a_phone(address, tmp_path):
    with browser(tmp_path) as opened:
        phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        opened.call("Emulation.setDeviceMetricsOverride", **phone)
        for page in pages():
            opened.open(address + page)
            assert opened.evaluate("document.documentElement.scrollWidth") == 390, page


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to open pages with")
@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("gradient accumulation", "ACCUMULATION"),
        pytest.param("CUDA out of memory", "OUT_OF_MEMORY", marks=pytest.mark.long),
        pytest.param("small gpu", "PLANNER", marks=pytest.mark.long),
        pytest.param("resume training", "RELIABILITY", marks=pytest.mark.long),
    ],
)
def test_the_search_finds_the_page_first(words, page, address, tmp_path):
    with browser(tmp_path) as opened:
        opened.open(address + "index.html")
        opened.click("label[for=__search]")
        opened.evaluate(
            "const field = document.querySelector('[data-md-component=search-query]');"
            f"field.focus(); field.value = {json.dumps(words)};"
            "field.dispatchEvent(new Event('input', {bubbles: true}));"
            "field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}))"
        )
        found = "[...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
        end = time.monotonic() + _SEARCHED_S
        while not (links := opened.evaluate(found)) and time.monotonic() < end:
            time.sleep(0.2)
        assert f"/{page}.html" in links[0], links
        assert opened.errors == []
