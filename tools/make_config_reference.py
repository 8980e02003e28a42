#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Write docs/CONFIG.md from the table of keys in d2_memfit/config/keys.py and the techniques.

tools/make_config_reference.py
"""

import re
from pathlib import Path

from d2_memfit.config.keys import Key, all_keys

CONFIG_MD = Path(__file__).resolve().parents[1] / "docs" / "CONFIG.md"

INTRODUCTION = """# Config keys

Every config key of d2_memfit, with its values, its default and what it does. With the defaults,
Detectron2's behaviour is unchanged. A key is set at the end of a command:

```bash
d2-memfit train --config-file COCO-Detection/faster_rcnn_R_50_FPN_3x \\
    SOLVER.ACCUMULATION_STEPS 4 MEMFIT.OOM.POLICY split
```

In a config file:

```yaml
SOLVER:
  ACCUMULATION_STEPS: 4
MEMFIT:
  OOM:
    POLICY: split
```

In Python, `add_memfit_config(cfg)` adds the keys to a config that was made elsewhere:

```python
from d2_memfit import get_cfg

cfg = get_cfg()
cfg.SOLVER.ACCUMULATION_STEPS = 4
```

**In a LazyConfig**, `MEMFIT.OOM.POLICY` is `train.memfit.oom.policy`, and
`SOLVER.ACCUMULATION_STEPS` is `train.accumulation_steps`. All keys work there, except
`MEMFIT.HOST.BUDGET_GB`. Mixed precision is `train.amp.enabled`.

```bash
d2-memfit train --config-file CONFIG.py train.accumulation_steps=4 +train.memfit.oom.policy=split
```

**In your own training loop**, they are the argument `memfit` of `Job`:
`Job(..., memfit={"oom": {"policy": "split"}})` ([OWN_LOOP.md](OWN_LOOP.md)).

The error of a config lists everything that is wrong before a model is built: a line for each key,
with its value and what to do. NaN and infinity are refused in every key, also in Detectron2's.

`python tools/make_config_reference.py` writes this page from the table in
[keys.py](../d2_memfit/config/keys.py) and the docstrings of the techniques. A key that ends with
(*exact*), (*precision*) or (*recipe*) turns on a technique of this tier:
[TECHNIQUES.md](TECHNIQUES.md) says what it saves and costs.

"""


def reference() -> str:
    """The text of docs/CONFIG.md."""
    head = "| key | values | default | what it does |\n| --- | --- | --- | --- |\n"
    return INTRODUCTION + head + "".join(map(_row, all_keys()))


def _row(key: Key) -> str:
    cells = f"`{key.name}`", _escaped(key.check.what), f"`{key.default!r}`", _escaped(key.text)
    return f"| {' | '.join(cells)} |\n"


def _escaped(text: str) -> str:
    return re.sub(r"([|*<])", r"\\\1", text)  # these have a meaning in Markdown


if __name__ == "__main__":
    CONFIG_MD.write_text(reference())
