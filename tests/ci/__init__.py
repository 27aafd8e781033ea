"""Tests that need root, and what .ci/run installs; run only when asked to: pytest tests/ci."""
