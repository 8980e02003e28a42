# Copyright (c) the d2_memfit developers.
"""The picture of docs/RECOVERY.md: the images behind it, and that its data are drawn."""

import argparse
import json
import shutil

import torch
from benchmarks import crowded
from benchmarks.common import coins
from PIL import Image


def test_a_crowded_image_is_four_photographs_with_all_their_coins():
    with coins(64, 96) as (dicts, mapper):
        photograph = mapper(dicts[0])
    image = crowded.crowd(photograph)
    assert image["image"].shape == (3, 128, 192)
    assert torch.equal(image["image"][:, 64:, 96:], photograph["image"])
    few, many = photograph["instances"], image["instances"]
    assert len(many) == 4 * len(few)
    assert torch.equal(many.gt_masks.tensor[: len(few), :64, :96], few.gt_masks.tensor)
    last = many.gt_masks.tensor[-len(few) :, 64:, 96:]
    assert torch.equal(last, few.gt_masks.tensor)
    assert torch.equal(
        many.gt_boxes.tensor[-len(few) :] - torch.tensor([96, 64] * 2), few.gt_boxes.tensor
    )


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
