"""The worker: `python -m polyhead.train RUN/config.json` trains that run in its folder, or goes on where it stopped.

Exit codes: 0 done, 1 the disk failed, 2 a mistake in the input, 130 interrupted and saved.
"""

import argparse
import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m polyhead.train", description="Train or resume one run in its folder."
    )
    parser.add_argument("config", help="RUN/config.json, or the folder RUN")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    asked = parser.parse_args(argv)
    try:
        from polyhead.train.folder import read_config
        from polyhead.train.trainer import run

        config = read_config(asked.config)
        run(config, progress=not asked.quiet, resume=True)
    except KeyboardInterrupt as stop:
        return _say(str(stop) or "interrupted", 128 + signal.SIGINT)
    except ValueError as error:
        return _say(str(error), 2)
    except OSError as error:
        return _say(error.strerror or str(error), 1)
    return 0


def _say(text: str, code: int) -> int:
    print(f"polyhead: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
