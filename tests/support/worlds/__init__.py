"""The worlds that tests run in: parts that several test files use, one module a room."""
