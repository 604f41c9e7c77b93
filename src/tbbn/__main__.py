"""``python -m tbbn``: the command line."""

from tbbn.bench.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
