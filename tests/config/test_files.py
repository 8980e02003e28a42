# Copyright (c) the d2_memfit developers.
"""Configs by path, and by their names in the zoos."""

from pathlib import Path

import pytest

from d2_memfit.common.errors import ConfigError
from d2_memfit.config.files import find_config_file, keys_in_own_files

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x"


@pytest.mark.parametrize("name", [MASK, f"{MASK}_6GB", "COCO-Detection/retinanet_R_50_FPN_1x"])
def test_names_of_both_zoos_are_found_with_and_without_their_ending(name):
    file = Path(find_config_file(f"{name}.yaml"))
    assert file.is_file()
    assert str(file).endswith(f"{name}.yaml")
    assert find_config_file(name) == str(file)


def test_detectron2s_zoo_is_found_as_detectron2_finds_it():
    model_zoo = pytest.importorskip("detectron2.model_zoo", reason="needs setuptools<81")
    expected = model_zoo.get_config_file("COCO-Detection/retinanet_R_50_FPN_1x.yaml")
    assert Path(find_config_file("COCO-Detection/retinanet_R_50_FPN_1x")).samefile(expected)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "mask_rcnn_R_50_FPN_3x",
        "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_9x",
        "no/such.yaml",
    ],
)
def test_what_is_not_there_is_answered_with_an_example(prose, name):
    with pytest.raises(ConfigError, match=f"--config-file.*{name}") as e:
        find_config_file(name)
    prose(str(e.value))


def test_keys_of_the_zoo_are_not_the_users(tmp_path):
    assert keys_in_own_files(find_config_file(MASK)) == set()
    base, mine = tmp_path / "base.yaml", tmp_path / "mine.yaml"
    base.write_text(f"_BASE_: {find_config_file(MASK)}\nMODEL: {{MASK_ON: False}}\n")
    mine.write_text("_BASE_: base.yaml\nSOLVER: {MAX_ITER: 100}\nSEED: 1\n")
    assert keys_in_own_files(str(mine)) == {"MODEL.MASK_ON", "SOLVER.MAX_ITER", "SEED"}
