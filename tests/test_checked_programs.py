"""Programs of the emulator that watch accesses, and what they say of faults."""

import pytest
from support.checked_texts import CASES, TEXT
from support.command import python
from support.emulation import compiled, needs_emulator

from hybrid_gemm.devices.emulator import program as emulation
from hybrid_gemm.devices.emulator.program import Options
from hybrid_gemm.errors import UnavailableError

pytestmark = needs_emulator


@pytest.fixture(scope="module")
def checked_environment():
    try:
        return emulation.sanitized_environment()
    except UnavailableError as error:
        pytest.skip(str(error))


def test_checked_programs(checked_environment):
    ran = python("-m", "support.checked_texts", env=checked_environment, timeout=120)
    assert ran.returncode == 0, ran.stderr
    lines = dict(line.split(":", 1) for line in ran.stdout.splitlines())
    assert list(lines) == list(CASES)
    for name, (_, _, wanted) in CASES.items():
        assert wanted in lines[name]
        assert wanted or not lines[name]


def test_checked_programs_need_their_environment(tmp_path):
    with pytest.raises(UnavailableError, match="sanitized_environment"):
        compiled(TEXT, tmp_path, options=Options(sanitize=True))
