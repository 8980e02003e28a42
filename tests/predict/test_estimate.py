# Copyright (c) the d2_memfit developers.
import json

from trained import save_trained

from d2_memfit.cli.command_line import main


def test_inference_takes_less_than_evaluation_in_training(tmp_path, capsys):
    config = save_trained(tmp_path / "trained", DATASETS__TEST="('coco_2017_val',)")
    args = ["estimate", "--config-file", str(config), "--device", "v100"]
    main([*args, "--inference-only", "--json"])
    inference = json.loads(capsys.readouterr().out)
    main([*args, "--json"])
    training = json.loads(capsys.readouterr().out)
    assert 0 < inference["peak_allocated_gb"] < training["evaluation_gb"]
    assert inference["device_total_gb"] <= training["device_total_gb"]
