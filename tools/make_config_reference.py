#!/usr/bin/env python3
"""Write docs/CONFIG.md from the comments above the keys in d2_memfit/config.py and the techniques.

tools/make_config_reference.py
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from detectron2.config import CfgNode

from d2_memfit import config_keys, get_cfg
from d2_memfit.config import check_config, with_settings
from d2_memfit.errors import ConfigError
from d2_memfit.job.lazy import overrides_of
from d2_memfit.techniques import TECHNIQUES

CONFIG_MD = Path(__file__).resolve().parents[1] / "docs" / "CONFIG.md"

# One or more lines of comment, and the assignment under them.
_COMMENTED_KEY = re.compile(r"((?: *#.*\n)+) *(?:_C|cfg)\.([A-Z0-9_.]+) = ")

INTRODUCTION = """# Config keys

Written by `python tools/make_config_reference.py` from the comments in
[config.py](../d2_memfit/config.py) and in the files of the [techniques](../d2_memfit/techniques).
The defaults leave Detectron2's behaviour as it is. Beside these keys,
[`SOLVER.REFERENCE_WORLD_SIZE`](ACCUMULATION.md#learning-rate-and-batch-size) and
[`SOLVER.AMP.ENABLED`](ACCUMULATION.md#mixed-precision) are Detectron2's own, and work with them.

A key is written in a config file,

```yaml
SOLVER:
  ACCUMULATION_STEPS: 4
MEMFIT:
  CHECKPOINT:
    MODULES: ["backbone"]
```

behind the other arguments of a command, as `SOLVER.ACCUMULATION_STEPS 4`, or in Python:

```python
from d2_memfit import get_cfg

cfg = get_cfg()
cfg.SOLVER.ACCUMULATION_STEPS = 4
```

A config that was made elsewhere gets the keys by `add_memfit_config(cfg)`. A key that does not
exist, or a value that cannot work, is an error with the key, the value and what to do:
[TROUBLESHOOTING.md](TROUBLESHOOTING.md#config-keys-and-values).

## In a LazyConfig

[tools/lazyconfig_train_net.py](../tools/lazyconfig_train_net.py) reads the names in the last
column, in the config file or on the command line: `train.accumulation_steps=4`,
`train.oom.policy=split`, `train.memfit.checkpoint.modules=[backbone]`. Where there is none, the key
is for yaml configs. Mixed precision is `train.amp.enabled`. In a loop of your own, `Job` takes them
as arguments ([OWN_LOOP.md](OWN_LOOP.md)).
"""


class Key(NamedTuple):
    name: str
    comment: str
    technique: str  # that has it, with its tier; "" is none


def documented_keys() -> Iterator[Key]:
    """All keys of d2_memfit that have a comment, in the order in which they are written."""
    for comment, name in _COMMENTED_KEY.findall(inspect.getsource(config_keys)):
        yield Key(name, _one_line(comment), "")
    for technique_name, technique in sorted(TECHNIQUES, key=lambda item: item[1].__module__):
        for comment, name in _COMMENTED_KEY.findall(inspect.getsource(technique.add_config)):
            yield Key(name, _one_line(comment), f"{technique_name} ({technique.tier})")


def lazy_name(key: str) -> str:
    """What a key is called in a LazyConfig; "" if it cannot be used there."""
    return "" if key == "MEMFIT.HOST.BUDGET_GB" else next(iter(overrides_of({key: None})))


def kind(key: str, default: object) -> str:
    """What values a key takes. That of a key that is None is found by trying a broken number."""
    if default is not None:
        return {"str": "text"}.get(type(default).__name__, type(default).__name__)
    try:
        check_config(with_settings(get_cfg(), {key: 1000.5}))
    except ConfigError:
        return "int or None"
    return "number or None"


def reference() -> str:
    """The text of docs/CONFIG.md."""
    by_node: dict[str, list[Key]] = {}
    for key in documented_keys():
        by_node.setdefault(key.name.rpartition(".")[0], []).append(key)
    return INTRODUCTION + "".join(_section(node, by_node[node]) for node in by_node)


def _section(node: str, keys: list[Key]) -> str:
    cfg = get_cfg()
    lines = ["", f"## `{node}`", "", "| key | type | default | what it does | in a LazyConfig |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for key in keys:
        default = _value(cfg, key.name)
        comment = re.sub(r"([|*<])", r"\\\1", key.comment)  # which mean something in Markdown
        of = f" [{key.technique}](TECHNIQUES.md)" if key.technique else ""
        lazy = f"`{lazy_name(key.name)}`" if lazy_name(key.name) else ""
        cells = f"`{key.name}`", kind(key.name, default), f"`{default!r}`", comment + of, lazy
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _value(cfg: CfgNode, key: str) -> object:
    for name in key.split("."):
        cfg = cfg[name]
    return cfg


def _one_line(comment: str) -> str:
    return " ".join(line.strip().lstrip("#").strip() for line in comment.splitlines())


if __name__ == "__main__":
    CONFIG_MD.write_text(reference())
