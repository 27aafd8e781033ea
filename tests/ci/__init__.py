"""Tests that need more than requirements.txt: tests/requirements-ci.txt, Chromium, ChromeDriver.

pytest runs them only when it is asked to: pytest tests/ci
"""
