"""Runs all tests in two processes at once: `python tests/run.py`.

Engines and trainer ranks mostly wait for each other, compilers and simulators do not. What the second
process prints is shown when it has ended.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
ENGINES = ("real", "faults")
REST = ("unit", "sanitize", "gpu")


def main() -> int:
    """Returns 0 if all tests passed."""
    with tempfile.TemporaryFile() as output:
        rest = subprocess.Popen(_pytest(REST), stdout=output, stderr=subprocess.STDOUT)
        engines = subprocess.run(_pytest(ENGINES), check=False)
        rest.wait()
        output.seek(0)
        sys.stdout.write(output.read().decode(errors="replace"))
    return engines.returncode or rest.returncode


def _pytest(folders: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", *(str(FOLDER / name) for name in folders)]


if __name__ == "__main__":
    sys.exit(main())
