"""The packages from npm that tests/ci uses, in the versions that package.json pins."""

import functools
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "npm"  # kept with the virtual environment: installing takes a minute
MODULES = FOLDER / "node_modules"


@functools.cache
def node_modules() -> Path:
    """The folder of the packages, which the first call installs."""
    FOLDER.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("package.json"), FOLDER)
    command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1"]
    subprocess.run(command, check=True, cwd=FOLDER)
    return MODULES
