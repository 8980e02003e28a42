# Copyright (c) the d2_memfit developers.
"""The steps of run.sh, and what they have found.

    python -m gpu_call.call first                 # the card answers, and a job with recovery runs
    python -m gpu_call.call rest FOLDER SECONDS   # items.py, each in a process of its own
    python -m gpu_call.call table FOLDER          # a line for each item

Each record is one line in FOLDER/more.jsonl, and on the disk at once. What has ended is not run
again, so a second call goes on where the first ended.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from d2_memfit.measure.items import Record
from d2_memfit.measure.jobs import error_record
from d2_memfit.measure.results import MACHINE, Results, summary
from d2_memfit.measure.worker import Worker, say, started_ahead

from .card import PREPARED, REHEARSE, card, measured
from .items import MEASUREMENTS

_AHEAD = 2  # processes that import everything while another measures


def first() -> None:
    """Show in half a minute whether anything can work at all."""
    with card():
        for key in (MACHINE, "trainers/d2_memfit, with recovery"):
            start = time.monotonic()
            print(key, measured(key), f"{time.monotonic() - start:.1f} s", flush=True)


def child(name: str) -> None:
    """Run an item when the parent says so; all has been imported by then."""
    if not sys.stdin.read():
        return
    start = time.monotonic()
    try:
        with card():
            for row in MEASUREMENTS[name].run():
                say({"key": name, **row})
    except Exception as e:
        say({"key": name, **error_record(e), "traceback": traceback.format_exc()[-2000:]})
    say({"key": name, "took": round(time.monotonic() - start, 2)})
    os._exit(0)  # at once, with whatever CUDA still has to do


def rest(folder: str, seconds: str, *names: str) -> None:
    """Run the items that have not ended, until the time is over.

    Args:
        names: of items; none are all.
    """
    end = time.monotonic() + float(seconds)
    file = Path(folder, "more.jsonl")
    done = {record["key"] for record in records(file) if "took" in record}
    todo = [name for name in names or MEASUREMENTS if name not in done]
    with file.open("a") as log:

        def take(record: Record) -> None:
            log.write(json.dumps(record) + "\n")
            log.flush()
            os.fsync(log.fileno())
            print(f"  {json.dumps(record)[:230]}", flush=True)

        def start(name: str) -> Worker:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            if MEASUREMENTS[name].allocator:
                environment["PYTORCH_CUDA_ALLOC_CONF"] = str(MEASUREMENTS[name].allocator)
            return Worker([sys.executable, "-m", "gpu_call.call", "child", name], environment)

        starts = [partial(start, name) for name in todo]
        with closing(started_ahead(starts, _AHEAD)) as workers:
            for name in todo:
                most = MEASUREMENTS[name].seconds * (4 if REHEARSE else 1)
                left = end - time.monotonic()
                if left < 5:
                    return
                error = next(workers).run("go", min(most, left), take)
                if error is not None and most <= left:  # else the next call runs it again
                    take({"key": name, "error": error, "took": most})


def records(file: Path) -> list[Record]:
    found = []
    for line in file.read_text().splitlines() if file.exists() else []:
        with suppress(json.JSONDecodeError):  # it was cut off
            found.append(json.loads(line))
    return found


def table(folder: str) -> None:
    """Print expected over measured (median and both ends), errors, and a line for each item."""
    path = Path(folder, "measured.jsonl")
    results = Results.read(path) if path.exists() else Results()
    told = summary(results)
    lines = {**told["expected_over_measured"], **told["errors"]}
    for key, of_card in results.stages["measured"].items():
        if of_card.get("budget_gb") and of_card.get("device_gb", 0) > of_card["budget_gb"]:
            lines[f"{key} is over its budget"] = of_card["device_gb"], of_card["budget_gb"]
    expected = {r["item"]: r for r in records(PREPARED / "ordinary_segments.jsonl")}
    for record in records(Path(folder, "more.jsonl")):
        key = record.pop("key")
        of_estimate = expected.get(record.get("of", ""))
        if of_estimate is not None and "reserved_gb" in record:
            record["x"] = of_estimate["reserved_gb"] / record["reserved_gb"]
        lines[key] = f"{lines.get(key, '')}{json.dumps(record)} "[:300]
    for name, line in lines.items():
        print(f"{name:16} {line}")


def main(what: str, *given: str) -> None:
    steps: tuple[Callable[..., None], ...] = (first, child, rest, table)
    {step.__name__: step for step in steps}[what](*given)


if __name__ == "__main__":
    main(*sys.argv[1:])
