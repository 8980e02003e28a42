# Copyright (c) the d2_memfit developers.
import make_readme_table
from pages import section

TABLE = section(make_readme_table.README, "jobs", "make_readme_table.py")


def documented():
    """Cells of README's table, without its head."""
    lines = TABLE.splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_all_jobs_are_in_the_table():
    assert [row[0].partition(",")[0] for row in documented()] == [
        name for name, *_ in make_readme_table.JOBS
    ]
