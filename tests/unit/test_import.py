"""`import lora_refit` is light: it needs torch, numpy and msgspec, and loads no engine or trainer."""

from __future__ import annotations

import json
import subprocess
import sys

IMPORT = """
import json, sys, time
import torch, numpy, msgspec
start, before = time.process_time(), set(sys.modules)
import lora_refit
seconds = time.process_time() - start
added = {name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
print(json.dumps([seconds, sorted(added), torch.cuda.is_initialized()]))
"""
BUDGET_S = 2.0
"""CPU time, which a busy machine does not stretch."""


def test_import_is_light() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
    )
    seconds, added, cuda_initialized = json.loads(done.stdout)
    print(f"import lora_refit: {seconds:.2f} s of CPU time, adds {added}")
    assert set(added) - {"torch", "numpy", "msgspec"} == {"lora_refit"}
    assert not cuda_initialized
    assert seconds < BUDGET_S
