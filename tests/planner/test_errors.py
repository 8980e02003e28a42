# Copyright (c) the d2_memfit developers.
"""Errors of models as one line."""

import pytest
import torch
from detectron2.structures import Instances

from d2_memfit.common.errors import ConfigError, DataError
from d2_memfit.planner.errors import one_line_errors


def line_of(run, **options):
    with pytest.raises(ConfigError) as info, one_line_errors(**options):
        run()
    assert info.value.__cause__ is not None
    assert "\n" not in str(info.value)
    return str(info.value)


@pytest.mark.parametrize("module", ["users_model", "detectron2.projects.point_rend.mask_head"])
def test_the_place_is_the_last_in_the_users_code(tmp_path, module):
    source = "import torch\ndef forward():\n    torch.ones(4, 5) @ torch.ones(4)"
    file = tmp_path / "users" / "modeling" / "head.py"
    file.parent.mkdir(parents=True)
    file.write_text(source)
    names = {"__name__": module}
    exec(compile(source, str(file), "exec"), names)
    line = line_of(names["forward"])
    assert "RuntimeError: size mismatch" in line
    assert "in users/modeling/head.py:3 in forward)" in line
    assert "--batch MODULE:FUNCTION" in line
    assert "--probe" in line


def test_an_error_of_a_worker_is_its_last_line():
    loader = torch.utils.data.DataLoader([1, 2], collate_fn="no function", num_workers=1)
    line = line_of(lambda: next(iter(loader)))
    assert "run (TypeError: 'str' object is not callable, in " in line


def test_an_evaluation_can_be_left_out():
    line = line_of(lambda: next(iter([])), in_evaluation=True)
    assert line.startswith("the model of this job does not run in evaluation (StopIteration, in ")
    assert line.endswith('. DATASETS.TEST "()" leaves evaluation out')


@pytest.mark.parametrize(
    "run", [lambda: {}["sem_seg"], lambda: Instances((2, 2)).gt_ids], ids=["key", "field"]
)
def test_what_the_mapper_did_not_make(run):
    line = line_of(run)
    assert "--trainer MODULE:CLASS" in line
    assert "--batch MODULE:FUNCTION" in line
    assert line.endswith("the dataset must exist")


@pytest.mark.parametrize(
    "error",
    [
        NameError("name '_C' is not defined"),
        NotImplementedError("Deformable Conv is not supported on CPUs!"),
    ],
    ids=str,
)
def test_what_needs_a_gpu_or_a_compiled_operator(error):
    def run():
        raise error

    assert "build the project's operators, or measure on a GPU, with --probe" in line_of(run)


def test_a_file_that_a_model_reads_is_missing():
    line = line_of(lambda: torch.load("/no/dla34.pth"))
    assert "FileNotFoundError" in line
    assert line.endswith("before its first step: put it there")


def test_errors_of_d2_memfit_stay_as_they_are():
    with pytest.raises(DataError, match=r"^as it is$"), one_line_errors():
        raise DataError("as it is")
