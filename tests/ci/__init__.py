"""Tests that need more than requirements.txt: tests/requirements-ci.txt, Chromium, ChromeDriver,
and root's rights for a disk of their own.

pytest runs them only when it is asked to: pytest tests/ci
"""
