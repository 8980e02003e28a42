# Copyright (c) the d2_memfit developers.
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.structures import Instances
from detectron2.utils.events import EventStorage
from forks import CONTEXT, start_server
from tiny import images, tiny_cfg, tiny_model

from d2_memfit.engine.oom_log import OomLog, padded_size
from d2_memfit.settings import RecoveryOptions

pytestmark = pytest.mark.slow


def record_of(output_dir="", model=None):
    options = RecoveryOptions(output_dir=str(output_dir), budget_gb=6)
    return OomLog(options, model or tiny_model(tiny_cfg()))


def event(num_images=2):
    error = torch.OutOfMemoryError("CUDA out of memory")
    with EventStorage(7):
        return record_of().event(error, "forward", images(num_images, size=70))


def test_an_event_holds_what_a_user_must_know(tmp_path):
    record = record_of(tmp_path / "new")
    made = event()
    record.append(made, "done")
    record.append(made, "done")
    lines = (tmp_path / "new" / "memfit_oom.jsonl").read_text().splitlines()
    assert len(lines) == 2
    read = json.loads(lines[0])
    assert read.pop("allocated_gb") > 0.1
    assert read.pop("reserved_gb") > 0.1
    assert read.pop("time") > 1.6e9
    described = {"height": 70, "width": 70, "num_instances": 3}
    assert read == {
        "iteration": 7,
        "phase": "forward",
        "micro_batch": 2,
        "images": [{"file_name": f"image_{i}.png", "image_id": i, **described} for i in range(2)],
        "padded_size": [96, 96],
        "budget_gb": 6,
        "error": "CUDA out of memory",
        "action": "done",
        "rank": 0,
    }


def test_images_are_padded_as_the_model_does():
    model = tiny_model(tiny_cfg())
    batch = [{"image": torch.zeros(3, 100, 33)}, {"image": torch.zeros(3, 64, 130)}]
    assert padded_size(batch, model) == (128, 160)
    assert padded_size(batch, model) == tuple(
        model.preprocess_image([{**b, "image": b["image"]} for b in batch]).tensor.shape[-2:]
    )
    assert padded_size("something else", model) is None


def test_a_backbone_with_a_fixed_square_pads_to_it(monkeypatch):
    model = tiny_model(tiny_cfg())
    square = property(lambda self: {"square_size": 256})  # main has it
    monkeypatch.setattr(type(model.backbone), "padding_constraints", square, raising=False)
    assert padded_size(images(2, size=70), model) == (256, 256)


def test_ids_of_any_type_and_images_without_annotations_are_written(tmp_path):
    record = record_of(tmp_path)
    pixels = torch.zeros(3, 8, 8)
    batch = [
        {"image": pixels, "image_id": np.int64(7), "instances": Instances((8, 8))},
        {"image": pixels, "image_id": Path("a/b"), "file_name": "c"},
    ]
    record.append(record.event(MemoryError(), "forward", batch), "done")
    first, second = json.loads((tmp_path / "memfit_oom.jsonl").read_text())["images"]
    assert (first["image_id"], first["num_instances"]) == (7, 0)
    assert (second["image_id"], second["num_instances"]) == ("a/b", None)


def append_many(folder, made):
    for _ in range(100):
        record_of(folder, torch.nn.Linear(1, 1)).append(made, "done")


def test_several_processes_share_the_file(tmp_path):
    made = event(100)  # a long line
    start_server()
    processes = [CONTEXT.Process(target=append_many, args=(str(tmp_path), made)) for _ in range(2)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(120)
    lines = (tmp_path / "memfit_oom.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["images"]) for line in lines] == [100] * 200


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record_of().append(event(), "done")
    assert not list(tmp_path.iterdir())
