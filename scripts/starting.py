"""How scripts that measure start: with what to say instead, where they cannot."""

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hybrid_gemm.devices.cuda import driver
from hybrid_gemm.errors import UnavailableError


def explained(text: str, least: int = 1) -> None:
    """Ends with a script's text where --help asks for it, or where there are fewer arguments than
    `least`."""
    given = sys.argv[1:]
    if {"-h", "--help"} & set(given):
        print(text.strip())
        sys.exit()
    if len(given) < least:
        sys.exit(text.strip())


def on_gpus(*packages: str) -> None:
    """Ends with one line where there is no GPU, or one of the packages is not installed."""
    absent = (f"{x} is not installed" for x in packages if importlib.util.find_spec(x) is None)
    reason = driver.unavailable() or next(absent, None)
    if reason is not None:
        print(f"{Path(sys.argv[0]).name}: {reason}", file=sys.stderr)
        sys.exit(UnavailableError.exit_code)
