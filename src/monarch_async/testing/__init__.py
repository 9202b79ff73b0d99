"""Tools for testing code that uses actors.

Import from the modules: `monarch_async.testing.faults` makes things go wrong on purpose, `monarch_async.testing.leaks` finds what a test
left behind; `monarch_async.testing.plugin` has fixtures for pytest.
"""
