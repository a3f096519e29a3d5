"""A GPU's link by its PCIe generation and width, from a tree like Linux's. No GPU needed."""

from types import SimpleNamespace

import pytest

from hybrid_gemm.devices.cuda import pcie

GPU = "0000:18:00.0"


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Writes what Linux tells of the GPU, and of the port above it."""
    monkeypatch.setattr(pcie, "DEVICES", tmp_path / "bus" / "pci" / "devices")
    port = tmp_path / "devices" / "pci0000:17" / "0000:17:01.0"
    (port / GPU).mkdir(parents=True)
    pcie.DEVICES.mkdir(parents=True)
    (pcie.DEVICES / GPU).symlink_to(port / GPU)

    def write(at: str = "gpu", **files: str) -> None:
        for name, text in files.items():
            ((port / GPU if at == "gpu" else port) / name).write_text(text + "\n")

    return write


def link(speed: str, width: str, now: tuple[str, str] | None = None) -> dict[str, str]:
    current = now or (speed, width)
    return {
        "max_link_speed": speed, "max_link_width": width,
        "current_link_speed": current[0], "current_link_width": current[1],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("speed", "width", "gbps"),
    [("32.0 GT/s PCIe", "16", 54.8), ("16.0 GT/s PCIe", "16", 27.4), ("8 GT/s", "8", 6.85),
     ("5.0 GT/s PCIe", "16", 6.96), ("64.0 GT/s PCIe", "16", 102.7)],
)  # fmt: skip
def test_a_links_rate_follows_from_its_generation_and_width(told, speed, width, gbps):
    told(**link(speed, width))
    assert pcie.gbps(GPU) == pytest.approx(gbps, rel=0.01)


def test_an_h200s_link_is_as_measured(told):
    told(**link("32.0 GT/s PCIe", "16"))
    assert pcie.gbps(GPU) == pytest.approx(55.0, rel=0.02)  # docs/results/peers1_h200.json


def test_an_idle_gpu_is_judged_by_what_its_link_can_be(told):
    told(**link("16.0 GT/s PCIe", "16", now=("2.5 GT/s PCIe", "16")))
    told("port", **link("16.0 GT/s PCIe", "16", now=("2.5 GT/s PCIe", "16")))
    assert pcie.gbps(GPU) == pytest.approx(27.4, rel=0.01)


def test_a_slower_slot_decides(told):
    told(**link("32.0 GT/s PCIe", "16", now=("2.5 GT/s PCIe", "8")))
    told("port", **link("16.0 GT/s PCIe", "8", now=("2.5 GT/s PCIe", "8")))
    assert pcie.gbps(GPU) == pytest.approx(13.7, rel=0.01)


def test_the_port_of_a_virtual_machine_does_not_decide(told):
    told(**link("32.0 GT/s PCIe", "16"))
    told("port", **link("2.5 GT/s PCIe", "1"))
    assert pcie.gbps(GPU) == pytest.approx(54.8, rel=0.01)


@pytest.mark.parametrize(
    "files",
    [{}, link("Unknown", "255"), link("Unknown speed", "0"), link("", ""), link("32.0 GT/s", "255"),
     link("nan", "16"), link("inf", "16"), link("-8", "16"), link("7 GT/s", "16"),
     link("8 GT/s", "nan"), {"max_link_speed": "8 GT/s"}, {"max_link_width": "16"}],
)  # fmt: skip
def test_what_is_not_told_is_not_guessed(told, files):
    told(**files)
    assert pcie.gbps(GPU) is None


def test_a_host_without_such_files_tells_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(pcie, "DEVICES", tmp_path / "hidden")
    assert pcie.gbps(GPU) is None


class Cupy:
    """CuPy, as far as it is asked: GPU 3 is at the address that is told of."""

    def __init__(self, *, uses_host_page_tables: bool) -> None:
        self.asked: list[int] = []
        attributes = {100: int(uses_host_page_tables)}  # by CUDA's numbers
        runtime = SimpleNamespace(
            deviceGetPCIBusId=self.address, deviceGetAttribute=lambda which, _: attributes[which]
        )
        self.cuda = SimpleNamespace(runtime=runtime)

    def address(self, ordinal: int) -> str:
        self.asked.append(ordinal)
        return GPU if ordinal == 3 else "0000:99:00.0"


def test_cudas_number_leads_to_the_address_and_is_asked_once(told):
    told(**link("32.0 GT/s PCIe", "16"))
    cupy = Cupy(uses_host_page_tables=False)
    assert pcie.of_gpu(cupy, 3) == pcie.of_gpu(cupy, 3) == pytest.approx(54.8, rel=0.01)
    assert pcie.of_gpu(cupy, 0) is None
    assert cupy.asked == [3, 0]


def test_pcie_says_nothing_of_a_gpu_beside_its_host_by_nvlink(told):
    told(**link("32.0 GT/s PCIe", "16"))
    assert pcie.of_gpu(Cupy(uses_host_page_tables=True), 3) is None
