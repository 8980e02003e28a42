# Copyright (c) the d2_memfit developers.
import subprocess
import sys
from pathlib import Path

import pytest

from d2_memfit.memory import process_memory

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="not Linux")

TAKES_50_MB = "import sys; kept = bytes(range(250)) * 200_000; print(flush=True); sys.stdin.read()"


def test_the_memory_of_another_process_is_read_until_it_ends():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", TAKES_50_MB], **pipes) as process:
        process.stdout.readline()
        memory = process_memory(process.pid)
        process.communicate()
    assert 50_000_000 < memory.anonymous_bytes < memory.resident_bytes
    assert process_memory(process.pid).anonymous_bytes == 0
    assert process_memory().resident_bytes > 0
