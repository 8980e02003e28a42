# Copyright (c) the d2_memfit developers.
import json

import cv2
import numpy as np
import pytest
import torch
from detectron2.modeling import build_model
from detectron2.structures import Boxes, BoxMode, Instances
from forks import run_forked
from pycocotools import mask as coco_mask
from tiled_images import TiledPredictor, load_tiled_cfg
from tiled_images.clip import clip_annotation
from tiled_images.dataset import TiledDataset
from tiled_images.mapper import TileMapper, repeat_factors
from tiled_images.planning import with_datasets_of_tiles
from tiled_images.reader import ImageReader
from tiny import ROOT, read_metrics

from d2_memfit import Job
from d2_memfit.errors import ConfigError, DataError
from d2_memfit.predict.tiles import Detection, Tile

pytestmark = pytest.mark.slow

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
    return load_tiled_cfg(str(CONFIG), ["DATALOADER.NUM_WORKERS", 0, *opts])


def spots(size=700, seed=0):
    """An image of dots, of one across the corner of four tiles, of a line across all tiles, of a
    ring around a dot, and of a frame around it all.
    """
    pixels = np.zeros((size, size), np.uint8)
    rng = np.random.default_rng(seed)
    for x in range(30, size - 20, 40):
        for y in range(30, size - 20, 40):
            radius = int(rng.integers(4, 15))
            cv2.circle(pixels, (x, y), radius, 255, -1)
    cv2.circle(pixels, (224, 224), 42, 0, -1)
    cv2.circle(pixels, (224, 224), 39, 255, -1)
    cv2.rectangle(pixels, (0, 480), (size, 530), 0, -1)
    cv2.line(pixels, (12, 490), (size - 14, 520), 255, 5)
    cv2.circle(pixels, (420, 230), 90, 0, -1)
    cv2.circle(pixels, (420, 230), 85, 255, 8)
    cv2.circle(pixels, (420, 230), 20, 255, -1)
    cv2.rectangle(pixels, (3, 3), (size - 4, size - 4), 255, 4)
    return pixels


def save(folder, pixels, name="spots.png"):
    cv2.imwrite(str(folder / name), pixels)
    return str(folder / name)


def masks(detections):
    return sorted((d.mask["counts"], tuple(d.box)) for d in detections)


@pytest.mark.parametrize(("size", "overlap"), [(256, 64), (256, 31), (300, 200)])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2))]
)
def test_merged_tiles_find_what_the_whole_image_has_every_object_once(
    size, overlap, seed, tmp_path
):
    pixels = spots(seed=seed)
    whole = BrightSpots.find(pixels)
    predictor = TiledPredictor(cfg("TILES.SIZE", size, "TILES.OVERLAP", overlap), BrightSpots())
    found = list(predictor.detect(save(tmp_path, pixels)))
    expected = [
        Detection(box.numpy(), 1.0, 0, coco_mask.encode(np.asfortranarray(mask.numpy())))
        for box, mask in zip(whole.pred_boxes.tensor, whole.pred_masks)
    ]
    assert masks(found) == masks(expected)


def annotation(polygon, **more):
    points = np.reshape(polygon, (-1, 2))
    return {
        "bbox": [*points.min(axis=0), *points.max(axis=0)],
        "bbox_mode": BoxMode.XYXY_ABS,
        "segmentation": [polygon],
        "category_id": 0,
        **more,
    }


def test_clipped_polygons_and_codes_cover_what_the_tile_shows():
    star = [10, 90, 50, 10, 90, 90, 5, 40, 95, 40]  # its lines cross
    horseshoe = [10, 10, 90, 10, 90, 30, 30, 30, 30, 70, 90, 70, 90, 90, 10, 90]
    for polygon in (star, horseshoe):
        (code,) = coco_mask.frPyObjects([polygon], 100, 100)
        whole = coco_mask.decode(code)
        for tile in (Tile(0, 0, 60, 60), Tile(40, 20, 100, 80), Tile(20, 20, 80, 80)):
            shown = whole[tile.y0 : tile.y1, tile.x0 : tile.x1]
            clipped = clip_annotation(annotation(polygon), tile)
            (of_polygon,) = coco_mask.frPyObjects(clipped["segmentation"], tile.height, tile.width)
            rows, columns = np.nonzero(shown)
            true_box = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            np.testing.assert_allclose(clipped["bbox"], true_box, atol=1)
            # Corners between pixels are rounded along the border.
            assert (coco_mask.decode(of_polygon) != shown).mean() < 0.02
            clipped = clip_annotation(annotation(polygon, segmentation=code), tile)
            assert (coco_mask.decode(clipped["segmentation"]) == shown).all()
            assert clipped["bbox"] == true_box


def dataset(folder, objects, size=600, name="spots.png", **more):
    polygons = [[x, y, x + w, y, x + w, y + h, x, y + h] for x, y, w, h in objects]
    return {
        "file_name": str(folder / name),
        "image_id": 7,
        "height": size,
        "width": size,
        "annotations": [annotation([float(v) for v in p], **more) for p in polygons],
    }


def test_every_object_is_in_the_tiles_that_show_it(tmp_path):
    objects = [(10, 10, 40, 40), (190, 300, 100, 20), (0, 0, 600, 5), (580, 580, 20, 20)]
    tiles = TiledDataset([dataset(tmp_path, objects)], size=256, overlap=64, min_visible=0.3)
    assert len(tiles) == 9
    assert tiles.has_objects.sum() == 6
    shown = [len(tiles[i]["annotations"]) for i in range(9)]
    assert (np.array(shown) > 0).tolist() == tiles.has_objects.tolist()
    first = tiles[0]
    assert (first["height"], first["width"], first["tile"]) == (256, 256, (0, 0, 256, 256))
    assert first["annotations"][0]["bbox"] == [10, 10, 50, 50]
    middle = tiles[4]
    assert middle["tile"] == (192, 192, 448, 448)
    assert [a["bbox"] for a in middle["annotations"]] == [[0, 108, 98, 128]]


def test_the_share_of_drawn_tiles_with_objects_is_the_keys(tmp_path):
    tiles = TiledDataset([dataset(tmp_path, [(10, 10, 40, 40)])], 256, 64, 0.3)
    drawn = repeat_factors(tiles, 0.75)
    assert drawn.sum() == pytest.approx(len(tiles))
    assert drawn[torch.as_tensor(tiles.has_objects)].sum() == pytest.approx(0.75 * len(tiles))


def test_crowds_and_objects_of_which_too_little_shows_are_left_out(tmp_path):
    image = dataset(tmp_path, [(200, 10, 100, 20)])
    for min_visible, tiles_with_it in [(0.5, 2), (0.6, 1), (1.0, 1)]:
        tiles = TiledDataset([image], 256, 64, min_visible)
        assert tiles.has_objects.sum() == tiles_with_it
    crowd = dataset(tmp_path, [(10, 10, 40, 40)], iscrowd=1)
    assert not TiledDataset([crowd], 256, 64, 0.1).has_objects.any()


def test_files_are_read_by_parts_where_the_format_allows_it(tmp_path, log):
    rasterio = pytest.importorskip("rasterio", reason="the optional extra rasterio")
    pixels = np.random.default_rng(0).integers(0, 256, (300, 400, 4), dtype=np.uint8)
    tile = Tile(130, 40, 290, 200)
    expected = pixels[40:200, 130:290, 2::-1]
    profile = {"driver": "GTiff", "height": 300, "width": 400, "count": 4, "dtype": "uint8"}
    for storage in ({}, {"tiled": True, "blockxsize": 64, "blockysize": 64, "compress": "lzw"}):
        with rasterio.open(tmp_path / "a.tif", "w", **profile, **storage) as file:
            file.write(pixels.transpose(2, 0, 1))
        image = ImageReader(str(tmp_path / "a.tif"))
        assert (image.height, image.width, image.decodes_whole) == (300, 400, False)
        assert (image.read(tile) == expected).all()
    cv2.imwrite(str(tmp_path / "a.png"), pixels[:, :, :3])
    whole = ImageReader(str(tmp_path / "a.png"), "BGR")
    assert whole.decodes_whole
    assert (whole.read(tile) == pixels[40:200, 130:290, :3]).all()


@pytest.mark.parametrize("damage", [b"", b"x"])
def test_whatever_is_wrong_with_a_file_is_one_kind_of_error_with_its_name(damage, tmp_path):
    for name in ("broken.png", "broken.tif"):
        (tmp_path / name).write_bytes(damage)
        with pytest.raises(DataError, match=f"the image .*{name} cannot be read"):
            ImageReader(str(tmp_path / name))


def test_a_large_image_that_is_decoded_whole_is_warned_of(tmp_path, log):
    cv2.imwrite(str(tmp_path / "large.png"), np.zeros((4200, 4200), np.uint8))
    ImageReader(str(tmp_path / "large.png"))
    (message,) = log.messages
    assert "large.png is read in parts of 18 megapixels" in message
    assert "rio convert" in message


def test_an_image_of_another_size_than_its_dataset_says_is_named(tmp_path):
    image = dataset(tmp_path, [(10, 10, 40, 40)], size=800)
    save(tmp_path, spots(600))
    with pytest.raises(DataError, match=r"spots\.png has 600 x 600 .* by its dataset 800 x 800"):
        TileMapper(cfg())(TiledDataset([image], 256, 64, 0.1)[0])


def test_a_plan_is_made_for_tiles_not_for_images(tmp_path):
    from detectron2.data import DatasetCatalog

    objects = [(x, 10, 20, 20) for x in range(0, 20_000, 25)]
    image = {**dataset(tmp_path, objects), "height": 2000, "width": 20_000}
    DatasetCatalog.register("wide", lambda: [image])
    try:
        config = cfg("DATASETS.TRAIN", ("wide",), "DATASETS.TEST", ("wide",))
        job = Job.from_cfg(with_datasets_of_tiles(config), 1)
        largest = (3, 256, 256)
        assert {tuple(d["image"].shape) for d in job.training_batch(2)} == {largest}
        (image,) = job.evaluation_batch()
        assert (tuple(image["image"].shape), image["height"], image["width"]) == (largest, 256, 256)
        assert 10 <= job.batches.num_instances <= 12
        assert not job.batches.assumptions
    finally:
        for name in [n for n in DatasetCatalog.list() if n.startswith("wide")]:
            DatasetCatalog.remove(name)


def test_a_real_model_finds_in_tiles_what_it_finds_in_the_whole(tmp_path):
    """Its results in the middle of a tile do not depend on where the tile ends."""
    torch.manual_seed(0)
    config = cfg("TILES.SIZE", 320, "TILES.OVERLAP", 160, "TEST.DETECTIONS_PER_IMAGE", 100)
    model = build_model(config).eval()
    pixels = spots(320)
    (whole,) = model([{"image": torch.as_tensor(pixels).expand(3, -1, -1)}])
    whole = whole["instances"]
    found = list(TiledPredictor(config, model).detect(save(tmp_path, pixels)))
    assert len(found) == len(whole) > 0
    np.testing.assert_allclose(
        sorted(d.score for d in found), sorted(whole.scores.tolist()), atol=1e-6
    )
    batched = cfg("TILES.SIZE", 200, "TILES.OVERLAP", 60, "TILES.BATCH_SIZE", 4)
    one_by_one = cfg("TILES.SIZE", 200, "TILES.OVERLAP", 60)
    boxes = [
        sorted(d.box.tolist() for d in TiledPredictor(c, model).detect(save(tmp_path, pixels)))
        for c in (batched, one_by_one)
    ]
    np.testing.assert_allclose(*boxes, atol=1e-2)


@pytest.mark.parametrize(
    ("opts", "message"),
    [
        (["TILES.OVERLAP", 256], "TILES.OVERLAP must be less than TILES.SIZE, 256, got 256"),
        (["TILES.OVERLAP", 0], "TILES.OVERLAP must be a positive integer, got 0"),
        (["TILES.SIZE", 0], "TILES.SIZE must be a positive integer, got 0"),
        (["TILES.OBJECT_SHARE", 1.5], "TILES.OBJECT_SHARE must be a number from 0 to 1, got 1.5"),
        (["INPUT.CROP.ENABLED", True], "INPUT.CROP.ENABLED must be False"),
        (["MEMFIT.MICRO_BATCH", 0], "MEMFIT.MICRO_BATCH must be a positive integer or None, got 0"),
    ],
)
def test_wrong_values_are_named(opts, message):
    with pytest.raises(ConfigError, match=message):
        cfg(*opts)


@pytest.fixture(scope="module")
def large_images(tmp_path_factory):
    """Folder of a dataset of tiled TIFF."""
    pytest.importorskip("rasterio", reason="the optional extra rasterio")
    from make_large_images import make_dataset

    folder = tmp_path_factory.mktemp("large")
    for split in ("train", "val"):
        make_dataset(folder, split, size=600, images=2)
    return folder


def run_script(name, *args):
    script = ROOT / "projects" / "TiledImages" / name
    return run_forked(script, "--config-file", CONFIG, *args)


@pytest.mark.long
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
    assert "tiles of 2 images" in result.stdout
    found = json.loads((tmp_path / "inference" / "coco_instances_results.json").read_text())
    assert {r["image_id"] for r in found} == {0, 1}
    assert {r["category_id"] for r in found} == {1}
    assert all(r["segmentation"]["size"] == [600, 600] for r in found)
    assert "bbox/AP" in read_metrics(tmp_path)[-1]

    val = sorted((large_images / "val").glob("*.tif"))
    output = tmp_path / "found.json"
    weights = ["MODEL.WEIGHTS", tmp_path / "model_final.pth", *small]
    result = run_script("predict.py", "--input", *val, "--output", output, "--opts", *weights)
    assert result.returncode == 0, result.stderr[-4000:]
    again = json.loads(output.read_text())
    boxes = [sorted(r["bbox"] for r in results) for results in (again, found)]
    np.testing.assert_allclose(*boxes, atol=1e-3)

    val[0].write_bytes(b"not an image")
    result = run_script("predict.py", "--input", *val, "--output", output, "--opts", *weights)
    assert result.returncode == 2
    assert "error: the image" in result.stderr
    assert json.loads(output.read_text()) == again
