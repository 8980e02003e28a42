# Copyright (c) the d2_memfit developers.
import json

import cv2
import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog
from detectron2.structures import Boxes, BoxMode, Instances
from forks import run_forked
from pycocotools import mask as coco_mask
from tiny import ROOT, read_metrics

from d2_memfit import Job
from d2_memfit.common.errors import DataError
from d2_memfit.config.load import load_cfg
from d2_memfit.predict.tiles import Tile

pytest.importorskip("rasterio", reason="the optional extra rasterio")
import tiled_images
from tiled_images import TileMapper, TileMerger, Trainer, tiles_of

CONFIG = ROOT / "projects" / "TiledImages" / "configs" / "mask_rcnn_coins_tiled.yaml"


class BrightSpots(torch.nn.Module):
    """Finds what is brighter than 128: exactly, wherever it is cut. The score is the share of the
    image's pixels that it has.
    """

    def forward(self, batch):
        return [{"instances": self.find(image["image"].numpy()[0])} for image in batch]

    @staticmethod
    def find(pixels):
        bright = (pixels > 128).astype(np.uint8)
        num, labels, stats, _ = cv2.connectedComponentsWithStats(bright)
        x, y, w, h, area = stats[1:].T
        found = Instances(pixels.shape)
        found.pred_boxes = Boxes(torch.as_tensor(np.stack([x, y, x + w, y + h], axis=1)).float())
        found.scores = torch.as_tensor(area / pixels.size)
        found.pred_classes = torch.zeros(num - 1, dtype=torch.int64)
        found.pred_masks = torch.as_tensor(labels == np.arange(1, num)[:, None, None])
        return found


def cfg(*opts):
    opts = ["DATALOADER.NUM_WORKERS", 0, *opts]
    return load_cfg(str(CONFIG), opts, [tiled_images.add_tiled_config])


def spots(size=700):
    """An image of dots, of one across the corner of four tiles, of a line across all tiles, of a
    ring around a dot, and of a frame around it all.
    """
    pixels = np.zeros((size, size), np.uint8)
    rng = np.random.default_rng(0)
    for x in range(30, size - 20, 40):
        for y in range(30, size - 20, 40):
            cv2.circle(pixels, (x, y), int(rng.integers(4, 15)), 255, -1)
    cv2.circle(pixels, (224, 224), 42, 0, -1)
    cv2.circle(pixels, (224, 224), 39, 255, -1)
    cv2.rectangle(pixels, (0, 480), (size, 530), 0, -1)
    cv2.line(pixels, (12, 490), (size - 14, 520), 255, 5)
    cv2.circle(pixels, (420, 230), 90, 0, -1)
    cv2.circle(pixels, (420, 230), 85, 255, 8)
    cv2.circle(pixels, (420, 230), 20, 255, -1)
    cv2.rectangle(pixels, (3, 3), (size - 4, size - 4), 255, 4)
    return pixels


@pytest.mark.parametrize(
    ("size", "overlap"), [(256, 64), pytest.param(300, 200, marks=pytest.mark.slow)]
)
def test_merged_tiles_find_what_the_whole_image_has_every_object_once(size, overlap, tmp_path):
    whole = BrightSpots.find(spots())
    cv2.imwrite(str(tmp_path / "spots.png"), spots())
    image = {"file_name": str(tmp_path / "spots.png"), "image_id": 1, "height": 700, "width": 700}
    mapper, merge = TileMapper(cfg(), is_train=False), TileMerger()
    inputs = map(mapper, tiles_of([image], size, overlap))
    found = [result for tile in inputs for result in merge(tile, *BrightSpots()([tile]))]
    codes = [coco_mask.encode(np.asfortranarray(mask.numpy())) for mask in whole.pred_masks]
    expected = sorted(code["counts"].decode() for code in codes)
    assert sorted(result["segmentation"]["counts"] for result in found) == expected


def annotation(polygon, **more):
    points = np.reshape(polygon, (-1, 2))
    made = {"bbox": [*points.min(axis=0), *points.max(axis=0)], "bbox_mode": BoxMode.XYXY_ABS}
    return {**made, "segmentation": [polygon], "category_id": 0, **more}


def clip(annotation, tile):
    box = np.array(annotation["bbox"])
    return tiled_images._clipped(annotation, tile, box, box.clip(tile[:2] * 2, tile[2:] * 2))


def test_clipped_polygons_and_codes_cover_what_the_tile_shows():
    star = [10, 90, 50, 10, 90, 90, 5, 40, 95, 40]  # its lines cross
    horseshoe = [10, 10, 90, 10, 90, 30, 30, 30, 30, 70, 90, 70, 90, 90, 10, 90]
    for polygon in (star, horseshoe):
        (code,) = coco_mask.frPyObjects([polygon], 100, 100)
        whole = coco_mask.decode(code)
        for tile in (Tile(0, 0, 60, 60), Tile(40, 20, 100, 80), Tile(20, 20, 80, 80)):
            shown = whole[tile.y0 : tile.y1, tile.x0 : tile.x1]
            clipped = clip(annotation(polygon), tile)
            (of_polygon,) = coco_mask.frPyObjects(clipped["segmentation"], tile.height, tile.width)
            rows, columns = np.nonzero(shown)
            true_box = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            np.testing.assert_allclose(clipped["bbox"], true_box, atol=1)
            # Corners between pixels are rounded along the border.
            assert (coco_mask.decode(of_polygon) != shown).mean() < 0.02
            clipped = clip(annotation(polygon, segmentation=code), tile)
            assert (coco_mask.decode(clipped["segmentation"]) == shown).all()
            assert clipped["bbox"] == true_box


def dataset(folder, objects, size=600):
    polygons = [[x, y, x + w, y, x + w, y + h, x, y + h] for x, y, w, h in objects]
    annotations = [annotation([float(v) for v in p]) for p in polygons]
    image = {"file_name": str(folder / "spots.png"), "image_id": 7, "annotations": annotations}
    return {**image, "height": size, "width": size}


def test_files_are_read_by_parts(tmp_path):
    import rasterio

    pixels = np.random.default_rng(0).integers(0, 256, (300, 400, 4), dtype=np.uint8)
    profile = {"driver": "GTiff", "height": 300, "width": 400, "count": 4, "dtype": "uint8"}
    with rasterio.open(tmp_path / "a.tif", "w", **profile, tiled=True, blockxsize=64) as file:
        file.write(pixels.transpose(2, 0, 1))
    cv2.imwrite(str(tmp_path / "a.png"), pixels[:, :, 2::-1])
    for name in ("a.tif", "a.png"):
        part = tiled_images._read_tile(f"{tmp_path / name}#130,40,290,200", "BGR")
        assert (part == pixels[40:200, 130:290, 2::-1]).all()
    (tmp_path / "a.tif").write_bytes(b"x")
    with pytest.raises(DataError, match=r"the image .*a\.tif cannot be read"):
        tiled_images._read_tile(f"{tmp_path}/a.tif#0,0,9,9", "BGR")


def test_a_plan_is_made_for_tiles_not_for_images(tmp_path):
    objects = [(x, 10, 20, 20) for x in range(0, 20_000, 25)]
    image = {**dataset(tmp_path, objects), "height": 2000, "width": 20_000}
    DatasetCatalog.register("wide", lambda: [image])
    try:
        config = cfg("DATASETS.TRAIN", ("wide",), "DATASETS.TEST", ("wide",))
        job = Job.from_trainer(Trainer, config, 1)
        largest = (3, 256, 256)
        assert {tuple(d["image"].shape) for d in job.training_batch(2)} == {largest}
        (image,) = job.batches.evaluation()
        assert (tuple(image["image"].shape), image["height"], image["width"]) == (largest, 256, 256)
        assert 10 <= job.batches.num_instances <= 12
        assert not job.batches.assumptions
    finally:
        for name in [n for n in DatasetCatalog.list() if n.startswith("wide")]:
            DatasetCatalog.remove(name)


@pytest.fixture(scope="module")
def large_images(tmp_path_factory):
    """Folder of a dataset of tiled TIFF."""
    from make_large_images import make_dataset

    folder = tmp_path_factory.mktemp("large")
    for split in ("train", "val"):
        make_dataset(folder, split, size=400, num_images=2)
    return folder


def run_script(name, *args):
    script = ROOT / "projects" / "TiledImages" / name
    return run_forked(script, "--config-file", CONFIG, *args)


@pytest.mark.slow
def test_training_evaluation_and_prediction_by_the_scripts(large_images, tmp_path):
    datasets = []
    for split in ("train", "val"):
        datasets += ["--coco", f"tiled_{split}", large_images / f"{split}.json"]
        datasets += [large_images / split]
    small = ["SOLVER.ACCUMULATION_STEPS", 2, "DATALOADER.NUM_WORKERS", 1, "TILES.SIZE", 160]
    small += ["TILES.OVERLAP", 50, "MEMFIT.BUDGET_GB", 4]
    options = ["OUTPUT_DIR", tmp_path, "SOLVER.MAX_ITER", 2, "SOLVER.STEPS", (), *small]
    result = run_script("train_tiles.py", *datasets, *options)
    assert result.returncode == 0, result.stderr[-4000:]
    found = json.loads((tmp_path / "inference" / "coco_instances_results.json").read_text())
    assert {r["image_id"] for r in found} == {0, 1}
    assert {r["category_id"] for r in found} == {1}
    assert all(r["segmentation"]["size"] == [400, 400] for r in found)
    assert "bbox/AP" in read_metrics(tmp_path)[-1]

    val = sorted((large_images / "val").glob("*.tif"))
    output = tmp_path / "found.json"
    weights = ["MODEL.WEIGHTS", tmp_path / "model_final.pth", *small]
    result = run_script("predict.py", "--input", *val, "--output", output, "--opts", *weights)
    assert result.returncode == 0, result.stderr[-4000:]
    again = json.loads(output.read_text())
    boxes = [sorted(r["bbox"] for r in results) for results in (again, found)]
    np.testing.assert_allclose(*boxes, atol=1e-3)
