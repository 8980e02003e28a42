# Copyright (c) the d2_memfit developers.
from dataclasses import astuple

import pytest
from made_up_logs import OOM, TRACEBACK, headed, log, progress

from d2_memfit.common.errors import DataError
from d2_memfit.explain.records import read_parts

FINISHED = progress(99)
NAN = "FloatingPointError: Loss became infinite or NaN at iteration=41!"
INTERRUPTED = "Overall training speed: 41 iterations in 0:00:10 (0.2500 s / it)"


def runs_in(lines):
    return read_parts([({}, lines)], "the log")


def runs_of(messages, style="file"):
    return runs_in(headed(messages, style).splitlines(True))


def run_of(*end, style="file", **options):
    (run,) = runs_of(log(*end, **options), style)
    return run


@pytest.mark.parametrize("style", ["file", "console", "pasted"])
def test_all_that_a_run_says_is_read(style):
    run = run_of(FINISHED, style=style)
    assert (run.gpus, run.ranks) == (["Made Up GPU 9000"], 2)
    assert run.torch == "1.13.1+cu117"
    assert (run.config_file, run.is_lazy) == ("made/up.yaml", False)
    assert run.config_text.endswith("SOLVER:\n  IMS_PER_BATCH: 4\n  MAX_ITER: 100")
    assert run.augmentations == "[ResizeShortestEdge(800), RandomFlip()]"
    assert (run.images, run.objects) == (28, 42)
    assert (run.start_iter, run.max_iter, run.peak_mib) == (0, 100, 3000)
    assert (run.iteration, run.seconds) == (99, [0.25] * 3)
    assert (run.ended, run.error, run.oom, run.notes) == ("finished", "", None, [])


@pytest.mark.parametrize(
    ("end", "ended"),
    [
        ([], "running"),
        ([FINISHED], "finished"),
        ([TRACEBACK + "KeyError: 'cup'", INTERRUPTED], "error"),
        ([TRACEBACK + NAN, INTERRUPTED], "diverged"),
        ([progress(59).replace("total_loss: 1.25", "total_loss: nan")], "diverged"),
        ([progress(59).replace("total_loss: 1.25", "total_loss: nan"), FINISHED], "finished"),
        ([TRACEBACK + OOM, progress(41), INTERRUPTED], "out of memory"),
        ([FINISHED, "Traceback (most recent call last):\nFileNotFoundError: x.json"], "finished"),
    ],
)
def test_how_a_run_ended(end, ended):
    assert run_of(*end).ended == ended


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        # PyTorch 1.0 to 1.3, 1.4 to 2.0, 2.1, 2.2 and later
        (
            "RuntimeError: CUDA out of memory. Tried to allocate 16.00 MiB (GPU 0; 11.00 GiB total "
            "capacity; 4.00 GiB already allocated; 1.00 GiB free; 179.00 MiB cached)",
            (16, 11264, 1024, 4096, None, None),
        ),
        (
            "RuntimeError: CUDA out of memory. Tried to allocate 414.00 MiB (GPU 0; 10.75 GiB "
            "total capacity; 6.25 GiB already allocated; 0 bytes free; 6.75 GiB reserved in total "
            "by PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb",
            (414, 11008, 0, 6400, 6912, None),
        ),
        (OOM.replace("capacity", "capacty"), (1536, 10240, 512, 7168, 8192, 8704)),
        (OOM, (1536, 10240, 512, 7168, 8192, 8704)),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", (None,) * 6),
    ],
)
def test_messages_of_all_releases(text, numbers):
    oom = run_of(TRACEBACK + text, iterations=()).oom
    assert astuple(oom)[2:8] == pytest.approx(numbers)
    assert oom.case == "at once"


def test_the_line_of_hooks_tells_the_iteration_of_an_error():
    run = run_of(TRACEBACK + OOM, progress(57, 8000), TRACEBACK + OOM)  # which a console repeats
    assert (run.oom.case, run.oom.iteration) == ("after some iterations", 57)
    run = run_of(TRACEBACK + OOM, " iter: 0    lr: N/A  max_mem: 2817M", OOM, iterations=())
    assert (run.oom.case, run.oom.iteration, run.peak_mib) == ("at once", 0, 2817)


@pytest.mark.parametrize(("number", "case"), [(0, "at once"), (41, "after some iterations")])
def test_our_commands_show_the_error_after_the_hooks_lines(number, case):
    message = f"Out of memory in the backward of iteration {number} on rank 0. It was: {OOM}"
    end = ["Exception during training:", progress(number, 9000), INTERRUPTED]
    end += [f"The traceback:\n{TRACEBACK}d2_memfit.errors.OutOfMemoryError: {message}"]
    run = run_of(*end, iterations=())
    assert (run.oom.case, run.oom.iteration, run.peak_mib) == (case, number, 9000)


def test_errors_in_evaluation():
    of_training = TRACEBACK + "  File 'x.py', line 9, in inference_on_dataset\n" + OOM
    alone = "Traceback\n    predictions = self.model([inputs])[0]\n" + OOM
    for run in (run_of(of_training), run_of(FINISHED, alone)):
        assert (run.ended, run.oom.case) == ("out of memory", "evaluation")


@pytest.mark.parametrize(
    "text",
    [
        "Killed",
        "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. ",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient "
        "shared memory (shm).",
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4096 bytes. Error code 12 (Cannot allocate memory)",
        "  traceback : Signal 9 (SIGKILL) received by PID 4711",
        "Out of memory in the forward of iteration 0 on rank 0, with a micro-batch of 1: a.jpg. "
        "The error was: could not create a primitive. Now training stops",
    ],
)
def test_the_hosts_memory(text):
    run = run_of(TRACEBACK + text)
    assert (run.ended, run.oom.case) == ("out of memory", "host")


def test_recovery_is_not_the_end():
    ours = (
        f"Out of memory in the backward of iteration 40 on rank 0. The error was: {OOM}. Now halved"
    )
    run = run_of(ours, progress(59), ours, FINISHED)
    assert (run.ended, run.oom) == ("finished", None)
    final = f"d2_memfit.errors.OutOfMemoryError: {ours[:-12]}. Next things to try: (1) a smaller"
    assert run_of(ours).ended == "running"
    run = run_of(ours, TRACEBACK + final, progress(40))
    assert (run.ended, run.oom.iteration) == ("out of memory", 40)
    assert run.oom.total_mib == 10240
    caught = run_of(OOM + " skipped", progress(59), progress(79))  # by a trainer of somebody
    assert (caught.ended, caught.oom) == ("running", None)


def test_several_runs_in_one_file():
    again = ["Model:\nRetinaNet()", "Starting training from iteration 0", progress(19)]
    runs = runs_of([*log(TRACEBACK + OOM, iterations=()), *log(), *log(FINISHED), *again])
    assert [run.ended for run in runs] == ["out of memory", "running", "finished", "running"]
    assert all("MAX_ITER: 100" in run.config_text for run in runs)
    assert not any(run.notes for run in runs)
    assert (runs[3].gpus, runs[3].images, len(runs[3].seconds)) == (runs[2].gpus, None, 1)


def test_runs_that_did_not_train_are_left_out():
    broken = log(iterations=())[:-1]
    assert len(runs_of([*broken, *log()])) == 1
    with pytest.raises(DataError, match=r"no training with Detectron2: it has no line about an it"):
        runs_of([*broken, "Start inference on 12 batches"])
    with pytest.raises(DataError, match=r"KeyError: 'cup'"):
        runs_of([*broken, TRACEBACK + "KeyError: 'cup'"])


def test_the_first_dataset_is_the_one_that_trains_and_a_single_class_has_no_total():
    one = "Distribution of instances among all 1 categories:\n|    cup     | 140          |"
    more = [
        "Distribution of instances among all 3 categories:\n|   total    | 99        |",
        "Serializing 12 elements to byte tensors and concatenating them all ...",
    ]
    for table, objects in ((None, 42), (one, 140)):
        messages = [table if table and "Distribution" in m else m for m in log()]
        (run,) = runs_of([*messages[:-3], *more, *messages[-3:]])
        assert (run.images, run.objects) == (28, objects)


def test_a_lazy_config():
    messages = [m.replace("up.yaml", "up.py") for m in log() if "full config" not in m]
    messages.insert(
        3, "Contents of args.config_file=made/up.py:\ntrain.max_iter = 90\nMAX_ITER = 7"
    )
    (run,) = runs_of([*messages, INTERRUPTED])
    assert (run.is_lazy, run.config_text, run.max_iter, run.ended) == (True, "", 90, "running")


def test_an_error_of_a_launcher_does_not_hide_the_cause():
    launcher = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n====="
    run = run_of(f"{TRACEBACK}[rank1]: KeyError: 'cup'\n{launcher}")
    assert (run.ended, run.error) == ("error", "[rank1]: KeyError: 'cup'")


def test_what_a_terminal_would_obey_is_left_out():
    hostile = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e\ud800"
    messages = [m.replace("Made Up", f"Made{hostile} Up") for m in log()]
    messages = [m.replace("'made/up", f"'made{hostile}/up") for m in messages]
    (run,) = runs_of([*messages, TRACEBACK + f"KeyError: {hostile}"])
    shown = [*run.gpus, run.config_file, run.error]
    assert all(text.isprintable() for text in shown)
    assert "GPU 9000" in run.gpus[0]


def test_nvidia_smi_names_the_card_of_a_pasted_console():
    smi = """| NVIDIA-SMI 460.32.03    Driver Version: 460.32.03    CUDA Version: 11.2     |
|   0  Tesla T4            Off  | 00000000:00:04.0 Off |                    0 |"""
    for text in (smi, "GPU 0: Tesla T4 (UUID: GPU-1234)"):
        (run,) = runs_in([*text.splitlines(), progress(19), progress(39, 3500), OOM])
        assert (run.gpus, run.peak_mib, run.start_iter) == (["Tesla T4"], 3500, None)
        assert run.oom.case == "after some iterations"


@pytest.mark.parametrize(
    "line",
    [
        "epoch: 1/300, iter: 10/924, mem: 2500Mb, iter_time: 0.4s, lr: 1e-6",
        "eta: 1:00:00  iter: 20  loss: 1.0  time: 0.4  lr: 0.01  max mem: 4321",
    ],
)
def test_other_logs_are_refused(line):
    with pytest.raises(DataError, match="has no line") as e:
        runs_in([line])
    assert "\n" not in str(e.value)
