"""Tests that need root and the programs that .ci/run installs. `pytest tests/ci` runs them."""
