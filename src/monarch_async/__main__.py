"""``python -m monarch_async``: the command line; without arguments the REPL."""

from __future__ import annotations

import sys

from monarch_async.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["repl"]))
