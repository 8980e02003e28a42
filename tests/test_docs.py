# Copyright (c) the d2_memfit developers.
"""What the documentation says to type, to read and to set is there."""

import argparse
import re
import runpy
import shlex
import sys
from functools import lru_cache

import pytest
import yaml
from detectron2.config import CfgNode
from detectron2.utils.registry import Registry
from tiny import ROOT
from torch.distributed.run import get_args_parser as torchrun_parser

from d2_memfit import get_cfg
from d2_memfit.cli.command_line import COMMANDS
from d2_memfit.cli.command_line import main as d2_memfit_command
from d2_memfit.config.load import load_cfg

PAGES = [
    *(page for page in ROOT.glob("*.md") if page.name != "CHANGELOG.md"),  # it names what left
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "projects").glob("*/README.md"),
    *(ROOT / ".github").glob("*.md"),
]
FOLDERS = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".")}
FOLDERS -= {"output", "build", "dist"}

# In an example of a wrong key, and of a key of one's own.
NO_KEYS = {"MEMFIT.MICROBATCH", "MEMFIT.MINE", "MEMFIT.OOM.GROW", "INPUT.MIN"}

_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)

_PROGRAMS = r"(\S+/bin/)?(python3?|pip) |torchrun |make |pytest |tools/|d2-memfit "

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page, *languages, until="\0"):
    """The code blocks of a page in some languages, up to a heading."""
    found = _BLOCK.findall(page.read_text().partition(until)[0])
    return [code for _, language, code in found if language in languages]


def prose(page):
    """A page without its code blocks."""
    return _BLOCK.sub("", page.read_text())


def commands(page):
    """What a page says to type: the lines of its code blocks, and of code within sentences.

    There, a tool without arguments is only named.
    """
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    spans = [re.sub(r"\s+", " ", code) for code in re.findall(r"`([^`]+)`", prose(page))]
    for typed in lines + [s for s in spans if " " in s]:
        line = re.sub(r"^srun (--\S+ \S+ )*", "", typed)
        if re.match(rf"([A-Z_]+=\S+ )*({_PROGRAMS})", line):
            tokens = shlex.split(line, comments=True)
            while re.match(r"[A-Z_]+=", tokens[0]):
                tokens = tokens[1:]
            tokens[0] = re.sub(r"^\S+/bin/", "", tokens[0])
            yield tokens


def is_known(node, page):
    """Whether all keys of a node of the config are known here: projects have some of their own."""
    return node in ("MEMFIT", "SOLVER") or ROOT / "projects" not in page.parents


def slug(heading):
    """What GitHub makes of a heading for links to it."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


@lru_cache
def anchors(page):
    return {slug(h) for h in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)}


@lru_cache
def parser_of(script):
    """The argument parser of a script, or of the command d2-memfit: the first that it uses.

    None for a script that takes no arguments, and so must not be started here.
    """
    if script != "d2-memfit" and not re.search(
        r"argparse|argument_parser|run_script|cli import", script.read_text()
    ):
        return None

    class Found(Exception):
        pass

    def stop(parser, *_):
        raise Found(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        patch.setattr(sys, "argv", [str(script)])
        # A script may define a model that another test has imported already.
        patch.setattr(Registry, "_do_register", lambda *_: None)
        try:
            if script == "d2-memfit":
                d2_memfit_command(["train"])
            else:
                patch.syspath_prepend(str(script.parent))
                runpy.run_path(str(script), run_name="__main__")
        except Found as e:
            return e.args[0]
    raise AssertionError(f"{script} did not look at its arguments")


def check_arguments(script, arguments):
    parser = parser_of(script)
    if parser is None:
        assert not arguments
        return
    args = vars(parser.parse_args(arguments))
    if str(args.get("config_file")).endswith(".py"):
        return  # the keys are those of a LazyConfig
    if script in (ROOT / "tools" / "train_net.py", "d2-memfit"):
        opts = args.get("opts", [])
        if args.get("project") or args.get("trainer"):  # which may have keys of their own
            pairs = zip(opts[::2], opts[1::2])
            opts = [text for pair in pairs if pair[0].split(".")[0] in get_cfg() for text in pair]
        load_cfg("", opts)  # names and values of config keys


@each_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or file.suffix != ".md" or anchor in anchors(file), target


@each_page
def test_files_that_are_named_exist(page):
    for tokens in commands(page):
        for token in tokens:
            path, _, test = token.partition("::")
            if path.partition("/")[0] in FOLDERS and "/" in path:
                assert (ROOT / path).exists(), " ".join(tokens)
                assert not test or f"def {test}(" in (ROOT / path).read_text(), token


@each_page
def test_commands_are_taken_by_their_tools(page):
    for tokens in commands(page):
        name, *arguments = tokens
        if name == "torchrun":
            args = torchrun_parser().parse_args(arguments)
            name, arguments = args.training_script, args.training_script_args
        elif name in ("python", "python3") and arguments[0] != "-m":
            name, *arguments = arguments
        if name == "d2-memfit":
            check_arguments(name, arguments)
        elif name == "make":
            targets = [a for a in arguments if "=" not in a and not a.startswith("-")]
            missing = [t for t in targets if f"\n{t}:" not in (ROOT / "Makefile").read_text()]
            assert not missing, " ".join(tokens)
        elif name.endswith(".py") and name.partition("/")[0] in FOLDERS:
            check_arguments(ROOT / name, arguments)


@each_page
def test_config_keys_exist(page):
    cfg = get_cfg()
    nodes = [name for name in cfg if isinstance(cfg[name], CfgNode) and is_known(name, page)]
    pattern = rf"\b(?:{'|'.join(nodes)})(?:\.[A-Z][A-Z0-9_]*)+\b"
    for key in re.findall(pattern, page.read_text()):
        node = cfg
        for name in key.split("."):
            assert key in NO_KEYS or name in node, key
            node = node.get(name, {})


@each_page
def test_python_can_be_compiled(page):
    for code in blocks(page, "python"):
        compile(code, page.name, "exec")


@each_page
def test_yaml_can_be_loaded_as_a_config(page, tmp_path):
    for code in blocks(page, "yaml"):
        file = tmp_path / "block.yaml"
        nodes = yaml.safe_load(code).items()
        file.write_text(yaml.safe_dump({k: v for k, v in nodes if is_known(k, page)}))
        load_cfg(str(file))


def test_the_index_lists_all_commands():
    rows = re.findall(r"^\| `([\w-]+)` \|", (ROOT / "docs/README.md").read_text(), re.MULTILINE)
    assert set(rows) == set(COMMANDS)


def test_commands_are_found():
    found = [tokens for page in PAGES for tokens in commands(page)]
    assert ["make", "demo"] in found
    assert any(tokens[:2] == ["d2-memfit", "train"] for tokens in found)


def test_shell_scripts_have_commands_that_their_tools_take(tmp_path):
    for script in (ROOT / "tools").glob("*.sh"):
        page = tmp_path / "script.md"
        page.write_text(f"```bash\n{script.read_text()}```\n")
        assert list(commands(page))
        test_files_that_are_named_exist(page)
        test_commands_are_taken_by_their_tools(page)


DOCS = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_a_page_begins_with_something_to_type(page):
    start = page.read_text().partition("\n## ")[0]
    assert page.read_text().startswith("# ")
    assert re.search(r"^```(bash|python|yaml|diff)$", start, re.MULTILINE)
