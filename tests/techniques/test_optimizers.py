# Copyright (c) the d2_memfit developers.
"""Techniques that change an optimizer: the same steps, less memory, checkpoints for everybody."""

import copy
import functools
import itertools
import sys

import pytest
import torch
from detectron2.solver import build_optimizer
from injection import iterate
from tiny import images, owners_at_peak, parameters, relative_difference, tiny_cfg, tiny_model

from d2_memfit import AccumulatingTrainer, Job
from d2_memfit.common import compat
from d2_memfit.common.errors import ConfigError
from d2_memfit.planner.steps import Session
from d2_memfit.techniques.registry import apply_techniques, get_technique
from d2_memfit.techniques.sharded import ShardedOptimizer


def cfg_with(*pairs, clip=False):
    cfg = tiny_cfg("proposal_network", fpn=False)
    cfg.SOLVER.CLIP_GRADIENTS.ENABLED = clip
    cfg.merge_from_list([*pairs])
    return cfg


def make(cfg, model):
    return apply_techniques("optimizer", build_optimizer(cfg, model), cfg)


def test_sharding_on_one_rank_is_said_to_save_nothing(log):
    cfg = cfg_with("MEMFIT.OPTIMIZER.ZERO", True)
    model = torch.nn.Linear(1, 1)
    assert make(cfg, model).param_groups[0]["params"][0] is model.weight
    assert "MEMFIT.OPTIMIZER.ZERO saves nothing on one rank" in log.text


def bytes_of_states(optimizer):
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def train_on_rank(rank, pairs, clip, state=None, num_iterations=3):
    """Parameters, momentum on this rank in bytes, the whole state dict on rank 0."""
    cfg = cfg_with(*pairs, clip=clip)
    model = tiny_model(cfg)
    optimizer = make(cfg, model)
    if state is not None:
        # What comes from another process is shared with it, and would be changed there too.
        optimizer.load_state_dict(copy.deepcopy(state))
    ddp = compat.create_ddp_model(model, broadcast_buffers=False)
    loader = [images(2, first=4 * i + 2 * rank) for i in range(num_iterations)]
    torch.manual_seed(0)
    iterate(AccumulatingTrainer(ddp, loader, optimizer), num_iterations)
    num_bytes = bytes_of_states(getattr(optimizer, "optim", optimizer))
    if isinstance(optimizer, ShardedOptimizer):
        assert not bytes_of_states(optimizer)
        optimizer.consolidate_state_dict()
    state = optimizer.state_dict() if rank == 0 else None
    return parameters(model), num_bytes, state


ZERO = ("MEMFIT.OPTIMIZER.ZERO", True)


@pytest.fixture(scope="module")
def trained(two_ranks):
    """What both ranks have after a training with given keys."""
    return functools.cache(lambda pairs, clip=False: two_ranks.run(train_on_rank, pairs, clip))


@pytest.mark.parametrize("clip", [False, True])
def test_ranks_that_share_states_make_the_same_steps_with_half_of_them(trained, clip):
    plain, shared = trained((), clip), trained(ZERO, clip)
    for (p, p_bytes, _), (s, s_bytes, _) in zip(plain, shared):
        assert relative_difference(s, p) == 0
        assert 0.4 * p_bytes < s_bytes < 0.6 * p_bytes


def test_an_estimate_has_the_largest_share_and_no_gradients_of_the_last_iteration(trained):
    largest = max(num_bytes for _, num_bytes, _ in trained(ZERO))
    job = Job.from_cfg(cfg_with(*ZERO), ranks=2, batch=images(2, size=256))
    peak = owners_at_peak(Session(job).train(job.training_batch(2)))
    assert (peak["optimizer"], peak["gradients"]) == (largest, 0)


def test_shared_states_are_saved_whole_and_load_anywhere(two_ranks, trained):
    (_, _, plain), _ = trained(())
    (_, _, shared), _ = trained(ZERO)
    assert plain["state"].keys() == shared["state"].keys()
    for index, state in plain["state"].items():
        assert torch.equal(shared["state"][index]["momentum_buffer"], state["momentum_buffer"])
    # From here on: on one rank with Detectron2's optimizer, and on two ranks in all four ways.
    cfg = cfg_with()
    model = tiny_model(cfg)
    build_optimizer(cfg, model).load_state_dict(shared)
    results = [
        two_ranks.run(train_on_rank, pairs, False, state)[0][0]
        for pairs, state in itertools.product(((), ZERO), (plain, shared))
    ]
    assert [relative_difference(r, results[0]) for r in results] == [0, 0, 0, 0]


class FullModelClipping(torch.optim.SGD):
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 0.01)
        return super().step(closure)


def test_an_optimizer_that_clips_all_gradients_together_is_not_shared():
    optimizer = FullModelClipping(torch.nn.Linear(3, 3).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"ZERO: the step of FullModelClipping is not PyTorch's"):
        get_technique("ShardedOptimizerStates").apply(optimizer, True)


@pytest.mark.parametrize("clip", [False, True])
def test_eight_bits_step_nearly_the_same_with_a_quarter_of_the_states(clip):
    pytest.importorskip("bitsandbytes")
    results = []
    for is_on in (False, True):
        cfg = cfg_with("MEMFIT.OPTIMIZER.STATES_8BIT", is_on, clip=clip)
        cfg.SOLVER.CLIP_GRADIENTS.CLIP_VALUE = 0.1
        torch.manual_seed(0)
        model = torch.nn.Linear(256, 256)
        optimizer = make(cfg, model)
        for _ in range(10):
            model.weight.grad, model.bias.grad = torch.randn(256, 256), torch.zeros(256)
            optimizer.step()
        states = [t for t in optimizer.state[model.weight].values() if torch.is_tensor(t)]
        results.append((parameters(model), sum(t.nbytes for t in states), optimizer))
    (plain, plain_bytes, _), (changed, changed_bytes, optimizer) = results
    assert 0 < relative_difference(changed, plain) < 5e-2
    assert changed_bytes < 0.3 * plain_bytes
    again = make(cfg, model)
    again.load_state_dict(optimizer.state_dict())
    assert again.state[model.weight]["state1"].dtype == torch.uint8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.SGD, "needs SOLVER.MOMENTUM above 0, .*NESTEROV False"),
        (torch.optim.Rprop, "supports SGD, Adam, AdamW .* not Rprop"),
        (None, "needs bitsandbytes .*pip install bitsandbytes"),
    ],
)
def test_what_eight_bits_cannot_do_is_an_error(make, message, monkeypatch):
    if make is None:
        monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    else:
        pytest.importorskip("bitsandbytes")
    optimizer = (make or torch.optim.Adam)([torch.ones(1, requires_grad=True)], lr=0.1)
    with pytest.raises(ConfigError, match=f"STATES_8BIT {message}"):
        apply_techniques("optimizer", optimizer, cfg_with("MEMFIT.OPTIMIZER.STATES_8BIT", True))
