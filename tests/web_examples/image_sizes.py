from d2_memfit import get_cfg
from detectron2.engine import default_argument_parser, default_setup
from detectron2.model_zoo import model_zoo
import os

def configure_training(min_size, max_size):
    cfg = get_cfg()
    cfg.merge_from_file(model_zoo.get_config_file("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml"))

    # Setting image resize parameters
    cfg.INPUT.MIN_SIZE_TRAIN = (min_size,)
    cfg.INPUT.MAX_SIZE_TRAIN = max_size
    cfg.INPUT.MIN_SIZE_TEST = (min_size,)
    cfg.INPUT.MAX_SIZE_TEST = max_size

    # Update output directory
    cfg.OUTPUT_DIR = os.path.join(cfg.OUTPUT_DIR, f"resize_min{min_size}_max{max_size}")

    return cfg

if __name__ == '__main__':
    config = configure_training(min_size=600, max_size=800)  # Experiment with image resize values
    default_setup(config, default_argument_parser().parse_args([]))
    print(f"Minimum resize size: {config.INPUT.MIN_SIZE_TRAIN}")
    print(f"Maximum resize size: {config.INPUT.MAX_SIZE_TRAIN}")
