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


def test_a_row_shows_the_plan_of_each_card():
    plan = {
        "before": {"images_per_gpu": 4, "accumulation_steps": 2, "device_total_gb": 9.96},
        "estimate": {"device_total_gb": 4.04},
        "steps": [{}],
        "time_factor": 1.25,
    }
    row = make_readme_table.row("A job", [plan, {**plan, "steps": []}])
    assert row == ["A job, 4 x 2 images", "10.0 to 4.0 GB, x 1.25", "10.0 GB as it is"]
