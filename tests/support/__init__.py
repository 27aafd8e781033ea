"""Servers, clients, locks and sample requests that the tests use. It contains no tests."""
