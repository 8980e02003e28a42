# Copyright (c) the d2_memfit developers.
import pytest
from browser import CHROMIUM, browser

from d2_memfit.report import Bar, Chart, Page, Tensor, write_page

GB = 2**30
EVIL = "</script><b>x</b><script>window.evil = 1</script>"


@pytest.fixture
def page(tmp_path):
    """Of 4 GB: 1 beside tensors, 1 that stays, and 2 in the middle half of the time."""
    tensors = [
        Tensor(0, 4, GB, "parameters", "backbone.conv1", "float32 [64, 3, 7, 7]", "setup"),
        Tensor(1, 3, 2 * GB, f"activations: {EVIL}", f"heads.{EVIL}", f"relu {EVIL}", "forward"),
    ]
    chart = Chart(f"training {EVIL}", tensors, 4, [("forward", 0), ("backward", 2)], GB, 4 * GB, 0)
    bars = [
        Bar("as it is", "", 4.0, 1.0, ""),
        Bar(f"Knob {EVIL}", "exact", 3.0, 1.2, f"KEY {EVIL}"),
    ]
    steps = [["step", "GB after"], [EVIL, "3.00"]]
    limits = {f"budget {EVIL}": 3.5, "6GB card": 6.0}
    file = tmp_path / "page.html"
    write_page(Page(f"A job {EVIL}", [f"fact {EVIL}"], [chart], limits, bars, steps), file)
    return file


def test_nothing_is_taken_for_markup_or_loaded(page):
    text = page.read_text()
    assert "<b>x" not in text
    assert text.count("</script>") == 2  # the data's and the page's own
    assert "default-src 'none'" in text


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to look at the page with")
def test_in_a_browser_tensors_are_named_owners_left_out_and_steps_explained(page, tmp_path):
    def count(selector):
        return b.evaluate(f"document.querySelectorAll('{selector}').length")

    def text(selector):
        return b.evaluate(f"document.querySelector('{selector}').textContent")

    with browser(tmp_path / "profile") as b:
        b.open(page)
        assert text("h1") == f"A job {EVIL}"
        assert text("#job_lines li") == f"fact {EVIL}"
        counts = {"path.band": 2, ".chart .limit": 2, ".bar": 2, "#legend button": 2}
        assert {s: count(s) for s in counts} == counts
        assert text("#steps td") == EVIL
        phases = b.evaluate("[...document.querySelectorAll('.phase-name')].map(e => e.textContent)")
        assert phases == ["forward", "backward"]
        # 4 GB of 6.3 are below the middle of the picture, and 2 GB below its lower third.
        b.move("svg.chart", 0.5, 0.6)
        assert text("#tip") == (
            f"2.00 GB: relu {EVIL}\nmodule: heads.{EVIL}\nowner: activations: {EVIL}\n"
            "allocated in: forward"
        )
        b.move("svg.chart", 0.5, 0.72)
        assert "module: backbone.conv1" in text("#tip")
        b.move("svg.chart", 0.5, 0.89)
        assert text("#tip") == "1.00 GB: the process in addition to its tensors"
        assert text("#alive-title").startswith("Alive at the peak, training")
        assert count("#alive tr") == 3
        b.click("svg.chart", 0.1, 0.5)
        assert text("#alive-title").startswith("Alive at allocation or free 0 of 4")
        assert count("#alive tr") == 2
        b.click("#legend button:nth-child(2)")
        assert count("path.band") == 1
        b.move("svg.chart", 0.5, 0.6)
        assert b.evaluate("document.querySelector('#tip').hidden")
        b.click("#legend button:nth-child(2)")
        assert count("path.band") == 2
        assert b.evaluate("window.evil") is None
        assert b.errors == []
        assert all(url.startswith(("file:", "about:")) for url in b.asked_for)
