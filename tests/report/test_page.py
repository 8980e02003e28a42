# Copyright (c) the d2_memfit developers.
import pytest

from d2_memfit.report import Bar, Chart, Measured, Page, Tensor, write_page

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
