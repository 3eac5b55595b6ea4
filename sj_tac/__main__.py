"""``python -m sj_tac``."""

from sj_tac.cli.app import main

if __name__ == "__main__":
    main()
