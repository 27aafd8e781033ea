"""Tests that need more than tests/requirements.txt, which .ci/run installs:
tests/requirements-ci.txt, PostgreSQL, a browser, a compiler and other programs, and root's rights
for disks and machines.

pytest runs them only when it is asked to: pytest tests/ci
"""
