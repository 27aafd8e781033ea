"""What tests use: servers, clients, locks, samples. Contains no tests."""
