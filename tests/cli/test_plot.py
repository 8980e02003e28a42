# Copyright (c) the d2_memfit developers.
import json
import re
import shutil
import subprocess

import pytest
from PIL import Image

from d2_memfit.cli.commands import main
from d2_memfit.report import read_run

pytestmark = pytest.mark.slow

EVENT = {
    "iteration": 40, "phase": "backward", "micro_batch": 4, "padded_size": [800, 1344],
    "images": [
        {"file_name": "<b>a.jpg", "image_id": 1, "height": 8, "width": 13, "num_instances": 87}
    ],
    "allocated_gb": 5.2, "reserved_gb": 5.9, "budget_gb": 6, "error": "CUDA out of memory",
    "action": "the micro-batch is halved to 2", "rank": 0, "time": 1.0,
}  # fmt: skip


def metrics(iteration):
    names = ("allocated_gb", "reserved_gb", "allocated_peak_gb", "reserved_peak_gb")
    return {
        "iteration": iteration,
        **{f"memfit/{name}": 1.0 + i for i, name in enumerate(names)},
        "memfit/budget_used": 4.0 / 6,
        "memfit/micro_batch": 4 if iteration < 40 else 2,
    }


@pytest.fixture
def output_dir(tmp_path):
    lines = [{"iteration": 0, "total_loss": 1.0}, *map(metrics, range(0, 100, 20))]
    (tmp_path / "metrics.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "memfit_oom.jsonl").write_text(json.dumps(EVENT) + '\n{"cut off')
    owners = {"parameters": 2**30, "activations: roi_heads": 2**31}
    snapshot = {"iteration": 60, "total_bytes": 3 * 2**30, "owners": owners}
    (tmp_path / "memfit_memory_60.json").write_text(json.dumps(snapshot))
    return tmp_path


def run(*arguments):
    main(["plot", *map(str, arguments)])


def test_what_a_run_has_written_is_read(output_dir):
    run = read_run(str(output_dir))
    assert run.series("allocated_peak_gb") == ([0, 20, 40, 60, 80], [3.0] * 5)
    assert run.series("micro_batch")[1] == [4, 4, 2, 2, 2]
    assert run.budget_gb == pytest.approx(6)
    assert [event["iteration"] for event in run.events] == [40]
    assert run.owners_iteration == 60


def test_a_snapshot_is_read_as_a_run_writes_it(output_dir):
    file = output_dir / "memfit_memory_60.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=1))  # over several lines
    assert read_run(str(output_dir)).owners == {
        "parameters": 2**30,
        "activations: roi_heads": 2**31,
    }


def test_names_that_no_page_can_have_are_escaped(output_dir):
    image = {**EVENT["images"][0], "file_name": "a\udc80\x1b[31m.jpg"}
    line = json.dumps({**EVENT, "images": [image], "action": "\x07 <script>"})
    (output_dir / "memfit_oom.jsonl").write_text(line)
    run(output_dir)
    page = (output_dir / "memory.html").read_text()
    assert r"a\\udc80\\x1b[31m.jpg" in page
    assert "\x1b" not in page
    assert '<script>"' not in page


def test_a_picture_and_a_page_are_made(output_dir, capsys):
    run(output_dir)
    written = f"Written: {output_dir / 'memory.png'}, {output_dir / 'memory.html'}\n"
    next_step = f"d2-memfit plan --config-file {output_dir / 'config.yaml'} --card 6GB"
    out = capsys.readouterr().out
    assert out.startswith(written)
    assert next_step in out.splitlines()[-1]
    assert Image.open(output_dir / "memory.png").size[0] >= 1000


def test_the_page_needs_no_network_and_escapes_what_it_shows(output_dir):
    run(output_dir, "--output", output_dir / "pictures")
    page = (output_dir / "pictures" / "memory.html").read_text()
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page)
    assert "<b>a.jpg" not in page


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to look at the page with")
def test_the_page_draws_everything_in_a_browser(output_dir, tmp_path):
    run(output_dir)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    url = f"file://{output_dir / 'memory.html'}"
    result = subprocess.run(
        [CHROMIUM, *options, profile, "--dump-dom", url],
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    page = result.stdout
    assert page.count('class="trace scatter') == 5
    assert page.count('class="trace bars"') == 2
    for text in ("at the peak of iteration 60", "halved to 2", "&lt;b&gt;a.jpg", "budget"):
        assert text in page


def test_what_a_killed_run_has_torn_is_left_out(output_dir, log):
    metrics_file = output_dir / "metrics.json"
    whole = metrics_file.read_text().splitlines()
    torn = whole[2][:9] + whole[3]  # a resumed run has written on
    metrics_file.write_bytes("\n".join([*whole[:2], torn, *whole[4:], "7"]).encode() + b"\0\xff")
    (output_dir / "memfit_memory_60.json").write_text('{"iteration": 6')
    run = read_run(output_dir)
    assert run.series("allocated_gb")[0] == [0, 60, 80]
    assert run.owners == {}
    assert any(
        "metrics.json: 2 of 6 lines are incomplete and are skipped" in r.getMessage()
        for r in log.records
    )


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"has no reports of memory: metrics.json is not there, .* MEMFIT.MONITOR.PERIOD 20"),
        ({"metrics.json": '{"iteration": 0}\n'}, "metrics.json has no memfit/allocated_gb"),
        ({"metrics.json": "no json\n7\n"}, r"metrics.json is not there"),
        (None, r"is not a folder. Name the OUTPUT_DIR of a run"),
    ],
)
def test_a_folder_without_a_run_is_one_clear_line(files, message, tmp_path, capsys):
    for name, text in (files or {}).items():
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit) as e:
        run(tmp_path / "missing" if files is None else tmp_path)
    assert e.value.code == 2
    printed = capsys.readouterr().err
    assert re.search(message, printed)
    assert printed.count("\n") == 1


def test_no_two_owners_look_alike(output_dir):
    owners = {f"owner {i}": 2**30 for i in range(20)}
    snapshot = {"iteration": 60, "total_bytes": 20 * 2**30, "owners": owners}
    (output_dir / "memfit_memory_60.json").write_text(json.dumps(snapshot))
    run(output_dir)
    page = (output_dir / "memory.html").read_text()
    looks = re.findall(r'"marker":\{"color":"([^"]*)","pattern":\{"shape":"([^"]*)"', page)
    assert len(set(looks)) == len(looks) == 20
