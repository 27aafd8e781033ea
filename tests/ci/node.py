"""The packages from npm that tests/ci uses, in the versions that package.json pins."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "npm"  # kept with the virtual environment: installing takes a minute
MODULES = FOLDER / "node_modules"
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{MODULES}/.bin:{os.environ['PATH']}",
    "REDOCLY_TELEMETRY": "off",
    "REDOCLY_SUPPRESS_UPDATE_NOTICE": "true",
}


@functools.cache
def node_modules() -> Path:
    """The folder of the packages, which the first call installs."""
    FOLDER.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("package.json"), FOLDER)
    command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1"]
    subprocess.run(command, check=True, cwd=FOLDER, env=ENVIRONMENT)
    return MODULES


def run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program that one of the packages has; return what it wrote."""
    command = [node_modules() / ".bin" / program, *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
