# Copyright (c) the d2_memfit developers.
"""Options that a command does not have."""

import pytest

from d2_memfit.cli.command_line import command_parser


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("plan --bugdet=5", "unrecognized arguments: --bugdet=5 (did you mean --budget?)\n"),
        ("train --conf-file a.yaml", "--conf-file (did you mean --config-file?)\n"),
        ("doctor --xyz", "unrecognized arguments: --xyz\n"),
        (
            "train --trainer a:B",
            "--trainer. A project trains by its own script: docs/YOUR_PROJECT.md\n",
        ),
    ],
)
def test_an_unknown_option_is_told_with_the_nearest_one(line, said, capsys):
    with pytest.raises(SystemExit):
        command_parser().parse_args(line.split())
    assert capsys.readouterr().err.endswith(said)
