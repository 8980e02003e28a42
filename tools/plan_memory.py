#!/usr/bin/env python3
"""The command d2-memfit from a checkout.

tools/plan_memory.py estimate --config-file FILE [--num-gpus N] [--json] [KEY VALUE ...]
tools/plan_memory.py plan --config-file FILE --budget 6 [--output plan.yaml] [KEY VALUE ...]
"""

from d2_memfit.cli import main

if __name__ == "__main__":
    main()
