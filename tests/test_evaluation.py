import pytest
from detectron2.data import MetadataCatalog
from detectron2.evaluation import COCOEvaluator

from d2_memfit import compat, get_cfg
from d2_memfit.evaluation import build_evaluator


def test_the_fast_evaluation_is_used_where_it_was_compiled(coins, tmp_path):
    cfg = get_cfg()
    cfg.OUTPUT_DIR = str(tmp_path)
    evaluator = build_evaluator(cfg, "coins_val")
    assert isinstance(evaluator, COCOEvaluator)
    assert evaluator._use_fast_impl is compat.has_compiled_ops()


def test_a_dataset_of_unknown_type_is_named(tmp_path):
    MetadataCatalog.get("made_up").evaluator_type = "made_up_type"
    with pytest.raises(NotImplementedError, match=r"'made_up'.*'made_up_type'"):
        build_evaluator(get_cfg(), "made_up")
