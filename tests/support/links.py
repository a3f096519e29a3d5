"""Links between the host and devices, which the package keeps from run to run."""

import inspect

from hybrid_gemm.devices.cuda.device import CudaDevice
from hybrid_gemm.devices.emulator.device import EmulatorDevice


def separate_links(monkeypatch, name) -> None:
    """Devices use links that only tests with the same `name` use: links keep slots of the size
    with which they were made, and threads."""
    for kind in (EmulatorDevice, CudaDevice):
        real = inspect.getattr_static(kind, "port")

        def port(device, real=real):
            own = real.__get__(device, type(device)) if hasattr(real, "__get__") else real
            return name, own

        monkeypatch.setattr(kind, "port", property(port))
