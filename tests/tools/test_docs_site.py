# Copyright (c) the d2_memfit developers.
"""How the site's pages are made of the files of the repository."""

import pytest

pytest.importorskip("mkdocs", reason="mkdocs is not there: requirements/docs.txt")

from docs_site import hooks


def rewritten(text, page):
    return hooks._LINK.sub(lambda match: hooks.rewrite_link(match, page), text)


@pytest.mark.parametrize(
    ("page", "link", "on_the_site"),
    [
        ("PLANNER.md", "[Coins](../projects/Coins/README.md#x)", "[Coins](projects/Coins.md#x)"),
        ("PLANNER.md", "[`Job`](../d2_memfit/job/job.py)", "`Job` (`d2_memfit/job/job.py`)"),
        ("RECOVERY.md", "![drawn](crowded.png)", "![drawn](crowded.png)"),
        ("PLANNER.md", "[lost](nowhere.md)", "[lost](nowhere.md)"),
        ("projects/Torchvision.md", "[Coins](../Coins/README.md)", "[Coins](Coins.md)"),
        ("CHANGELOG.md", "[plans](docs/PLANNER.md)", "[plans](PLANNER.md)"),
    ],
)
def test_a_link(page, link, on_the_site):
    assert rewritten(link, page) == on_the_site
