#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""The command d2-memfit from a checkout.

tools/plan_memory.py estimate --config-file FILE [--num-gpus N] [--json] [KEY VALUE ...]
tools/plan_memory.py plan --config-file FILE --card 6GB [--output plan.yaml] [KEY VALUE ...]
"""

from d2_memfit.common.library_warnings import ignore_warnings_of_libraries

ignore_warnings_of_libraries()

from d2_memfit.cli.commands import main

if __name__ == "__main__":
    main()
