# Copyright (c) the d2_memfit developers.
"""The picture of docs/RECOVERY.md: the images behind it, and that its data are drawn."""

import argparse
import json
import shutil

from benchmarks import crowded
from PIL import Image


def test_what_was_measured_is_drawn_and_says_what_the_page_says(tmp_path, capsys):
    shutil.copy(crowded.DOCS / "crowded.jsonl", tmp_path)
    crowded.run(argparse.Namespace(draw=True, docs=tmp_path))
    assert Image.open(tmp_path / "crowded.png").width >= 900
    plain, ours = [json.loads(x) for x in (tmp_path / "crowded.jsonl").read_text().splitlines()]
    assert plain["iterations"] == crowded.CROWDED_AT[0]
    assert "can't allocate memory" in plain["end"]
    assert (ours["iterations"], ours["end"]) == (crowded.ITERATIONS, "all of them")
    assert ours["events"][0]["iteration"] == crowded.CROWDED_AT[0]
    for line in (plain, ours):
        assert max(gb for _, gb in line["memory"]) <= line["budget_gb"] + 0.001
    assert capsys.readouterr().out.count("\n") == 2
