#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Write the public address of the repository into all files that name it.

    python tools/set_address.py https://github.com/OWNER/d2_memfit

These are the package's metadata, README's badges, the notebook with its link to Colab, the site,
the citation and docs/INSTALL.md. Another address replaces the one before.
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = "docs/notebooks/first_steps.ipynb"

# For each file: what is replaced, with an address or without, and by what.
PLACES = [
    (
        "pyproject.toml",
        r"(\[project\.urls\]\n(.+\n)+\n)?(?=\[project\.scripts\])",
        """[project.urls]
Homepage = "{address}"
Documentation = "{site}"
Issues = "{address}/issues"
Changelog = "{address}/blob/main/CHANGELOG.md"

""",
    ),
    (
        "README.md",
        r"(?<=\A# d2_memfit\n\n)(\[!.+\n)*\n?(?=d2_memfit makes)",
        """[![CI]({address}/actions/workflows/ci.yml/badge.svg)]({address}/actions/workflows/ci.yml)
[![PyPI](https://img.shields.io/pypi/v/d2-memfit)](https://pypi.org/project/d2-memfit/)
[![Documentation](https://img.shields.io/badge/docs-site-blue)]({site})
[![Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab})

""",
    ),
    (
        NOTEBOOK,
        r'(    "\[!.+\n    "\\n",\n)?(?=    "What a training job needs)',
        '    "[![Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab})\\n",\n'
        '    "\\n",\n',
    ),
    (NOTEBOOK, r'(?<="REPOSITORY = \\")[^"\\]*', "{address}"),
    (
        "mkdocs.yml",
        r"(?<=\nsite_name: d2_memfit\n)(site_url: .+\nrepo_url: .+\n)?",
        "site_url: {site}\nrepo_url: {address}\n",
    ),
    (
        "CITATION.cff",
        r"(?<=\nlicense: Apache-2\.0\n)(repository-code: .+\n)?",
        'repository-code: "{address}"\n',
    ),
    ("docs/INSTALL.md", r"(?<=git clone )\S+(?= && pip install ./d2_memfit)", "{address}"),
]


def set_address(root: Path, address: str) -> None:
    """Write an address into the files of a checkout.

    Raises:
        ValueError: it is not the address of a repository on GitHub, or a file has no place for it.
    """
    address = address.rstrip("/").removesuffix(".git")
    found = re.fullmatch(r"https://github\.com/([\w-]+)/([\w.-]+)", address)
    if found is None:
        raise ValueError(f"the address must be https://github.com/OWNER/NAME, got {address!r}")
    owner, name = found.groups()
    colab = f"https://colab.research.google.com/github/{owner}/{name}/blob/main/{NOTEBOOK}"
    site = f"https://{owner.lower()}.github.io/{name}/"
    for file, place, text in PLACES:
        path = root / file
        made = text.format(address=address, colab=colab, site=site)
        content, times = re.subn(place, made.replace("\\", r"\\"), path.read_text(), count=1)
        if not times:
            raise ValueError(f"{file} has no place for the address")
        path.write_text(content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="such as https://github.com/OWNER/d2_memfit")
    args = parser.parse_args()
    try:
        set_address(ROOT, args.address)
    except ValueError as e:
        sys.exit(f"error: {e}")


if __name__ == "__main__":
    main()
