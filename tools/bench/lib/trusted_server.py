#!/usr/bin/env python3
"""Our server without the checks and timings of a first start (lib/trust.py); takes its flags.

    python -m tools.bench.lib.trusted_server serve MODEL --port 8000

The engine has a process of its own, which imports this file, too.
"""

import sys

from tools.bench.lib.trust import trusted
from vllm_metal_lite.cli.main import main

_until_the_end = trusted()
_until_the_end.__enter__()

if __name__ == "__main__":
    sys.exit(main())
