# Copyright (c) the d2_memfit developers.
import pytest
from browser import CHROMIUM, browser

from d2_memfit.report import Bar, Chart, Measured, Page, Tensor, write_page

GB = 2**30


def needs_chromium(test):
    reason = "no Chromium to look at the page with"
    return pytest.mark.slow(pytest.mark.skipif(CHROMIUM is None, reason=reason)(test))


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
    rows = [["", "measured"], ["peak", EVIL]]
    content = Page(
        title=f"A job {EVIL}",
        answer=f"Fits: 3 of 4 GB {EVIL}\nbecause {EVIL}",
        next_step=f"Next {EVIL}\n  d2-memfit plan {EVIL}",
        job_lines=[f"fact {EVIL}"],
        charts=[chart],
        limits_gb={f"budget {EVIL}": 3.5, "6GB card": 6.0},
        keys=f"KEY: {EVIL}",
        bars=bars,
        steps=steps,
        measured=Measured(rows, [(0, 1.0), (19, 2.0), (99, 2.0)], (1.5, 2.5), (119, 3.0)),
    )
    file = tmp_path / "page.html"
    write_page(content, file)
    return file


def test_nothing_is_taken_for_markup_or_loaded(page):
    text = page.read_text()
    assert "<b>x" not in text
    assert text.count("</script>") == 2  # the data's and the page's own
    assert "default-src 'none'" in text


@needs_chromium
def test_in_a_browser_tensors_are_named_owners_left_out_and_steps_explained(page, tmp_path):
    def count(selector):
        return b.evaluate(f"document.querySelectorAll('{selector}').length")

    def text(selector):
        return b.evaluate(f"document.querySelector('{selector}').textContent")

    with browser(tmp_path / "profile") as b:
        b.open(page)
        assert text("#title") == f"A job {EVIL}"
        assert text("h1") == f"Fits: 3 of 4 GB {EVIL}"
        assert b.evaluate("document.querySelector('h1').className") == "yes"  # its colour
        assert text("#answer") == f"because {EVIL}"
        assert text("#keys pre") == f"KEY: {EVIL}"
        assert text("#next_step pre") == f"Next {EVIL}\n  d2-memfit plan {EVIL}"
        b.evaluate("navigator.clipboard.writeText = async text => { window.copied = text; }")
        for part, copied in (("keys", f"KEY: {EVIL}"), ("next_step", f"d2-memfit plan {EVIL}")):
            b.click(f"#{part} button")
            assert b.evaluate("window.copied") == copied  # the command alone can be pasted
        assert text("#measured td:nth-child(2)") == EVIL
        assert count("#measured .failed") == 1
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


@needs_chromium
@pytest.mark.parametrize("width", [390, 1160])
def test_it_fills_the_width_of_a_phone_and_of_a_desktop(page, tmp_path, width):
    def box(selector):
        of_element = f"document.querySelector('{selector}').getBoundingClientRect().toJSON()"
        return b.evaluate(of_element)

    with browser(tmp_path / "profile") as b:
        screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        b.call("Emulation.setDeviceMetricsOverride", **screen)
        b.open(page)
        assert b.evaluate("document.documentElement.scrollWidth") <= width  # wide parts scroll
        for picture in ("svg.chart", "#measured svg", "#bars svg"):
            drawn = b.evaluate(f"document.querySelector('{picture}').viewBox.baseVal.width")
            assert drawn == pytest.approx(box(picture)["width"], abs=1)  # letters keep their size
            assert drawn > 0.85 * width
        # The log's peak of 2 GB is in the range of 1.5 to 2.5, and the error at 3 is above it.
        band, error = box("#measured .range"), box("#measured .failed")
        peak = box("#measured .measured:nth-last-child(4)")
        assert band["top"] < peak["top"] < band["bottom"]
        assert error["bottom"] < band["top"]
        assert b.errors == []


@needs_chromium
def test_nothing_is_drawn_of_what_is_not_known(tmp_path):
    page = tmp_path / "page.html"
    measured = Measured([["", "measured"]], [], None, (0, 3.0))
    write_page(Page("A log", "Not predicted", "", [], [], {}, measured=measured), page)
    with browser(tmp_path / "profile") as b:
        b.open(page)
        shown = "[...document.querySelectorAll('section')].filter(e => !e.hidden).map(e => e.id)"
        assert b.evaluate(shown) == ["measured", "job"]
        assert b.evaluate("document.querySelector('figure').hidden")
        assert b.errors == []
