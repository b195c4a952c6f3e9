"""Say on which device this job computes: printed, and in the job's summary on GitHub.

A job that may use a GPU and finds none passes like a job on the CPU.  The summary and a warning
tell the two apart.
"""

import os
import platform

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx


def report() -> list[str]:
    """The summary, in Markdown."""
    metal = mx.metal.is_available()
    rows = {
        "Used": backend.describe(),
        "METAL_LITE_DEVICE": os.environ.get("METAL_LITE_DEVICE", "(not set)"),
        "mx.metal.is_available()": metal,
        "mx.default_device()": mx.default_device(),
        "System": platform.platform(),
    }
    if metal:
        rows |= {f"GPU {key}": value for key, value in sorted(mx.device_info(mx.gpu).items())}
    used = "No GPU was used." if backend.is_cpu() else f"A GPU was used ({backend.name()})."
    table = [f"| {name} | {value} |" for name, value in rows.items()]
    return [f"### {used}", "", "| | |", "| --- | --- |", *table, ""]


def main() -> None:
    """Print the report, append it to the job's summary, and warn if a GPU was wanted in vain."""
    text = "\n".join(report())
    print(text)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a", encoding="utf-8") as file:
            file.write(text + "\n")
    if backend.is_cpu() and os.environ.get("METAL_LITE_DEVICE") != "cpu":
        print("::warning title=No GPU::MLX found no GPU here: this job checked the CPU only.")


if __name__ == "__main__":
    main()
