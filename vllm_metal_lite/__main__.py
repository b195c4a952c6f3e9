"""`python -m vllm_metal_lite`: the command line, for when its script is not on the PATH."""

import sys

from vllm_metal_lite.cli.main import main

sys.exit(main())
