from d2_memfit import get_cfg
from detectron2.engine import default_argument_parser, default_setup
from detectron2.model_zoo import model_zoo
import os

def configure_training(accumulation_steps, batch_size):
    cfg = get_cfg()
    cfg.merge_from_file(model_zoo.get_config_file("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml"))

    # Setting gradient accumulation steps
    cfg.SOLVER.ACCUMULATION_STEPS = accumulation_steps
    cfg.SOLVER.IMS_PER_BATCH = batch_size

    # Update output directory
    cfg.OUTPUT_DIR = os.path.join(cfg.OUTPUT_DIR, f"acc{accumulation_steps}_bs{batch_size}")

    return cfg

if __name__ == '__main__':
    config = configure_training(accumulation_steps=2, batch_size=2) # Experiment with different batch and step values
    default_setup(config, default_argument_parser().parse_args([]))
    print(f"Gradient accumulation steps: {config.SOLVER.ACCUMULATION_STEPS}")
    print(f"Batch Size: {config.SOLVER.IMS_PER_BATCH}")
