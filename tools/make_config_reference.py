#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Write docs/CONFIG.md from the comments above the keys in d2_memfit/config and the techniques.

tools/make_config_reference.py
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from d2_memfit import get_cfg
from d2_memfit.common.checks import value_of
from d2_memfit.config import keys as config_keys
from d2_memfit.config import with_settings
from d2_memfit.errors import ConfigError
from d2_memfit.settings import check_settings, overrides_of
from d2_memfit.techniques import TECHNIQUES

CONFIG_MD = Path(__file__).resolve().parents[1] / "docs" / "CONFIG.md"

# One or more lines of comment, and what stands under them: a key's default, or a technique's key.
_COMMENTED_KEY = re.compile(
    r"((?:^ *#.*\n)+) *(?:(?:_C|cfg)\.([A-Z0-9_.]+) = |key = \"(.+)\")", re.MULTILINE
)

INTRODUCTION = """# Config keys

This page lists every config key of d2_memfit, with its type, its default and what it does. The
defaults leave Detectron2's behaviour unchanged. A key is set at the end of a command:

```bash
d2-memfit train --config-file COCO-Detection/faster_rcnn_R_50_FPN_3x \\
    SOLVER.ACCUMULATION_STEPS 4
```

| node | what its keys are for |
| --- | --- |
{nodes}

In a config file, a key is written like this:

```yaml
SOLVER:
  ACCUMULATION_STEPS: 4
MEMFIT:
  CHECKPOINT:
    MODULES: ["backbone"]
```

In Python:

```python
from d2_memfit import get_cfg

cfg = get_cfg()
cfg.SOLVER.ACCUMULATION_STEPS = 4
```

- `add_memfit_config(cfg)` adds the keys to a config that was made elsewhere.
- An unknown key, or a value that cannot work, is an error. It names the key, the value and what to
  do. Each value that is wrong has a line.
- [`SOLVER.REFERENCE_WORLD_SIZE`](ACCUMULATION.md#learning-rate-and-batch-size) and
  [`SOLVER.AMP.ENABLED`](ACCUMULATION.md#mixed-precision) are keys of Detectron2. They work together
  with these.

`python tools/make_config_reference.py` writes this page from the comments in
[keys.py](../d2_memfit/config/keys.py) and in the files of the
[techniques](../d2_memfit/techniques).

## In a LazyConfig

The last column of the tables has the names for a LazyConfig. Write them in the config file or on
the command line of `d2-memfit train`: `train.accumulation_steps=4`, `train.oom.policy=split`,
`train.memfit.checkpoint.modules=[backbone]`. Without a name there, the key is for yaml configs
only. Mixed precision is `train.amp.enabled`. In your own training loop, the keys are arguments of
`Job` ([OWN_LOOP.md](OWN_LOOP.md)).
"""

_PURPOSES = {
    "SOLVER": "accumulation",
    "MEMFIT": "micro-batches, precision, budget, signals",
    "MEMFIT.OOM": "recovery from out-of-memory errors",
    "MEMFIT.NORMALIZERS": "counts that losses are divided by",
    "MEMFIT.MONITOR": "reports, leaks, owners of the memory",
    "MEMFIT.EVALUATION": "memory of evaluation",
    "MEMFIT.PLAN": "plans before training",
    "MEMFIT.HEADS": "mask and keypoint heads",
    "MEMFIT.OPTIMIZER": "the optimizer's states and gradients",
    "MEMFIT.CHECKPOINT": "activation checkpointing",
    "MEMFIT.CRITERION": "matching and losses of DETR-likes",
    "MEMFIT.FINE_TUNE": "fewer trained parameters",
    "MEMFIT.HOST": "RAM, workers, dataset",
    "MEMFIT.MATCHING": "matching of anchors",
    "MEMFIT.OFFLOAD": "activations on the host",
}


class Key(NamedTuple):
    name: str
    comment: str
    technique: str  # the key's technique, with its tier; "" for none


def documented_keys() -> Iterator[Key]:
    """All keys of d2_memfit that have a comment, in source order."""
    sources = [("", config_keys)]
    for name, technique in sorted(TECHNIQUES, key=lambda item: item[1].__module__):
        sources.append((f"{name} ({technique.tier})", technique))
    for of, source in sources:
        for comment, assigned, key in _COMMENTED_KEY.findall(inspect.getsource(source)):
            yield Key(assigned or key, _one_line(comment), of)


def lazy_name(key: str) -> str:
    """Name of a key in a LazyConfig; "" if it cannot be used there."""
    return "" if key == "MEMFIT.HOST.BUDGET_GB" else next(iter(overrides_of({key: None})))


def kind(key: str, default: object) -> str:
    """Type of a key's values. If the default is None, it is found by trying a broken number."""
    if default is not None:
        return {"str": "text"}.get(type(default).__name__, type(default).__name__)
    try:
        check_settings(with_settings(get_cfg(), {key: 1000.5}))
    except ConfigError:
        return "int or None"
    return "number or None"


def reference() -> str:
    """The text of docs/CONFIG.md."""
    by_node: dict[str, list[Key]] = {}
    for key in documented_keys():
        by_node.setdefault(key.name.rpartition(".")[0], []).append(key)
    anchors = {node: node.replace(".", "").lower() for node in by_node}
    nodes = [f"| [`{node}`](#{anchors[node]}) | {_PURPOSES[node]} |" for node in by_node]
    introduction = INTRODUCTION.replace("{nodes}", "\n".join(nodes))
    return introduction + "".join(_section(node, by_node[node]) for node in by_node)


def _section(node: str, keys: list[Key]) -> str:
    cfg = get_cfg()
    lines = ["", f"## `{node}`", "", "| key | type | default | what it does | in a LazyConfig |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for key in keys:
        default = value_of(cfg, key.name)
        comment = re.sub(r"([|*<])", r"\\\1", key.comment)  # these have a meaning in Markdown
        of = f" [{key.technique}](TECHNIQUES.md)" if key.technique else ""
        lazy = f"`{lazy_name(key.name)}`" if lazy_name(key.name) else ""
        cells = f"`{key.name}`", kind(key.name, default), f"`{default!r}`", comment + of, lazy
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _one_line(comment: str) -> str:
    return " ".join(line.strip().lstrip("#").strip() for line in comment.splitlines())


if __name__ == "__main__":
    CONFIG_MD.write_text(reference())
