# Copyright (c) the d2_memfit developers.
"""The page of a command: escaped text, and the memory of a step."""

import re
from html.parser import HTMLParser

import yaml
from lazy_configs import lazy_config
from tiny import tiny_cfg

from d2_memfit.cli.command_line import main
from d2_memfit.job import Job
from d2_memfit.planner.plan import plan_memory
from d2_memfit.planner.plan_file import keys_as_yaml
from d2_memfit.planner.timeline import Allocate, Allocation, Free
from d2_memfit.report import write_page

GB = 2**30
EVIL = "</title></pre><script>window.evil = 1</script>"


class Tags(HTMLParser):
    """The tags, and the text between them."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = set(), ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs)

    def handle_data(self, data):
        self.text += data


def test_texts_are_escaped_and_nothing_is_loaded(tmp_path):
    weights = Allocation(GB, "parameters", "setup", f"backbone{EVIL}")
    activation = Allocation(2 * GB, f"activations{EVIL}", "forward", f"heads{EVIL}", f"relu{EVIL}")
    events = [Allocate(weights), Allocate(activation), Free(activation)]
    page = tmp_path / "page.html"
    write_page(page, f"A job{EVIL}", {f"Answer{EVIL}": EVIL, "Keys": ""}, {EVIL: events}, 4.0)
    found = Tags(page.read_text())
    assert "script" not in found.tags
    assert {"svg", "polygon", "table"} <= found.tags
    for text in (
        f"A job{EVIL}",
        f"Answer{EVIL}",
        f"heads{EVIL}",
        f"relu{EVIL}",
        "2048.0",
        "4.0 GB",
    ):
        assert text in found.text
    assert "Keys" not in found.text
    assert not re.search(r"https?:|//", page.read_text().replace(EVIL, ""))


def test_an_estimate_is_drawn(tmp_path, capsys):
    file, page = tmp_path / "tiny.yaml", tmp_path / "page.html"
    file.write_text(tiny_cfg("mask_rcnn").dump())
    args = ["--config-file", str(file), "--device", "cuda", "--training-only"]
    main(["estimate", *args, "--html", str(page)])
    text = Tags(page.read_text()).text
    assert capsys.readouterr().out.splitlines()[0] in text
    for word in ("parameters", "workspace", "activations: roi_heads", "backward", "fpn_output2"):
        assert word in text


def test_keys_to_copy_are_those_of_the_job_s_kind_of_config():
    plan = plan_memory(Job.from_lazy(lazy_config()), 1.0, device="cuda", evaluates=False)
    lazy = yaml.safe_load(keys_as_yaml(Job.from_lazy(lazy_config()), plan))
    assert lazy["train.memfit.budget_gb"] == 1.0
    assert lazy["train.memfit.oom.policy"] == "split"
    job = Job.from_cfg(tiny_cfg("mask_rcnn"))
    assert yaml.safe_load(keys_as_yaml(job, plan))["MEMFIT"]["OOM"] == {"POLICY": "split"}
