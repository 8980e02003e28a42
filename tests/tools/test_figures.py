# Copyright (c) the d2_memfit developers.
"""Each figure of README.md and docs/ has a command, and the quick ones are what it makes."""

import re
import subprocess
import sys

import benchmark
import figures
import pytest
from tiny import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MADE_BY = {(file, f.command.split(" ")[0]) for f in figures.FIGURES for file in f.files}
FILES = {file for file, _ in MADE_BY}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_picture_and_generated_table_of_a_page_has_a_command(page):
    text = page.read_text()
    name = page.relative_to(ROOT).as_posix()
    shown = re.findall(r"!\[[^\]]*\]\(([^)#]+)\)|<img [^>]*src=\"([^\"]+)\"", text)
    for link in filter(None, (x for pair in shown for x in pair)):
        if "://" not in link:
            assert (page.parent / link).resolve().relative_to(ROOT).as_posix() in FILES, link
    for script in re.findall(r"<!-- \w+: written by (tools/\w+\.py)", text):
        assert (name, script) in MADE_BY, f"{name} has a table of {script}"
    if re.search(r"^<!-- end of ", text, re.MULTILINE):
        assert name in FILES


def test_no_picture_or_data_of_the_documentation_is_without_a_command():
    files = (ROOT / "docs").rglob("*")
    kinds = (".png", ".svg", ".jpg", ".gif", ".jsonl", ".csv")
    found = {f.relative_to(ROOT).as_posix() for f in files if f.suffix in kinds}
    assert found <= FILES


def test_figures_and_commands_exist():
    for figure in figures.FIGURES:
        for file in (*figure.files, *figure.sources, *figure.command.split()[:1]):
            assert (ROOT / file).exists(), file


def test_each_benchmark_is_the_command_of_a_figure():
    commands = [f.command.split() for f in figures.FIGURES]
    named = {words[1] for words in commands if words[:1] == ["tools/benchmark.py"]}
    assert named == set(benchmark.BENCHMARKS)


def test_a_stale_page_is_found_and_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    (tmp_path / "made.py").write_text("open('page.md', 'w').write('new')")
    page = tmp_path / "page.md"
    for old, stale in (("old", ["page.md"]), ("new", [])):
        page.write_text(old)
        assert figures.remade(figures.quick(("page.md",), "made.py"), keep_old=True) == stale
        assert page.read_text() == old
    page.write_text("old")
    assert figures.remade(figures.quick(("page.md",), "made.py")) == ["page.md"]
    assert page.read_text() == "new"


def test_pictures_are_alike_if_only_their_fonts_differ():
    crowded = (ROOT / "docs/crowded.png").read_bytes()
    assert figures.same_picture(crowded, crowded)
    assert not figures.same_picture(crowded, (ROOT / "docs/knobs.png").read_bytes())


def test_the_age_of_a_figure_counts_the_commits_to_its_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    figure = figures.Figure(("page.md",), "make.py", ("source",))
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    figures.git("init", "--quiet")
    assert figures.age(figure) == "not committed"
    files = ("page.md", "source", "other", "make.py", "source", "page.md")
    for number, file in enumerate(files):
        # The last one changes the text of the page, and no figure of its table.
        row = "| 1 |\n" if file == "page.md" else ""
        (tmp_path / file).write_text(f"{row}Words {number}\n")
        figures.git("add", file)
        figures.git(*who, "commit", "--quiet", "-m", file)
    assert figures.age(figure).endswith(", 3 commits of its sources since")


@pytest.mark.long
def test_the_quick_figures_are_what_their_commands_make():
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "figures.py"), "--check"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
