"""Tools for testing code that uses actors.

Import from the modules: `monarch_async.testing.leaks` finds what a test left behind.
"""
