from d2_memfit import get_cfg
from detectron2.engine import default_argument_parser, default_setup
from detectron2.model_zoo import model_zoo
import os

def configure_training(batch_size, num_workers):
    cfg = get_cfg()
    cfg.merge_from_file(model_zoo.get_config_file("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml"))

    # Setting data loading
    cfg.DATALOADER.NUM_WORKERS = num_workers
    cfg.SOLVER.IMS_PER_BATCH = batch_size
    cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE = 512  # Adjust based on available memory

    # Update output directory
    cfg.OUTPUT_DIR = os.path.join(cfg.OUTPUT_DIR, f"bs{batch_size}_workers{num_workers}")

    return cfg

if __name__ == '__main__':
    config = configure_training(batch_size=4, num_workers=2)  # Experiment with different batch and worker values
    default_setup(config, default_argument_parser().parse_args([]))
    print(f"Dataset batch size: {config.SOLVER.IMS_PER_BATCH}")
    print(f"Dataloader worker count: {config.DATALOADER.NUM_WORKERS}")
