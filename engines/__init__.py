"""The databases that a storage can have, each an Engine of storage.py."""
