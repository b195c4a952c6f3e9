"""`python -m vllm_metal_lite.checks`: see child.py."""

from vllm_metal_lite.checks.child import main

main()
