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
from tiled_images import (
    BalancedTileSampler,
    ImageReader,
    TiledDataset,
    TiledPredictor,
    TileMapper,
    build_tiled_train_loader,
    load_tiled_cfg,
)
from tiled_images.clip import clip_annotation
from tiled_images.dataset import tiles_showing
from tiled_images.planning import with_datasets_of_tiles
from tiny import ROOT, read_metrics

from d2_memfit import Job
from d2_memfit.errors import ConfigError, DataError
from d2_memfit.inference import CocoResultsWriter, Detection, Grid, Tile, to_coco

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


def save(folder, pixels, name="spots.npy"):
    np.save(folder / name, pixels)
    return str(folder / name)


def masks(detections):
    return sorted((d.mask["counts"], tuple(d.box)) for d in detections)


def test_a_tile_larger_than_the_image_is_the_image(tmp_path):
    pixels = spots(200)
    (only,) = Grid(200, 200, 1024, 200)
    assert only == (0, 0, 200, 200)
    found = list(TiledPredictor(cfg(), BrightSpots()).detect(save(tmp_path, pixels)))
    assert len(found) == len(BrightSpots.find(pixels))


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


def test_models_without_masks_are_merged_by_their_boxes(tmp_path):
    class BoxesOnly(BrightSpots):
        def forward(self, batch):
            outputs = super().forward(batch)
            for output in outputs:
                output["instances"].remove("pred_masks")
            return outputs

    pixels = np.zeros((400, 600), np.uint8)
    for x, y, w, h in [(10, 10, 580, 20), (10, 40, 30, 350), (190, 100, 80, 80), (400, 300, 90, 9)]:
        pixels[y : y + h, x : x + w] = 255
    found = list(TiledPredictor(cfg(), BoxesOnly()).detect(save(tmp_path, pixels)))
    expected = BrightSpots.find(pixels).pred_boxes.tensor.tolist()
    assert sorted(d.box.tolist() for d in found) == sorted(expected)


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


def test_an_object_whose_box_alone_reaches_into_a_tile_is_not_in_it():
    corner = [0, 0, 100, 0, 100, 10, 10, 10, 10, 100, 0, 100]  # an L
    (code,) = coco_mask.frPyObjects([corner], 100, 100)
    for segmentation in ([corner], code):
        found = annotation(corner, segmentation=segmentation)
        assert clip_annotation(found, Tile(20, 20, 100, 100)) is None
        assert clip_annotation(found, Tile(0, 0, 50, 50))["bbox"] == [0, 0, 50, 50]


def dataset(folder, objects, size=600, name="spots.npy", **more):
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


def test_crowds_and_objects_of_which_too_little_shows_are_left_out(tmp_path):
    image = dataset(tmp_path, [(200, 10, 100, 20)])
    for min_visible, tiles_with_it in [(0.5, 2), (0.6, 1), (1.0, 1)]:
        tiles = TiledDataset([image], 256, 64, min_visible)
        assert tiles.has_objects.sum() == tiles_with_it
    crowd = dataset(tmp_path, [(10, 10, 40, 40)], iscrowd=1)
    assert not TiledDataset([crowd], 256, 64, 0.1).has_objects.any()


def test_an_object_larger_than_a_tile_is_in_all_that_it_fills():
    grid = Grid(1000, 1000, 256, 64)
    shown = tiles_showing(grid, np.array([100.0, 100, 900, 900]), 0.5)
    filled = {row * 5 + column for row in (1, 2, 3) for column in (1, 2, 3)}
    assert filled < set(shown)
    line = tiles_showing(grid, np.array([0.0, 300, 1000, 310]), 0.5)
    assert len(line) == len(grid.lefts)


def test_ranks_draw_disjoint_tiles_of_one_order(two_ranks):
    has_objects = np.arange(100) < 30
    shares = two_ranks.run(sampler_of_rank, has_objects)
    both = [i for pair in zip(*shares) for i in pair]
    assert both == take(BalancedTileSampler(has_objects, 0.5, seed=1), 100)


def sampler_of_rank(rank, has_objects):
    return take(BalancedTileSampler(has_objects, 0.5, seed=1), 50)


def test_tiles_with_and_without_objects_are_balanced_and_all_come():
    has_objects = np.zeros(1000, bool)
    has_objects[:30] = True
    numbers = np.array(take(BalancedTileSampler(has_objects, 0.5, seed=1), 3000))
    assert 0.46 < has_objects[numbers].mean() < 0.54
    assert set(numbers) == set(range(1000))
    of_objects = numbers[has_objects[numbers]]
    assert len(set(of_objects[:30])) == 30  # each once before one comes again
    assert take(BalancedTileSampler(has_objects, 0.5, seed=1), 50) == numbers[:50].tolist()
    for all_alike in (np.ones(5, bool), np.zeros(5, bool)):
        assert len(set(take(BalancedTileSampler(all_alike, 0.5, seed=1), 5))) == 5


def take(sampler, num):
    return [i for i, _ in zip(sampler, range(num))]


def test_the_loader_keeps_the_sizes_of_objects(tmp_path):
    from detectron2.data import DatasetCatalog

    save(tmp_path, spots(600))
    image = dataset(tmp_path, [(270, 270, 60, 40)])
    DatasetCatalog.register("tiles_of_one", lambda: [image])
    try:
        config = cfg("DATASETS.TRAIN", ("tiles_of_one",), "TILES.OBJECT_SHARE", 1.0)
        batch = next(iter(build_tiled_train_loader(config)))
    finally:
        DatasetCatalog.remove("tiles_of_one")
    for tile in batch:
        assert tile["image"].shape == (3, 256, 256)
        (box,) = tile["instances"].gt_boxes.tensor
        assert (box[2:] - box[:2]).tolist() == [60, 40]


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
    infrared = ImageReader(str(tmp_path / "a.tif"), "RGB", bands=[4, 1, 2, 3]).read(tile)
    assert (infrared == pixels[40:200, 130:290, [3, 0, 1, 2]]).all()


def test_npy_files_are_mapped_and_others_decoded_whole(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    tile = Tile(130, 40, 290, 200)
    mapped = ImageReader(save(tmp_path, pixels), "RGB")
    assert not mapped.decodes_whole
    assert (mapped.read(tile) == pixels[40:200, 130:290]).all()
    deep = ImageReader(save(tmp_path, pixels[:, :, 0].astype(np.uint16) * 100, "deep.npy"))
    assert deep.read(tile).dtype == np.float32
    cv2.imwrite(str(tmp_path / "a.png"), pixels)
    whole = ImageReader(str(tmp_path / "a.png"), "BGR")
    assert whole.decodes_whole
    assert (whole.read(tile) == pixels[40:200, 130:290]).all()


@pytest.mark.parametrize(
    "damage", [b"", b"\x93NUMPY\x01\x00", b"\x93NUMPY\x01\x00\x10\x00{'descr': ((((((", b"x"]
)
def test_whatever_is_wrong_with_a_file_is_one_kind_of_error_with_its_name(damage, tmp_path):
    for name in ("broken.npy", "broken.png", "broken.tif"):
        (tmp_path / name).write_bytes(damage)
        with pytest.raises(DataError, match=f"the image .*{name} cannot be read"):
            ImageReader(str(tmp_path / name))


def test_a_large_image_that_is_decoded_whole_is_warned_of(tmp_path, log):
    cv2.imwrite(str(tmp_path / "large.png"), np.zeros((4200, 4200), np.uint8))
    ImageReader(str(tmp_path / "large.png"))
    (message,) = log.messages
    assert "large.png must be decoded whole, 4200 x 4200 pixels and 50 MiB" in message
    assert "rio convert" in message


@pytest.fixture
def with_a_broken_image(tmp_path):
    """Three images, of which the second is cut off in the middle."""
    images = [dataset(tmp_path, [(10, 10, 40, 40)], name=f"{i}.npy") for i in range(3)]
    for i, image in enumerate(images):
        save(tmp_path, spots(600), f"{i}.npy")
        image["image_id"] = i
    data = (tmp_path / "1.npy").read_bytes()
    (tmp_path / "1.npy").write_bytes(data[: len(data) // 2])
    return images


def test_a_corrupt_image_is_named_and_left_out_only_if_asked(with_a_broken_image, log):
    tiles = TiledDataset(with_a_broken_image, 256, 64, 0.1)
    of_the_broken = tiles[9]
    with pytest.raises(DataError, match=r"1\.npy cannot be read .*TILES\.SKIP_CORRUPT"):
        TileMapper(cfg())(of_the_broken)
    skipping = cfg("TILES.SKIP_CORRUPT", True)
    predictor = TiledPredictor(cfg(), BrightSpots())
    with pytest.raises(DataError, match=r"1\.npy"):
        predictor(with_a_broken_image)
    outputs = TiledPredictor(skipping, BrightSpots())(with_a_broken_image)
    assert [len(o["instances"]) > 0 for o in outputs] == [True, False, True]
    assert any("Left out: the image" in m and "1.npy" in m for m in log.messages)


def test_training_goes_on_without_a_corrupt_image_if_asked(with_a_broken_image):
    from detectron2.data import DatasetCatalog

    DatasetCatalog.register("tiles_of_three", lambda: with_a_broken_image)
    options = ["DATASETS.TRAIN", ("tiles_of_three",), "TILES.OBJECT_SHARE", 1.0]
    try:
        batches = iter(build_tiled_train_loader(cfg(*options, "TILES.SKIP_CORRUPT", True)))
        seen = {tile["image_id"] for _ in range(20) for tile in next(batches)}
        assert seen == {0, 2}
        with pytest.raises(DataError, match=r"1\.npy"):
            for _, _ in zip(build_tiled_train_loader(cfg(*options)), range(20)):
                pass
    finally:
        DatasetCatalog.remove("tiles_of_three")


def test_an_image_of_another_size_than_its_dataset_says_is_named(tmp_path):
    image = dataset(tmp_path, [(10, 10, 40, 40)], size=800)
    save(tmp_path, spots(600))
    with pytest.raises(DataError, match=r"spots\.npy has 600 x 600 .* by its dataset 800 x 800"):
        TileMapper(cfg())(TiledDataset([image], 256, 64, 0.1)[0])


def test_an_image_that_breaks_in_the_middle_leaves_no_results_if_it_is_left_out(tmp_path):
    rasterio = pytest.importorskip("rasterio", reason="the optional extra rasterio")
    profile = {"driver": "GTiff", "height": 700, "width": 700, "count": 1, "dtype": "uint8"}
    storage = {"tiled": True, "blockxsize": 64, "blockysize": 64, "compress": "deflate"}
    file_name = str(tmp_path / "spots.tif")
    with rasterio.open(file_name, "w", **profile, **storage) as file:
        file.write(spots()[None])
    data = bytearray((tmp_path / "spots.tif").read_bytes())
    data[-3000:-2000] = bytes(1000)
    (tmp_path / "spots.tif").write_bytes(data)
    image = {"file_name": file_name, "image_id": 3}
    predictor = TiledPredictor(cfg("TILES.SKIP_CORRUPT", True), BrightSpots())
    assert predictor([image]) == [{"instances": []}]
    with CocoResultsWriter.open(tmp_path / "results.json") as results:
        results.write([{"image_id": 1}])
        with pytest.raises(DataError, match=r"spots\.tif cannot be read"):
            results.write(to_coco(d, 3) for d in predictor.detect(file_name))
        results.write([{"image_id": 2}])
    written = json.loads((tmp_path / "results.json").read_text())
    assert [r["image_id"] for r in written] == [1, 2]


def test_files_that_are_decoded_whole_must_be_what_detectron2_reads(tmp_path):
    cv2.imwrite(str(tmp_path / "deep.png"), np.full((50, 60), 60_000, np.uint16))
    with pytest.raises(DataError, match=r"deep\.png .* more than 8 bits"):
        ImageReader(str(tmp_path / "deep.png"))
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((50, 60, 4), np.uint8))
    with pytest.raises(DataError, match=r"TILES\.BANDS \[1, 2, 3, 4\] need a TIFF"):
        ImageReader(str(tmp_path / "a.png"), bands=[1, 2, 3, 4])


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


@pytest.mark.long
def test_tiles_that_do_not_fit_together_are_run_one_at_a_time(tmp_path):
    """A budget that the kernel enforces, for one tile and not for eight."""
    script = tmp_path / "limited.py"
    script.write_text(LIMITED)
    np.save(tmp_path / "large.npy", spots(800))
    result = run_forked(script, CONFIG, tmp_path, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-4000:]
    record = [json.loads(x) for x in (tmp_path / "memfit_oom.jsonl").read_text().splitlines()]
    assert record[-1]["action"] == "the images are run one at a time"
    assert "tiles are done" in result.stdout


LIMITED = """
import sys
from detectron2.modeling import build_model
from tiled_images import TiledPredictor, load_tiled_cfg
from d2_memfit.engine import recovering_inference
from d2_memfit.config.settings import Settings
from d2_memfit.memory import enforce_budget, process_memory

config, folder = sys.argv[1:]
cfg = load_tiled_cfg(config, ["TILES.SIZE", 400, "TILES.BATCH_SIZE", 9, "OUTPUT_DIR", folder,
                              "DATALOADER.NUM_WORKERS", 0])
model = build_model(cfg).eval()
predictor = TiledPredictor(cfg, model)
predictor._tiles.BATCH_SIZE = 1  # what the first forward allocates once is there before the limit
next(predictor.detect(f"{folder}/large.npy"), None)
predictor._tiles.BATCH_SIZE = 9
enforce_budget(process_memory().data_bytes / 2**30 + 0.2, "cpu")
with recovering_inference(model, Settings.from_cfg(cfg, trains=False).recovery):
    list(predictor.detect(f"{folder}/large.npy"))
print("tiles are done")
"""


@pytest.mark.parametrize(
    ("opts", "message"),
    [
        (["TILES.OVERLAP", 256], "TILES.OVERLAP must be less than TILES.SIZE, 256, got 256"),
        (["TILES.OVERLAP", 0], "TILES.OVERLAP must be a positive integer, got 0"),
        (["TILES.SIZE", 0], "TILES.SIZE must be a positive integer, got 0"),
        (["TILES.OBJECT_SHARE", 1.5], "TILES.OBJECT_SHARE must be a number from 0 to 1, got 1.5"),
        (["TILES.BANDS", [1, 2]], "TILES.BANDS has 2 bands, and MODEL.PIXEL_MEAN has 3"),
        (["INPUT.CROP.ENABLED", True], "INPUT.CROP.ENABLED must be False"),
        (["MODEL.META_ARCHITECTURE", "PanopticFPN"], "PanopticFPN cannot be trained on tiles"),
        (["MEMFIT.MICRO_BATCH", 0], "MEMFIT.MICRO_BATCH must be a positive integer or None, got 0"),
    ],
)
def test_wrong_values_are_named(opts, message):
    with pytest.raises(ConfigError, match=message):
        cfg(*opts)


def test_results_appear_when_they_are_complete(tmp_path):
    path = tmp_path / "results.json"
    mask = coco_mask.encode(np.ones((4, 5), np.uint8, order="F"))
    found = Detection(np.array([1.0, 2, 4, 6]), 0.5, 3, mask)
    with CocoResultsWriter.open(path) as results:
        results.write(to_coco(found, image_id) for image_id in (1, 2))
        assert not path.exists()
    written = json.loads(path.read_text())
    assert [r["image_id"] for r in written] == [1, 2]
    assert written[0]["bbox"] == [1, 2, 3, 4]
    assert (coco_mask.decode(written[0]["segmentation"]) == 1).all()
    with pytest.raises(KeyError), CocoResultsWriter.open(path) as results:
        raise KeyError
    assert json.loads(path.read_text()) == written
    with CocoResultsWriter.open(path):
        pass
    assert json.loads(path.read_text()) == []


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


def test_the_large_images_have_their_coins_where_the_annotations_say(large_images):
    coco = json.loads((large_images / "train.json").read_text())
    image = ImageReader(str(large_images / "train" / "000.tif"), "RGB")
    pixels = image.read(Tile(0, 0, 600, 600))[:, :, 0]
    on_coins = np.zeros_like(pixels)
    for a in coco["annotations"]:
        if a["image_id"] == 0:
            (code,) = coco_mask.frPyObjects(a["segmentation"], 600, 600)
            on_coins |= coco_mask.decode(code)
    assert on_coins.any()
    assert pixels[on_coins == 1].mean() > 2 * pixels[on_coins == 0].mean()


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


def test_training_names_a_corrupt_image_in_one_line(large_images, tmp_path):
    (tmp_path / "train").mkdir()
    for file in (large_images / "train").glob("*.tif"):
        (tmp_path / "train" / file.name).write_bytes(file.read_bytes()[:3000])
    dataset = ["--coco", "tiled_train", large_images / "train.json", tmp_path / "train"]
    options = ["DATASETS.TEST", (), "OUTPUT_DIR", tmp_path / "out", "SOLVER.STEPS", ()]
    result = run_script("train_tiles.py", *dataset, *options)
    assert result.returncode == 2
    (line,) = [text for text in result.stderr.splitlines() if text.startswith("error: ")]
    assert ".tif cannot be read" in line
    assert "TILES.SKIP_CORRUPT" in line
