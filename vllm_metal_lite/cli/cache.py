"""`vllm-metal-lite cache`: the prefixes that are kept on the disk."""

import argparse

from vllm_metal_lite import envs
from vllm_metal_lite.errors import size_text
from vllm_metal_lite.prefix_disk.folder import Folder


def run(args: argparse.Namespace) -> int:
    """Run the command `cache`; 1 if files are bad."""
    path = envs.prefix_folder()
    if not path.exists():
        print(f"no prefixes are kept in {path}")
        return 0
    folder = Folder(path, quota=1 << 62)  # a look must evict nothing
    if args.action == "clear":
        folder.clear()
        print(f"cleared {path}")
        return 0
    if args.action == "verify":
        good, bad = folder.verify()
        print(f"good: {good:,}, bad: {bad:,}")
        return 1 if bad else 0
    models = folder.models()
    for name, num_files, num_bytes in models:
        print(f"{size_text(num_bytes):>10}  {num_files:>7,} files  {name}")
    print(f"{size_text(sum(num_bytes for *_, num_bytes in models)):>10} in {path}")
    return 0
